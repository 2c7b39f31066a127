"""Family: C = (A * scales) @ (B * scales), fp8 operands with a float32 scale for each 128 numbers along K of a row of A, and
for each 128 x 128 of B; B shuffled beforehand, as AITER's assembly kernels read it.

The scales of A lie as [K / 128, M], those of B as [N / 128, K / 128].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.operands import Operands, OperandSpec
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.numerics import random_inputs
from tritongemm.numerics.error_metric import deviation, outside
from tritongemm.numerics.families import dense
from tritongemm.numerics.weight_layouts import shuffled_16x16

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = "fp8", "bf16"  # where nothing else is said
SHUFFLED_B = True
GROUP = 128  # numbers along K, and columns of B, that share a scale


def unsupported(problem: Problem, target: Target) -> str | None:
    """Why the target can't run this problem, or None."""
    if not (problem.a == problem.b and problem.a.is_fp8):
        return f"family {problem.family} multiplies one type of fp8, not {problem.dtype_a} by {problem.dtype_b}"
    if problem.dtype_c not in ("bf16", "fp16") or problem.bias != "none" or problem.k % GROUP:
        return f"family {problem.family} gives bf16 or fp16, wants K a multiple of {GROUP} and no bias"
    return dense.unreadable(problem, target) or shuffled_16x16.unsupported(problem)


def tolerance(problem: Problem) -> float:
    """Largest error that is rounding rather than a fault."""
    return problem.c.epsilon + 2**-6


def scale(problem: Problem) -> float:
    """Standard deviation of the random floats of A and B."""
    return 1.0


def extras(problem: Problem) -> tuple[OperandSpec, ...]:
    """Both scales; no epilogue applies them."""
    groups, typical = problem.k // GROUP, round(problem.k**-0.25, 6)
    scale_a = OperandSpec("scale_a", DTYPES["fp32"], (groups, problem.m), "", typical)
    return scale_a, OperandSpec("scale_b", DTYPES["fp32"], (-(-problem.n // GROUP), groups), "", typical)


def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> Operands:
    """Random operands; scales are uniform between a half and one and a half of what makes a C of about one."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed + 1)
    operands = random_inputs.random_inputs(problem, (), scale(problem), device, init, seed)
    for extra in extras(problem):
        operands[extra.name] = (torch.rand(extra.shape, device=device, generator=generator) + 0.5) * extra.typical
    return operands | {"b": shuffled_16x16.shuffled(operands["b"])}


def reference(problem: Problem, operands: Operands) -> Tensor:
    """C in float64 [M, N]."""
    of_a = operands["scale_a"].double().T.repeat_interleave(GROUP, 1)
    of_b = operands["scale_b"].double().repeat_interleave(GROUP, 0)[: problem.n].repeat_interleave(GROUP, 1)
    return (operands["a"].double() * of_a) @ (shuffled_16x16.plain(operands["b"]).double() * of_b.T)
