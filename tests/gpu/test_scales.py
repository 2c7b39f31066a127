"""Scales in every place and granularity on a real GPU: every template that there is against float64."""

import pytest

from tests.gpu.here import fp8
from tests.gpu.test_numeric import verify_all
from tritongemm.build.pool import BuildPool
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.target import Target
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family

SWAPPED = (("swap_ab", 1),)
CONFIGS = (
    Config("tile", 64, 64, 128, 4, 1, 4, 2),
    Config("tile", 16, 64, 128, 1, 3, 4, 3, (("poll", 1), *SWAPPED)),
    Config("tile", 32, 256, 64, 1, 2, 8, 2),
    Config("gemv", 1, 8, 512, 1, 2, 4, 1),
    Config("gemv", 4, 16, 256, 1, 1, 4, 1, (("prefetch", 3),)),
    Config("stream_k", 64, 64, 128, 8, 1, 4, 2),
    Config("tma", 64, 128, 128, 8, 2, 4, 3),
    Config("tma", 32, 64, 128, 1, 1, 4, 3, SWAPPED),
    Config("persistent", 128, 64, 128, 8, 1, 8, 3, (("epilogue_parts", 2), ("warp_specialize", 0))),
    Config("stream_k_tma", 64, 64, 128, 8, 1, 4, 3, (("share_more", 1),)),
    Config("ws_tma", 128, 128, 128, 8, 1, 8, 4, (("share", 2),)),
    Config("ws_tma", 128, 256, 128, 8, 1, 8, 3),
    Config("ws_tma", 256, 64, 128, 4, 1, 8, 4),
    Config("ws_tma", 256, 128, 128, 4, 1, 8, 4, (("epilogue_parts", 4),)),  # in halves of rows
    Config("ws_tma", 256, 128, 128, 2, 1, 8, 3, (("pair", 1),)),  # which share A
    Config("ws_tma", 256, 128, 128, 1, 2, 8, 3, (("epilogue_parts", 2),)),
    Config("ws_tma", 256, 128, 128, 4, 1, 8, 4, (("epilogue_parts", 4), ("pair", 1), ("share", 2))),
    Config("ws_tma", 128, 64, 128, 4, 2, 8, 4, (("pair", 1),)),
    Config("ws_tma", 192, 128, 128, 4, 1, 12, 3),  # three groups of warps
    Config("ws_tma", 128, 192, 128, 4, 1, 8, 3, (("share", 1),)),  # the narrower part to the left of every other tile
    Config("ws_tma", 128, 256, 128, 4, 1, 8, 4, (("epilogue_parts", 4),)),
    Config("ws_tma", 64, 32, 128, 1, 2, 4, 8),  # four blocks of K in a turn
    Config("ws_tma", 64, 64, 128, 1, 1, 4, 12, (("ahead", 8),)),  # a deep ring
    Config("ws_tma", 128, 128, 128, 8, 1, 8, 5),  # four blocks of K in a turn, then one by one
    Config("ws_tma", 64, 128, 128, 1, 1, 4, 7, (("pair", 1),)),
    Config("ws_tma", 128, 128, 128, 2, 1, 8, 6, (("adjacent", 1),)),
    Config("ws_tma", 128, 256, 128, 2, 2, 8, 3, (("epilogue_parts", 2), ("pair", 1))),
    Config("ws_tma", 192, 128, 128, 4, 1, 12, 3, (("pair", 1), ("share", 2))),
    Config("ws_tma_swapped", 16, 64, 128, 1, 2, 4, 8, SWAPPED),
    Config("ws_tma_swapped", 16, 64, 128, 1, 1, 4, 16, (("ahead", 8), *SWAPPED)),
    Config("ws_tma_swapped", 32, 128, 128, 1, 1, 8, 7, SWAPPED),
    Config("ws_tma", 64, 64, 128, 1, 2, 4, 8, (("ahead", 4),)),  # splits that exchange sums
    Config("ws_tma", 128, 128, 128, 2, 4, 8, 4),
    Config("ws_tma_swapped", 16, 64, 128, 1, 2, 4, 14, SWAPPED),
    Config("ws_tma_swapped", 32, 128, 128, 1, 4, 8, 5, SWAPPED),
    Config("ws_tma", 64, 64, 128, 1, 3, 4, 3),
    Config("ws_tma_swapped", 40, 64, 128, 1, 2, 4, 3, SWAPPED),
    Config("ws_tma_swapped", 96, 128, 128, 1, 1, 8, 4, (("epilogue_parts", 2), *SWAPPED)),
)
SIZES = ((300, 528, 1040), (7, 272, 1040), (72, 136, 2176))  # the ends of rows at multiples of 16 bytes, or not of 128


def problems(target: Target, family: str, scales: str, bias: str) -> list[Problem]:
    found = registry.get(Family, family)
    made = [
        found.problem(Problem(*size, *matrices(dtype, c="bf16", layout="TN"), bias=bias), scales)
        for dtype in (*([] if target.fp8 == "none" else [fp8(target)]), "int8")
        for size in SIZES
    ]
    assert all(found.supports(p, target) for p in made)
    return made


@pytest.mark.parametrize(
    ("family", "scales", "bias"),
    [
        ("a8w8", "row", "n"),
        ("a8w8", "tensor", "none"),
        ("a8w8_blockscale", "block", "none"),
        ("a8w8_blockscale", "block_rows", "n"),
        ("a8w8_blockscale", "group", "m"),
        ("a8w8_blockscale", "group_rows", "none"),
    ],
)
def test_scales_are_applied_where_they_belong(
    gpu: GpuEvaluator, compiler: BuildPool, family: str, scales: str, bias: str
) -> None:
    verify_all(gpu, compiler, problems(gpu.target, family, scales, bias), CONFIGS)
