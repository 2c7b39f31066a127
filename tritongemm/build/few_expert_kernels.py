"""Chooses the two kernels of a mixture of experts for a few tokens, with their grids and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from tritongemm.build.expert_kernels import DEPTH, ID_TYPES, MOST_TOPK, Chosen, mode_of
from tritongemm.build.helpers import read_text
from tritongemm.core.dtypes import DTYPES
from tritongemm.core.helper_kernel import ACTIVATIONS, HelperArguments, HelperKernel
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem

SCALES = {"": 0, "row": 1, "block": 2}  # the granularities of weights that these kernels read
_DIVISOR = 16  # the most elements that a size is known to be a multiple of
_LOAD_BYTES = 16  # what a thread loads at once
_LINE_BYTES = 128  # of L2
_MOST_FETCHED_BYTES = 32 << 20  # of weights of the second product that L2 keeps until they are read


class Tile(NamedTuple):
    """What a program computes at a time."""

    columns: int  # of a result
    depth_bytes: int  # of a row of weights
    warps: int
    early: int = 0  # whether the next kernel may start before this one's loops are done


FIRST, SECOND = Tile(4, 512, 1), Tile(1, 256, 1)


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
    x, w = _pointer(one.dtype_x), _pointer(one.dtype_w)
    pointers = {"ids_ptr": f"*{one.ids}", "x_ptr": x, "w_ptr": w, "scale_ptr": "*fp32", "h_ptr": x, "next_ptr": w}
    numbers = {"K": one.k, "inner": one.n, "hidden": one.k, "stride": stride, "topk": one.topk, "experts": one.experts}
    numbers["fetches"] = int(one.rows * one.n * one.k * one.bytes <= _MOST_FETCHED_BYTES)
    lines = _power_of_two(cdiv(FIRST.columns * one.k * one.bytes, _LINE_BYTES))
    constants = {"ACTIVATION": ACTIVATIONS.index(activation), "LINES": lines, "LINE": _LINE_BYTES // one.bytes}
    return _chosen("gate_up_rows", one, pointers, numbers, constants, FIRST)


def choose_down(one: FewExperts, weights: str) -> Chosen:
    """Return the kernel of each token's weighted sum; `weights` is the routing weights' type."""
    x = _pointer(one.dtype_x)
    pointers = {"ids_ptr": f"*{one.ids}", "h_ptr": x, "w_ptr": _pointer(one.dtype_w), "scale_ptr": "*fp32"}
    pointers |= {"weights_ptr": _pointer(weights), "out_ptr": x}
    numbers = {"K": one.k, "hidden": one.n, "topk": one.topk, "experts": one.experts}
    return _chosen("down_rows", one, pointers, numbers, {"MOST": _power_of_two(one.topk)}, SECOND)


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
            yield from (choose_down(one._replace(topk=1 << i), weights) for i in range(MOST_TOPK.bit_length()))


def _chosen(
    name: str,
    one: FewExperts,
    pointers: dict[str, str],
    numbers: dict[str, int],
    constants: dict[str, int],
    tile: Tile,
) -> Chosen:
    at_once, block = _LOAD_BYTES // one.bytes, min(tile.depth_bytes // one.bytes, max(DEPTH, _power_of_two(one.k)))
    chosen: dict[str, float] = {**constants, "SCALES": SCALES[one.mode], "COLUMNS": tile.columns, "BLOCK": block}
    chosen |= {"AT_ONCE": at_once, "DEPTH": DEPTH, "EARLY": tile.early}
    divisors = {n: gcd(value, _DIVISOR) for n, value in numbers.items() if n not in ("topk", "experts", "fetches")}
    signature = pointers | dict.fromkeys(numbers, "i32")
    helper = HelperKernel(name, read_text("few_experts"), signature, chosen, divisors, tile.warps, overlaps=True)
    return helper, HelperArguments((one.rows, cdiv(one.n, tile.columns), 1), numbers)


def _pointer(dtype: str) -> str:
    return f"*{DTYPES[dtype].triton}"


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
