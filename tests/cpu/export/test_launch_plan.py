import json
import struct
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import ROOT, emulated
from tests.support.nouns import Capsys, Config, KernelBackend, Patch, Problem, cases, loader, matrices, registry
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.cli import launch_plan
from tritongemm.core.launch import Buffer, Launch, StridePlaces
from tritongemm.export import launch_plans, selection
from tritongemm.hip_ext.binaries import code_object
from tritongemm.hip_ext.compilers import hip_compiler
from tritongemm.search_spaces import loader as target_files
from tritongemm.system import settings

LDS = {"gfx942": 65536, "gfx950": 163840}
M, N, K = 33, 100, 77
SPLIT = "tile__bm16__bn32__bk32__gm1__sk2__w2__s2__kpack1__matrix_instr_nonkdim16__waves_per_eu0"
# Triton 3.9 has trouble with eight warps where values of tiles outlive a branch.
STREAM = "stream_k__bm64__bn64__bk64__gm8__sk1__w8__s2__kpack2__matrix_instr_nonkdim32__num_sms5__share_more1"
GEMV = "gemv__bm2__bn8__bk128__gm1__sk1__w4__s2"


def write(folder: Path, *options: str, size: tuple[int, int, int] = (M, N, K), target: str = "gfx942") -> list[Path]:
    m, n, k = map(str, size)
    argv = ["-m", m, "-n", n, "-k", k, "--target", target, "-o", str(folder), "--num_threads", "1", *options]
    assert launch_plan.main(argv) == 0
    return sorted(folder.glob("plan_*.json"))


def test_what_no_plan_can_hold_is_passed_over(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    """Of Hopper's kernels those of its copy engine are predicted fastest; a driver makes their tensor maps."""
    ranked = [Config("tma", 64, 64, 64), Config("tma", 64, 128, 64), Config("tile", 64, 64, 64)]
    monkeypatch.setattr(selection, "rank_candidates", lambda *_: ranked)
    (path,) = write(tmp_path, "-dtype_a", "bf16", size=(256, 256, 512), target="sm90")
    said = capsys.readouterr().err
    assert said.count("passed over: tma__") == 1 and "takes tensor maps, which only a driver can make" in said
    plan = json.loads(path.read_text())
    assert plan["arch"] == "sm90" and not plan["kernel"].startswith("tma")
    assert (tmp_path / plan["object"]).read_bytes().startswith(b"\x7fELF")


@pytest.mark.heavy
def test_a_config_whose_loop_spills_is_passed_over(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    """Instructions of 16 rows whose operands are read by eights: at 256 x 256 they need more than 256 registers."""
    spills, steady = (
        Config("tile", 256, 256, 64, num_warps=8, options=(("kpack", kpack), ("matrix_instr_nonkdim", 16)))
        for kpack in (2, 1)
    )
    for ranked, taken in (([spills, steady], steady), ([spills], spills)):
        monkeypatch.setattr(selection, "rank_candidates", lambda *_, ranked=ranked: ranked)
        (path,) = write(tmp_path, size=(256, 256, 512))
        assert json.loads(path.read_text())["kernel"] == taken.kernel_name
        said = capsys.readouterr().err
        assert "passed over: " + spills.name in said and "bytes of registers in its loop" in said
        assert (f"{steady.name}: its loop has " in said) is (taken == steady)


@pytest.mark.parametrize("target", LDS)
def test_plan_agrees_with_the_code_object_and_the_problem(tmp_path: Path, target: str) -> None:
    (path,) = write(tmp_path, "--config", SPLIT, "--bias-vector", "n", "-col_b", target=target)
    plan = json.loads(path.read_text())
    code = (tmp_path / plan["object"]).read_bytes()
    (kernel,) = code_object.read(code)
    assert (
        (plan["arch"], plan["kernel"])
        == (code_object.arch(code), kernel.symbol)
        == (target, Config.parse(SPLIT).kernel_name)
    )
    assert plan["grid"] == [3 * 4, 2, 1] and plan["block"] == [2 * 64, 1, 1]
    assert plan["block"][0] <= kernel.max_threads and 0 < plan["dynamic_lds"] + kernel.shared <= LDS[target]

    block = bytes.fromhex(plan["kernarg"])
    assert len(block) <= kernel.kernarg_bytes
    pointers = [a.offset for a in kernel.args if a.kind == "pointer"]
    values = [struct.unpack_from("<i", block, a.offset)[0] for a in kernel.args if a.kind == "value"]
    assert values == [M, N, K, K, K, N, 1] and all(block[at : at + 8] == bytes(8) for at in pointers)

    buffers = {b["name"]: b for b in plan["buffers"]}
    assert [b["offset"] for b in plan["buffers"]] == pointers[:6]
    assert {n: (b["bytes"], b["init"]) for n, b in buffers.items()} == {
        "a": (M * K * 2, "random"), "b": (K * N * 2, "random"), "c": (M * N * 2, "poison"),
        "bias": (N * 2, "random"), "workspace": (12 * 2 * 16 * 32 * 4, "poison"), "semaphore": (12 * 4, "zero"),
    }  # fmt: skip
    assert buffers["a"]["strides"] == [K, 1] and buffers["b"]["strides"] == [1, K]
    assert all(b["name"] == b["role"] for b in plan["buffers"]) and plan["problem"] == {"M": M, "N": N, "K": K}
    assert plan["launches"] == 1


def test_read_pointers_alone_and_what_is_added_into_have_buffers(tmp_path: Path) -> None:
    (path,) = write(tmp_path, "--config", SPLIT.replace("sk2", "sk1"), "-dtype_a", "int8")
    plan = json.loads(path.read_text())
    assert [(b["name"], b["dtype"]) for b in plan["buffers"]] == [("a", "i8"), ("b", "i8"), ("c", "i32")]
    bias = launch_plans.operands(Problem(M, N, K, *matrices(), bias="m"))["bias"]
    assert (bias["shape"], bias["bytes"]) == ([M, 1], M * 2)
    problem = Problem(M, N, K)
    adding = Launch("k.co", "k", (1, 1, 1), (64, 1, 1), 0, (), (), zeroed=(Buffer("c", M * N * 2),))
    plain = Launch("k.co", "k", (1, 1, 1), (64, 1, 1), 0, (), ())
    assert [launch_plans._buffers(launch, problem)["c"]["init"] for launch in (adding, plain)] == ["zero", "poison"]


def test_arguments_of_a_runtime_and_room_for_stream_k_are_in_the_plan(tmp_path: Path) -> None:
    (path,) = write(tmp_path, "--config", SPLIT + "__xcds8")
    plan = json.loads(path.read_text())
    (kernel,) = code_object.read((tmp_path / plan["object"]).read_bytes())
    block, at = bytes.fromhex(plan["kernarg"]), {a.kind: a.offset for a in kernel.args}
    assert len(block) == kernel.kernarg_bytes > kernel.explicit_bytes
    assert struct.unpack_from("<III", block, at["hidden_block_count_x"]) == tuple(plan["grid"])
    assert struct.unpack_from("<HHH", block, at["hidden_group_size_x"]) == tuple(plan["block"])
    assert struct.unpack_from("<I", block, at["hidden_dynamic_lds_size"])[0] == plan["dynamic_lds"]
    assert struct.unpack_from("<H", block, at["hidden_grid_dims"])[0] == 3
    (path,) = write(tmp_path, "--config", STREAM.replace("num_sms5", "num_sms304"))
    plan = json.loads(path.read_text())
    programs = 1 * 2 * 2  # 33 x 100 is 1 x 2 tiles of 2 blocks, of which there are fewer than programs asked for
    assert plan["grid"] == [programs, 1, 1]
    sizes = {b["name"]: b["bytes"] for b in plan["buffers"]}
    assert (sizes["workspace"], sizes["semaphore"]) == (2 * programs * 64 * 64 * 4, 2 * 4)


def test_best_config_and_all(tmp_path: Path) -> None:
    (best,) = write(tmp_path / "one", size=(4, 16, 256))
    several = write(tmp_path / "two", "--all", "1", size=(4, 16, 256))
    assert len(several) > 1 and len(write(tmp_path / "two", size=(4, 16, 256))) == 1, "none of an earlier run is left"
    several = write(tmp_path / "two", "--all", "1", size=(4, 16, 256))
    names = [json.loads(p.read_text())["kernel"] for p in several]
    assert names[0] == json.loads(best.read_text())["kernel"]
    assert {n.split("__")[0] for n in names} >= {"tile", "gemv"} and len(set(names)) == len(names)
    assert not list(tmp_path.glob("*/generated_kernel_*"))


@cases(
    (["--config", "no_such_thing"], "is not a config name"),
    (["--config", SPLIT.replace("tile", "tma")], "does not run template tma"),
    (["--config", SPLIT.replace("tile", "nothing")], "nothing"),
    (["--config", SPLIT.replace("bn32", "bn48")], "block_n must be a power of two, not 48"),
    (["--config", SPLIT.replace("w2", "w3")], "num_warps must be a power of two, not 3"),
    (["--config", SPLIT.replace("sk2", "sk0")], "split_k must be at least 1"),
    (["--config", SPLIT.replace("gm1", "gm0")], "group_m must be at least 1"),
    (["--config", SPLIT + "__speed9"], "nothing reads speed"),
    (["--config", "torch." + SPLIT], "only kernels of asm, ck, triton have plans"),
    (["--config", SPLIT.replace("gm1__sk2", "gm99999999999__sk1")], "beyond the 32 bits in which kernels count"),
    (["--config", SPLIT.replace("bm16", "bm" + 5000 * "1")], "is not a config name"),
    (["-m", "2000000000", "-n", "2000000000", "-k", "8"], "its operands take 8000000064000000000 bytes"),
    (["-m", "2147483647", "-n", "1", "-k", "1"], "beyond the 32 bits in which kernels count"),
    (
        ["-m", "16", "-n", "16", "-k", "268435456"],
        "rows of A that begin 268435456 elements apart: offsets beyond 32 bits",
    ),
    (["-o", str(ROOT / "LICENSE")], "can't be a folder of plans: a file has that name; choose another with -o"),
    (["-o", "/proc/none"], "/proc/none can't be a folder of plans: "),
    (["-dtype_a", "fp8e4m3fn"], "fp8 encoding is fnuz"),
    (["--target", "gfx1"], "unknown target"),
)
def test_bad_input_is_named(options: list[str], named: str, /, tmp_path: Path, capsys: Capsys) -> None:
    size = [] if "-m" in options else ["-m", "8", "-n", "8", "-k", "8"]
    assert launch_plan.main([*size, "-o", str(tmp_path / "new" / "plans"), *options]) == 2
    said = capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert named in said and said.count("\n") == 1 and len(said) < 500


@pytest.mark.emulator
@pytest.mark.parametrize("target", LDS)
@pytest.mark.parametrize(
    ("config", "size"),
    [(SPLIT, (M, N, K)), (GEMV, (1, 33, 300)), (STREAM, (100, 200, K))],
    ids=["split", "gemv", "stream_k"],
)
def test_kernels_run_right_on_an_emulator(tmp_path: Path, target: str, config: str, size: tuple[int, int, int]) -> None:
    (path,) = write(tmp_path, "--config", config, "--bias-vector", "m", size=size, target=target)
    emulated.run(path, tmp_path)


# With two stages LLVM of Triton 3.9 loses a wait on gfx950, where rows begin at odd multiples of 2 bytes.
ONE_STAGE = SPLIT.replace("__s2__", "__s1__")
PIPELINED = "tile__bm32__bn32__bk64__gm2__sk1__w4__s2__xcds8"
BATCHED_GEMV = "gemv__bm2__bn8__bk128__gm1__sk2__w4__s2"


def write_batched(folder: Path, config: str, size: tuple[int, int, int], target: str, *options: str) -> Path:
    (path,) = write(folder, "--config", config, *options, size=size, target=target)
    return path


def test_operands_have_a_dimension_for_the_batch(tmp_path: Path) -> None:
    options = ["--family", "a8w8", "-dtype_a", "int8", "-col_b", "--bias-vector", "n", "--batch", "3", "--shared", "b"]
    plan = json.loads(write_batched(tmp_path, SPLIT, (33, 40, 77), "gfx942", *options).read_text())
    assert plan["grid"] == [3 * 2, 2, 3] and plan["problem"] == {"M": 33, "N": 40, "K": 77, "batch": 3}
    buffers = {b["name"]: b for b in plan["buffers"]}
    shapes = {name: (b["shape"], b["strides"]) for name, b in buffers.items()}
    assert shapes["a"] == ([3, 33, 77], [33 * 77, 77, 1]) and shapes["b"] == ([77, 40], [1, 77])
    assert shapes["c"] == ([3, 33, 40], [33 * 40, 40, 1]) and shapes["scale_a"] == ([3, 33, 1], [33, 1, 1])
    assert shapes["scale_b"] == ([40], [1]) and shapes["bias"] == ([3, 1, 40], [40, 40, 1])
    assert buffers["workspace"]["bytes"] == 3 * 6 * 2 * 16 * 32 * 4 and buffers["semaphore"]["bytes"] == 3 * 6 * 4
    assert (buffers["a"]["bytes"], buffers["bias"]["bytes"]) == (3 * 33 * 77, 3 * 40 * 2)


@pytest.mark.parametrize(
    ("config", "target", "options", "shape_a", "shape_b", "scales"),
    [
        (PIPELINED, "gfx942", [], [3, 33, 300], [3, 300, 136], ([3, 3, 33], [3, 2, 3])),
        (BATCHED_GEMV, "gfx950", ["-dtype_a", "int8", "--shared", "a"], [33, 300], [3, 300, 136], ([3, 33], [3, 2, 3])),
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
    plan = json.loads(write_batched(tmp_path, config, (33, 136, 300), target, *more).read_text())
    shapes = {b["name"]: b["shape"] for b in plan["buffers"]}
    assert plan["grid"][2] == 3 and (shapes["a"], shapes["b"], shapes["c"]) == (shape_a, shape_b, [3, 33, 136])
    assert (shapes["scale_a"], shapes["scale_b"]) == scales


@pytest.mark.emulator
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("config", "size", "options"),
    [
        (SPLIT, (33, 40, 77), ["-col_b", "--bias-vector", "n"]),
        (ONE_STAGE, (17, 40, 77), ["-col_a", "-dtype_a", "bf16", "--shared", "b"]),
        (PIPELINED, (33, 72, 200), ["-dtype_a", "bf16", "-col_b", "--bias-vector", "m", "--shared", "a"]),
        (BATCHED_GEMV, (1, 33, 300), ["-col_b"]),
        (PIPELINED, (33, 40, 77), ["--family", "a8w8", "-dtype_a", "int8", "-col_b", "--bias-vector", "n"]),
        (SPLIT, (33, 40, 96), ["--family", "a8w8", "-dtype_a", "fp8", "-col_b", "--shared", "b"]),
        (PIPELINED, (33, 136, 300), ["--family", "a8w8_blockscale", "-col_b"]),
        (SPLIT, (17, 40, 272), ["--family", "a8w8_blockscale", "--scales", "group_rows", "-col_b", "--shared", "b"]),
        (BATCHED_GEMV, (2, 33, 300), ["--family", "a8w8_blockscale", "-dtype_a", "int8", "-col_b", "--shared", "a"]),
    ],
    ids=["split", "shared_b", "shared_a", "gemv", "int8", "fp8", "blocks", "groups_shared_b", "gemv_blocks_shared_a"],
)
def test_every_product_is_right_on_an_emulator(
    tmp_path: Path, target: str, config: str, size: tuple[int, int, int], options: list[str]
) -> None:
    emulated.run_scaled(tmp_path, write_batched(tmp_path, config, size, target, "--batch", "3", *options))


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
    about["bias"] |= {"strides": [0, 0, 1], "bytes": 40 * 2}
    (tmp_path / "moved.hsaco").write_bytes(launch.read_code())
    (tmp_path / "moved.json").write_text(json.dumps({**plan, "object": "moved.hsaco"}))
    emulated.run_scaled(tmp_path, tmp_path / "moved.json")


@dataclass
class StandIn:
    """A compiler whose library is its source."""

    version: str = "stand-in 1.0"
    compiled: list[bytes] = field(default_factory=list)

    def library(self, source: str, options: tuple[str, ...], seconds: float) -> bytes:
        self.compiled.append(source.encode())
        return self.compiled[-1]


def test_a_recorder_that_was_replaced_is_compiled_again(tmp_path: Path, monkeypatch: Patch) -> None:
    compiler, facts = StandIn(), target_files.load_target("gfx942")
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path))
    monkeypatch.setattr(hip_compiler, "compiler", lambda arch: compiler)
    path, sha256 = launch_plans._runtime(facts)
    assert launch_plans._runtime(facts) == (path, sha256) and len(compiler.compiled) == 1
    library = Path(path)
    library.write_bytes(b"planted")
    assert launch_plans._runtime(facts) == (path, sha256) and len(compiler.compiled) == 2
    assert library.read_bytes() == compiler.compiled[0]
    library.unlink()
    library.symlink_to(tmp_path / "elsewhere.so")
    assert launch_plans._runtime(facts) == (path, sha256) and not library.is_symlink()
