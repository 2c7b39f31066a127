"""Scale factors in the terms of libraries: their granularity, and copies in the layouts that libraries read."""

from tritongemm.core.integers import round_up
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import MX_DEPTH, SCALED_BLOCK, Scaling
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ScaleLayout

_OTHER = "other"

# By the factors of A and of B: their type, the rows that share one, the elements along K that do.
_ONE, _EACH, _VECTOR = ("fp32", 0, 0), ("fp32", 1, 0), ("fp32", 1, SCALED_BLOCK)
_SQUARE, _MX = ("fp32", SCALED_BLOCK, SCALED_BLOCK), ("e8m0", 1, MX_DEPTH)
_NAMES = {
    (_ONE, _ONE): "tensor",
    (_EACH, _EACH): "row",
    (_VECTOR, _SQUARE): "block",
    (_VECTOR, _VECTOR): "group",
    (_MX, _MX): "mx",
}


def coverage(problem: Problem) -> str:
    """Return the name of the granularity of a problem's factors; "" if there are none.

    ``tensor``, ``row`` (of A and column of B), ``block`` (1 x 128 of A, 128 x 128 of B), ``group`` (1 x 128 of both),
    ``mx`` (1 x 32 of both, powers of two) or ``other``.
    """
    if problem.a.scaling is None or problem.b.scaling is None:
        return "" if problem.a.scaling is problem.b.scaling else _OTHER
    return _NAMES.get((_covers(problem.a.scaling), _covers(problem.b.scaling)), _OTHER)


def _covers(scaling: Scaling) -> tuple[str, int, int]:
    return scaling.dtype, scaling.rows, scaling.depth


def factors(problem: Problem, operands: Operands, name: str) -> Tensor:
    """Return the factors of one operand as [rows, groups along K], without padding, as a view if possible."""
    scaling, given = problem.operands[name].scaling, operands[name]
    assert scaling is not None
    rows, groups = scaling._replace(layout="rows", pad=(1, 1)).shape(
        problem.m if name == "scale_a" else problem.n, problem.k
    )
    if not scaling.depth:
        return given.reshape(rows, groups)
    if scaling.layout == "groups":
        given = given.T
    elif scaling.layout != "rows":
        given = registry.get(ScaleLayout, scaling.layout).unpack(given)
    return given[:rows, :groups]


def dense(matrix: Tensor, multiple: int = 1) -> Tensor:
    """Return a matrix with contiguous rows, each padded with zeros to a multiple; itself if it is stored so."""
    rows, columns = matrix.shape
    padded = round_up(columns, multiple)
    if padded == columns and matrix.stride() == (columns, 1):
        return matrix
    copy = matrix.new_zeros((rows, padded))
    copy[:, :columns] = matrix
    return copy


def has_shape(problem: Problem, name: str, shape: tuple[int, int]) -> bool:
    """Say whether factors are stored as a contiguous row-major matrix of this shape, so that they need no copy."""
    spec = problem.operands[name]
    return spec.order in ("rows", "groups") and spec.shape == shape
