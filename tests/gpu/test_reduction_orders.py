"""Kernels whose stated reduction orders are equal give equal bits, at every M, on a real GPU."""

from collections import defaultdict
from dataclasses import replace

import pytest

from tests.gpu.here import triton
from tests.gpu.test_numeric import CONFIGS, usable
from tests.gpu.test_scaled_kernels import CONFIGS as SCALED
from tests.support.nouns import Artifact, Backend, BuildPool, Config, Family, Groups, Problem, matrices, registry
from tests.support.products import product
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.measure.gpu_evaluator import GpuEvaluator

ROWS = (1, 70, 300)
SPLITS = tuple(
    Config(template, bm, bn, bk, 1, split, 4, 3, options)
    for split in (2, 4, 8, 16)
    for template, bm, bn, bk, options in (
        ("tile", 16, 32, 64, (("swap_ab", 0),)),
        ("tile", 64, 64, 32, (("swap_ab", 0),)),
        ("tile", 16, 64, 128, (("poll", 1), ("swap_ab", 1))),
        ("tma", 64, 128, 64, (("swap_ab", 0),)),
        ("tma", 16, 64, 128, (("poll", 1), ("swap_ab", 1))),
        ("ws_tma", 64, 32, 64, ()),
        ("ws_tma", 64, 256, 64, ()),
        ("ws_tma_swapped", 16, 64, 64, (("swap_ab", 1),)),
    )
)

SUMS_IN_MEMORY = (  # of runs, where they are scaled, many or added pairwise
    ("ws_tma", 64, 64, 128, 4, ()),
    ("ws_tma", 128, 256, 64, 8, ()),
    ("ws_tma", 128, 160, 128, 8, ()),
    ("ws_tma", 192, 128, 128, 12, ()),
    ("ws_tma", 256, 64, 128, 8, ()),
    ("ws_tma_swapped", 16, 64, 128, 4, (("swap_ab", 1),)),
    ("ws_tma_swapped", 48, 128, 64, 8, (("swap_ab", 1),)),
)
RUNS = tuple(
    Config(template, bm, bn, bk, 1, 1, warps, 3, (("runs", runs), *options))
    for runs in (2, 4, 8)
    for template, bm, bn, bk, warps, options in (
        ("tile", 64, 64, 64, 4, ()),
        ("tile", 16, 64, 128, 4, (("swap_ab", 1),)),
        ("tma", 64, 128, 64, 8, ()),
        ("ws_tma", 128, 128, 64, 8, ()),
        ("ws_tma", 128, 80, 64, 8, ()),
        ("ws_tma", 128, 208, 64, 8, ()),
        ("ws_tma", 64, 16, 64, 4, ()),
        ("ws_tma_swapped", 32, 128, 64, 8, (("swap_ab", 1),)),
        *SUMS_IN_MEMORY,
    )
)

PAIRWISE = tuple(
    Config(template, bm, bn, bk, 1, 1, warps, 3, (("pairwise", 1), ("runs", runs), *options))
    for runs in (4, 8)
    for template, bm, bn, bk, warps, options in (
        ("tile", 64, 64, 64, 4, ()),
        ("tile", 16, 64, 128, 4, (("swap_ab", 1),)),
        ("tma", 128, 64, 64, 8, ()),
        ("tma", 16, 64, 64, 4, (("swap_ab", 1),)),
        *SUMS_IN_MEMORY,
    )
)

GROUPED = tuple(
    Config(template, bm, bn, bk, 1, 1, warps, 3, options)
    for bk in (64, 128)
    for template, bm, bn, warps, options in (
        ("grouped", 16, 64, 4, (("swap_ab", 1),)),
        ("grouped", 64, 64, 4, ()),
        ("grouped_gemv", 1, 4, 2, ()),
        ("grouped_tile", 32, 64, 4, ()),
        ("grouped_tma", 64, 128, 8, ()),
        ("grouped_ws_tma", 64, 128, 4, ()),
        ("grouped_ws_tma", 128, 64, 8, ()),
        ("grouped_ws_tma_swapped", 16, 128, 8, (("swap_ab", 1),)),
    )
)


def scaled(family: str, k: int, scales: str = "", dtype: str = "fp8e4m3fn") -> Problem:
    return product(family, 1, 512, k, dtype, scales)


CASES = {
    "bf16": Problem(1, 1024, 4096, *matrices("bf16", layout="TN"), bias="n"),
    "fp16": Problem(1, 256, 2112, *matrices("fp16", layout="TT")),
    "tf32": Problem(1, 512, 2048, *matrices("fp32", layout="TN")),
    "batched": Problem(1, 256, 2048, *matrices("bf16", layout="TN"), batch=3),
    "grouped": Problem(8, 512, 2048, *matrices("bf16", layout="TN"), groups=Groups(4)),
    "grouped fp8 blocks": replace(scaled("a8w8_blockscale", 2048), m=8, groups=Groups(4)),
    "fp8 long": Problem(1, 512, 16384, *matrices("fp8e4m3fn", "fp8e4m3fn", "bf16", layout="TN")),
    "fp8 rows": scaled("a8w8", 2048),
    "int8 rows": scaled("a8w8", 2048, dtype="int8"),
    "fp8 blocks": scaled("a8w8_blockscale", 2048),
    "mx fp4": scaled("a4w4_blockscale", 2048, "mx", "fp4e2m1"),
    "mx fp8": scaled("a8w8_blockscale", 2048, "mx"),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_orders_give_equal_bits(gpu: GpuEvaluator, compiler: BuildPool, name: str) -> None:
    case = CASES[name]
    if not registry.get(Family, case.family).supports(case, gpu.target):
        pytest.skip(f"{gpu.target.name} does not compute it")
    gpu.protocol = replace(gpu.protocol, compares_rows=True)
    try:
        classes, faults = find_classes(gpu, compiler, name)
    finally:
        gpu.protocol = replace(gpu.protocol, compares_rows=False)
    for order, bits in sorted(classes.items()):
        print(f"{name}: {order}: " + "; ".join(f"{one} {len(of)} x {sorted(of)[0]}" for one, of in bits.items()))
    found = [one for bits in classes.values() for one in bits]
    print(f"{name}: {len(classes)} stated orders, {len(set(found))} by bits; {len(faults)} without")
    assert not faults, "\n".join(faults)
    mixed = {order: bits for order, bits in classes.items() if len(bits) > 1}
    assert classes and not mixed, "\n".join(f"{order}: {bits}" for order, bits in mixed.items())


def find_classes(gpu: GpuEvaluator, compiler: BuildPool, name: str) -> tuple[dict[str, dict[str, set[str]]], list[str]]:
    """Return the configs of each stated order by the bits of a row, and what is wrong or differs in a batch."""
    classes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    case, faults, built = CASES[name], [], dict[str, Artifact]()
    work = []
    for m in ROWS if name == "bf16" else ROWS[1:]:
        problem = case.at(m)
        for config in usable(
            problem, gpu.target, (*CONFIGS, *SPLITS, *RUNS, *PAIRWISE, *GROUPED, *(SCALED if case.scale_depth else ()))
        ):
            order = triton().reduction_order(config, problem, gpu.target)
            if isinstance(order, ReductionOrder) and not (config.template == "gemv" and m > 70):
                job = triton().compile_job(config, problem, gpu.target)
                work.append((problem, config, order, job))
    for one in compiler.stream({job.digest: job for *_, job in work}.values()):
        built[one.digest] = one
    for m in reversed(ROWS):
        for problem, config, order, job in (w for w in work if w[0].m == m):
            if built[job.digest].status == "out_of_resources":
                continue
            (trial,) = gpu.verify(problem, [replace(built[job.digest], config=config)])
            if trial.status == "ok":
                classes[str(order)][trial.row_bits].add(f"{config.name} at M {m}")
            elif trial.status != "out_of_resources":
                faults.append(f"{problem.key} {config.name}: {trial.status} {trial.reason}")
    return classes, faults


def test_an_unsplit_algorithm_of_the_library_has_the_kernels_bits(gpu: GpuEvaluator, compiler: BuildPool) -> None:
    gpu.protocol = replace(gpu.protocol, compares_rows=True)
    try:
        agreeing, asked = 0, 0
        for m in ROWS:
            problem = CASES["bf16"].at(m)
            config = Config("tile", 16, 64, 64, 1, 1, 4, 3)
            (kernel,) = compiler.stream([triton().compile_job(config, problem, gpu.target)])
            (ours,) = gpu.verify(problem, [kernel])
            listed = gpu.list_algorithms(problem, "blaslt", 24)
            backend = registry.get(Backend, "blaslt")
            unsplit = [c for c in listed if isinstance(backend.reduction_order(c, problem, gpu.target), ReductionOrder)]
            trials = list(gpu.verify(problem, [Artifact(c, "") for c in unsplit]))
            same = sum(t.row_bits == ours.row_bits for t in trials if t.status == "ok")
            print(f"M {m}: {same} of {len(trials)} unsplit algorithms of {len(listed)} agree")
            agreeing, asked = agreeing + same, asked + len(trials)
        assert asked and agreeing, "the library's unsplit order is another one here"
    finally:
        gpu.protocol = replace(gpu.protocol, compares_rows=False)
