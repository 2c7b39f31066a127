"""Family: C = (A * scales) @ (B * scales), fp4 (e2m1) operands with one power of two for each 32 numbers along K (OCP MX).

Two numbers share a byte, the earlier one in its low half: A is [M, K / 2] bytes, B [K / 2, N], column-major. Scales are
e8m0, in the order in which CDNA4's matrix instructions want them, which is that of AITER's `e8m0_shuffle`: blocks of 32
rows and 8 groups, M and N padded to 32 rows and K / 32 to 8 groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.operands import Operands, OperandSpec
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.numerics.error_metric import deviation, outside

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = "fp4e2m1", "bf16"  # where nothing else is said
GROUP = 32  # numbers along K that share a scale
ROWS, GROUPS = 32, 8  # of a block of scales
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same below zero
_BIAS = 127  # of the exponents
_LEAST = -6  # random scales are 2**-6 to 1, which keeps C in the range of fp16


def unsupported(problem: Problem, target: Target) -> str | None:
    """Why the target can't run this problem, or None."""
    if (problem.dtype_a, problem.dtype_b) != ("fp4e2m1", "fp4e2m1"):
        return f"family a4w4_blockscale multiplies fp4 by fp4, not {problem.dtype_a} by {problem.dtype_b}"
    if problem.dtype_c not in ("bf16", "fp16"):
        return f"family a4w4_blockscale gives bf16 or fp16, not {problem.dtype_c}"
    if problem.layout != "TN" or problem.bias != "none" or problem.k % 2:
        return "family a4w4_blockscale wants A row-major, B column-major (-col_b), an even K and no bias"
    if not target.supports(problem.a):
        return f"{target.name} has no matrix instruction for fp4"
    return None


def tolerance(problem: Problem) -> float:
    """Largest error that is rounding rather than a fault: products and their scales are exact in float32."""
    return problem.c.epsilon + 2**-12


def scale(problem: Problem) -> float:
    """Typical size of A and B."""
    return 1.0


def extras(problem: Problem) -> tuple[OperandSpec, ...]:
    """The scales, in blocks; no epilogue applies them."""
    groups = _up(-(-problem.k // GROUP), GROUPS)
    sides = (("scale_a", problem.m), ("scale_b", problem.n))
    return tuple(OperandSpec(name, DTYPES["e8m0"], (_up(rows, ROWS), groups), "") for name, rows in sides)


def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> Operands:
    """Random operands as bytes; every bit pattern is a number. `init` ``zeros`` makes A and B zero, others are alike."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def random(rows: int, cols: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows, cols), generator=generator, device=device, dtype=torch.uint8)

    most = 1 if init == "zeros" else 256
    a = random(problem.m, problem.k // 2, 0, most)
    b = random(problem.n, problem.k // 2, 0, most).T
    exponents = _BIAS + _LEAST, _BIAS + 1
    scales = {e.name: random(e.shape[0], e.shape[1], *exponents) for e in extras(problem)}
    return {"a": a, "b": b} | scales


def reference(problem: Problem, operands: Operands) -> Tensor:
    """C in float64 [M, N]."""
    a = _numbers(operands["a"]) * _factors(operands["scale_a"], problem.m, problem.k)
    b = _numbers(operands["b"].T) * _factors(operands["scale_b"], problem.n, problem.k)
    return a @ b.T


def shuffled(scales: Tensor) -> Tensor:
    """Scales [rows, groups], of whole blocks, in the order of the matrix instructions."""
    rows, groups = scales.shape
    blocks = scales.reshape(rows // ROWS, 2, ROWS // 2, groups // GROUPS, 2, GROUPS // 2)
    return blocks.permute(0, 3, 5, 2, 4, 1).reshape(rows, groups)


def plain(scales: Tensor) -> Tensor:
    """What `shuffled` was given."""
    rows, groups = scales.shape
    blocks = scales.reshape(rows // ROWS, groups // GROUPS, GROUPS // 2, ROWS // 2, 2, 2)
    return blocks.permute(0, 5, 3, 1, 4, 2).reshape(rows, groups)


def _numbers(packed: Tensor) -> Tensor:
    """[rows, K] in float64 of [rows, K / 2] bytes."""
    import torch

    values = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=torch.float64, device=packed.device)
    halves = torch.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)
    return values[halves.long()]


def _factors(scales: Tensor, rows: int, k: int) -> Tensor:
    exponents = plain(scales)[:rows].double() - _BIAS
    return exponents.exp2().repeat_interleave(GROUP, 1)[:, :k]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
