"""Chooses the kernels that quantise activations of one shape, with their grids and numbers."""

from dataclasses import dataclass
from math import gcd

from tritongemm.build.helpers import read_text
from tritongemm.core.dtypes import DTYPES, Rounding
from tritongemm.core.helper_kernel import PARTS, HelperArguments, HelperKernel
from tritongemm.core.integers import cdiv, power_of_two
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import SCALED_BLOCK, Scaling
from tritongemm.numerics.scale_factors import scale_places

_MOST_COLUMNS = 16384  # of a row that a program holds at a time
_LEAST_COLUMNS = 256
_FEW_ROWS = 256  # a compute unit has one or two of them: more warps share each
_ROWS = 8  # rows per program of groups, where there are enough
_MANY_ROWS = 32  # rows per program, where there are enough
_MANY_PROGRAMS = 2048  # programs of `_ROWS` rows each
_GROUPS = 8  # groups of 32 numbers along K per program
_PART = 4096  # elements per program at a time
_DIVISOR = 16  # the most elements that a size is known to be a multiple of


@dataclass(frozen=True)
class Quantization:
    """The request for a quantisation."""

    # m, k: extents of the activations
    m: int
    k: int
    dtype_x: str  # name of their type
    dtype_q: str  # name of the quantised type
    granularity: str  # `tensor`, `row`, `block` or `mx`
    # Of the scale factors along rows and along groups; of powers of two their extents in memory.
    strides: tuple[int, int]
    # What the row `r` of a power of two and its group `g` add to its place in memory.
    places: tuple[str, str] = ("r * groups", "g")


def quantization_of(problem: Problem, dtype_x: str, m: int) -> Quantization | None:
    """Return the quantisation of activations to the A of a problem; None where there is no kernel for it."""
    scaling = problem.a.scaling
    if scaling is None or not problem.a.row_major:
        return None
    extents = scaling.shape(m, problem.k)
    if problem.microscaled:
        places = scale_places(scaling.layout)
        return Quantization(m, problem.k, dtype_x, problem.a.dtype, "mx", extents, places) if all(places) else None
    if not (problem.a.type.is_fp8 or problem.a.dtype == "int8"):
        return None
    if scaling == Scaling(rows=0):
        return Quantization(m, problem.k, dtype_x, problem.a.dtype, "tensor", (1, 1))
    if scaling.dtype != "fp32" or scaling.rows != 1 or scaling.depth not in (0, SCALED_BLOCK):
        return None
    if scaling.layout not in ("rows", "groups"):
        return None
    strides = (1, extents[1]) if scaling.layout == "groups" else (extents[1], 1)
    return Quantization(m, problem.k, dtype_x, problem.a.dtype, "block" if scaling.depth else "row", strides)


def choose_kernels(asked: Quantization) -> tuple[tuple[HelperKernel, HelperArguments], ...]:
    """Return the kernels of a quantisation in order, with the arguments of one launch of each.

    Where all numbers share a factor, a first one writes the largest of `PARTS` parts as float32 to an address named
    part.
    """
    if asked.granularity != "tensor":
        return (choose_kernel(asked),)
    x, blocks = DTYPES[asked.dtype_x], cdiv(asked.m * asked.k, _PART)
    numbers = {"M": asked.m, "K": asked.k}
    signature = {"x_ptr": f"*{x.triton}", "part_ptr": "*fp32"} | dict.fromkeys(numbers, "i32")
    helper = HelperKernel("find_largest", read_text("quantize"), signature, {"BLOCK": _PART}, {}, 8, overlaps=True)
    return (helper, HelperArguments((min(PARTS, blocks), 1, 1), numbers)), choose_kernel(asked)


def choose_kernel(asked: Quantization) -> tuple[HelperKernel, HelperArguments]:
    """Return the kernel that quantises, with the arguments of one launch. Few binaries serve all M and most K."""
    if asked.granularity == "mx":
        return _powers(asked)
    x, q = DTYPES[asked.dtype_x], DTYPES[asked.dtype_q]
    pointers = {"x_ptr": f"*{x.triton}", "q_ptr": f"*{q.triton}", "scale_ptr": "*fp32"}
    numbers = {"M": asked.m, "K": asked.k}
    constants = {"MAXIMUM": q.maximum, "INTEGER": int(q.is_integer)}
    if asked.granularity == "row":
        columns = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, power_of_two(asked.k)))
        each = 512 if asked.m <= _FEW_ROWS else 1024  # columns of a warp
        name, grid, warps = "quantize_rows", (asked.m, 1, 1), min(16, max(4, columns // each))
        constants |= {"BLOCK": columns, "ONCE": int(asked.k <= columns)}
    elif asked.granularity == "tensor":
        blocks = cdiv(asked.m * asked.k, _PART)
        name, grid, warps = "quantize_tensor", (blocks, 1, 1), 8
        pointers |= {"part_ptr": "*fp32"}
        constants |= {"PARTS": PARTS, "BLOCK": _PART}
        numbers |= {"parts": min(PARTS, blocks)}
    else:
        groups = cdiv(asked.k, SCALED_BLOCK)
        many = asked.m * groups > _MANY_PROGRAMS * _ROWS
        rows = 1 if asked.m <= _ROWS else _MANY_ROWS if many else _ROWS
        name, grid, warps = "quantize_groups", (cdiv(asked.m, rows), groups, 1), 4 if rows > 1 else 1
        constants |= {"ROWS": rows, "GROUP": SCALED_BLOCK}
        numbers |= {"row_stride": asked.strides[0], "group_stride": asked.strides[1]}
    signature = pointers | dict.fromkeys(numbers, "i32")
    divisors = {"K": gcd(asked.k, _DIVISOR)}
    helper = HelperKernel(name, read_text("quantize"), signature, constants, divisors, warps, overlaps=True)
    return helper, HelperArguments(grid, numbers)


def _powers(asked: Quantization) -> tuple[HelperKernel, HelperArguments]:
    """Return the kernel that finds a power of two for each 32 numbers along K."""
    x, q = DTYPES[asked.dtype_x], DTYPES[asked.dtype_q]
    rounding, (of_row, of_group) = Rounding.of(asked.dtype_q), asked.places
    rows = _ROWS if asked.m > _ROWS else 1
    stored, groups = asked.strides
    numbers = {"M": asked.m, "K": asked.k, "rows_stored": stored, "groups": groups}
    signature = {"x_ptr": f"*{x.triton}", "q_ptr": f"*{q.triton}", "scale_ptr": "*u8"} | dict.fromkeys(numbers, "i32")
    constants = {"CARRY": rounding.carry, "LESS": rounding.less, "PACKED": int(q.packed > 1)}
    constants |= {"ROWS": rows, "GROUPS": _GROUPS}
    text = read_text("quantize").replace("ROW_PLACE", of_row).replace("GROUP_PLACE", of_group)
    divisors = {"K": gcd(asked.k, _DIVISOR)}
    helper = HelperKernel("quantize_powers", text, signature, constants, divisors, 4 if rows > 1 else 1, True)
    return helper, HelperArguments((cdiv(stored, rows), cdiv(groups, _GROUPS), 1), numbers)
