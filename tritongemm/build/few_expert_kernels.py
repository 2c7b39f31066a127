"""Chooses the two kernels of a mixture of experts for a few tokens, with their grids and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Final, NamedTuple

from tritongemm.build.expert_kernels import DEPTH, ID_TYPES, MOST_TOPK, Chosen, mode_of, pointer
from tritongemm.build.helpers import read_text
from tritongemm.core.dtypes import DTYPES
from tritongemm.core.helper_kernel import ACTIVATIONS, HelperArguments, HelperKernel
from tritongemm.core.integers import cdiv, power_of_two
from tritongemm.core.problem import Problem

SCALES = {"": 0, "row": 1, "block": 2}  # the granularities of weights that these kernels read
_DIVISOR = 16  # the most elements that a size is known to be a multiple of
_LOAD_BYTES = 16  # what a thread loads at once


class Tile(NamedTuple):
    """What a program computes, and how much of K at a time."""

    columns: int  # of a result
    depth: int  # elements of K
    warps: int
    early: int = 0  # whether the next kernel may start before this one's loops are done


# As they were fastest on an H200, with Qwen3-30B-A3B's experts. More columns of fp8; of int8 they would spill.
FIRST, FIRST_OF_FP8 = Tile(4, 1024, 4, 1), Tile(8, 1024, 2, 1)
SECOND, SECOND_OF_BYTES = Tile(1, 128, 1, 1), Tile(1, 256, 1, 1)
_EXPERTS_OF_A_WARP = 8  # whose blocks of weights it has in registers
MOST_ROWS: Final = 8  # rows up to which two kernels were faster there, or of eight bits as fast


class FewExperts(NamedTuple):
    """The types and sizes of a product of both, as its kernel reads them."""

    ids: str  # type of experts' ids, of `ID_TYPES`
    dtype_x: str  # of tokens, activated values and results
    dtype_w: str
    mode: str  # granularity of the weights' factors, of `SCALES`
    rows: int  # of the first product, tokens times experts of a token; of the second tokens
    n: int  # columns of the result: of the first product half of what its weights have
    k: int
    topk: int
    experts: int

    @property
    def bytes(self) -> int:
        """The bytes of a weight's element."""
        return DTYPES[self.dtype_w].bytes


def choose_gate_up(one: FewExperts, stride: int, activation: str) -> Chosen:
    """Return the kernel of activation(gate) * up of each row, whose tokens begin `stride` elements apart."""
    x = pointer(one.dtype_x)
    pointers = {"ids_ptr": f"*{one.ids}", "x_ptr": x, "w_ptr": pointer(one.dtype_w), "scale_ptr": "*fp32", "h_ptr": x}
    numbers = {"K": one.k, "inner": one.n, "stride": stride, "topk": one.topk, "experts": one.experts}
    tile = FIRST_OF_FP8 if DTYPES[one.dtype_w].is_fp8 else FIRST
    return _chosen("gate_up_rows", one, pointers, numbers, {"ACTIVATION": ACTIVATIONS.index(activation)}, tile)


def choose_down(one: FewExperts, weights: str) -> Chosen:
    """Return the kernel of each token's weighted sum; `weights` is the routing weights' type."""
    x = pointer(one.dtype_x)
    pointers = {"ids_ptr": f"*{one.ids}", "h_ptr": x, "w_ptr": pointer(one.dtype_w), "scale_ptr": "*fp32"}
    pointers |= {"weights_ptr": pointer(weights), "out_ptr": x}
    numbers = {"K": one.k, "hidden": one.n, "topk": one.topk, "experts": one.experts}
    most, tile = power_of_two(one.topk), SECOND if one.bytes > 1 else SECOND_OF_BYTES
    tile = tile._replace(warps=max(tile.warps, most // _EXPERTS_OF_A_WARP))
    constants = {"MOST": most, "AHEAD": int(one.rows == 1 and one.bytes > 1)}  # more tokens have more programs
    return _chosen("down_rows", one, pointers, numbers, constants, tile)


def kernels_for(problem: Problem) -> Iterator[Chosen]:
    """Yield the kernels of mixtures of which a grouped product is the first, and those of which it is the second."""
    mode = mode_of(problem)
    if mode not in SCALES:
        return
    for ids in ID_TYPES:
        types = ids, problem.c.dtype, problem.b.dtype, mode
        one = FewExperts(*types, problem.m, problem.n, problem.k, 1, problem.group_count)
        if problem.n % 2 == 0:
            yield from (choose_gate_up(one._replace(n=problem.n // 2), problem.k, name) for name in ACTIVATIONS)
        for weights in dict.fromkeys(("fp32", problem.c.dtype)):
            counts = [(rows, 1 << i) for rows in (1, 2) for i in range(MOST_TOPK.bit_length())]
            yield from (choose_down(one._replace(rows=rows, topk=topk), weights) for rows, topk in counts)


def _chosen(
    name: str, one: FewExperts, pointers: dict[str, str], numbers: dict[str, int], constants: dict[str, int], tile: Tile
) -> Chosen:
    at_once, block = _LOAD_BYTES // one.bytes, min(tile.depth, max(DEPTH, power_of_two(one.k)))
    chosen: dict[str, float] = {**constants, "SCALES": SCALES[one.mode], "COLUMNS": tile.columns, "BLOCK": block}
    chosen |= {"AT_ONCE": at_once, "DEPTH": DEPTH, "EARLY": tile.early}
    divisors = {n: gcd(value, _DIVISOR) for n, value in numbers.items() if n not in ("topk", "experts")}
    signature = pointers | dict.fromkeys(numbers, "i32")
    helper = HelperKernel(name, read_text("few_experts"), signature, chosen, divisors, tile.warps, overlaps=True)
    return helper, HelperArguments((one.rows, cdiv(one.n, tile.columns), 1), numbers)
