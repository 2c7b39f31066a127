"""The vendor's library with scale factors of every granularity, against a stand-in that computes on the host."""

from dataclasses import replace

import pytest
import torch

from tests.support import scaled_operands
from tests.support.fakes.blaslt_library import NEEDS_COMPILER, NO_CAPTURE
from tests.support.nouns import Backend, Record, Scaling, Support, loader, registry
from tests.support.products import product
from tests.support.scaled_operands import PAIRS
from tritongemm.backends.blaslt import algorithms as blaslt
from tritongemm.backends.blaslt import scale_modes, served_algorithm
from tritongemm.hip_ext.blaslt.library import Library
from tritongemm.numerics.verify import deviation

pytestmark = NEEDS_COMPILER

SM90, SM100, GFX950 = map(loader.load_target, ("sm90", "sm100", "gfx950"))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 384), (9, 160, 640)])
def test_every_granularity_and_order_of_factors(library: Library, pair: str, m: int, n: int, k: int) -> None:
    problem = scaled_operands.problem(m, n, k, PAIRS[pair])
    operands, exact = scaled_operands.operands(problem)
    configs = blaslt.list_configs(problem, operands, 3)
    both = PAIRS[pair][0].depth == 0 and library.table.vendor == "nvidia"
    # two thirds of three of each way to accumulate, where there are two
    assert [c.option("fast") for c in configs] == ([0, 0, 1, 1] if both else [0, 0, 0])[: len(configs)]
    for config in configs:
        operands["c"].fill_(float("nan"))
        call = blaslt.prepare_call(problem, operands, config)
        assert call is not None
        call()
        assert deviation(operands["c"], exact) < 2**-7, config.name


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor at a multiple of 256 bytes, as on a GPU: how memory is aligned is part of a plan."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.empty(size + 255, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def test_calls_share_a_plan_and_keep_their_own_factors(library: Library) -> None:
    problem = scaled_operands.problem(8, 32, 256, PAIRS["block, A in groups"])
    made = [
        ({name: aligned(tensor) for name, tensor in operands.items()}, exact)
        for operands, exact in (scaled_operands.operands(problem, seed=seed) for seed in range(3))
    ]
    config = blaslt.list_configs(problem, made[0][0], 1)[0]
    calls = [blaslt.prepare_call(problem, operands, config) for operands, _ in made]
    for call, (operands, exact) in (*zip(calls, made, strict=True), (calls[0], made[0])):
        assert call is not None
        call()
        assert deviation(operands["c"], exact) < 2**-7
    assert blaslt._planned.cache_info().currsize <= 2


@pytest.mark.parametrize("pair", ["row", "block, A in groups"])
def test_a_scaled_algorithm_serves_operands_that_move(library: Library, pair: str) -> None:
    problem = scaled_operands.problem(8, 32, 512, PAIRS[pair])
    made = [scaled_operands.operands(problem, seed=seed) for seed in range(2)]
    config = blaslt.list_configs(problem, made[0][0], 1)[0]
    record = Record(problem, "sm90", config, "blaslt", 1e-6, 0.0, "events")
    loaded = served_algorithm.load_tuned(record, 0, NO_CAPTURE)
    assert isinstance(loaded, served_algorithm.LoadedAlgorithm)
    launches = [loaded.prepare(NO_CAPTURE) for _ in made]
    scratch = torch.empty(max(loaded.bytes("workspace"), 1), dtype=torch.uint8)
    for launch, (operands, _) in zip(launches, made, strict=True):
        for name in ("a", "b", "c", "scale_a", "scale_b"):
            launch.set_address(name)(operands[name].data_ptr())
        launch.set_address("workspace")(scratch.data_ptr())
    for launch, (operands, exact) in zip(launches, made, strict=True):
        launch.launch(0)
        assert deviation(operands["c"], exact) < 2**-7


def test_factors_that_would_be_copied_and_shuffled_ones_of_fp4(library: Library) -> None:
    for pair, k, said in (("block, A in rows", 512, "scale_a as [4, 8]"), ("block, A in groups", 384, "[1, 4]")):
        problem = scaled_operands.problem(8, 32, k, PAIRS[pair])
        operands, _ = scaled_operands.operands(problem)
        config = blaslt.list_configs(problem, operands, 1)[0]
        record = Record(problem, "sm90", config, "blaslt", 1e-6, 0.0, "events")
        refused = served_algorithm.load_tuned(record, 0, NO_CAPTURE)
        assert isinstance(refused, Support) and said in refused.reason
    fp4 = product("a4w4_blockscale", 64, 96, 256, "fp4e2m1")
    assert scale_modes.modes(fp4) == ("blk32_ue8m0_swizzled",) * 2
    assert scale_modes.supports(fp4, GFX950, "amd", lambda: 0) and scale_modes.reads_as_they_are(fp4)
    assert not scale_modes.supports(fp4, SM100, "nvidia", lambda: 130100)
    matmul = blaslt.with_scales(blaslt.to_matmul(fp4, (256, 256, 96), (0, 0, 0), 16, "amd"), fp4)
    assert matmul is not None and (matmul.a.dtype, matmul.a.rows, matmul.a.ld) == ("fp4e2m1", 256, 256)


def test_what_the_library_lacks_is_refused_by_name() -> None:
    def asked(problem: object, target: object = SM90, version: int = 130100, vendor: str | None = "nvidia") -> str:
        return scale_modes.supports(problem, target, vendor, lambda: version).reason  # type: ignore[arg-type]

    block = scaled_operands.problem(8, 32, 512, PAIRS["block, A in rows"])
    row = scaled_operands.problem(8, 32, 512, PAIRS["row"])
    assert asked(block) == asked(row) == asked(row, SM100) == asked(block, vendor=None, version=0) == ""
    assert "are for sm90, not sm100" in asked(block, SM100)
    assert "120900 (CUDA 12.9) and later" in asked(row, version=120800)
    assert asked(scaled_operands.problem(8, 32, 512, PAIRS["tensor"]), version=120800) == ""
    assert "fp8 alone, not to int8" in asked(scaled_operands.problem(8, 32, 512, PAIRS["row"], "int8"))
    assert "a batch" in asked(replace(row, batch=2))
    assert "no scales that cover" in asked(replace(block, b=block.b._replace(scaling=Scaling(rows=64, depth=128))))
    assert registry.get(Backend, "blaslt").supports(block, SM90)
    assert "M must be a multiple of 4" in asked(replace(block, m=3))
