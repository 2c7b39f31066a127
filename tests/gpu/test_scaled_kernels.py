import hashlib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tritongemm
from tests.gpu.here import fp8, needs_gpu, triton
from tests.gpu.test_numeric import usable, verify_all
from tests.support.nouns import BuildPool, Config, Family, Groups, Patch, Problem, Target, matrices, raising, registry
from tritongemm.backends.triton import assembly_edits, compiling
from tritongemm.backends.triton.assembly_edits import UnknownAssemblyError
from tritongemm.codegen.template_facts import exchanges_sums
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.operations import microscaling

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
def test_scales_are_in_place(gpu: GpuEvaluator, compiler: BuildPool, family: str, scales: str, bias: str) -> None:
    verify_all(gpu, compiler, problems(gpu.target, family, scales, bias), CONFIGS)


FORMS = (("fp4e2m1", ""), ("fp4e2m1", "mx"), ("fp8e4m3fn", "mx"), ("fp8e5m2", "mx_shuffled"))
MX_CONFIGS = (
    Config("tile", 64, 64, 128, 4, 1, 4, 2),
    Config("tile", 16, 64, 256, 1, 3, 4, 3, SWAPPED),
    Config("tile", 128, 128, 128, 4, 1, 8, 3),
    Config("stream_k", 64, 64, 128, 8, 1, 4, 2),
    Config("tma", 64, 64, 128, 8, 2, 4, 3),
    Config("persistent", 64, 64, 128, 8, 1, 4, 2, (("epilogue_parts", 2), ("warp_specialize", 0))),
    Config("stream_k_tma", 64, 64, 128, 8, 1, 4, 3, (("share_more", 1),)),
    Config("gemv", 1, 8, 256, 1, 1, 4, 1),
    Config("gemv", 4, 16, 256, 1, 2, 4, 1),
)
MX_GROUPED = (
    Config("grouped", 16, 64, 128, 4, 1, 4, 2, (("per_unit", 2),)),
    Config("grouped", 64, 64, 128, 4, 1, 4, 3, SWAPPED),
    Config("grouped_tile", 64, 64, 128, 4, 1, 4, 2),
    Config("grouped_tma", 64, 64, 128, 4, 1, 4, 3),
)
MX_COUNTS = (7, 0, 133, 1, 0)
TORCH = {"fp4e2m1": torch.uint8, "fp8e4m3fn": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2}


def of(dtype: str, scales: str, m: int, n: int, k: int, **more: Any) -> Problem:
    family = registry.get(Family, "a4w4_blockscale" if dtype == "fp4e2m1" else "a8w8_blockscale")
    operands = matrices(dtype, c="bf16", layout="TN", shared=more.pop("shared", ""))
    made: Problem = family.problem(Problem(m, n, k, *operands, **more), scales)
    return made


OF_MX: dict[str, dict[str, Any]] = {
    "one": {"sizes": ((300, 528, 1040), (7, 45, 330), (72, 136, 2176))},
    **{
        f"batch, {s or 'own'}": {"sizes": ((72, 136, 1088), (5, 45, 330)), "batch": 3, "shared": s}
        for s in ("", "a", "b")
    },
    **{
        f"groups of room {room}": {
            "sizes": tuple((sum(MX_COUNTS), n, k) for n, k in ((136, 1088), (45, 330))),
            "groups": Groups(len(MX_COUNTS), room, "captured", MX_COUNTS),
        }
        for room in (0, 140)
    },
}


@needs_gpu
@pytest.mark.parametrize(("dtype", "scales"), FORMS)
@pytest.mark.parametrize("form", OF_MX)
def test_powers_of_two_are_applied(gpu: GpuEvaluator, compiler: BuildPool, dtype: str, scales: str, form: str) -> None:
    if not gpu.target.has("dot_scaled"):
        pytest.skip(f"{gpu.target.name} has no dot_scaled")
    more = dict(OF_MX[form])
    for size in more.pop("sizes"):
        problem = of(dtype, scales, *size, **more)
        configs = [c for c in (MX_GROUPED if problem.groups else MX_CONFIGS) if triton().check(c, problem, gpu.target)]
        assert {c.template for c in configs} >= ({"grouped", "grouped_tile"} if problem.groups else {"tile", "gemv"})
        verify_all(gpu, compiler, [problem], configs)


@needs_gpu
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("layout", ["rows", "e8m0_32x8"])
def test_the_kernel_quantises_as_pytorchs_operations_do(dtype: str, layout: str) -> None:
    x = torch.randn(77, 1056, device="cuda") * torch.logspace(-6, 6, 77, device="cuda")[:, None]
    x[5], x[6, 40] = 0, float("nan")
    for given in (x, x.bfloat16(), x[:1]):
        q, powers = tritongemm.quantize(given, "mx", TORCH[dtype], layout)
        wanted, exponents = microscaling.by_torch(given, TORCH[dtype], layout)
        assert torch.equal(powers, exponents)
        there = torch.arange(len(given), device="cuda") != 6
        assert torch.equal(q.view(torch.uint8)[there], wanted.view(torch.uint8)[there])


FOUR_BITS = (
    Config("tile", 64, 64, 64, 4, 1, 4, 3),
    Config("tile", 16, 64, 128, 1, 3, 4, 4, (("swap_ab", 1),)),
    Config("tile", 16, 64, 256, 1, 2, 4, 3, (("poll", 1), ("swap_ab", 1))),
    Config("fragments", 16, 64, 256, 1, 2, 2, 3, (("slices", 2), *SWAPPED)),
    Config("fragments", 64, 128, 128, 4, 1, 8, 4, SWAPPED),
    Config("fragments", 32, 64, 256, 1, 2, 4, 3, SWAPPED),
    Config("ws_fragments", 128, 128, 128, 2, 1, 8, 4, (("epilogue_parts", 1), ("share", 1), *SWAPPED)),
    Config("ws_fragments", 64, 128, 64, 1, 2, 8, 4, (("epilogue_parts", 1), ("share", 0), *SWAPPED)),
)
FOUR_BITS_GROUPED = (
    Config("grouped", 16, 64, 128, 1, 1, 4, 3, (("swap_ab", 1),)),
    Config("grouped", 64, 64, 64, 4, 1, 4, 3, (("per_unit", 2),)),
    Config("grouped_tile", 16, 64, 256, 1, 1, 4, 3),
    Config("grouped_fragments", 8, 32, 512, 1, 1, 4, 3, (("slices", 4), *SWAPPED)),
    Config("grouped_fragments", 16, 64, 256, 1, 1, 2, 3, (("slices", 2), *SWAPPED)),
    Config("grouped_fragments", 64, 128, 128, 4, 1, 8, 4, SWAPPED),
    Config("grouped_fragments", 8, 64, 256, 1, 1, 2, 3, (("slices", 2), *SWAPPED, ("turns", 4))),  # of a short K
)
COUNTS = (7, 0, 133, 1)
CASES = {
    "a16w4": ("bf16", "int4", ("weight_128_zeros", "weight_32_zeros", "weight_32"), "halves_32"),
    "a16w4 fp16": ("fp16", "int4", ("weight_64_zeros_fp16",), "plain"),
    "a16w4 fp4": ("bf16", "fp4e2m1", ("weight_mx",), "halves_32"),
    "a16w4 fragments": ("bf16", "int4", ("weight_128_zeros", "weight_32"), "fragments"),
    "a16w4 fp4 fragments": ("bf16", "fp4e2m1", ("weight_mx", "weight_16"), "fragments"),
    "a16w4 nvfp4": ("bf16", "fp4e2m1", ("weight_16",), "plain"),
    "a8w4": ("fp8", "fp4e2m1", ("mx", "row_weight_mx", "block_weight_mx", "block_rows_weight_mx"), "halves_32"),
    "a8w4 int4": ("fp8", "int4", ("row_weight_128_zeros", "block_weight_128"), "plain"),
    "a8w4 int8": ("int8", "int4", ("row_weight_64",), "halves_32"),
}


@needs_gpu
@pytest.mark.parametrize("room", [None, 0, 140], ids=["one", "groups", "masked"])
@pytest.mark.parametrize("case", CASES)
def test_weights_of_four_bits(gpu: GpuEvaluator, compiler: BuildPool, case: str, room: int | None) -> None:
    of_a, of_b, granularities, order = CASES[case]
    of_a = fp8(gpu.target) if of_a == "fp8" else of_a
    family = registry.get(Family, case.split()[0])
    groups = None if room is None else Groups(len(COUNTS), room, "captured", COUNTS)
    for scales, k in product(granularities, (1152, 256) if order == "fragments" and groups else (1152,)):
        n = 336 if order == "fragments" else 328  # which want blocks of 16
        plain = Problem(sum(COUNTS), n, k, *matrices(of_a, of_b, "bf16", layout="TN"), groups=groups)
        problem = family.problem(plain, scales)
        problem = replace(problem, b=problem.b._replace(order=order), bias="none" if groups else "n")
        if not family.supports(problem, gpu.target):
            continue
        configs = [c for c in (FOUR_BITS_GROUPED if groups else FOUR_BITS) if triton().check(c, problem, gpu.target)]
        assert len(configs) >= 2 or order == "fragments"  # which some targets read
        verify_all(gpu, compiler, [problem], configs)


EXCHANGING = (
    Config("ws_tma", 64, 64, 128, 1, 2, 4, 6, (("ahead", 4),)),
    Config("ws_tma", 128, 128, 128, 2, 4, 8, 3),
    Config("ws_tma", 64, 96, 128, 1, 2, 4, 4),
    Config("ws_tma_swapped", 16, 64, 128, 1, 2, 4, 8, SWAPPED),
)


@pytest.mark.parametrize(("family", "dtype"), [("dense", "bf16"), ("a8w8", "int8"), ("a8w8_blockscale", "fp8e4m3fn")])
def test_splits_add_in_memory(gpu: GpuEvaluator, tmp_path: Path, monkeypatch: Patch, family: str, dtype: str) -> None:
    monkeypatch.setattr(assembly_edits, "edit", raising(UnknownAssemblyError("a new version")))
    problem: Problem = registry.get(Family, family).problem(
        Problem(61, 528, 1040, *matrices(dtype, c="bf16", layout="TN"))
    )
    chosen = usable(problem, gpu.target, EXCHANGING)
    if not chosen:
        pytest.skip("no kernels with warps that have roles on this target")
    for config in chosen:
        assert exchanges_sums(config)
        built, code, file = compiling.compile_job(triton().compile_job(config, problem, gpu.target))
        assert built.status == "ok", built.reason
        assert getattr(triton().launch(built, problem, gpu.target), "cluster", 0) == 1
        (path := tmp_path / file).write_bytes(code)
        (trial,) = gpu.verify(problem, [replace(built, path=str(path), sha256=hashlib.sha256(code).hexdigest())])
        assert trial.status == "ok", f"{config.name}: {trial.reason}"
