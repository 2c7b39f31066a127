"""The BLASLt binding and backend, against a stand-in that computes on the host, as cuBLASLt and as hipBLASLt."""

import ctypes
import itertools
import logging
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.fakes.blaslt_library import NEEDS_COMPILER, NO_CAPTURE
from tests.support.nouns import Backend, Config, Family, Operands, Patch, Problem, Record, Support, matrices, registry
from tests.support.products import product
from tritongemm.backends.blaslt import algorithms as blaslt
from tritongemm.backends.blaslt import served_algorithm
from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.hip_ext.blaslt import library as blaslt_library
from tritongemm.hip_ext.blaslt import tables as blaslt_tables
from tritongemm.hip_ext.blaslt import variants as blaslt_variants
from tritongemm.hip_ext.blaslt.matmul import PreparedMatmul
from tritongemm.hip_ext.blaslt.tables import Matmul, Matrix
from tritongemm.hip_ext.driver import driver

pytestmark = NEEDS_COMPILER

F32 = ("fp32", "fp32", "fp32")


def poke(library: blaslt_library.Library, name: str, value: int) -> None:
    ctypes.c_int.in_dll(library._library, f"fake_{name}").value = value


def peek(library: blaslt_library.Library, name: str) -> int:
    return ctypes.c_int.in_dll(library._library, f"fake_{name}").value


def operands(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    torch.manual_seed(0)
    lead = (problem.batch,) if problem.batch > 1 else ()

    def fill(rows: int, cols: int, row_major: bool) -> torch.Tensor:
        return torch.randn(*lead, rows, cols) if row_major else torch.randn(*lead, cols, rows).transpose(-1, -2)

    a, b = fill(problem.m, problem.k, problem.a.row_major), fill(problem.k, problem.n, problem.b.row_major)
    length = {"none": 0, "m": problem.m, "n": problem.n}[problem.bias]
    return a, b, torch.randn(length) if length else None, torch.full((*lead, problem.m, problem.n), float("nan"))


def expected(problem: Problem, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return a @ b + (0 if bias is None else bias[:, None] if problem.bias == "m" else bias[None, :])


def named(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor) -> Operands:
    return {"a": a, "b": b, "c": c} | ({} if bias is None else {"bias": bias})


def prepared(problem: Problem, tensors: Operands, config: Config | None = None) -> Callable[[], object]:
    """The call of an algorithm that the library must have."""
    call = blaslt.prepare_call(problem, tensors, config)
    assert call is not None
    return call


@pytest.mark.parametrize("bias", ["none", "n", "m"])
@pytest.mark.parametrize(("row_a", "row_b"), list(itertools.product([True, False], repeat=2)))
def test_every_layout_and_bias(library: blaslt_library.Library, row_a: bool, row_b: bool, bias: str) -> None:
    problem = Problem(5, 7, 3, *matrices(*F32, layout="NT"[row_a] + "NT"[row_b]), bias=bias)
    a, b, vector, c = operands(problem)
    call = prepared(problem, named(a, b, vector, c))
    for _ in range(2):
        c.fill_(float("nan"))
        call()
        torch.testing.assert_close(c, expected(problem, a, b, vector))
    assert peek(library, "matmuls") == 2


def test_rows_further_apart_batches_and_one_row_whose_stride_says_nothing(library: blaslt_library.Library) -> None:
    problem = Problem(4, 6, 5, *matrices(*F32, layout="TN"))
    a, b = torch.randn(4, 9)[:, :5], torch.randn(6, 11)[:, :5].T
    c = torch.zeros(4, 8)
    prepared(problem, named(a, b, None, c[:, :6]))()
    torch.testing.assert_close(c, torch.nn.functional.pad(a @ b, (0, 2)))
    problem = Problem(4, 6, 5, *matrices(*F32, layout="NT"), batch=3)
    a, b, _, c = operands(problem)
    prepared(problem, named(a, b, None, c))()
    torch.testing.assert_close(c, a @ b)
    assert blaslt.prepare_call(problem, named(torch.randn(3, 8, 5)[:, ::2], b, None, c)) is None
    problem = Problem(1, 6, 5, *matrices(*F32))
    a, b, _, c = operands(problem)
    prepared(problem, named(a.as_strided((1, 5), (1, 1)), b, None, c))()
    torch.testing.assert_close(c, a @ b)


@pytest.mark.parametrize("shared", ["a", "b"])
@pytest.mark.parametrize("bias", ["none", "n", "m"])
def test_what_a_batch_shares_is_read_again(library: blaslt_library.Library, shared: str, bias: str) -> None:
    problem = Problem(4, 6, 5, *matrices(*F32, layout="TN", shared=shared), batch=3, bias=bias)
    family = registry.get(Family, "dense")
    tensors = family.make_inputs(problem, "cpu") | {"c": torch.full((3, 4, 6), float("nan"))}
    call = prepared(problem, tensors)
    for _ in range(2):
        call()
        torch.testing.assert_close(tensors["c"].double(), family.reference(problem, tensors), rtol=1e-5, atol=1e-5)


def test_algorithms_become_configs_that_find_their_way_back(library: blaslt_library.Library) -> None:
    problem = Problem(5, 7, 3, *matrices(*F32), bias="n")
    a, b, bias, c = operands(problem)
    configs = blaslt.list_configs(problem, named(a, b, bias, c))
    # neither the one that failed, nor the one that needs too much, nor one twice; hipBLASLt's C++ side knows more
    amd = library.table.vendor == "amd"
    assert [x.option("index") for x in configs] == ([1, 2, 0, 4, 5] if amd else list(range(len(configs))))
    assert len({blaslt.identity(x) for x in configs}) == len(configs)
    assert blaslt.list_configs(problem, named(a, b, bias, c), 2) == configs[:2]
    assert all(Config.parse(x.name) == x for x in configs)
    if amd:
        assert configs[0].template == "Cijk_third" and configs[4].template == "heuristic"
        longest = configs[2]
        assert longest.template == "Cijk_MT128x256x64_a_long_name_on_the_heap_GSU4"
        assert (longest.tile, longest.split_k) == ((256, 128, 64), 4)
    else:
        # tile 21 is 256 rows by 64 columns of the transposed problem; stages 16 is four of 64
        assert (configs[0].tile, configs[0].num_stages, configs[0].split_k) == ((64, 256, 64), 4, 1)
        assert configs[0].option("version") == 130100
        # beyond the heuristics' two: other splits of K, and tiles as far as the library accepts them
        assert {x.split_k for x in configs} == set(blaslt_variants.SPLITS)
        pairs = {(x.option("algo"), x.option("tile")) for x in configs}
        assert pairs == {(1, 15), (1, 21), (1, 22), (2, 15), (2, 21), (2, 22)}
    for config in configs:
        c.fill_(float("nan"))
        prepared(problem, named(a, b, bias, c), config)()
        torch.testing.assert_close(c, expected(problem, a, b, bias))


@pytest.mark.parametrize("bias", ["none", "n"])
def test_an_algorithm_serves_operands_that_move(library: blaslt_library.Library, bias: str, monkeypatch: Patch) -> None:
    problem = Problem(5, 7, 3, *matrices(*F32, layout="TN"), bias=bias)
    a, b, given, c = operands(problem)
    config = blaslt.list_configs(problem, named(a, b, given, c))[-1]
    record = Record(problem, "sm90", config, "blaslt", 1e-6, 0.0, "events")
    solution = served_algorithm.load_tuned(record, 0, NO_CAPTURE)
    assert isinstance(solution, served_algorithm.LoadedAlgorithm)
    first, second = solution.prepare(NO_CAPTURE), solution.prepare(NO_CAPTURE)
    scratch = torch.empty(max(solution.bytes("workspace"), 1), dtype=torch.uint8)
    for bound, scale in ((first, 1), (second, 2), (first, 3)):
        x, w, out = (a * scale).contiguous(), b.T.contiguous(), torch.full_like(c, float("nan"))
        added = None if given is None else given * scale
        for name, tensor in (("a", x), ("b", w), ("c", out), ("workspace", scratch), ("bias", added)):
            bound.set_address(name)(0 if tensor is None else tensor.data_ptr())
        bound.launch(0)
        torch.testing.assert_close(out, expected(problem, x, w.T, added))
    monkeypatch.setattr(blaslt, "_listed", lambda problem: [config])
    stale = replace(config, template="no_such_kernel", options=(("algo", 999), ("index", 10**6), ("version", 1)))
    lost = served_algorithm.load_tuned(replace(record, config=stale), 0, NO_CAPTURE)
    assert isinstance(lost, Support) and "not in this version" in lost.reason


def test_a_config_the_heuristics_do_not_know_is_rebuilt_or_refused(library: blaslt_library.Library) -> None:
    problem = Problem(5, 7, 3, *matrices(*F32))
    a, b, _, c = operands(problem)
    config = blaslt.list_configs(problem, named(a, b, None, c))[-1]
    if library.table.vendor == "nvidia":
        other = dict(config.options) | {"tile": 15, "index": 99}
        config = Config("heuristic", 64, 64, 64, options=tuple(other.items()), backend="blaslt", num_warps=0)
        prepared(problem, named(a, b, None, c), config)()
        torch.testing.assert_close(c, a @ b)
        other["algo"] = 50
    else:
        other = dict(config.options) | {"index": 3}
    gone = Config("heuristic", 0, 0, 0, options=tuple(other.items()), backend="blaslt", num_warps=0, num_stages=0)
    assert blaslt.prepare_call(problem, named(a, b, None, c), gone) is None


def test_stored_rows_follow_the_library(library: blaslt_library.Library, caplog: pytest.LogCaptureFixture) -> None:
    problem = Problem(5, 7, 3, *matrices(*F32))
    a, b, _, c = operands(problem)
    stored = blaslt.list_configs(problem, named(a, b, None, c))
    version = blaslt.version()
    assert blaslt.resolve(stored[0], problem, version) is stored[0]
    if library.table.vendor == "amd":
        assert version == (100000 << 32) + 0x8D1AE90E
        poke(library, "revision", 2)
        blaslt._planned.cache_clear()
        found, now = blaslt.list_configs(problem, named(a, b, None, c)), blaslt.version()
        # the kernels moved to other indices
        moved = blaslt.resolve(stored[0], problem, now, found)
        assert moved is not None
        assert moved.template == stored[0].template and moved.option("index") != stored[0].option("index")
        assert blaslt.prepare_call(problem, named(a, b, None, c), stored[0]) is not None  # searched by name
        lost = stored[4]  # it had no name
        assert blaslt.prepare_call(problem, named(a, b, None, c), lost) is None
    else:
        found, now = [x for x in stored if x is not stored[1]], 140000
        assert blaslt.resolve(stored[0], problem, now, found) is stored[0]
        lost = stored[1]
    with caplog.at_level(logging.WARNING):
        assert blaslt.resolve(lost, problem, now, found) is None
    assert len(caplog.records) == 1
    assert "5x7x3_fp32_TT" in caplog.text and "stale" in caplog.text and str(now) in caplog.text


def test_an_index_that_means_another_kernel_is_not_used(library: blaslt_library.Library) -> None:
    if library.table.vendor != "amd":
        pytest.skip("cuBLASLt's algorithms are compared by their attributes")
    problem = Problem(5, 7, 3, *matrices(*F32))
    a, b, _, c = operands(problem)
    first, second, *_ = blaslt.list_configs(problem, named(a, b, None, c))
    swapped = Config(first.template, 0, 0, 0, options=second.options, backend="blaslt")
    planned = blaslt._prepared(problem, named(a, b, None, c), False)
    assert planned is not None
    algorithm = blaslt.find(planned[0], swapped, blaslt.version())
    assert algorithm is not None and dict(algorithm.values)["solution"] == first.option("index")


def test_what_the_library_lacks_is_none_and_what_fails_is_named(library: blaslt_library.Library) -> None:
    problem = Problem(5, 7, 3, *matrices(*F32))
    a, b, _, c = operands(problem)
    call = prepared(problem, named(a, b, None, c))
    poke(library, "fail", 13 if library.table.vendor == "nvidia" else 5)
    with pytest.raises(DriverError, match=r"blasLtMatmul failed: .*STATUS_EXECUTION_FAILED"):
        call()
    poke(library, "none", 1)
    blaslt._planned.cache_clear()
    if library.table.vendor == "nvidia":
        assert blaslt.prepare_call(problem, named(a, b, None, c)) is None
        assert blaslt.list_configs(problem, named(a, b, None, c)) == []
        fnuz = Problem(5, 7, 3, *matrices("fp8e4m3fnuz", c="fp16"))
        assert blaslt.prepare_call(fnuz, named(a, b, None, c)) is None
    else:  # the C++ side still has some
        assert [x.option("index") for x in blaslt.list_configs(problem, named(a, b, None, c))] == [0, 1, 2, 4, 5]


def test_scales_reach_the_library_also_for_each_row_and_column(library: blaslt_library.Library) -> None:
    a, b, d = torch.randn(3, 2), torch.randn(2, 3), torch.zeros(2, 2)
    scale_a, scale_b = torch.tensor(2.0), torch.tensor(0.5)
    matmul = Matmul(
        Matrix("fp32", 2, 3, 2), Matrix("fp32", 3, 2, 3), Matrix("fp32", 2, 2, 2), Matrix("fp32", 2, 2, 2),
        scales=(scale_a.data_ptr(), scale_b.data_ptr(), 0),
    )  # fmt: skip
    plan = PreparedMatmul(library, matmul, 0, 1 << 20, 10)
    start = plan.prepare(plan.algorithms[0], a.data_ptr(), b.data_ptr(), d.data_ptr(), d.data_ptr())
    scratch = torch.zeros(16)
    start(scratch.data_ptr(), 0)
    scale_a.fill_(4.0)
    first = d.clone()
    start(scratch.data_ptr(), 0)
    torch.testing.assert_close(first, b @ a)
    torch.testing.assert_close(d, 2 * first)
    del plan
    assert peek(library, "alive") > 0  # the call holds them
    del start
    assert peek(library, "alive") == 0
    a, b, d = torch.randn(3, 2), torch.randn(4, 3), torch.zeros(4, 2)  # column-major: 2 x 3, 3 x 4, 2 x 4
    scale_a, scale_b = torch.rand(2), torch.rand(4)
    matmul = Matmul(
        Matrix("fp32", 2, 3, 2), Matrix("fp32", 3, 4, 3), Matrix("fp32", 2, 4, 2), Matrix("fp32", 2, 4, 2),
        scales=(scale_a.data_ptr(), scale_b.data_ptr(), 0), scale_modes=("outer_vec", "outer_vec"),
    )  # fmt: skip
    plan = PreparedMatmul(library, matmul, 0, 1 << 20, 10)
    scratch = torch.zeros(16)
    plan.prepare(plan.algorithms[0], a.data_ptr(), b.data_ptr(), d.data_ptr(), d.data_ptr())(scratch.data_ptr(), 0)
    torch.testing.assert_close(d, b @ a * scale_b[:, None] * scale_a[None, :])


def test_each_of_the_librarys_operands_has_its_own_scale(library: blaslt_library.Library, monkeypatch: Patch) -> None:
    encoding = "fp8e4m3fnuz" if library.table.vendor == "amd" else "fp8e4m3fn"
    problem = product("a8w8", 5, 7, 3, encoding, bias="n")
    asked = list[Matmul]()

    def without_algorithms(library: blaslt_library.Library, matmul: Matmul, *rest: int) -> SimpleNamespace:
        asked.append(matmul)
        return SimpleNamespace(algorithms=())

    monkeypatch.setattr(blaslt, "PreparedMatmul", without_algorithms)
    tensors = registry.get(Family, "a8w8").make_inputs(problem, "cpu") | {"c": torch.zeros(5, 7, dtype=torch.bfloat16)}
    assert blaslt.list_configs(problem, tensors) == []
    assert len(asked) == (2 if library.table.vendor == "amd" else 4)  # with the bias and without, fast or not
    for matmul in asked:  # its A is our B
        assert matmul.scales == (blaslt.ANY_ADDRESS, blaslt.ANY_ADDRESS, 0)  # a launch says where they are
        assert matmul.scale_modes == ("outer_vec", "outer_vec")
        assert (matmul.a.dtype, matmul.d.dtype, matmul.trans) == (encoding, "bf16", "TN")
    asked.clear()
    integers = registry.get(Family, "a8w8").problem(Problem(5, 7, 3, *matrices("int8", c="bf16", layout="TN")))
    tensors = registry.get(Family, "a8w8").make_inputs(integers, "cpu") | {"c": torch.zeros(5, 7, dtype=torch.bfloat16)}
    assert blaslt.prepare_call(integers, tensors) is None and asked == []


def test_fp8_output_has_a_wider_c_on_nvidia_and_both_accumulations() -> None:
    problem = Problem(16, 32, 64, *matrices("fp8e4m3fn", layout="TN"))
    matmul = blaslt.to_matmul(problem, (64, 64, 32), (0, 0, 0), 16, "nvidia")
    assert (matmul.trans, matmul.c.dtype, matmul.d.dtype) == ("TN", "fp16", "fp8e4m3fn")
    assert blaslt.to_matmul(problem, (64, 64, 32), (0, 0, 0), 16, "amd").c.dtype == "fp8e4m3fn"
    entire = blaslt.to_matmul(Problem(16, 32, 64, *matrices("int8", c="int32")), (64, 32, 32), (0, 0, 0), 16, "amd")
    assert (entire.compute, entire.scale, entire.trans) == ("int32", "int32", "NN")


def test_without_a_gpu_a_library_or_its_symbols_it_says_so(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "empty.c").write_text("int nothing;")
    path = tmp_path / "empty.so"
    subprocess.run(["c++", "-shared", "-fPIC", str(tmp_path / "empty.c"), "-o", str(path)], check=True, timeout=60)
    with pytest.raises(UnavailableError, match=r"empty\.so has no cublasLtCreate"):
        blaslt_library.Library(blaslt_tables.NVIDIA, ctypes.CDLL(str(path)))
    if driver.find_vendor() is None:
        assert "no CUDA or HIP driver" in registry.available(Backend, "blaslt").reason
    blaslt_library.open_library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(
            blaslt_tables.TABLES, "amd",
            blaslt_tables.Table(**{**blaslt_tables.AMD.__dict__, "files": ("libnohipblaslt.so",), "folders": ()}),
        )  # fmt: skip
        with pytest.raises(UnavailableError, match=r"hipblaslt: no library found; looked for libnohipblaslt\.so"):
            blaslt_library.open_library("amd")
    for vendor, label in (("amd", "hipblaslt"), ("nvidia", "cublaslt"), (None, "cublaslt")):
        monkeypatch.setattr(blaslt, "vendor", lambda vendor=vendor: vendor)
        assert label == registry.get(Backend, "blaslt").label
