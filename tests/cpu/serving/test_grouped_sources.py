"""What serves a grouped product, as on a GPU that is not there: what the kernel sources answer, and its launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tritongemm
from tests.cpu.serving.test_grouped import COUNTS, problem
from tests.support.linear_layers import StandInKernel, attach_device, record, run_on_cpu, stand_in_device
from tritongemm.core.config import Config
from tritongemm.core.errors import DriverError
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.operations.contract import Reading
from tritongemm.operations.grouped import GROUPED, GroupedOperands
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.launching import OperandCall


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Dispatcher, GroupedOperands]]:
    """A dispatcher that believes in an sm90, and operands of 16 rows in four groups on it."""
    run_on_cpu(monkeypatch)
    dispatcher = Dispatcher()
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", dispatcher)
    with FakeTensorMode():
        a, b = (torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda:0") for shape in ((16, 256), (4, 144, 256)))
        of_a, of_b = torch.empty(16, device="cuda:0"), torch.empty(4, 144, device="cuda:0")
        ends = torch.empty(4, dtype=torch.int32, device="cuda:0")
        yield dispatcher, GroupedOperands(a, b.mT, ends, of_a, of_b, torch.bfloat16)


@pytest.mark.parametrize(
    ("m", "counts", "changes", "starts"),
    [
        (16, (), {}, "exact: grouped__"),
        (16, COUNTS, {}, "near: M 16, tuned with another spread of rows over groups: grouped__"),
        (64, (), {}, "near: M 64, as no row has 16: grouped__"),
        (16, (), {"winner": "torch"}, "library: torch won the tuning of 16x144x256"),
        (64, (), {"winner": "torch"}, "fallback: 16x144x256"),
    ],
)
def test_sources_answer_for_groups(
    gpu: tuple[Dispatcher, GroupedOperands], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    m: int, counts: tuple[int, ...], changes: dict[str, Any], starts: str,
) -> None:  # fmt: skip
    """What serves a call is resolved, reported by `explain` and logged as for every other product."""
    dispatcher, operands = gpu
    monkeypatch.setenv("TRITONGEMM_LOG", "config")
    row = record(problem("a8w8", 0, m, counts), Config("grouped", 16, 32, 64), **changes)
    dispatcher.load([row])
    kernels = attach_device(dispatcher, {} if changes else {row.problem: StandInKernel()})
    kernels.binders = {(row.problem, 0): lambda m: StandInKernel()}
    with caplog.at_level("INFO", logger="tritongemm"):
        said = tritongemm.explain(tritongemm.grouped_mm, *operands[:6])
    assert said.startswith(starts), said
    assert ("near_record declines: 64x144x256" in said) == (m == 64 and bool(changes))
    assert [starts in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("m", [16, 64])
def test_a_kernel_that_cannot_be_prepared_leaves_the_call_to_pytorch(
    gpu: tuple[Dispatcher, GroupedOperands], m: int
) -> None:
    """But where it was tuned for this very size: that it fails there must be seen."""

    class Broken(StandInKernel):
        def prepare(self, device: Any) -> PatchedLaunch:
            raise DriverError("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND")

    dispatcher, operands = gpu
    row = record(problem("a8w8", 0, m, ()), Config("grouped", 16, 32, 64))
    dispatcher.load([row])
    kernels = attach_device(dispatcher, {row.problem: Broken()})
    kernels.binders = {(row.problem, 0): lambda m: Broken()}
    if m == 16:
        with pytest.raises(DriverError, match="NOT_FOUND"):
            dispatcher.resolve(GROUPED, ("key",), operands)
    else:
        call = dispatcher.resolve(GROUPED, ("key",), operands)
        assert not isinstance(call, OperandCall) and dispatcher.calls.table == {("key",): call}


def test_a_launch_has_the_addresses_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)
    now: dict[str, int] = {}
    launched: list[dict[str, int]] = []

    class Kernel(StandInKernel):
        def prepare(self, device: Any) -> PatchedLaunch:
            names = ("a", "b", "c", "offsets", "scale_a", "scale_b")
            setters = {name: (lambda at, name=name: now.update({name: at})) for name in names}
            return PatchedLaunch(setters, lambda stream: launched.append(dict(now)))

    asked = problem("a8w8_blockscale")
    made = registry.get(Family, "a8w8_blockscale").make_inputs(asked, "cpu")
    for read_in_place, of_a in ((True, made["scale_a"].mT), (False, made["scale_a"].mT.contiguous())):
        operands = GroupedOperands(made["a"], made["b"], made["offsets"], of_a, made["scale_b"], torch.bfloat16)
        reading = GROUPED.read(operands)
        assert isinstance(reading, Reading)
        call = OperandCall(Kernel(), stand_in_device(), GROUPED, operands, reading, lambda *given: torch.empty(0))
        assert (call._operation is None) == read_in_place
        assert call(*operands).shape == call(*operands).shape == (16, 144)
        assert launched[-1]["offsets"] == made["offsets"].data_ptr() and launched[-1]["a"] == made["a"].data_ptr()
        assert (launched[-1]["scale_a"] == made["scale_a"].data_ptr()) == read_in_place
    odd = torch.empty(16 * 256 + 1, dtype=torch.float8_e4m3fn)[1:].view(16, 256)  # which the kernel can't read
    assert call(*operands._replace(a=odd.copy_(made["a"]))).shape == (0,) and len(launched) == 4
