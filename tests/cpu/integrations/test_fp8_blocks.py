"""fp8 layers in blocks of vLLM and SGLang: tuned kernels stand before the servers' own, which compute the rest."""

import logging
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fakes import servers
from tests.support.linear_layers import StandInKernel, name_table, record, run_on_cpu, stand_in_kernels
from tests.support.nouns import Caplog, Config, Dispatcher, Patch, Problem, Record
from tests.support.products import product
from tritongemm.integrations import compiled, process, sglang, vllm, vllm_fp8
from tritongemm.serving import server_calls
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.linear_fp8 import BlockOperands, find_layout

M, N, K = 16, 256, 512
FP8 = torch.float8_e4m3fn


def problem(m: int = M, scales: str = "block") -> Problem:
    return product("a8w8_blockscale", m, N, K, "fp8e4m3fn", scales)


def write_table(tmp_path: Any, monkeypatch: Patch, **facts: Any) -> None:
    name_table(tmp_path, monkeypatch, record(problem(), **facts))


@pytest.fixture
def table(tmp_path: Any, unloaded: Dispatcher, monkeypatch: Patch) -> Dispatcher:
    write_table(tmp_path, monkeypatch)
    return unloaded


@pytest.fixture
def tuned(monkeypatch: Patch) -> list[BlockOperands]:
    """Operands of the calls that a tuned kernel serves: those of M rows, on any device."""
    calls: list[BlockOperands] = []

    def product_or(operands: BlockOperands, otherwise: Callable[[], Tensor]) -> Tensor:
        if operands.x.shape[0] != M:
            return otherwise()
        calls.append(operands)
        return torch.full((M, operands.weight.shape[0]), 3.0, dtype=operands.out_dtype)

    monkeypatch.setattr("tritongemm.serving.server_calls.product_or", product_or)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    return calls


def operands(rows: int, n: int = N, quantised: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = torch.ones(rows, K).to(FP8 if quantised else torch.bfloat16)
    of_a = torch.ones(K // 128, rows).t() if quantised else torch.empty(1)
    return a, torch.ones(n, K).to(FP8), of_a, torch.ones(n // 128, K // 128)


@pytest.fixture
def kinds(table: Dispatcher, monkeypatch: Patch) -> Any:
    servers.install_vllm(monkeypatch)
    found = servers.install_vllm_blocks(monkeypatch)
    for _ in range(2):
        vllm.register()
    return found


@pytest.fixture
def sglangs(table: Dispatcher, monkeypatch: Patch) -> tuple[Any, Any]:
    """(SGLang's classes, served by the table, its batch-invariant mode)"""
    hooks, places, mode = servers.install_sglang(monkeypatch)
    for _ in range(2):
        sglang.register()
    hooks.apply_hooks()
    return places, mode


def test_vllms_kernels_compute_what_no_row_holds_for(kinds: Any, tuned: list[BlockOperands], caplog: Caplog) -> None:
    calls = tuned
    for kind, quantised in zip(kinds, (True, False), strict=True):
        kernel = kind()
        for given in (operands(3, quantised=quantised), operands(M, 128, quantised), operands(3, 128, quantised)):
            assert bool((kernel.apply_block_scaled_mm(*given) == kind.answer).all()) and not calls
        assert bool((kernel.apply_block_scaled_mm(*operands(M, quantised=quantised)) == 3).all())
        assert (calls.pop().x_scale is not None) == quantised

        def layer(a: Tensor, scale_a: Tensor, kernel: Any = kernel) -> Tensor:
            _, b, _, scale_b = operands(1)
            result: Tensor = kernel.apply_block_scaled_mm(a, b, scale_a, scale_b)
            return result

        traced = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
        for rows, wanted in ((3, kind.answer), (M, 3.0), (5, kind.answer)):
            a, _, of_a, _ = operands(rows, quantised=quantised)
            assert bool((traced(a, of_a) == wanted).all())
        calls.clear()
    with pytest.raises(TypeError):  # of another version: read as the hook knows it, then given to the operator
        torch.ops.vllm.fp8_gemm_nt_op.default._op._hook(lambda: None, *operands(M))
    assert not calls


@pytest.mark.parametrize("order", ["", f"1x{K} blocks of 128 by wgmma"])
def test_fp8_layers_whose_rows_state_their_order_are_served_where_batches_must_not_matter(
    unloaded: Dispatcher, tuned: list[BlockOperands], tmp_path: Any, monkeypatch: Patch, caplog: Caplog, order: str
) -> None:
    write_table(tmp_path, monkeypatch, order=order, row_bits="aa" if order else "")
    calls, wanted = tuned, 3.0 if order else 5.0
    hooks, places, mode = servers.install_sglang(monkeypatch)
    sglang.register()
    hooks.apply_hooks()
    layer = SimpleNamespace(weight=operands(1)[1], weight_scale_inv=operands(1)[3])
    x, method = torch.ones(M, K, dtype=torch.bfloat16), places.Fp8LinearMethod(block_quant=True)
    mode.is_batch_invariant_mode_enabled = lambda: True
    assert bool((method.apply(layer, x) == (3 if order else 7)).all()) and unloaded.wants_invariant_rows
    mode.is_batch_invariant_mode_enabled = lambda: False
    assert bool((method.apply(layer, x) == 3).all()) and not unloaded.wants_invariant_rows
    calls.clear()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    servers.install_vllm(monkeypatch)
    kind, _ = servers.install_vllm_blocks(monkeypatch)
    vllm.register()
    assert ("no row states its order" in caplog.text) == (not order)
    kernel = kind()
    assert bool((kernel.apply_block_scaled_mm(*operands(M)) == wanted).all()) and len(calls) == bool(order)
    assert bool((kernel.apply_block_scaled_mm(*operands(M, 128)) == 5).all()) and len(calls) == bool(order)


def test_parameters_of_a_servers_class_are_plain_tensors(kinds: Any, tuned: list[BlockOperands]) -> None:
    calls, kernel, (a, b, of_a, of_b) = tuned, kinds[0](), operands(M)
    weight, scale = servers.ServerParameter(b), servers.ServerParameter(of_b)
    traced = torch.compile(lambda a, of_a: kernel.apply_block_scaled_mm(a, weight, of_a, scale), backend="eager")
    for result in (kernel.apply_block_scaled_mm(a, weight, of_a, scale), traced(a, of_a)):
        given = calls.pop()
        assert bool((result == 3).all()) and type(given.weight) is type(given.weight_scale) is Tensor
        assert given.weight.data_ptr() == b.data_ptr()
    assert process.plain(weight).data_ptr() == b.data_ptr() and process.plain(b) is b and process.plain(None) is None


def test_a_capture_sees_compiled_layers(
    unloaded: Dispatcher, tuned: list[BlockOperands], tmp_path: Any, monkeypatch: Patch
) -> None:
    """Without a table; what torch.compile traces reads no environment."""
    monkeypatch.delenv("TRITONGEMM_CONFIG", raising=False)
    monkeypatch.setenv("TRITONGEMM_CAPTURE", str(tmp_path / "sizes.yaml"))
    envs, _ = servers.install_vllm(monkeypatch)
    kind, _ = servers.install_vllm_blocks(monkeypatch)
    servers.install_vllm_mixtures(monkeypatch)
    vllm.register()
    kernel, (a, b, of_a, of_b) = kind(), operands(M, 128)
    layer = torch.compile(kernel.apply_block_scaled_mm, fullgraph=True, backend="eager", dynamic=True)
    assert bool((layer(a, b, of_a, of_b) == 3).all()) and len(tuned) == 1
    assert envs.environment_variables["TRITONGEMM_CONFIG"]() == "capture"


def test_vllms_layers_with_a_factor_per_row(kinds: Any, tuned: list[BlockOperands]) -> None:
    calls = tuned

    def layer(a: Tensor, n: int = N) -> Tensor:
        factors, b = (torch.ones(a.shape[0], 1), torch.ones(n, 1)), torch.ones(n, K).to(FP8).t()
        out = a.new_empty((a.shape[0], n), dtype=torch.bfloat16)
        torch.ops._C.cutlass_scaled_mm(out, a, b, *factors, bias=None)
        return out

    rows = {count: torch.ones(count, K).to(FP8) for count in (3, M, 5)}
    for call in (layer, torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)):
        for count, a in rows.items():
            result = call(a)
            assert result.shape == (count, N) and bool((result == (3 if count == M else 4)).all())
    assert calls[0].weight.shape == (N, K) and calls[0].weight_scale.shape == (N, 1) and len(calls) == 2
    assert bool((layer(rows[M], 128) == 4).all()) and len(calls) == 2
    a, b, of_a, of_b = operands(M)
    torch.ops._C.cutlass_scaled_mm(torch.empty(M, N), a, b.t(), of_a, of_b.t(), None)
    assert calls[2].weight_scale.shape == (N // 128, K // 128)  # in blocks


def test_another_vllm_keeps_its_own_kernels(table: Dispatcher, monkeypatch: Patch, caplog: Caplog) -> None:
    servers.install_vllm(monkeypatch)
    servers.install_vllm_blocks(monkeypatch)
    monkeypatch.setattr(vllm_fp8, "OPERATORS", {"vllm::moved": vllm_fp8.OPERATORS["_C::cutlass_scaled_mm"]})
    with caplog.at_level(logging.ERROR, "tritongemm"):
        vllm.register()
    assert "tuned kernels serve no fp8 layer" in caplog.text


def test_without_scales_in_the_table_nothing_is_wrapped(config: Any, monkeypatch: Patch) -> None:
    servers.install_vllm(monkeypatch)
    servers.install_vllm_blocks(monkeypatch)
    before = torch.ops._C.cutlass_scaled_mm._op
    vllm.register()
    assert torch.ops._C.cutlass_scaled_mm._op is before


def test_sglangs_method_computes_what_no_row_holds_for(
    sglangs: tuple[Any, Any], tuned: list[BlockOperands], caplog: Caplog
) -> None:
    places, mode = sglangs
    calls, method = tuned, places.Fp8LinearMethod
    _, weight, _, scale = operands(1)
    layer = SimpleNamespace(weight=weight, weight_scale_inv=scale)
    x = torch.ones(M, K, dtype=torch.bfloat16)
    served = method(block_quant=True)
    assert bool((served.apply(layer, x) == 3).all()) and calls.pop().bias is None
    others = {"no row": (served, layer, x[:3]), "quantised before": (served, layer, (x, scale))}
    others |= {"no blocks": (method(block_quant=False), layer, x), "marlin": (method(use_marlin=True), layer, x)}
    others["e8m0"] = served, SimpleNamespace(weight=weight, weight_scale_inv=scale.to(torch.float8_e8m0fnu)), x
    for name, (own, of, given) in others.items():
        assert bool((own.apply(of, given) == 7).all()) and not calls, name
    mode.is_batch_invariant_mode_enabled = lambda: True
    assert bool((served.apply(layer, x) == 7).all()) and not calls
    del served.use_mxfp8  # as of a version that has another name for it
    for _ in range(2):
        assert bool((served.apply(layer, x) == 7).all())
    (line,) = (r.getMessage() for r in caplog.records)
    assert line.startswith("SGLang: this fp8 layer is not as") and "has no attribute 'use_mxfp8'" in line
    assert bool((method(block_quant=True).apply(layer, x) == 7).all())
    mode.is_batch_invariant_mode_enabled = lambda: False
    assert bool((method(block_quant=True).apply(layer, x) == 3).all())


def test_sglangs_other_fp8_layers(sglangs: tuple[Any, Any], tuned: list[BlockOperands]) -> None:
    (places, mode), calls = sglangs, tuned
    (x, weight, _, scale), scheme = operands(M, quantised=False), places.CompressedTensorsW8A8Fp8()
    layer = SimpleNamespace(weight=weight, weight_scale=scale)
    assert bool((scheme.apply_weights(layer, x) == 3).all()) and calls.pop().weight_scale is scale
    scheme.weight_block_size = None
    assert bool((scheme.apply_weights(layer, x) == 6).all()) and not calls
    a, of_a, of_b = torch.ones(M, K).to(FP8), torch.ones(M, 1), torch.ones(N, 1)
    multiply = places.fp8_utils.fp8_scaled_mm
    assert bool((multiply(a, weight.t(), of_a, of_b, out_dtype=torch.bfloat16, bias=None) == 3).all())
    given = calls.pop()
    assert given.weight.shape == (N, K) and [given.weight_scale, given.x_scale] == [of_b, of_a]
    others = (
        (a, weight.t().contiguous(), of_a, of_b),
        (a, weight.t(), of_a[:1], of_b),
        (a, weight[:128].t(), of_a, of_b),
    )
    for one in others:
        assert bool((multiply(*one, torch.bfloat16) == 5).all()) and not calls
    mode.is_batch_invariant_mode_enabled = lambda: True
    assert bool((multiply(a, weight.t(), of_a, of_b, torch.bfloat16) == 5).all()) and not calls


def test_weights_in_blocks_are_known(table: Dispatcher) -> None:
    table.add_configured()
    _, weight, _, scale = operands(1)
    assert process.serves_blocks(weight, scale) and not process.serves_blocks(weight.bfloat16(), scale)
    assert not process.serves_blocks(weight, scale[:1]) and not process.serves_blocks(weight[:128], scale[:1])


@pytest.mark.servers
def test_the_real_servers(table: Dispatcher, monkeypatch: Patch) -> None:
    linear = pytest.importorskip("vllm.model_executor.kernels.linear", exc_type=ImportError)
    assert hasattr(linear, "_POSSIBLE_KERNELS")
    names = [name.replace("::", ".") for name in vllm_fp8.OPERATORS if name[0] == "v" and "aiter" not in name]
    for every in (pkgutil.resolve_name(f"torch:ops.{name}") for name in names):
        for one in (every, every.default):
            monkeypatch.setattr(one, "_op", one._op)
    vllm_fp8.hook()
    assert all(isinstance(pkgutil.resolve_name(f"torch:ops.{name}.default._op"), compiled._Before) for name in names)


def hold(monkeypatch: Patch, dispatcher: Dispatcher, *rows: Record) -> DeviceKernels:
    """Have the CPU stand in for a GPU with the kernels of rows."""
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    dispatcher.load(list(rows))
    kernels = stand_in_kernels(dispatcher._records, {row.problem: StandInKernel() for row in rows})
    dispatcher._devices[-1] = dispatcher._devices[0] = kernels
    return kernels


def test_an_invariant_product_is_served_at_every_m_without_a_race(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """At an M without a row by an untuned kernel of the rows' order, and never by a layout that has no rows."""
    capturing = False
    monkeypatch.setattr(server_calls, "pays", lambda key, prepare: pytest.fail("timed"))
    config = Config("tile", 64, 64, 128, num_warps=4)
    row = record(problem(), config=config, order=f"1x{K} blocks of 128 by wgmma", row_bits="aa")
    kernels = hold(monkeypatch, unloaded, row)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    kernels.load_record = lambda untuned: StandInKernel()
    kernels.row_bits = lambda kernel, problem: "aa"  # type: ignore[method-assign]
    unloaded.want_invariant_rows(unloaded)
    server = torch.empty(1)
    with torch.no_grad():
        for m in (M, 5, 300):
            a, b, of_a, of_b = operands(m)
            assert server_calls.product_or(BlockOperands(a, b, of_b, of_a), lambda: server).shape == (m, N)
            by_rows = BlockOperands(a, b, of_b, of_a.contiguous())
            with pytest.warns(UserWarning, match="no kernel of the rows' order serves, so the server computes it"):
                assert server_calls.product_or(by_rows, lambda: server) is server
        capturing = True
        a, b, of_a, of_b = operands(7)
        with pytest.warns(UserWarning, match=r"\(7, 512\) by \(256, 512\): no kernel"):
            assert server_calls.product_or(BlockOperands(a, b, of_b, of_a), lambda: server) is server


def test_a_served_product_is_looked_up_once(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """A launch is found again by shapes, types and strides of all operands."""
    hold(monkeypatch, unloaded, record(problem()))
    monkeypatch.setattr(server_calls, "pays", lambda key, prepare: True)
    asked = list[BlockOperands]()

    def find(given: BlockOperands, near: bool) -> str | None:
        asked.append(given)
        return find_layout(given, near)

    monkeypatch.setattr(server_calls, "find_layout", find)
    a, b, of_a, of_b = operands(M)
    theirs = torch.empty(1)
    with torch.no_grad():
        for factors, count in ((of_a, 1), (of_a, 1), (of_a.contiguous(), 2), (of_a, 2)):
            given = BlockOperands(a, b, of_b, factors)
            result = server_calls.product_or(given, lambda: theirs)
            assert len(asked) == count and (result is theirs) == (factors is not of_a)
            assert factors is not of_a or result.shape == (M, N)


def test_what_lost_its_race_is_looked_for_at_no_other_m(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """Prompts are of a new length each. All M of as many bits share a race, but for multiples of four and others."""
    hold(monkeypatch, unloaded, record(problem()))
    monkeypatch.setattr(server_calls, "_race", lambda key, prepare: False)
    asked, theirs = list[int](), torch.empty(1)

    def find(given: BlockOperands, near: bool) -> str:
        asked.append(len(given.x))
        return "groups"

    monkeypatch.setattr(server_calls, "find_layout", find)
    with torch.no_grad():
        for m in (M, M + 4, M + 1, 2 * M - 1, 2 * M):
            a, b, _, of_b = operands(m, quantised=False)
            assert server_calls.product_or(BlockOperands(a, b, of_b), lambda: theirs) is theirs
    assert asked == [M, M + 1, 2 * M]


def test_factors_that_a_row_wants_padded_are_copied(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """At M that are no multiple of 4 DeepGEMM has them so, and CUTLASS has not; the server's memory is written.

    A row of dense ones has them as they are.
    """
    hold(monkeypatch, unloaded, *(record(problem(m, s)) for m, s in ((5, "block_tma"), (3, "block_tma"), (3, "block"))))
    monkeypatch.setattr(server_calls, "pays", lambda key, prepare: True)
    read = list[tuple[int, ...]]()

    def launch(call: Any, *given: Any) -> Any:
        read.append(given[2].stride())
        return given[-1]

    monkeypatch.setattr("tritongemm.serving.launching.OperandCall.__call__", launch)
    with torch.no_grad():
        for m in (5, 5, 3):
            a, b, of_a, of_b = operands(m)
            out = torch.empty(m, N, dtype=torch.bfloat16)
            assert server_calls.product_or(BlockOperands(a, b, of_b, of_a, out=out), lambda: torch.empty(1)) is out
    assert read == [(1, 8), (1, 8), (1, 3)]


def test_what_the_server_computes_is_not_looked_at_again(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """Until rows are added; a race that tuned kernels win calls the server's kernel too, and is no such answer."""
    asked, multiply = list[int](), vllm_fp8._multiply

    def pays(key: Any, prepare: Callable[[], Any]) -> bool:
        _, theirs = prepare()
        return all(theirs() is None for _ in range(2))

    def count(given: BlockOperands, own: Callable[[], Any]) -> Any:
        asked.append(given.x.shape[0])
        return multiply(given, own)

    servers.install_vllm_blocks(monkeypatch)
    hold(monkeypatch, unloaded, record(problem()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(server_calls, "pays", pays)
    monkeypatch.setattr(vllm_fp8, "_multiply", count)
    monkeypatch.setattr("tritongemm.serving.launching.OperandCall.__call__", lambda call, *given: given[-1])
    vllm_fp8.hook()

    b, of_b = operands(1)[1::2]

    def call(m: int) -> float:
        out = torch.zeros(m, N, dtype=torch.bfloat16)
        torch.ops._C.cutlass_scaled_mm(out, operands(m)[0], b.t(), operands(m)[2], of_b.t(), None)
        return float(out.max())

    with torch.no_grad():
        assert [call(m) for m in (5, 5, 5)] == [4, 4, 4] and asked == [5]
        assert [call(m) for m in (M, M, M)] == [4, 0, 0] and asked == [5, M, M, M]  # by a kernel that writes nothing
        hold(monkeypatch, unloaded, record(problem(5)))
        assert call(5) == 4 and call(5) == 0 and asked[4:] == [5, 5]
