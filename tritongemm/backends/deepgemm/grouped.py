"""Calls DeepGEMM's grouped products: uneven groups one after another, or groups with equal room each.

For consecutive groups the package requires each to begin at a multiple of 128 rows. A program that calls it keeps its
activations and their product in that layout: A is copied into it before the call, and C out of it only if C itself is
needed. Groups that begin at such rows anyway, and those with equal room, are read and written in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tritongemm.backends._scales import coverage, factors
from tritongemm.backends.deepgemm import package
from tritongemm.core.integers import cdiv
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem


def function(problem: Problem) -> str:
    """Return the name of the package's function for a grouped problem."""
    form = "masked" if problem.masked else "contiguous"
    return f"m_grouped_{'fp8' if problem.a.type.is_fp8 else 'bf16'}_gemm_nt_{form}"


def product(problem: Problem, operands: Operands, into_c: bool, overlap: bool) -> Callable[[], Tensor]:
    """Return a call that computes the product of every group and returns it."""
    return _masked(problem, operands, overlap) if problem.masked else _contiguous(problem, operands, into_c, overlap)


def _masked(problem: Problem, operands: Operands, overlap: bool) -> Callable[[], Tensor]:
    c, counts = operands["c"], operands["counts"]
    a, b = _with_scales(problem, operands, operands["a"], _of_rooms(problem, operands))
    compute, switched = package.find(function(problem)), package.overlapping(overlap)
    expected = cdiv(problem.m, problem.group_count)
    options = {"disable_ue8m0_cast": True} if problem.a.type.is_fp8 else {}

    def call() -> Tensor:
        with switched():
            compute(a, b, c, counts, expected, **options)
        return c

    return call


def _contiguous(problem: Problem, operands: Operands, into_c: bool, overlap: bool) -> Callable[[], Tensor]:
    import torch

    c = operands["c"]
    order = _padded_order(operands["offsets"], package.group_alignment())
    of_a = factors(problem, operands, "scale_a") if coverage(problem) else None
    left, out, copied_out = operands["a"], c, False
    if order.rows != problem.m:
        left = _spread_out(left, order)
        of_a = None if of_a is None else _spread_out(of_a, order)
        out, copied_out = c.new_zeros((order.rows, problem.n)), into_c
    a, b = _with_scales(problem, operands, left, None if of_a is None else of_a.T)
    compute, switched = package.find(function(problem)), package.overlapping(overlap)
    options = {"disable_ue8m0_cast": True} if problem.a.type.is_fp8 else {}

    def call() -> Tensor:
        with switched():
            compute(a, b, out, order.groups, **options)
        return torch.index_select(out, 0, order.places, out=c) if copied_out else out

    return call


@dataclass(frozen=True)
class _Order:
    """Rows of groups, each group padded to a multiple."""

    rows: int
    places: Tensor
    groups: Tensor


def _padded_order(ends: Tensor, multiple: int) -> _Order:
    import torch

    places, groups = list[int](), list[int]()
    for group, (first, end) in enumerate(pairwise((0, *ends.tolist()))):
        count = end - first
        places += range(len(groups), len(groups) + count)
        groups += [group] * count + [-1] * (-count % multiple)
    where = {"device": ends.device}
    return _Order(
        len(groups), torch.tensor(places, dtype=torch.int64, **where), torch.tensor(groups, dtype=torch.int32, **where)
    )


def _spread_out(matrix: Tensor, order: _Order) -> Tensor:
    """Return the rows at their places, zeros between them."""
    out = matrix.new_zeros((order.rows, matrix.shape[1]))
    out[order.places] = matrix
    return out


def _of_rooms(problem: Problem, operands: Operands) -> Tensor | None:
    """Return the factors of A as [groups, K / 128, room]; None where there are none."""
    if not coverage(problem):
        return None
    given = operands["scale_a"]
    assert problem.a.scaling is not None
    if problem.a.scaling.layout == "groups":
        return given
    return given.reshape(problem.group_count, problem.group_m, -1).mT


def _with_scales(problem: Problem, operands: Operands, a: Tensor, of_a: Tensor | None) -> tuple[object, object]:
    """Return a and B as the package takes them: with their factors, where there are any."""
    import torch

    b = operands["b"].mT
    if of_a is None:
        return a, b
    rows = of_a.shape[-1]
    padded = torch.nn.functional.pad(of_a, (0, -rows % package.ALIGNED_ROWS)).contiguous()
    return (a, padded[..., :rows].mT), (b, operands["scale_b"].contiguous())
