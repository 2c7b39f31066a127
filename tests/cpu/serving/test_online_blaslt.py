from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.fakes.blaslt_library import stand_in
from tests.support.linear_layers import problem, run_on_cpu, stand_in_device
from tests.support.nouns import Backend, CallSignature, LibraryBackend, Patch, registry
from tritongemm.backends.blaslt import algorithms as blaslt
from tritongemm.hip_ext.blaslt import library as blaslt_library
from tritongemm.serving.launching import FastCall
from tritongemm.serving.online import CSV_FILE, FILE, OnlineBudget, OnlineKernel, OnlineStore, OnlineTuner
from tritongemm.serving.online_race import AlgorithmRace, Run

CALLS = [CallSignature(problem(6, 16, 32, bias, "fp32"), "tf32") for bias in ("none", "n")]


@pytest.fixture(params=["nvidia", "amd"])
def vendor(request: pytest.FixtureRequest, monkeypatch: Patch, blaslt_libraries: Path, tmp_path: Path) -> Iterator[str]:
    run_on_cpu(monkeypatch)
    with stand_in(blaslt_libraries, request.param, tmp_path) as library:
        monkeypatch.setattr(blaslt_library, "open_library", lambda vendor: library)
        yield request.param


class LaterIsFaster:
    """A clock by which each algorithm that is timed is faster than those before it."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def __call__(self, run: Run, launches: int) -> list[float]:
        run()
        if run not in self.runs:
            self.runs.append(run)
        return [1e-5 * 0.9 ** self.runs.index(run)] * launches


@pytest.mark.parametrize("call", CALLS, ids=["plain", "bias"])
def test_from_the_first_call_to_the_next_process(vendor: str, tmp_path: Path, call: CallSignature) -> None:
    library = registry.get(Backend, "blaslt")
    assert isinstance(library, LibraryBackend) and library.version() == str(blaslt.version())

    def open_process(seconds: float) -> OnlineTuner:
        store, budget = OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), OnlineBudget(seconds, seconds)
        return OnlineTuner(stand_in_device(), store, budget, library, partial(AlgorithmRace, clock=LaterIsFaster()))

    found = open_process(600.0).find(call)
    assert isinstance(found, OnlineKernel) and found.record.speedup is not None and found.record.speedup > 1
    config = found.record.config
    assert (tmp_path / CSV_FILE).read_text().endswith(f",{config.option('index')},{config.template}\n")
    again = open_process(0.0).find(call)
    assert isinstance(again, OnlineKernel) and again.record == found.record
    device = stand_in_device()
    device.reserve_workspaces(again.kernel.bytes("workspace"), 0)
    x, w, bias = torch.randn(6, 32), torch.randn(16, 32), torch.randn(16) if call.problem.bias == "n" else None
    launched = FastCall(again.kernel, device, (6, 16), torch.float32)(x, w, bias, None)
    torch.testing.assert_close(launched, torch.nn.functional.linear(x, w, bias))
