"""Chooses the kernels between the products of a mixture of experts for one call, with their grids and numbers.

Binaries depend on types, on K to a power of two and its divisors, and on how many experts a token has to a power of
two; not on how many tokens or experts there are.
"""

from collections.abc import Iterator, Mapping
from math import gcd
from typing import TypeAlias

from tritongemm.build.helpers import read_text
from tritongemm.core.dtypes import DTYPES, Rounding
from tritongemm.core.helper_kernel import ACTIVATIONS, HelperArguments, HelperKernel
from tritongemm.core.integers import cdiv, power_of_two
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import MX_MODES, SCALED_BLOCK, granularity, powers_of
from tritongemm.core.target import Target
from tritongemm.numerics.scale_factors import scale_places

Chosen: TypeAlias = "tuple[HelperKernel, HelperArguments]"
Added: TypeAlias = "tuple[str, str, int]"  # types of a bias and of the experts' ids, and the number of experts
UNBIASED: Added = ("", "i32", 0)

DEPTH = SCALED_BLOCK  # the elements of a row that share a factor of a block
ID_TYPES = ("i32", "i64")
WEIGHT_TYPES = ("fp32", "bf16", "fp16")
MOST_TOPK = 16  # experts of a token for which a library has kernels
_MODES = {"": 0, "row": 1, "block": 2}
_POWERS, _PACKED_POWERS = 3, 4  # of fp8, and of fp4
_INTEGERS = 5  # with a factor for each row
_GROUPS_STORED = 8  # powers of a row that are stored together, at most
_SORTED_AT_A_TIME = (128, 1024)  # ids that a program looks at together, where there are few and many
MOST_ROUTED = _SORTED_AT_A_TIME[-1]  # rows that one kernel sorts and gathers
_MANY_SORTED, _MANY_IDS = 8192, 4096  # ids that a program looks at together, of more than this number
_COMBINED_AT_A_TIME = 1024  # columns of a token's result
_PART = 1024  # elements of a row that a program writes, where no factor is of more
_FEW_COLUMNS = 4096  # of a row that four warps hold
_DIVISOR = 16  # the most elements that a size is known to be a multiple of


def choose_sort(ids: str, count: int, experts: int) -> Chosen:
    """Return the kernel that sorts rows by expert."""
    few, some = _SORTED_AT_A_TIME
    block = few if count <= few else some if count <= _MANY_IDS else _MANY_SORTED
    pointers = {"ids_ptr": f"*{ids}"} | dict.fromkeys(("order_ptr", "place_ptr", "ends_ptr"), "*i32")
    numbers = {"count": count, "experts": experts}
    return _chosen("sort_rows", pointers, numbers, {"BLOCK": block}, (experts + 1, 1))


def choose_gather(dtype_x: str, dtype_q: str, mode: str, rows: int, k: int, stride: int, topk: int) -> Chosen:
    """Return the kernel that writes the token of each sorted row.

    Types are our names; `mode` is ``row``, ``block`` or one of `MX_MODES` where rows are quantised, what shares a
    factor; else "". Rows have `k` elements, tokens begin `stride` elements apart, and each has `topk` experts.
    """
    pointers = {"x_ptr": pointer(dtype_x), "order_ptr": "*i32", **_results(dtype_q, mode)}
    numbers = {"rows": rows, "K": k, "stride": stride, "topk": topk}
    divided = {"K": k, "stride": stride}
    text, constants = _text(mode), _row_constants(dtype_q, mode, k, _PART)
    return _chosen("gather_rows", pointers, numbers, constants, _parts(rows, k, constants), divided, text)


def choose_route(
    ids: str, dtype_x: str, dtype_q: str, mode: str, shape: tuple[int, int], stride: int, topk: int, experts: int
) -> Chosen:
    """Return the kernel that does what those of `choose_sort` and `choose_gather` do, for at most `MOST_ROUTED` rows of
    a shape [rows, K].
    """
    rows, k = shape
    count = next(most for most in _SORTED_AT_A_TIME if rows <= most)
    pointers = {"ids_ptr": f"*{ids}", "x_ptr": pointer(dtype_x)}
    pointers |= dict.fromkeys(("order_ptr", "place_ptr", "ends_ptr"), "*i32") | _results(dtype_q, mode)
    numbers = {"rows": rows, "K": k, "stride": stride, "topk": topk, "experts": experts}
    constants, grid = {"COUNT": count, **_row_constants(dtype_q, mode, k)}, (max(rows, experts), 1)
    return _chosen("route_rows", pointers, numbers, constants, grid, {"K": k, "stride": stride}, _text(mode))


def choose_activate(
    dtype_h: str, dtype_q: str, mode: str, rows: int, k: int, activation: str, added: Added = UNBIASED, run: int = 0
) -> Chosen:
    """Return the kernel that writes the activation of the left half of each row times its right half.

    Arguments are as of `choose_gather`, but `k` counts half a row; the activation is one of `ACTIVATIONS`. Columns of
    both alternate by `run` where that is not 0, and nothing is added then.
    """
    pointers = {"h_ptr": pointer(dtype_h), **_results(dtype_q, mode), **_bias(added, dtype_h), "order_ptr": "*i32"}
    biased = {"ACTIVATION": ACTIVATIONS.index(activation), "BIASED": int(added != UNBIASED), "RUN": run}
    constants = {**biased, **_row_constants(dtype_q, mode, k, _PART)}
    numbers, grid = {"rows": rows, "K": k, "experts": added[2]}, _parts(rows, k, constants)
    return _chosen("activate_rows", pointers, numbers, constants, grid, {"K": k}, _text(mode))


def choose_combine(
    dtype_y: str, weights: str, tokens: int, k: int, experts: int, topk: int, added: Added = UNBIASED
) -> Chosen:
    """Return the kernel that adds up each token's rows with its weights.

    `dtype_y` is the type of the rows and of the result, `weights` one of `WEIGHT_TYPES`.
    """
    y = pointer(dtype_y)
    pointers = {"y_ptr": y, "place_ptr": "*i32", "weights_ptr": pointer(weights), "ends_ptr": "*i32", "out_ptr": y}
    pointers |= _bias(added, dtype_y)
    block = min(_COMBINED_AT_A_TIME, power_of_two(k))
    constants = {"MOST": power_of_two(topk), "BIASED": int(added != UNBIASED), "BLOCK": block}
    numbers = {"K": k, "experts": experts, "topk": topk}
    return _chosen("combine_rows", pointers, numbers, constants, (tokens, cdiv(k, block)), {"K": k})


def kernels_for(problem: Problem, target: Target) -> Iterator[Chosen]:
    """Yield the kernels beside a grouped product in a mixture, as its first product and as its second.

    Those that write fp8 in an encoding that the target can't convert to are left out: PyTorch's operations write it.
    """
    mode = mode_of(problem)
    if mode is None:
        return
    x, q, k = problem.c.dtype, problem.a.dtype, problem.k
    for ids in ID_TYPES:
        yield from (choose_sort(ids, count, problem.group_count) for count in (*_SORTED_AT_A_TIME, _MANY_SORTED))
    if target.supports(problem.a.type) or not problem.a.type.is_fp8:
        yield choose_gather(x, q, mode, problem.m, k, k, 1)
        counts = [(ids, count) for ids in ID_TYPES for count in _SORTED_AT_A_TIME]
        yield from (choose_route(ids, x, q, mode, (count, k), k, 1, problem.group_count) for ids, count in counts)
        yield from (choose_activate(x, q, mode, problem.m, k, activation) for activation in ACTIVATIONS)
    for weights in dict.fromkeys(("fp32", x)):
        for power in range(MOST_TOPK.bit_length()):
            yield choose_combine(x, weights, problem.m, problem.n, problem.group_count, 1 << power)


def mode_of(problem: Problem) -> str | None:
    """Return how `fused_moe` would quantise the A of a grouped product; None where it has no such product."""
    if problem.kind != "grouped" or problem.masked or problem.layout != "TN" or problem.bias != "none":
        return None
    if problem.a.scaling is None:
        return "" if problem.a.dtype == problem.c.dtype else None
    pair = granularity(problem.scalings)
    if pair in MX_MODES or (pair == "row" and (problem.a.type.is_fp8 or problem.a.dtype == "int8")):
        return pair
    return "block" if pair in ("block", "block_rows") and problem.a.type.is_fp8 else None


def _parts(rows: int, k: int, constants: Mapping[str, float]) -> tuple[int, int]:
    return rows, cdiv(k, int(constants["BLOCK"]))


def _row_constants(dtype_q: str, mode: str, k: int, most: int = 0) -> dict[str, float]:
    """Return constants of a kernel that writes rows, or `most` elements of them where no factor is of all of a row."""
    block = max(DEPTH, power_of_two(k))
    block = min(block, most) if most and _MODES.get(mode) != 1 else block
    constants = {"MAXIMUM": 0.0, "DEPTH": DEPTH, "CARRY": 0, "LESS": 0, "PAD": 1, "BLOCK": block}
    if mode not in MX_MODES:
        kind = _INTEGERS if mode and DTYPES[dtype_q].is_integer else _MODES[mode]
        return constants | {"MODE": kind, "MAXIMUM": DTYPES[dtype_q].maximum if mode else 0.0}
    scaling, rounding, packed = powers_of(mode), Rounding.of(dtype_q), DTYPES[dtype_q].packed > 1
    constants |= {"MODE": _PACKED_POWERS if packed else _POWERS, "CARRY": rounding.carry, "LESS": rounding.less}
    block = max(scaling.depth * _GROUPS_STORED, power_of_two(k))
    return constants | {"DEPTH": scaling.depth, "PAD": scaling.pad[1], "BLOCK": block}


def _text(mode: str = "") -> str:
    """Return the module of kernels, with the order of its powers of two."""
    of_row, of_group = scale_places(powers_of(mode).layout if mode in MX_MODES else "rows")
    return read_text("experts").replace("ROW_PLACE", of_row).replace("GROUP_PLACE", of_group)


def _bias(added: Added, rows: str) -> dict[str, str]:
    """Return the pointers to the bias of each expert and to the experts of tokens, which none but a bias reads."""
    bias, ids, _ = added
    return {"bias_ptr": pointer(bias or rows), "ids_ptr": f"*{ids}"}


def _results(dtype_q: str, mode: str) -> dict[str, str]:
    return {"q_ptr": pointer(dtype_q), "scale_ptr": "*u8" if mode in MX_MODES else "*fp32"}


def pointer(dtype: str) -> str:
    """Return the type of a pointer in a kernel's signature."""
    return f"*{DTYPES[dtype].triton}"


def _chosen(
    name: str,
    pointers: dict[str, str],
    numbers: dict[str, int],
    constants: Mapping[str, float],
    grid: tuple[int, int],
    divided: dict[str, int] | None = None,
    text: str = "",
) -> Chosen:
    divisors = {number: gcd(value, _DIVISOR) for number, value in (divided or {}).items()}
    warps = 8 if constants["BLOCK"] > _FEW_COLUMNS else 4
    signature = pointers | dict.fromkeys(numbers, "i32")
    helper = HelperKernel(name, text or _text(), signature, constants, divisors, warps, overlaps=True)
    return helper, HelperArguments((*grid, 1), numbers)
