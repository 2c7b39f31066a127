import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.gpu.here import DENSE, fp8, triton
from tests.support.nouns import BuildPool, Config, Family, Machine, Problem, Target, matrices, registry, space
from tritongemm.measure.gpu_evaluator import GpuEvaluator

TILE = Config("tile", 32, 64, 64, 4, 1, 4, 2)
CONFIGS = (
    TILE,
    Config("tile", 64, 32, 32, 1, 3, 4, 2),
    Config("tile", 16, 64, 64, 1, 1, 4, 3, (("swap_ab", 1),)),
    Config("tile", 128, 128, 32, 8, 1, 8, 2, (("xcds", 8),)),
    Config("gemv", 4, 16, 256, 1, 2, 4, 2),
    Config("stream_k", 64, 64, 32, 8, 1, 4, 2),
    Config("stream_k", 32, 32, 64, 8, 1, 4, 2, (("num_sms", 5), ("share_more", 1))),
    Config("tma", 64, 64, 64, 8, 2, 4, 3),
    Config("tma", 16, 64, 64, 1, 1, 4, 3, (("swap_ab", 1),)),
    Config("persistent", 128, 64, 64, 8, 1, 4, 3, (("epilogue_parts", 2), ("warp_specialize", 0))),
    Config("stream_k_tma", 64, 64, 64, 8, 1, 4, 3, (("share_more", 1),)),
    Config("ws_tma", 128, 64, 64, 8, 1, 8, 4, (("epilogue_parts", 2), ("share", 2))),
    Config("ws_tma", 64, 32, 128, 1, 3, 4, 3),
    Config("ws_tma", 64, 64, 64, 1, 8, 4, 3),  # more splits than some K have blocks
    Config("ws_tma", 128, 128, 64, 8, 1, 8, 4),
    Config("ws_tma", 128, 192, 64, 8, 1, 8, 3, (("epilogue_parts", 2),)),  # tiles of two powers of two
    Config("ws_tma", 128, 288, 64, 8, 1, 8, 3, (("epilogue_parts", 2),)),
    Config("ws_tma", 128, 224, 64, 8, 1, 8, 4, (("epilogue_parts", 4),)),  # in blocks of 256 columns
    Config("ws_tma", 128, 112, 64, 2, 1, 8, 6, (("pair", 1),)),
    Config("ws_tma", 256, 112, 64, 2, 1, 8, 4, (("epilogue_parts", 4), ("pair", 1))),
    Config("ws_tma", 64, 176, 64, 1, 1, 4, 4, (("epilogue_parts", 4),)),
    Config("ws_tma", 128, 208, 64, 4, 1, 8, 4, (("epilogue_parts", 2),)),
    Config("ws_tma", 64, 80, 64, 1, 3, 4, 4),
    Config("ws_tma", 64, 64, 64, 1, 2, 4, 12, (("ahead", 8),)),
    Config("ws_tma", 128, 128, 64, 2, 4, 8, 4, (("ahead", 4),)),  # splits that exchange sums
    Config("ws_tma", 256, 64, 64, 1, 2, 8, 3),
    Config("ws_tma", 128, 160, 64, 2, 2, 8, 4),  # of padded tiles
    Config("ws_tma_swapped", 80, 64, 64, 1, 2, 4, 6, (("swap_ab", 1),)),
    Config("ws_tma", 64, 64, 64, 1, 2, 4, 6, (("epilogue_parts", 2),)),  # and others that do not
    Config("ws_tma_swapped", 16, 64, 64, 1, 2, 4, 14, (("ahead", 8), ("swap_ab", 1))),
    Config("ws_tma_swapped", 32, 128, 64, 1, 4, 8, 4, (("swap_ab", 1),)),
    Config("ws_tma", 128, 128, 64, 4, 1, 8, 4, (("alternate", 1),)),  # a tile for each group of warps
    Config("ws_tma", 128, 64, 64, 4, 1, 8, 3, (("alternate", 1), ("pair", 1))),
    Config("ws_tma_swapped", 16, 64, 64, 1, 1, 4, 16, (("ahead", 8), ("swap_ab", 1))),
    Config("ws_tma", 128, 128, 64, 2, 1, 8, 4, (("pair", 1),)),  # two programs fetch for each other
    Config("ws_tma", 64, 32, 64, 1, 5, 4, 3, (("pair", 1),)),
    Config("ws_tma", 128, 128, 64, 2, 1, 8, 4, (("adjacent", 1),)),  # adjacent programs
    Config("ws_tma", 64, 112, 64, 1, 1, 4, 6, (("adjacent", 1), ("ahead", 4))),
    Config("ws_tma", 128, 192, 64, 1, 1, 8, 3, (("epilogue_parts", 2), ("pair", 1), ("share", 1))),
    Config("ws_tma", 256, 160, 64, 1, 1, 8, 3, (("epilogue_parts", 2), ("share", 1))),
    Config("ws_tma_swapped", 264, 128, 64, 4, 1, 8, 3, (("swap_ab", 1),)),
    Config("ws_tma_swapped", 72, 64, 64, 1, 3, 4, 4, (("swap_ab", 1),)),
    Config("ws_tma_swapped", 136, 128, 64, 4, 1, 8, 5, (("epilogue_parts", 4), ("swap_ab", 1))),  # slots of 136 rows
    Config("ws_tma_swapped", 104, 64, 64, 1, 3, 4, 6, (("swap_ab", 1),)),
    Config("ws_tma_swapped", 96, 64, 64, 2, 1, 4, 8, (("pair", 1), ("swap_ab", 1))),  # A is fetched for two programs
    Config("ws_tma_swapped", 96, 128, 64, 2, 1, 8, 6, (("pair", 1), ("swap_ab", 1))),  # and B
    Config("ws_tma_swapped", 48, 64, 64, 1, 1, 4, 8, (("adjacent", 1), ("swap_ab", 1))),
    Config("ws_tma_swapped", 56, 192, 64, 2, 1, 12, 5, (("share", 1), ("swap_ab", 1))),
    Config("ws_tma", 128, 176, 64, 4, 1, 8, 4, (("epilogue_parts", 4), ("share", 1))),
    Config("ws_tma", 256, 160, 64, 1, 1, 8, 4, (("epilogue_parts", 4),)),
    Config("ws_tma_swapped", 192, 256, 64, 2, 1, 8, 2, (("epilogue_parts", 2), ("swap_ab", 1))),
    Config("tile", 16, 64, 64, 1, 3, 4, 3, (("ahead", 2), ("early", 1), ("swap_ab", 1))),
    Config("gemv", 1, 8, 256, 1, 1, 4, 1, (("ahead", 1), ("early", 1), ("prefetch", 3))),
    Config("tma", 32, 64, 64, 1, 2, 4, 3, (("ahead", 1),)),
    Config("tile", 16, 64, 64, 1, 3, 4, 3, (("poll", 1),)),
    Config("tma", 16, 64, 64, 1, 4, 4, 3, (("poll", 1), ("swap_ab", 1))),
    Config("gemv", 1, 16, 256, 1, 4, 4, 1, (("early", 1), ("poll", 1))),  # several warps look for the same sums
    Config("tma", 64, 64, 64, 1, 1, 4, 3, (("ahead", 2), ("early", 1))),
)
LAYOUTS = list(itertools.product((True, False), repeat=2))


def usable(problem: Problem, target: Target, configs: Sequence[Config] = CONFIGS) -> list[Config]:
    entire = {a.template for a in space(problem, target).axes}
    free = {"tile", "gemv", "stream_k", "grouped_gemv"}  # through pointers: anything goes, whatever the space offers
    return [c for c in configs if c.template in free | entire and triton().check(c, problem, target)]


def verify_all(
    gpu: GpuEvaluator, compiler: BuildPool, problems: Sequence[Problem], configs: Sequence[Config] = CONFIGS
) -> None:
    """Compile all, check each at full size; every one that is built has to be right."""
    wanted: dict[str, list[tuple[Problem, Config]]] = {}
    jobs = []
    for problem in problems:
        chosen = usable(problem, gpu.target, configs)
        assert chosen, problem.key
        for config in chosen:
            job = triton().compile_job(config, problem, gpu.target)
            wanted.setdefault(job.digest, []).append((problem, config))
            jobs.append(job)
    built = {b.digest: b for b in compiler.stream(jobs)}
    bad, right = [], 0
    for digest, places in wanted.items():
        one = built[digest]
        if one.status == "out_of_resources":
            continue
        assert one.status == "ok", f"{places[0][0].key} {one.config.name}: {one.reason}"
        for problem, config in places:
            (trial,) = gpu.verify(problem, [one])
            right += trial.status == "ok"
            if trial.status != "ok":
                bad.append(f"{problem.key} {config.name}: {trial.status} {trial.reason}")
    assert not bad, "\n".join(bad)
    assert right >= len(problems), "a kernel ran for every problem"


@pytest.mark.parametrize(("row_a", "row_b"), LAYOUTS)
def test_layouts_and_biases_at_odd_sizes(gpu: GpuEvaluator, compiler: BuildPool, row_a: bool, row_b: bool) -> None:
    problems = [
        Problem(*size, *matrices(layout="NT"[row_a] + "NT"[row_b]), bias=bias)
        for size, bias in (((7, 33, 70), "n"), ((33, 100, 777), "m"), ((72, 136, 200), "none"), ((1, 1, 1), "none"))
    ]
    verify_all(gpu, compiler, problems)


def dtype_sets(target: Target) -> list[tuple[str, str, str]]:
    """Combinations of A, B and C that this target's matrix units read."""
    f, g = ("fp8e4m3fnuz", "fp8e5m2fnuz") if target.fp8 == "fnuz" else ("fp8e4m3fn", "fp8e5m2")
    every = [("fp16",) * 3, ("bf16",) * 3, ("fp32",) * 3, ("bf16", "bf16", "fp32"), ("fp16", "bf16", "fp16")]
    every += [("int8", "int8", "int32"), ("int8",) * 3]
    every += [(f, f, "fp16"), (f, f, f), (g, f, "bf16"), (g, g, g), ("fp16", f, "fp16")]
    return [d for d in every if DENSE.supports(Problem(1, 1, 1, *matrices(*d)), target)]


@pytest.mark.parametrize("index", range(12))
def test_dtypes(gpu: GpuEvaluator, compiler: BuildPool, index: int) -> None:
    sets = dtype_sets(gpu.target)
    if index >= len(sets):
        pytest.skip("this GPU has fewer combinations")
    odd = Problem(33, 50, 99, *matrices(*sets[index], layout="TN"), bias="n")
    even = Problem(64, 128, 256, *matrices(*sets[index], layout="TN"))
    verify_all(gpu, compiler, [odd, even], [c for c in CONFIGS if c.block_k >= 32 or gpu.target.vendor == "amd"])


def test_epilogues(gpu: GpuEvaluator, compiler: BuildPool) -> None:
    problems = [
        Problem(33, 96, 99, *matrices(layout="TN"), bias="n", epilogue="silu_mul"),
        Problem(200, 656, 264, *matrices("bf16", layout="TN"), bias="m", epilogue="gelu_tanh_mul"),
        Problem(200, 1328, 520, *matrices("bf16", layout="TN"), epilogue="silu_mul"),
        Problem(72, 304, 136, *matrices("bf16", layout="TN"), bias="n", epilogue="gelu"),
        Problem(200, 1328, 520, *matrices("bf16", layout="TN"), epilogue="add"),
    ]
    scaled = Problem(72, 304, 256, *matrices(fp8(gpu.target), c="bf16", layout="TN"), epilogue="silu_mul")
    family = registry.get(Family, "a8w8")
    problems += [family.problem(scaled)] if family.supports(family.problem(scaled), gpu.target) else []
    verify_all(gpu, compiler, problems)


def test_results_in_blocks(gpu: GpuEvaluator, compiler: BuildPool) -> None:
    e4m3 = fp8(gpu.target)
    gated = Problem(200, 1536, 264, *matrices("bf16", c=e4m3, layout="TN"), epilogue="silu_mul_block")
    scaled = replace(gated, k=256, a=gated.a._replace(dtype=e4m3), b=gated.b._replace(dtype=e4m3))
    family, blocks = registry.get(Family, "a8w8"), registry.get(Family, "a8w8_blockscale")
    problems = [gated, Problem(33, 384, 136, *matrices("bf16", c=e4m3, layout="TN"), bias="n", epilogue="block")]
    problems += [family.problem(scaled), blocks.problem(scaled, "group"), blocks.problem(scaled)]
    if not DENSE.supports(gated, gpu.target):
        pytest.skip(f"{gpu.target.name} has no fp8")
    configs = (
        Config("tile", 64, 256, 64, 4, 1, 8, 3),
        Config("tile", 16, 256, 64, 1, 2, 4, 2, (("swap_ab", 1),)),
        Config("stream_k", 64, 256, 64, 8, 1, 8, 2),
        Config("tma", 64, 256, 128, 4, 1, 8, 3),
        Config("persistent", 128, 256, 64, 4, 1, 8, 3, (("epilogue_parts", 2),)),
        Config("ws_tma", 128, 256, 64, 8, 1, 8, 4, (("epilogue_parts", 2),)),
        Config("ws_tma", 128, 256, 64, 8, 1, 8, 4, (("epilogue_parts", 2), ("pair", 1))),
        Config("ws_tma", 128, 128, 64, 8, 1, 8, 4),
        Config("ws_tma", 64, 256, 64, 8, 2, 4, 4),  # splits that exchange sums
    )
    verify_all(gpu, compiler, problems, configs)


def test_large_and_not_a_multiple_of_anything(gpu: GpuEvaluator, compiler: BuildPool) -> None:
    """4097 along M and N: the last tile holds one row and one column, and offsets are large."""
    chosen = [c for c in CONFIGS if c.template != "gemv"]
    verify_all(gpu, compiler, [Problem(4097, 4097, 520, *matrices("bf16")), Problem(4097, 4104, 520)], chosen)


def test_many_rows_or_columns_or_a_long_sum(gpu: GpuEvaluator, compiler: BuildPool) -> None:
    problems = [Problem(1, 5000, 4099, bias="n"), Problem(100_003, 3, 5), Problem(2, 3, 100_003)]
    verify_all(gpu, compiler, problems, [TILE, Config("tile", 16, 16, 64, 1, 4, 4, 2), CONFIGS[6]])
    verify_all(gpu, compiler, [problems[0]], [CONFIGS[4]])


def test_offsets_beyond_31_bits(gpu: GpuEvaluator, compiler: BuildPool) -> None:
    """A of more than 2^31 elements: the corner of a tile needs 64 bits."""
    problem = Problem(2**21 + 3, 16, 1032, *matrices("int8", c="int32"))
    if gpu.target.memory_bytes < 60e9:
        pytest.skip("A and its float64 reference need about 40 GB")
    verify_all(gpu, compiler, [problem], [Config("tile", 128, 16, 64, 8, 1, 4, 2)])


def test_split_k_gives_the_same_bits_every_time(gpu: GpuEvaluator, gpu_machine: Machine, compiler: BuildPool) -> None:
    """Parts are added in a fixed order, so ten launches agree to the bit, and every counter ends as it began."""
    import torch

    from tritongemm.hip_ext.driver import driver
    from tritongemm.measure.jobs import LaunchCandidate, MeasureSetup
    from tritongemm.measure.operand_sets import OperandSets

    problem = Problem(48, 80, 4096, *matrices("fp32"))
    polled = (
        Config("tile", 16, 32, 32, 1, 6, 4, 2, (("poll", 1),)),
        Config("gemv", 1, 16, 256, 1, 4, 4, 1, (("poll", 1),)),
    )
    configs = [Config("tile", 16, 16, 32, 1, 8, 4, 2), CONFIGS[6], *polled]
    jobs = [triton().compile_job(c, problem, gpu.target) for c in configs]
    built = {b.config: b for b in compiler.stream(jobs)}
    device = driver.open_driver(gpu_machine.vendor).device(gpu_machine.devices[0])
    stream = torch.cuda.Stream(gpu_machine.devices[0])
    setup = MeasureSetup(problem, gpu.target, gpu.protocol, gpu_machine.vendor, gpu_machine.devices[0])
    with torch.cuda.stream(stream):
        operands = OperandSets(setup, device, stream.cuda_stream)
        torch.cuda.synchronize()
        for config in configs:
            launch = triton().launch(built[config], problem, gpu.target)
            prepared = operands.prepare(LaunchCandidate(config, launch), 1)
            seen = set()
            for _ in range(10):
                operands.sets[0]["c"].fill_(float("nan"))
                prepared.calls[0]()
                stream.synchronize()
                seen.add(operands.sets[0]["c"].cpu().numpy().tobytes())
            assert len(seen) == 1, config.name
            assert not operands._buffers["semaphore"].any(), config.name
            prepared.unload()
