"""vLLM's plug-in: on a stand-in of its modules everywhere, on the real ones where they can be imported."""

import logging
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import tritongemm
from tests.support.fakes.servers import ServerParameter, install_vllm
from tests.support.linear_layers import problem, record
from tests.support.nouns import Dispatcher, DriverError, Patch, raising
from tests.support.served_region import compile_for_each_m, gpu_that_serves
from tritongemm.integrations import process, sglang, vllm
from tritongemm.serving.sources.invariant_kernel import InvariantKernel


@pytest.mark.parametrize("named", [{}, {"TRITONGEMM_CONFIG": ""}, {"AITER_CONFIG_GEMM_BF16": "tuned.yaml"}])
def test_without_a_table_nothing_is_imported(
    config: Path, unloaded: Dispatcher, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, named: dict[str, str]
) -> None:
    """AITER's own users have its variable set, and did not ask us for anything."""
    monkeypatch.chdir(config.parent)
    monkeypatch.delenv("TRITONGEMM_CONFIG")
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    for server in (vllm, sglang):
        monkeypatch.setitem(sys.modules, server.__name__.rpartition(".")[2], None)  # An import would fail.
        server.register()
    assert unloaded.weights == frozenset() and not caplog.records


@pytest.mark.parametrize("content", [None, "", "- {M: 1, N: 2, K: 3}\n", "\0\0"])
def test_a_file_that_cannot_be_read_leaves_the_server_as_it_is(
    unloaded: Dispatcher, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    file = tmp_path / "broken.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(file))
    vllm.register()
    (line,) = (r.getMessage() for r in caplog.records if r.levelno == logging.ERROR)
    assert "broken.yaml" in line and line.endswith("; nothing is served by tuned kernels")


def test_serves_what_a_row_holds_for(config: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    envs, utils = install_vllm(monkeypatch)
    names = "default_unquantized_gemm", "rocm_unquantized_gemm"
    originals = [getattr(utils, name) for name in names]
    for _ in range(3):
        vllm.register()
    assert logging.getLogger("tritongemm").parent is logging.getLogger("vllm")
    assert envs.environment_variables["TRITONGEMM_CONFIG"]() == ""  # vLLM's graphs of these layers are its own
    with gpu_that_serves(monkeypatch, unloaded, [record(problem(16, 32, 64))]) as (served, make):
        for name, original in zip(names, originals, strict=True):
            gemm = getattr(utils, name)
            assert gemm is not original
            for x, w in ((make(17, 64), make(32, 64)), (make(16, 64), make(33, 64))):
                assert gemm(None, x, w).shape == (x.shape[0], w.shape[0]) and not served.shapes
            assert gemm(layer=None, x=make(16, 64), weight=make(32, 64), bias=None).shape == (16, 32)
            assert served.shapes.pop() == ((16, 64), (32, 64))
    cpu = torch.randn(16, 64), torch.randn(32, 64)
    assert torch.equal(utils.default_unquantized_gemm(None, *cpu), functional.linear(*cpu))
    assert torch.equal(utils.rocm_unquantized_gemm(None, *cpu), functional.linear(*cpu) + 1)


def test_a_capture_sees_layers_outside_compiled_code(unloaded: Dispatcher, tmp_path: Path, monkeypatch: Patch) -> None:
    """Such as routers in vLLM's own operators."""
    monkeypatch.delenv("TRITONGEMM_CONFIG", raising=False)
    monkeypatch.setenv("TRITONGEMM_CAPTURE", str(tmp_path / "sizes.yaml"))
    _, utils = install_vllm(monkeypatch)
    x, weight = torch.randn(5, 64), ServerParameter(torch.randn(32, 64))
    with torch.no_grad(), tritongemm.capture(tmp_path / "sizes.yaml"):
        for _ in range(2):
            vllm.register()
            result = utils.default_unquantized_gemm(None, x, weight)
    assert torch.equal(result, functional.linear(x, weight))
    assert '"M": 5, "N": 32, "K": 64' in (tmp_path / "sizes.yaml").read_text()


def test_where_kernels_do_not_launch_vllm_computes(config: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    _, utils = install_vllm(monkeypatch)
    vllm.register()
    error = DriverError("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND")
    with gpu_that_serves(monkeypatch, unloaded, [record(problem(16, 32, 64))]) as (_, make):
        monkeypatch.setattr("tritongemm.serving.launching.FastCall", raising(error))
        with pytest.warns(UserWarning, match="CUDA_ERROR_NOT_FOUND"):
            assert utils.default_unquantized_gemm(None, make(16, 64), make(32, 64)).shape == (16, 32)
        assert utils.default_unquantized_gemm(None, make(16, 64), make(32, 64)).shape == (16, 32)  # asked once


def test_what_no_row_holds_for_is_computed_as_by_vllm(config: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    install_vllm(monkeypatch)
    vllm.register()
    operands = torch.randn(2, 8, 64), torch.randn(32, 64), torch.randn(32)
    assert torch.equal(torch.ops.tritongemm.vllm_rocm_linear(*operands), functional.linear(*operands) + 1)
    torch.library.opcheck(
        torch.ops.tritongemm.vllm_rocm_linear.default, operands, test_utils=("test_schema", "test_faketensor")
    )


def test_one_graph_serves_every_m(config: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    _, utils = install_vllm(monkeypatch)
    vllm.register()
    with gpu_that_serves(monkeypatch, unloaded, [record(problem(16, 32, 64))]) as (_, make):
        gemm, w, other = utils.default_unquantized_gemm, make(32, 64), make(33, 64)
        graphs = compile_for_each_m(lambda x: (gemm(None, x, w), gemm(None, x, other)), make)
        assert graphs == [[functional.linear, functional.linear]]
        rocm = utils.rocm_unquantized_gemm
        graphs = compile_for_each_m(lambda x: (rocm(None, x, w), rocm(None, x, other)), make)
        assert graphs[0][:2] == [torch.ops.tritongemm.vllm_rocm_linear, functional.linear]


def test_nothing_is_served_where_batches_must_not_matter_and_no_row_states_its_order(
    config: Path, unloaded: Dispatcher, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    _, utils = install_vllm(monkeypatch)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    before = utils.default_unquantized_gemm
    vllm.register()
    assert utils.default_unquantized_gemm is before
    assert "VLLM_BATCH_INVARIANT is set, and no row states its order (tune --invariant)" in caplog.text


def test_rows_of_a_stated_order_serve_invariant_calls(config: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    envs, utils = install_vllm(monkeypatch)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    before, row = utils.default_unquantized_gemm, record(problem(16, 32, 64), order="1x64", row_bits="aa")
    unloaded.load([row])
    for _ in range(2):
        vllm.register()
    assert utils.default_unquantized_gemm is before and envs.environment_variables["TRITONGEMM_CONFIG"]() != ""
    layers = [sys.modules[f"vllm.model_executor.layers.{name}"] for name in ("linear", "vocab_parallel_embedding")]
    monkeypatch.setattr(InvariantKernel, "review", lambda self, answer, call, device: answer)
    with gpu_that_serves(monkeypatch, unloaded, [row]) as (served, make):
        w, compute = make(32, 64), layers[0].linear_batch_invariant
        # A server traces its model before it calls a layer.
        assert compile_for_each_m(lambda x: compute(x, w), make) == [[torch.ops.tritongemm.vllm_invariant_linear]]
        served.shapes.clear()
        for at, layer in enumerate(layers, start=1):
            compute = layer.linear_batch_invariant
            assert compute(make(16, 64), make(33, 64)).shape == (16, 33) and len(served.shapes) == at - 1
            assert compute(make(16, 64), make(32, 64)).shape == (16, 32) and len(served.shapes) == at


def test_another_vllm_is_left_as_it_is(config: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    envs, utils = install_vllm(monkeypatch)
    before = utils.default_unquantized_gemm
    del utils.rocm_unquantized_gemm_impl
    vllm.register()
    assert utils.default_unquantized_gemm is before and "rocm_unquantized_gemm_impl" in caplog.text
    del envs.environment_variables
    caplog.clear()
    vllm.register()
    (line,) = (r.getMessage() for r in caplog.records)
    assert "environment_variables" in line and line.endswith("tuned kernels serve no layer")


@pytest.mark.servers
def test_the_real_server(config: Path, monkeypatch: Patch) -> None:
    envs = pytest.importorskip("vllm.envs", exc_type=ImportError)
    utils = pytest.importorskip("vllm.model_executor.layers.utils", exc_type=ImportError)
    for name in ("default_unquantized_gemm", "rocm_unquantized_gemm"):
        monkeypatch.setattr(utils, name, getattr(utils, name))
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    vllm.register()
    assert envs.compile_factors()["TRITONGEMM_CONFIG"] == ""
    for cuda in (True, False):
        answers = {"is_cuda": cuda, "is_rocm": not cuda, "is_cpu": False}
        platform = SimpleNamespace(**{name: partial(bool, answer) for name, answer in answers.items()})
        monkeypatch.setattr(utils, "current_platform", platform)
        assert process.is_hooked(utils.dispatch_unquantized_gemm())
    for n in (32, 33):
        operands = torch.randn(3, 64), torch.randn(n, 64)
        assert torch.equal(utils.default_unquantized_gemm(None, *operands), functional.linear(*operands))
