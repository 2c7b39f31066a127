"""Which of AITER's assembly kernels with scales computes which problem. All of them were tried in an emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tritongemm.backends.asm.manifest import KernelRow
from tritongemm.core.problem import Problem

REACH = 2**32  # bytes that 32-bit offsets and sizes reach
_PLAIN_DEPTH = 512  # the kernel that reads B as it is fetches two steps of K before it looks at K


def _vectors(problem: Problem) -> dict[str, tuple[int, ...]]:
    return {"scale_a": (problem.m, 1), "scale_b": (problem.n,)}


def _blocks(problem: Problem) -> dict[str, tuple[int, ...]]:
    groups = problem.k // 128
    return {"scale_a": (groups, problem.m), "scale_b": (-(-problem.n // 128), groups)}


def _groups(problem: Problem) -> dict[str, tuple[int, ...]]:
    rows_a, rows_b = (-(-size // 32) * 32 for size in (problem.m, problem.n))
    return {"scale_a": (rows_a, problem.k // 32), "scale_b": (rows_b, problem.k // 32)}


@dataclass(frozen=True)
class Scaled:
    """What the kernels of one layout compute.

    Attributes:
        what: in words.
        dtypes: of A and B.
        depth: what K must be a multiple of.
        scales: shapes of the operands beside A and B, by name.
    """

    what: str
    dtypes: tuple[str, ...]
    depth: int
    scales: Callable[[Problem], dict[str, tuple[int, ...]]]


LAYOUTS = {
    "fp4": Scaled("fp4 with a scale for each 32 numbers", ("fp4e2m1",), 256, _groups),
    "i8": Scaled("int8 with a scale for each row and column", ("int8",), 128, _vectors),
    "fp8_blockscale": Scaled("fp8 with a scale for each 128 numbers", ("fp8e4m3fn", "fp8e4m3fnuz"), 128, _blocks),
}


def refusal(layout: str, row: KernelRow, problem: Problem) -> str | None:
    """Why a kernel of one of `LAYOUTS` can't compute a problem, or None."""
    wanted = LAYOUTS[layout]
    if problem.k % wanted.depth or problem.n % row.tile_n:
        return f"K must be a multiple of {wanted.depth} and N of {row.tile_n}"
    scales = {e.name: e.shape for e in problem.extras}
    if problem.a != problem.b or problem.dtype_a not in wanted.dtypes or scales != wanted.scales(problem):
        return f"it multiplies {wanted.what} and adds nothing, not {problem.key}"
    if problem.dtype_c != "bf16" or problem.layout != "TN":
        return f"it reads A row-major and B column-major (TN) and writes bf16, not {problem.key}"
    largest = max(problem.m * problem.k, problem.n * problem.k, problem.m * problem.n * problem.c.bytes)
    if largest >= REACH:
        return f"an operand of {largest} bytes is beyond its 32-bit offsets"
    return _mx_refusal(row, problem) if layout == "fp4" else None


def _mx_refusal(row: KernelRow, problem: Problem) -> str | None:
    if not row.shuffled and (problem.m % row.tile_m or problem.k < _PLAIN_DEPTH):
        return f"M must be a multiple of {row.tile_m} and K at least {_PLAIN_DEPTH}"
    rows, groups = _groups(problem)["scale_a"]
    fetched = 2 * row.tile_m
    if rows * groups < fetched:
        return f"it fetches {fetched} scales of A before it looks at M; A has {rows * groups}"
    return None
