from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tritongemm
from tests.support.linear_layers import (
    StandInKernel,
    attach_device,
    be_a_gpu,
    problem,
    record,
    stand_in_device,
    stand_in_kernels,
)
from tests.support.nouns import CallSignature, Dispatcher, Patch, Resolution, Support, registry
from tests.support.plugins import dropped
from tritongemm.plugins.contracts import KernelSource
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.stored_kernels import TorchKernels

TOY = "kernel_source_toy"
SOURCES = [*registry.names(KernelSource), TOY]

WON, LOST = record(problem(16, 32, 64)), record(problem(8, 32, 64), winner="torch")
PREDICTED = record(problem(4, 32, 64), timer="model")
CALLS = {
    "tuned": CallSignature(WON.problem),
    "library won": CallSignature(LOST.problem),
    "predicted": CallSignature(PREDICTED.problem),
    "never tuned": CallSignature(problem(2, 32, 64, "n")),
    "never tuned, rare": CallSignature(problem(2, 32, 64), frequent=False),
    "vector": CallSignature(problem(1, 32, 64), vector=True),
    "float32 in full": CallSignature(problem(2, 1, 64, dtype="fp32")),
    "float32 in tf32": CallSignature(problem(2, 1, 64, dtype="fp32"), "tf32"),
}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    """Puts the documentation's toy beside the sources that are there, as a user would."""
    with dropped(KernelSource, TOY, tmp_path, monkeypatch):
        yield


@pytest.fixture
def source(example: None, request: pytest.FixtureRequest) -> KernelSource:
    found = registry.get(KernelSource, request.param)
    assert isinstance(found, KernelSource)
    return found


@pytest.fixture
def no_capture(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def device(torch_kernel: StandInKernel | None) -> DeviceKernels:
    return stand_in_kernels(RecordTable([WON, LOST, PREDICTED]), {WON.problem: StandInKernel()}, torch_kernel)


every_source = pytest.mark.parametrize("source", SOURCES, indirect=True)


@every_source
def test_it_is_named_after_its_file_and_has_a_rank_of_its_own(source: KernelSource) -> None:
    ranks = [other.rank for other in registry.every(KernelSource)]
    assert source.name in SOURCES and isinstance(source.rank, int) and ranks.count(source.rank) == 1


@every_source
@pytest.mark.parametrize("torch_kernel", [None, StandInKernel()], ids=["unknown", "known"])
@pytest.mark.parametrize("call", CALLS)
def test_it_answers_with_a_kernel_or_a_reason(
    source: KernelSource, call: str, torch_kernel: StandInKernel | None, no_capture: None
) -> None:
    answer = source.resolve(CALLS[call], device(torch_kernel))
    if isinstance(answer, Support):
        assert not answer and answer.reason and "\n" not in answer.reason
        return
    assert isinstance(answer, Resolution) and answer.kind in ("exact", "library", "fallback")
    assert answer.text and "\n" not in answer.text and answer.lasting
    assert answer.kernel is not None or answer.kind != "exact"
    assert str(source.resolve(CALLS[call], device(torch_kernel))) == str(answer), "equal calls, equal answers"


class Untouchable(TorchKernels):
    """Stands in for PyTorch's kernels that were not looked for before the capture."""

    def __init__(self) -> None:
        super().__init__(stand_in_device())

    def _load(self, *_: Any) -> None:
        pytest.fail("looked for during a capture")


@every_source
@pytest.mark.parametrize("call", CALLS)
def test_captures_load_nothing_and_answer_for_the_moment(source: KernelSource, call: str, monkeypatch: Patch) -> None:
    """But that of a kernel that was loaded before."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernels = device(None)
    kernels.torch_kernels = Untouchable()
    answer = source.resolve(CALLS[call], kernels)
    assert isinstance(answer, Support) or answer.kernel is not None or not answer.lasting


def test_they_are_asked_in_the_order_of_ranks_and_the_last_serves_every_call(no_capture: None, example: None) -> None:
    last = Dispatcher().sources[-1]
    assert all(isinstance(last.resolve(call, device(None)), Resolution) for call in CALLS.values())
    assert [source.name for source in Dispatcher().sources] == [
        TOY,
        "tuned_record",
        "library_winner",
        "near_record",
        "invariant_kernel",
        "online_algorithm",
        "torch_kernel",
        "torch_layer",
    ]


def test_a_source_put_beside_the_others_serves_calls_and_is_explained(example: None, monkeypatch: Patch) -> None:
    gpu = be_a_gpu(monkeypatch)
    gpu._devices[-1] = attach_device(gpu)  # what a tensor on the CPU says that its device is
    for _ in range(2):
        x, w, wide = torch.randn(6, 20), torch.randn(1, 20), torch.randn(8, 20)
        torch.testing.assert_close(tritongemm.mm(x, w), x @ w.T)
        torch.testing.assert_close(tritongemm.mm(x, wide), x @ wide.T)
    assert [type(call).__name__ for call in gpu.calls.table.values()] == ["FastCall", "ResolveAfterCalls"]
    assert str(gpu.explain(x, w)) == f"exact: 6x1x20_fp32_TN by numpy\n  {TOY} serves the call"
    assert str(gpu.explain(x, wide)).splitlines()[:2] == [
        "fallback: 6x8x20_fp32_TN was never tuned for sm90",
        f"  {TOY} declines: numpy computes float32 products of one column",
    ]
