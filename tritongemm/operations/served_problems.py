"""Lists the problems that calls at run time ask for, without PyTorch, as commands that run no kernel use it too."""

from dataclasses import replace
from typing import Any, NamedTuple

from tritongemm.core.epilogues import RESIDUAL
from tritongemm.core.problem import DEFAULT_FAMILY, PLAIN, Problem, matrices
from tritongemm.core.scaling import GRANULARITIES, NO_SCALES, ScalePair, granularity
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import WeightLayout

# The pairs of factors that grouped products are read with, those of A with K first where they change along K.
_OF_GROUPS = ("", "row", "block", "mx", "mx_shuffled")
_OF_ROWS = [GRANULARITIES[name][0] for name in _OF_GROUPS[1:4]]  # of A beside a weight of four bits


def layer_problem(sizes: tuple[int, int, int], dtypes: tuple[str, str, str], bias: str) -> Problem:
    """Return the problem of a linear layer: x [M, K] row-major, w [N, K] row-major, a bias along N or none.

    `sizes` are M, N and K, `dtypes` those of x, of w and of the result.
    """
    return Problem(*sizes, *matrices(*dtypes, layout="TN"), bias=bias)


def is_layer(problem: Problem) -> bool:
    """Return whether a problem is a linear layer's, which `mm` asks for where x and w are row-major."""
    p = problem
    return p.bias in ("none", "n") and p == layer_problem((p.m, p.n, p.k), (p.a.dtype, p.b.dtype, p.c.dtype), p.bias)


def is_product(problem: Problem) -> bool:
    """Return whether `mm` can ask for a problem: a linear layer's, or that with x or w a transposed view."""
    return is_layer(problem.stored(True, False))


def other_layouts(problem: Problem) -> list[Problem]:
    """Return the problem in each other memory layout that calls can ask for: of A, of B, or of their scale factors."""
    if None not in problem.scalings:
        alike = (pair for pair in GRANULARITIES.values() if _covered(pair) == _covered(problem.scalings))
        return [problem.scaled(pair) for pair in alike if pair != problem.scalings]
    if has_scaled_weight(problem):
        orders = (PLAIN, *registry.names(WeightLayout))
        return [replace(problem, b=problem.b._replace(order=name)) for name in orders if name != problem.b.order]
    every = (problem.stored(a, b) for a in (True, False) for b in (False, True))
    return [other for other in every if other != problem and is_product(other)]


def _covered(pair: ScalePair) -> list[tuple[str, int, int]]:
    """Return the types of scale factors, and what each covers, whatever their layout."""
    return [(one.dtype, one.rows, one.depth) for one in pair if one is not None]


def is_scaled(problem: Problem) -> bool:
    """Return whether `scaled_mm` can ask for a problem."""
    return None not in problem.scalings and not _is_mixed(problem) and _is_plain_layer(problem)


def _is_mixed(problem: Problem) -> bool:
    """Return whether a weight has fewer bits than activations that have factors too."""
    return problem.a.scaling is not None and problem.a.type.packed < problem.b.type.packed


def _is_mixed_layer(problem: Problem) -> bool:
    return _is_mixed(problem) and _is_plain_layer(problem)


def has_scaled_weight(problem: Problem) -> bool:
    """Return whether `linear_w4` can ask for a problem: only its weight has scale factors."""
    return problem.a.scaling is None and problem.b.scaling is not None and _is_plain_layer(problem)


def _is_plain_layer(problem: Problem) -> bool:
    """Return whether a problem is a linear layer's but for its scale factors and the order of its weight."""
    p = problem
    return is_layer(replace(p, family=DEFAULT_FAMILY, b=p.b._replace(order=PLAIN)).scaled(NO_SCALES))


def is_activated(problem: Problem) -> bool:
    """Return whether `linear_act` can ask for a problem."""
    return problem.epilogue != "none" and (is_layer(problem.without_epilogue) or is_scaled(problem.without_epilogue))


class ExpertWeights(NamedTuple):
    """The weights of a mixture of experts, by which records of its products are found."""

    groups: int  # how many experts have a weight [N, K] each
    # n, k: its extents
    n: int
    k: int
    dtype: str  # name of its type
    family: str  # what is computed


def expert_weights(problem: Problem) -> ExpertWeights | None:
    """Return the weights of a grouped product whose groups' rows are one after another; None of other products."""
    if problem.kind != "grouped" or problem.masked or problem.b.row_major:
        return None
    return ExpertWeights(problem.group_count, problem.n, problem.k, problem.b.dtype, problem.family)


def packed_weight(problem: Problem) -> tuple[Any, ...] | None:
    """Return the number of groups, if there are groups, N, K and B of a product whose weight alone has scale factors;
    None of others.
    """
    if problem.kind == "batched" or problem.masked or not has_scaled_weight(replace(problem, groups=None)):
        return None
    groups = (problem.group_count,) if problem.kind == "grouped" else ()
    return (*groups, problem.n, problem.k, problem.b)


def is_served(problem: Problem) -> bool:
    """Return whether any call at run time can ask for a problem."""
    if problem.kind == "grouped":
        one = replace(problem, groups=None)
        if _is_mixed(problem):
            return _is_mixed_layer(one) and problem.a.scaling in _OF_ROWS
        return has_scaled_weight(one) or granularity(problem.scalings) in _OF_GROUPS
    if problem.kind == "batched":
        return problem.b.scaling is None or problem.a.scaling is not None
    return any(asks(problem) for asks in (is_product, is_scaled, has_scaled_weight, is_activated, _is_mixed_layer))


def why_unserved(problem: Problem) -> str:
    """Return why no call asks for a problem, behind the number of such rows; "" where one does."""
    if is_served(problem):
        return ""
    if problem.bias == "m":
        return "with a bias along M, which no call has"
    if problem.kind == "grouped":
        return "of groups whose factors have a layout that grouped_mm gives no kernel (tune with --scales block)"
    if problem.kind == "batched":
        return "of batches whose weights alone have scales, which no call has"
    if problem.a.scaling is not None and (problem.layout, problem.b.order) != ("TN", PLAIN):
        return f"of layout {problem.layout} with scales, which scaled_mm takes in TN (tune with -col_b)"
    if problem.epilogue != "none" and problem.layout != "TN":
        return f"of layout {problem.layout} with an epilogue, which linear_act takes in TN (tune with -col_b)"
    return "of products that no call computes"


def describe_calls(problem: Problem) -> str:
    """Return which calls a row of a problem serves, in words; of a problem that no call asks for, why."""
    if reason := why_unserved(problem):
        return f"no call: they are {reason}"
    if problem.epilogue != "none" and problem.groups:
        return f'grouped_mm(…, act="{problem.epilogue}"), and fused_moe where both of its products have rows'
    if problem.epilogue != "none":
        rows = " whose rows of gate and of up alternate (interleave_gate_up)" if problem.fold > 1 else ""
        if problem.epilogue == RESIDUAL:
            return "linear_add(x, w, residual) with w [N, K]"
        call = "linear_act_quantize" if problem.in_blocks else "linear_act"
        act = problem.epilogue.removesuffix("block").removesuffix("_")
        scales = "" if problem.a.scaling is None else f", scale_a=…, scale_b=…{_with_factors(problem)}"
        return f'{call}(x, w, "{act}"{scales}) with w [N, K]{rows}'
    if problem.kind == "grouped":
        if _is_mixed(problem):
            return "grouped_mm"
        return "grouped_mm, and fused_moe where both of its products have rows"
    if problem.kind == "batched":
        of_factors = f"scaled_bmm(a, b, scale_a, scale_b){_with_factors(problem)}"
        return "bmm(a, b)" if problem.a.scaling is None else of_factors
    if problem.a.scaling is not None and not _is_mixed(problem):
        calls = f"scaled_mm(a, w, scale_a, scale_w) with w [N, K]{_with_factors(problem)}"
        return f"{calls}, and linear_fp8 of such weights"
    if problem.b.scaling is not None:
        extents = (
            "[N, K / 32] e8m0"
            if problem.b.scaling.dtype == "e8m0"
            else f"[K / {problem.scale_depth}, {'2, ' * problem.b.scaling.zeros}N]"
        )
        order = "" if problem.b.order == PLAIN else f", order={problem.b.order!r}"
        of_x = ", scale_x=…" if problem.a.scaling else ""
        return f"linear_w4(x, weight, scale{of_x}) with weight [N, K / 2], scale {extents}{order}"
    of_x = "" if problem.a.row_major else ", x the transposed view of a [K, M] matrix"
    if problem.b.row_major:
        return f"mm(x, b.t()) and, inside serve(), x @ b with b [K, N]{of_x}; for linear layers tune with -col_b"
    return f"mm(x, w) and linear layers, with w [N, K]{of_x}"


def describe_factors(problem: Problem) -> str:
    """Return how calls must store the factors of A that change along K for a row to serve them; "" without any."""
    scaling = problem.a.scaling
    if scaling is None or not scaling.depth:
        return ""
    if scaling.dtype != "fp32":
        return f"scale_layout={'' if scaling.layout == 'rows' else scaling.layout!r}"
    layout = "tma" if scaling.pad != (1, 1) else scaling.layout
    return f'scale_a as quantize(a, "block", layout="{layout}") or pack_scales(scale_a, "{layout}") stores it'


def _with_factors(problem: Problem) -> str:
    return f", {factors}" if (factors := describe_factors(problem)) else ""
