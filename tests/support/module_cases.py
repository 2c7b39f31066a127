from dataclasses import replace
from typing import Any, NamedTuple

from tests.support.kernel_cases import (
    DESCRIBED,
    FRAGMENTS,
    FRAGMENTS_OF_GROUPS,
    GLUON,
    GROUPED,
    MX_BATCHED,
    MX_GEMV,
    MX_GROUPED,
    POINTERS,
    SPLIT,
    TMA,
    WS_FRAGMENTS,
)
from tests.support.nouns import Config, Groups, Problem
from tests.support.products import product


class ModuleCase(NamedTuple):
    problem: Problem
    configs: tuple[Config, ...]
    anywhere: bool = False


def _problem(family: str, types: str, **more: Any) -> Problem:
    return product(family, 48, 256, 256, types, **more)


def _fragments(dtype: str, scales: str) -> Problem:
    """A product of bf16 by a weight of four bits in the order of fragments."""
    return _problem("a16w4", f"bf16 {dtype}", scales=scales, order="fragments")


_GROUPS = Groups(5, spread="captured", counts=(7, 0, 33, 7, 1))
# Splits of a tile that exchange sums where assembly is edited; of one, a pair of programs; of one, tiles in turns.
_WARP_ROLES = (
    *GLUON,
    Config("ws_tma", 64, 32, 64, 1, 2, 4, 3),
    Config("ws_tma_swapped", 32, 64, 64, 1, 2, 4, 3, (("swap_ab", 1),)),
    Config("ws_tma", 128, 48, 64, 1, 1, 8, 3),
    Config("ws_tma", 128, 96, 64, 1, 1, 8, 3, (("pair", 1),)),
    Config("ws_tma", 128, 64, 64, 1, 1, 8, 3, (("alternate", 1), ("ahead", 2))),
)
# Each template, most of its branches.
_POINTERS_ONCE, _DESCRIBED_ONCE = (SPLIT, POINTERS[3], *POINTERS[5:8]), (*DESCRIBED[1::2], DESCRIBED[4])
_ONCE = (*_POINTERS_ONCE, *_DESCRIBED_ONCE)
_DEEP = (
    Config("tile", 16, 32, 32, 4, 3),
    Config("tma", 16, 32, 32, 2, 2),
    Config("persistent", 16, 32, 32, 2),
)  # for bytes
# Of scales of 128 elements along K.
_BLOCKS = (
    Config("tile", 16, 64, 128, 4, 2, 4, 2, (("swap_ab", 1),)),
    Config("gemv", 1, 32, 128),
    Config("stream_k", 32, 64, 128),
)
_DESCRIBED_BLOCKS = (
    Config("tma", 32, 64, 128, 1, 2, 4, 3),
    Config("persistent", 64, 64, 128, 4),
    Config("stream_k_tma", 32, 64, 128),
    Config("ws_tma", 64, 64, 128, 1, 2, 4, 3),
    Config("ws_tma", 128, 128, 128, 8, 1, 8, 4, (("share", 1),)),
    Config("ws_tma_swapped", 32, 64, 128, 1, 1, 4, 4, (("swap_ab", 1),)),
)
_GROUPED_BLOCKS = (
    Config("grouped", 32, 64, 128, 1, options=(("swap_ab", 1), ("per_unit", 2))),
    Config("grouped_tma", 32, 64, 128, 4),
    Config("grouped_tile", 16, 64, 128, 2),
    Config("grouped_gemv", 1, 4, 256),
    Config("grouped_ws_tma", 64, 64, 128, 4, num_warps=4, num_stages=3),
    Config("grouped_ws_tma_swapped", 16, 64, 128, 1, num_warps=4, num_stages=4, options=(("swap_ab", 1),)),
)
CASES = {
    "bf16": ModuleCase(_problem("dense", "bf16", bias="n"), _POINTERS_ONCE, True),
    "bf16, copy engine": ModuleCase(_problem("dense", "bf16", bias="n"), (*_DESCRIBED_ONCE, *_WARP_ROLES[:4])),
    "bf16, other tiles": ModuleCase(
        _problem("dense", "bf16"), (*(c for c in (*POINTERS, *DESCRIBED) if c not in _ONCE), *_WARP_ROLES[4:]), True
    ),
    "fp16 column-major A, bias along M": ModuleCase(
        _problem("dense", "fp16", layout="NT", bias="m"), (SPLIT, TMA, GLUON[1]), True
    ),
    "bf16, gate and up": ModuleCase(
        _problem("dense", "bf16", epilogue="silu_mul"), (SPLIT, POINTERS[3], *_DEEP[1:], *GLUON, _WARP_ROLES[3]), True
    ),
    "int8": ModuleCase(_problem("a8w8", "int8"), (*_DEEP, POINTERS[4], *GLUON[1:]), True),
    "fp8, scales of rows": ModuleCase(_problem("a8w8", "fp8e4m3fn", bias="n"), (*_DEEP, *GLUON, _WARP_ROLES[4])),
    "fp8, one scale a matrix": ModuleCase(_problem("a8w8", "fp8e4m3fn", scales="tensor"), (*_DEEP[:1], GLUON[1])),
    "fp8, scales of blocks": ModuleCase(
        _problem("a8w8_blockscale", "fp8e4m3fn", scales="block"), (*_BLOCKS, *_DESCRIBED_BLOCKS)
    ),
    "batched bf16": ModuleCase(
        _problem("dense", "bf16", batch=3, bias="n"), (SPLIT, POINTERS[2], POINTERS[4], *DESCRIBED[:3]), True
    ),
    "batched fp8, scales of blocks": ModuleCase(
        _problem("a8w8_blockscale", "fp8e4m3fn", scales="block", batch=2), (*_BLOCKS[:2], _DESCRIBED_BLOCKS[0])
    ),
    "grouped bf16": ModuleCase(_problem("dense", "bf16", groups=_GROUPS), GROUPED, True),
    "grouped fp8, masked": ModuleCase(
        _problem("a8w8_blockscale", "fp8e4m3fn", scales="block", groups=replace(_GROUPS, room=40)), _GROUPED_BLOCKS
    ),
    "fp4": ModuleCase(_problem("a4w4_blockscale", "fp4e2m1"), (*MX_GEMV, *MX_BATCHED), True),
    "int4 in fragments": ModuleCase(_fragments("int4", "weight_64_zeros"), (*FRAGMENTS, WS_FRAGMENTS)),
    "groups of int4 in fragments": ModuleCase(
        replace(_fragments("int4", "weight_64_zeros"), groups=_GROUPS), FRAGMENTS_OF_GROUPS
    ),
    "fp4 in fragments": ModuleCase(_fragments("fp4e2m1", "weight_mx"), (*FRAGMENTS, WS_FRAGMENTS)),
    "grouped fp4": ModuleCase(_problem("a4w4_blockscale", "fp4e2m1", groups=_GROUPS), MX_GROUPED, True),
}
