import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import FAKES
from tests.support.nouns import Artifact, BuildPool, Config, KernelBackend, Patch, Target, cases, fails, heavy, registry
from tests.support.nouns import loader as target_files
from tritongemm.backends import _cpp_instances
from tritongemm.backends.cutlass import backend as cutlass_module
from tritongemm.backends.cutlass import instances as cutlass_instances
from tritongemm.build.cache import ArtifactCache
from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.core.launch import Buffer, HostLaunch, Param
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.hip_ext.compilers import toolchain
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.hip_ext.launching.loaded_kernels import HostLaunchedKernel

cutlass = registry.get(KernelBackend, "cutlass")
NO_DEVICE: Any = None  # A call of host code takes no device; the library finds it itself.
SM90 = target_files.load_target("sm90")
BF16 = Problem(1024, 4096, 4096, *matrices("bf16", layout="TN"))
NAME = "cutlass.pingpong__bm128__bn128__bk64__gm1__sk1__w12__s6__cluster_m2__cluster_n1__raster0__swap_ab0"
SWAPPED = "cutlass.single__bm16__bn64__bk128__gm1__sk1__w8__s8__cluster_m1__cluster_n2__raster0__swap_ab1"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """A folder that passes for CUTLASS, and an nvcc that refuses."""
    for name in (cutlass_module._HEADER, "cutlass/version.h"):
        (tmp_path / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "include" / name).write_text("")
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo release 0 && exit\necho "kernel.cu(3): error: no" >&2\nexit 1\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{nvcc.parent}:/usr/bin:/bin")
    for cached in (cutlass_module._nvcc, cutlass_module._version):
        cached.cache_clear()
    yield tmp_path
    for cached in (cutlass_module._nvcc, cutlass_module._version):
        cached.cache_clear()


@pytest.mark.parametrize("layout", ["TN", heavy("NT")])
@pytest.mark.parametrize(
    "size",
    [
        (1, 4096, 4096),
        (200, 328, 1096),
        *(heavy(s) for s in ((64, 4096, 4096), (1024, 1280, 8192), (4096, 4096, 4096))),
    ],
)
def test_every_size_has_instances_that_render(layout: str, size: tuple[int, int, int]) -> None:
    rows = layout == "TN"
    m = size[0] if rows else -(-size[0] // 8) * 8  # column-major rows of A are of M
    problem = Problem(m, *size[1:], *matrices("bf16", layout="NT"[rows] + "NT"[not rows]))
    configs = cutlass.candidates(problem, SM90)
    assert configs
    section = target_files.space_file("sm90")["cutlass"]
    assert len({_cpp_instances.at_run_time(c, section["run_time"]) for c in configs}) <= section["limit"]
    for config in configs:
        assert Config.parse(config.name) == config and cutlass.check(config, problem, SM90)
        used = config.num_stages * cutlass_instances.stage_bytes(config, problem)
        assert used + cutlass_instances.epilogue_bytes(config, problem) <= SM90.lds_bytes
        assert f"StageCount<{config.num_stages}>" in cutlass_module.source(config, problem, SM90)


def test_a_swapped_kernel_computes_the_transpose() -> None:
    text = cutlass_module.source(Config.parse(SWAPPED), replace(BF16, bias="n"), SM90)
    for line in (
        "using TileShape = Shape<_64, _16, _128>;",
        "using ClusterShape = Shape<_2, _1, _1>;",
        "using LayoutX = cutlass::layout::RowMajor;",
        "using LayoutY = cutlass::layout::ColumnMajor;",
        "using LayoutD = cutlass::layout::ColumnMajor;",
        "LinCombPerRowBias<",
        "{N, M, K, 1},",
    ):
        assert line in text, line
    plain = cutlass_module.source(Config.parse(NAME), replace(BF16, bias="n"), SM90)
    for line in (
        "Shape<_128, _128, _64>",
        "Shape<_2, _1, _1>",
        "using LayoutD = cutlass::layout::RowMajor;",
        "LinCombPerColBias<",
        "{M, N, K, 1},",
    ):
        assert line in plain, line


@cases(
    (BF16, target_files.load_target("gfx942"), "not gfx942"),
    (BF16, target_files.load_target("sm100"), "not sm100"),
    (replace(BF16, k=4095), SM90, "lda 4095: rows must start at multiples of 16 bytes"),
    (replace(BF16, n=4095), SM90, "ldc 4095"),
    (replace(BF16, c=Operand("fp16")), SM90, "bf16 or fp32 here, not fp16"),
    (Problem(64, 64, 64, *matrices("fp8e4m3fn", c="bf16")), SM90, "contiguous along K"),
    (Problem(64, 64, 64, *matrices("int8", c="int32")), SM90, "give nothing here"),
)
def test_problems_it_can_not_compute(problem: Problem, facts: Target, reason: str, /) -> None:
    assert reason in cutlass.supports(problem, facts).reason and cutlass.candidates(problem, facts) == []


@cases(
    (NAME.replace("pingpong", "cooperative").replace("bm128", "bm64"), "64 rows for warp groups that take 128"),
    (NAME.replace("sk1", "sk2"), "pingpong does not share tiles"),
    (NAME.replace("w12", "w8"), "8 warps, pingpong has 12"),
    (NAME.replace("pingpong", "simple"), "no template simple"),
)
def test_reasons(name: str, reason: str, /) -> None:
    assert reason in cutlass.check(Config.parse(name), BF16, SM90).reason


def test_what_a_binary_depends_on(tools: Path) -> None:
    config = Config.parse(NAME)

    def digest(problem: Problem = BF16, **changed: Any) -> str:
        return cutlass.compile_job(replace(config, **changed), problem, SM90).digest

    assert digest() == digest(replace(BF16, m=7, n=64, k=8192)) == digest(group_m=4)
    others = [
        digest(replace(BF16, bias="n")),
        digest(replace(BF16, b=BF16.b._replace(row_major=True))),
        digest(replace(BF16, c=Operand("fp32"))),
        digest(num_stages=5),
    ]
    assert len({digest(), *others}) == 1 + len(others)


def test_the_call_names_its_choices() -> None:
    config = replace(Config.parse(NAME), template="stream_k", split_k=3, group_m=1)
    built = Artifact(config, "", "k.so", launch={"parameters": [list(p) for p in cutlass_module._PARAMETERS]})
    call = cutlass.launch(built, replace(BF16, m=130, n=264), SM90)
    values = {n: p.value for (n, _), p in zip(cutlass_module._PARAMETERS, call.params, strict=True)}
    assert (values["splits"], values["swizzle"], values["sm_count"], values["ldb"]) == (3, 1, 132, 4096)
    tiles, room = 2 * 3, values["workspace_bytes"]
    assert isinstance(room, int) and call.buffers == (Buffer("workspace", room),)
    assert room >= tiles * (4 * 128 * 128 + 8)


def test_a_compiler_that_fails_hangs_or_is_missing_is_named(tools: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    compiler = BuildPool(ArtifactCache(tmp_path / "cache"), 1)
    try:
        built = compiler.build(cutlass.compile_job(Config.parse(NAME), BF16, SM90))
    finally:
        compiler.close()
    assert (built.status, built.reason) == (
        "compile_failed",
        "InputError: nvcc refuses the source: kernel.cu(3): error: no",
    )
    fails(Exception, r"took more than 0\.2 s", toolchain.run, ["sleep", "5"], 0.2)
    assert cutlass.available()
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path / "nowhere"))
    assert f"nowhere (CUTLASS_DIR) lacks include/{cutlass_module._HEADER}" in cutlass.available().reason


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = str(tmp_path_factory.mktemp("library") / "l.so")
    subprocess.run([compiler, "-shared", "-fPIC", str(FAKES / "host_call.c"), "-o", library], check=True)
    return library


def call(path: str, symbol: str = "run", runtime: str = "") -> HostLaunch:
    params = (
        Param("pointer", "a"), Param("i32", 5), Param("i64", 2**40), Param("pointer", "stream"), Param("f32", 0.25),
    )  # fmt: skip
    content = Path(path).read_bytes() if Path(path).exists() else b""
    return HostLaunch(path, hashlib.sha256(content).hexdigest(), symbol, params, (), runtime)


def test_host_calls_pass_their_arguments_and_take_new_addresses(library: str) -> None:
    prepared = PreparedCall(call(library), {"a": 0x1000})
    prepared.launch(0x77)
    last = ctypes.CDLL(library).last
    last.restype = ctypes.POINTER(ctypes.c_longlong)
    assert last()[:5] == [0x1000, 5, 2**40, 0x77, 25]
    prepared.setter("a")(0x2000)
    prepared.setter("nothing")(1)
    prepared.launch(0x78)
    assert last()[:5] == [0x2000, 5, 2**40, 0x78, 25]
    served = HostLaunchedKernel(call(library)).prepare(NO_DEVICE)
    served.set_address("a")(0x3000)
    served.set_address("bias")(0x1)  # it takes none
    served.launch(0x79)
    assert last()[:4] == [0x3000, 5, 2**40, 0x79]


def test_what_a_host_call_refuses_is_named(library: str, tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="misaligned operand") as refused:
        PreparedCall(call(library), {}).launch(0)
    assert (refused.value.name, refused.value.code) == ("REFUSED", -7)
    fails(DriverError, "SYMBOL_NOT_FOUND", PreparedCall, call(library, "walk"), {})
    with pytest.raises(UnavailableError, match=r"absent\.so can't be opened: No such file"):
        PreparedCall(call(str(tmp_path / "absent.so")), {})
    fails(UnavailableError, r"does not load: libabsent\.so", PreparedCall, call(library, runtime="libabsent.so"), {})
