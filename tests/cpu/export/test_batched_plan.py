"""Plans of batched launches: what each operand is, and, on an emulated GPU, the result at odd sizes."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import emulated
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.cli import launch_plan
from tritongemm.core.config import Config
from tritongemm.core.launch import Launch, StridePlaces
from tritongemm.core.problem import Problem, matrices
from tritongemm.export import launch_plans
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import KernelBackend
from tritongemm.search_spaces import loader
from tritongemm.system import settings

SPLIT = "tile__bm16__bn32__bk32__gm1__sk2__w2__s2__kpack1__matrix_instr_nonkdim16__waves_per_eu0"
# With two stages LLVM of Triton 3.9 loses a wait on gfx950, where rows begin at odd multiples of 2 bytes.
ONE_STAGE = SPLIT.replace("__s2__", "__s1__")
PIPELINED = "tile__bm32__bn32__bk64__gm2__sk1__w4__s2__xcds8"
GEMV = "gemv__bm2__bn8__bk128__gm1__sk2__w4__s2"


def write(folder: Path, config: str, size: tuple[int, int, int], target: str, *options: str) -> Path:
    m, n, k = map(str, size)
    argv = ["-m", m, "-n", n, "-k", k, "--target", target, "-o", str(folder), "--num_threads", "1", "--config", config]
    assert launch_plan.main([*argv, *options]) == 0
    (path,) = folder.glob("plan_*.json")
    return path


def test_operands_have_a_dimension_for_the_batch(tmp_path: Path) -> None:
    options = ["--family", "a8w8", "-dtype_a", "int8", "-col_b", "--bias-vector", "n", "--batch", "3", "--shared", "b"]
    plan = json.loads(write(tmp_path, SPLIT, (33, 40, 77), "gfx942", *options).read_text())
    assert plan["grid"] == [3 * 2, 2, 3]
    assert plan["problem"] == {"M": 33, "N": 40, "K": 77, "batch": 3}
    buffers = {b["name"]: b for b in plan["buffers"]}
    shapes = {name: (b["shape"], b["strides"]) for name, b in buffers.items()}
    assert shapes["a"] == ([3, 33, 77], [33 * 77, 77, 1])
    assert shapes["b"] == ([77, 40], [1, 77])
    assert shapes["c"] == ([3, 33, 40], [33 * 40, 40, 1])
    assert shapes["scale_a"] == ([3, 33, 1], [33, 1, 1])
    assert shapes["scale_b"] == ([40], [1])
    assert shapes["bias"] == ([3, 1, 40], [40, 40, 1])
    assert buffers["workspace"]["bytes"] == 3 * 6 * 2 * 16 * 32 * 4 and buffers["semaphore"]["bytes"] == 3 * 6 * 4
    assert (buffers["a"]["bytes"], buffers["bias"]["bytes"]) == (3 * 33 * 77, 3 * 40 * 2)


@pytest.mark.parametrize(
    ("config", "target", "options", "shape_a", "shape_b", "scales"),
    [
        (PIPELINED, "gfx942", [], [3, 33, 300], [3, 300, 136], ([3, 3, 33], [3, 2, 3])),
        (GEMV, "gfx950", ["-dtype_a", "int8", "--shared", "a"], [33, 300], [3, 300, 136], ([3, 33], [3, 2, 3])),
        (
            SPLIT,
            "gfx950",
            ["--scales", "group_rows", "--shared", "b"],
            [3, 33, 300],
            [300, 136],
            ([3, 33, 3], [136, 3]),
        ),
    ],
    ids=["blocks", "gemv_blocks_shared_a", "groups_shared_b"],
)
def test_factors_along_k_have_a_dimension_for_the_batch_unless_all_share_them(
    tmp_path: Path,
    config: str,
    target: str,
    options: list[str],
    shape_a: list[int],
    shape_b: list[int],
    scales: tuple[list[int], list[int]],
) -> None:
    """Factors of A are in columns, unless a name ends with rows."""
    more = ["--family", "a8w8_blockscale", "-col_b", "--batch", "3", *options]
    plan = json.loads(write(tmp_path, config, (33, 136, 300), target, *more).read_text())
    shapes = {b["name"]: b["shape"] for b in plan["buffers"]}
    assert plan["grid"][2] == 3
    assert (shapes["a"], shapes["b"], shapes["c"]) == (shape_a, shape_b, [3, 33, 136])
    assert (shapes["scale_a"], shapes["scale_b"]) == scales


@pytest.mark.emulator
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("config", "size", "options"),
    [
        (SPLIT, (33, 40, 77), ["-col_b", "--bias-vector", "n"]),
        (ONE_STAGE, (17, 40, 77), ["-col_a", "-dtype_a", "bf16", "--shared", "b"]),
        (PIPELINED, (33, 72, 200), ["-dtype_a", "bf16", "-col_b", "--bias-vector", "m", "--shared", "a"]),
        (GEMV, (1, 33, 300), ["-col_b"]),
        (PIPELINED, (33, 40, 77), ["--family", "a8w8", "-dtype_a", "int8", "-col_b", "--bias-vector", "n"]),
        (SPLIT, (33, 40, 96), ["--family", "a8w8", "-dtype_a", "fp8", "-col_b", "--shared", "b"]),
        (PIPELINED, (33, 136, 300), ["--family", "a8w8_blockscale", "-col_b"]),
        (SPLIT, (17, 40, 272), ["--family", "a8w8_blockscale", "--scales", "group_rows", "-col_b", "--shared", "b"]),
        (GEMV, (2, 33, 300), ["--family", "a8w8_blockscale", "-dtype_a", "int8", "-col_b", "--shared", "a"]),
    ],
    ids=["split", "shared_b", "shared_a", "gemv", "int8", "fp8", "blocks", "groups_shared_b", "gemv_blocks_shared_a"],
)
def test_every_product_is_right_on_an_emulator(
    tmp_path: Path, target: str, config: str, size: tuple[int, int, int], options: list[str]
) -> None:
    path = write(tmp_path, config, size, target, "--batch", "3", *options)
    emulated.run_scaled(tmp_path, path)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_operands_are_read_as_stored_on_an_emulator(tmp_path: Path, name: str) -> None:
    """A model's heads: [tokens, heads, K] read head by head, and a bias that all of them share."""
    problem = Problem(33, 40, 80, *matrices("bf16", layout="TN"), bias="n", batch=3)
    target, config, triton = loader.load_target(name), Config.parse(SPLIT), registry.get(KernelBackend, "triton")
    with closing(BuildPool(ArtifactCache(settings.cache_folder()), 1)) as compiler:
        (built,) = compiler.stream([triton.compile_job(config, problem, target)])
    launch = triton.launch(built, problem, target)
    assert isinstance(launch, Launch)
    places = triton.stride_places(config, problem)
    assert isinstance(places, StridePlaces)
    moved = places.move(launch, {"a": (3 * 96, 96), "bias": (0, 0)})
    assert isinstance(moved, Launch)
    plan = launch_plans.plan(moved, problem, target)
    about = {b["name"]: b for b in plan["buffers"]}
    about["a"] |= {"strides": [96, 3 * 96, 1], "bytes": 33 * 3 * 96 * 2}
    about["bias"] |= {"shape": [1, 1, 40], "strides": [40, 40, 1], "bytes": 40 * 2}
    (tmp_path / "moved.hsaco").write_bytes(launch.read_code())
    (tmp_path / "moved.json").write_text(json.dumps({**plan, "object": "moved.hsaco"}))
    emulated.run_scaled(tmp_path, tmp_path / "moved.json")
