"""Family: a toy, C = (A @ B) * scale_b[None, :] (+ bias): int8 weights with a scale per column."""

from __future__ import annotations

from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import ScalePair, Scaling
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics.families._standard import StandardFamily


class WeightOnlyFamily(StandardFamily):
    """Weights of eight bits, each column with its own float32 scale; A is fp16 or bf16 and has none."""

    summary = "int8 weights with a scale per column, fp16 or bf16 activations"
    defaults = Defaults.of("fp16", "int8")

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """No factors of A; a float32 factor for each column of B, [N], which the epilogue applies."""
        return ((None, Scaling(dtype="fp32", rows=1)),)

    def _types(self, problem: Problem) -> Support:
        if problem.a.dtype not in ("fp16", "bf16") or (problem.b.dtype, problem.c.dtype) != ("int8", problem.a.dtype):
            return Support(f"it multiplies fp16 or bf16 by int8 into A's type, not {problem.dtypes}")
        return SUPPORTED

    def tolerance(self, problem: Problem) -> float:
        """Half a step of C from rounding it, and what sums in float32 lose; int8 is exact in fp16 and in bf16."""
        return problem.c.type.epsilon + 2**-12

    def typical_scale(self, problem: Problem) -> float:
        """Random int8 has a root mean square of 37, and a sum over K that of its products times the root of K."""
        return float(1 / 37 / problem.k**0.5)
