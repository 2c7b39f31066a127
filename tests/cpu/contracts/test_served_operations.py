"""What serving does for every tuned product, on a stand-in of a GPU: it looks up, launches, explains and logs."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import tritongemm
from tests.support.kernel_cases import SM90
from tests.support.linear_layers import HostKernel, StandInKernel, attach_device, be_a_gpu, record
from tests.support.nouns import Config, DriverError, Family, Groups, Patch, Problem, each, fails, matrices, registry
from tests.support.operation_calls import Call
from tests.support.tuned_calls import make_call
from tritongemm.core.scaling import GRANULARITIES, granularity
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.numerics import verify
from tritongemm.operations import contract
from tritongemm.operations.contract import ProductOperation
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.dispatcher import Dispatcher

COUNTS = (5, 0, 9, 2)
FORMS: dict[str, dict[str, Any]] = {
    "one": {}, "batch": {"batch": 3}, "one A": {"batch": 3, "shared": "a"}, "one B": {"batch": 3, "shared": "b"},
    "groups": {"groups": Groups(4, 0, "captured", COUNTS)}, "masked": {"groups": Groups(4, 11, "captured", COUNTS)},
}  # fmt: skip
TYPES = {"dense": ("bf16",), "a8w8": ("fp8e4m3fn", "int8"), "a8w8_blockscale": ("fp8e4m3fn", "fp8e5m2"),
         "a4w4_blockscale": ("fp4e2m1",), "a16w4": ("bf16 int4", "fp16 int4", "bf16 fp4e2m1"),
         "a8w4": ("fp8e4m3fn fp4e2m1", "int8 int4")}  # fmt: skip
# Families have more than calls: one factor for each product of a batch, and other scales of groups than blocks.
NO_CALL = {
    "one": (),
    "batch": ("tensor", *(name for name in GRANULARITIES if name.startswith("weight_"))),
    "groups": ("group", "group_rows", "block_rows", "block_rows_weight_mx", "block_rows_weight_128"),
}


def list_cases() -> Iterator[tuple[str, Problem]]:
    """Each pair of scale factors that a family has, of one product, of batches and of groups, where it has those."""
    for name, types in TYPES.items():
        family = registry.get(Family, name)
        for dtype in types:
            of_a, _, of_b = dtype.partition(" ")
            for place, pair in enumerate(family.scalings(of_a, of_b or of_a)):
                scales = "" if name == "dense" else granularity(pair)
                if dtype == "fp8e5m2" and not scales.startswith("mx"):
                    continue
                for form, more in FORMS.items():
                    operands = matrices(of_a, of_b, "bf16", layout="TN", shared=more.get("shared", ""))
                    plain = Problem(16, 144, 320, *operands, batch=more.get("batch", 1), groups=more.get("groups"))
                    one = family.problem(plain, scales if place else "")
                    if family.supports(replace(one, bias="n"), SM90):
                        one = replace(one, bias="n")
                    if name == "a8w4" and one.batch > 1:
                        continue  # no call has those
                    kind = "groups" if one.groups else "batch" if one.batch > 1 else "one"
                    if family.supports(one, SM90) and scales not in NO_CALL[kind]:
                        yield f"{form}, {scales or name}, {dtype}", one


CASES = dict(list_cases())
for layout in ("TT", "NT", "NN"):
    CASES |= {
        f"{batch} products, {layout}": Problem(16, 144, 320, *matrices("bf16", layout=layout), "n", batch)
        for batch in (1, 3)
    }
INT4 = CASES["one, weight_64, bf16 int4"]
CASES["one, halves_32, bf16 int4"] = replace(INT4, b=INT4.b._replace(order="halves_32"))
CASES["one, silu_mul, bf16"] = Problem(16, 144, 320, *matrices("bf16", layout="TN"), "n", epilogue="silu_mul")
CASES["one, add, bf16"] = Problem(16, 144, 320, *matrices("bf16", layout="TN"), epilogue="add")
CASES["one, add, fp8 rows"] = replace(CASES["one, row, fp8e4m3fn"], bias="none", epilogue="add")
CASES["one, silu_mul, fp8 rows"] = replace(CASES["one, row, fp8e4m3fn"], epilogue="silu_mul")
KINDS = ("one, dense, bf16", "one, row, fp8e4m3fn", "one, block, fp8e4m3fn", "one, weight_64, bf16 int4",
         "one, silu_mul, bf16",
         "batch, dense, bf16", "batch, row, int8",
         "groups, dense, bf16", "groups, block, fp8e4m3fn", "masked, row, fp8e4m3fn")  # fmt: skip
every_case = pytest.mark.parametrize("of", CASES.values(), ids=CASES)
every_kind = pytest.mark.parametrize("of", [CASES[name] for name in KINDS], ids=KINDS)


class Broken(StandInKernel):
    def prepare(self, device: Any) -> PatchedLaunch:
        raise DriverError("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND")


@pytest.fixture
def gpu(monkeypatch: Patch) -> Dispatcher:
    """The dispatcher of a process whose tensors are on a GPU, an sm90, which is the CPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    return be_a_gpu(monkeypatch)


def hold(dispatcher: Dispatcher, of: Problem, kernel: StandInKernel, **changes: Any) -> DeviceKernels:
    """Have a dispatcher serve a row of a problem by a kernel, at other M too."""
    assert dispatcher.load([record(of, Config("grouped" if of.groups else "tile", 16, 32, 64), **changes)]) == 1
    kernels = attach_device(dispatcher, {} if changes else {of: kernel})
    kernels.binders = {(of, 0): lambda m: kernel}
    dispatcher._devices[-1] = kernels  # what a tensor on the CPU says that its device is
    return kernels


def even(of: Problem) -> Problem:
    """A problem whose rows are spread evenly over its groups, as a call is looked up."""
    return replace(of, m=of.rows, groups=Groups(of.group_count, of.group_m if of.masked else 0)) if of.groups else of


def said(call: Call) -> str:
    return tritongemm.explain(call.name, *call.given, **call.named)


def operation_of(call: Call) -> tuple[ProductOperation, Any]:
    operation, given = contract.bind(call.name, call.given, call.named)
    assert isinstance(operation, ProductOperation)
    return operation, given


@each("of", CASES.values())
def test_pytorch_computes_what_a_family_means(of: Problem) -> None:
    call, _, exact = make_call(of)
    found, there = call(), ~exact[..., 0].isnan()
    assert found.shape == exact.shape and found.dtype == getattr(torch, of.c.type.torch)
    assert verify.deviation(found[there], exact[there]) <= registry.get(Family, of.family).tolerance(of)


SCALED = [
    of
    for of in CASES.values()
    if of.family.startswith("a8w8") and not of.groups and of.epilogue == "none"
    and of.a.scaling and of.a.scaling.layout in ("rows", "groups")
]  # fmt: skip


@each("m", [1, 5])
@each("of", SCALED)
def test_operands_may_be_stored_otherwise(of: Problem, m: int) -> None:
    """The weight as it is or turned, factors whose rows are side by side or apart; with a bias and without."""
    call, _, exact = make_call(of.at(m))
    a, b, of_a, of_b, *bias = call.tensors
    weights = (
        [(b.contiguous(), of_b), (b, of_b)] if of.batch > 1 else [(b, of_b), (b.T, of_b.T if of_b.dim() > 1 else of_b)]
    )
    weights += [(b, of_b.mT.contiguous().mT)] if of_b.dim() > 1 else []
    for w, scale_b in weights:
        for scale_a in (of_a, of_a.mT.contiguous().mT) if of_a.dim() > 1 else (of_a,):
            found = call(a, w, scale_a, scale_b, *bias)
            assert verify.deviation(found, exact) <= registry.get(Family, of.family).tolerance(of), scale_a.stride()


@every_case
def test_a_kernel_reads_what_it_was_tuned_with(gpu: Dispatcher, of: Problem) -> None:
    """At the addresses of each call, without copies, and the result is what it writes."""
    call, made, exact = make_call(of)
    kernel = HostKernel(exact.to(getattr(torch, of.c.type.torch)))
    hold(gpu, of, kernel)
    assert said(call).startswith("near: M " if of.groups else "exact: tile__")
    assert not of.groups or ", tuned with another spread of rows over groups: grouped__" in said(call)
    for again, given in ((call, made), make_call(of, seed=1)[:2]):
        found = again()
        assert torch.equal(found.nan_to_num(-1), kernel.result.nan_to_num(-1)) and found.is_contiguous()
        addresses = {name: one.data_ptr() for name, one in given.items()} | {"c": found.data_ptr()}
        assert {name: at for name, at in kernel.launched.pop().items() if at} == addresses
    assert len(gpu.calls.table) == 1 and not kernel.launched


@pytest.mark.parametrize("of", [one for one in CASES.values() if not one.masked], ids=lambda of: of.key)
def test_another_m_has_the_next_row_where_pytorch_is_slow(gpu: Dispatcher, of: Problem) -> None:
    of = even(of)
    hold(gpu, of, StandInKernel())
    call, _, _ = make_call(of.at(12))
    if serves_other_m(of.at(12), "sm90"):
        assert said(call).startswith("near: M 16, as no row has 12: ")
    else:
        assert said(call).startswith("fallback: ") and "was never tuned for sm90" in said(call)


@every_kind
@pytest.mark.parametrize("changes", [{}, {"winner": "torch"}, {"timer": "model"}, {"target": "gfx942"}])
def test_what_serves_is_explained_and_logged_once(
    gpu: Dispatcher, caplog: pytest.LogCaptureFixture, monkeypatch: Patch, of: Problem, changes: Any
) -> None:
    of = even(of)
    monkeypatch.setenv("TRITONGEMM_LOG", "config")
    hold(gpu, of, StandInKernel(), **changes)
    starts = {"winner": "library: torch won the tuning of", "timer": "fallback: ", "target": "fallback: "}
    call, _, _ = make_call(of)
    with caplog.at_level("INFO", logger="tritongemm"):
        texts = {said(call) for _ in range(3)}
    (text,) = texts
    assert text.startswith(starts.get(next(iter(changes), ""), "exact: ")), text
    assert ("predict" in text) == ("timer" in changes) and ("gfx942" in text) == ("target" in changes)
    (line,) = caplog.messages
    assert line.startswith(of.key) and text.splitlines()[0].partition(";")[0] in line


@every_kind
def test_a_kernel_that_cannot_be_prepared_leaves_other_m_to_pytorch(gpu: Dispatcher, of: Problem) -> None:
    """That it fails at the size that it was tuned for must be seen."""
    of = even(of)
    hold(gpu, of, Broken())
    call, _, _ = make_call(of)
    fails(DriverError, "NOT_FOUND", call)
    operation, given = operation_of(make_call(of.at(12))[0])
    if serves_other_m(of.at(12), "sm90") and not of.masked:
        ready = gpu.resolve(operation, ("key",), given)
        assert type(ready).__name__ != "OperandCall" and gpu.calls.table == {("key",): ready}


def fall_back(monkeypatch: Patch, call: Call, exact: torch.Tensor) -> None:
    """Have PyTorch's way give a result; what serves an operation may have another second step."""
    kind = type(operation_of(call)[0])
    for one in (kind, *kind.__subclasses__()):
        monkeypatch.setattr(one, "make_fallback", lambda *_: lambda *given: exact)


@every_kind
def test_an_address_that_kernels_do_not_take_is_pytorchs(gpu: Dispatcher, monkeypatch: Patch, of: Problem) -> None:
    call, _, exact = make_call(of)
    kernel = HostKernel(torch.zeros_like(exact, dtype=torch.bfloat16))
    hold(gpu, of, kernel)
    fall_back(monkeypatch, call, exact)
    assert not call().any() and len(kernel.launched) == 1
    for place, one in enumerate(call.tensors):
        if one.dim() > 1 and one.is_contiguous():
            odd = torch.empty(one.numel() + 1, dtype=one.dtype)[1:].view(one.shape).copy_(one)
            assert call(*(odd if at == place else other for at, other in enumerate(call.tensors))).any()
    assert len(kernel.launched) == 1


@every_kind
def test_what_wants_more_than_a_product_is_pytorchs(gpu: Dispatcher, monkeypatch: Patch, of: Problem) -> None:
    """Gradients and tracers; under autocast a batch is cast, as a layer is. Compiled code asks PyTorch by itself."""
    monkeypatch.setattr("tritongemm.hip_ext.launching.native_calls.serve", lambda *_: None)
    call, _, exact = make_call(of)
    kernel = HostKernel(torch.zeros_like(exact, dtype=torch.bfloat16))
    hold(gpu, of, kernel)
    fall_back(monkeypatch, call, exact)
    call()
    wanted = [one.detach().requires_grad_() if one.dtype.itemsize in (2, 4) and one.is_floating_point() else one
              for one in call.tensors]  # fmt: skip
    with torch.enable_grad():
        call(*wanted)
    with monkeypatch.context() as patch:
        patch.setattr("tritongemm.operations.checks._tracing", object)
        call()
    with monkeypatch.context() as patch:
        patch.setattr("tritongemm.serving.products._autocast", lambda: of.kind == "batched")
        call()
    assert len(kernel.launched) == 1 + (of.kind != "batched" or of.family != "dense")


@every_kind
def test_a_capture_loads_nothing(gpu: Dispatcher, monkeypatch: Patch, of: Problem) -> None:
    call, _, _ = make_call(of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert said(call).startswith("fallback: not loaded on this device before a graph is captured")
    answers = gpu.ask(operation_of(call)[0], operation_of(call)[0].check(operation_of(call)[1]))
    assert not answers.resolution.lasting


def test_a_row_of_another_order_of_a_weight_is_named(gpu: Dispatcher) -> None:
    hold(gpu, CASES["one, halves_32, bf16 int4"], StandInKernel())
    call, _, _ = make_call(INT4)
    assert f"{INT4.key}_halves_32 was, which serves linear_w4(x, weight, scale)" in said(call)
    assert "scale [K / 64, N], order='halves_32'" in said(call)
