import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tritongemm
from tests.support import ROOT, raising
from tests.support.linear_layers import (
    HostDriver,
    HostKernel,
    StandInKernel,
    StandInLibrary,
    be_a_gpu,
    problem,
    record,
    run_on_cpu,
    stand_in_device,
)
from tests.support.nouns import ArtifactCache, Config, DriverError, Patch, Record, each, load_target, registry, settings
from tritongemm import backends
from tritongemm.core.errors import WorkspaceError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.served_call import LoadedKernel
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.trial import PREDICTED
from tritongemm.hip_ext import machine
from tritongemm.plugins.contracts import Family, KernelBackend
from tritongemm.serving import kernel_loading, source_row, stored_kernels
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.loaded_tables import LoadedTable
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.source_row import SourceRow
from tritongemm.serving.stored_kernels import check_kernel

TOY = "toy_backend"
OTHER = Config("one", 0, 0, 0, backend="library")
SM90 = load_target("sm90", compute_units=132)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: Patch) -> Iterator[KernelBackend]:
    folder = tmp_path / "plugins"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "support" / "toys" / "backend_toy.py", folder / f"{TOY}.py")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(folder)])
    yield registry.get(KernelBackend, TOY)
    sys.modules.pop(f"{backends.__name__}.{TOY}", None)
    vars(backends).pop(TOY, None)
    registry._load.cache_clear()


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: Patch) -> HostDriver:
    """A machine whose one GPU, an sm90, is the CPU, and a dispatcher of `mm` that knows no records yet."""
    host = HostDriver()
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_loading, "open_device", lambda index, workspaces: stand_in_device(driver_device=host))
    monkeypatch.setattr(machine, "find_machine", lambda *_: SimpleNamespace(target=SM90))
    be_a_gpu(monkeypatch)
    return host


def test_records_of_an_added_backend_serve_calls(example: KernelBackend, gpu: HostDriver, monkeypatch: Patch) -> None:
    p = problem(6, 8, 20, dtype="fp32")
    (config,) = example.candidates(p, SM90)
    artifact, code, name = example.compile(
        example.compile_job(config, p, SM90)
    )  # here, as a compiler's process knows no toys
    ArtifactCache(settings.cache_folder()).put(artifact, code, name)
    assert tritongemm.load([record(p, config, winner=example.name)]) == 1
    monkeypatch.setattr("tritongemm.serving.dispatcher.float32_precision", lambda: "tf32")
    for _ in range(2):
        x, w = torch.randn(6, 20), torch.randn(8, 20)
        torch.testing.assert_close(tritongemm.mm(x, w), x @ w.T)
    said = tritongemm.explain(x, w).splitlines()
    assert said == [f"exact: {config.name} (2.00 us, 1.50x torch)", "  tuned_record serves the call"]
    assert gpu.loaded == [(code, artifact.symbol)]
    monkeypatch.setattr("tritongemm.serving.dispatcher.float32_precision", lambda: "fp32")
    assert tritongemm.explain(x, w).startswith(f"fallback: {p.key} on sm90: tuned in tf32")


def test_rows_of_aiters_kind_serve_a_calls_true_m(example: KernelBackend, gpu: HostDriver, monkeypatch: Patch) -> None:
    """Also where AITER looks M 9000 up at 8192: the launch is that of the call, and nothing is padded."""
    row, largest = problem(16, 8, 20, dtype="fp32"), problem(8192, 4104, 4, dtype="fp32")
    for p in (row, largest):
        (config,) = example.candidates(p, SM90)
        artifact, code, name = example.compile(example.compile_job(config, p, SM90))
        ArtifactCache(settings.cache_folder()).put(artifact, code, name)
    monkeypatch.setattr("tritongemm.serving.dispatcher.float32_precision", lambda: "tf32")
    rows = tuple(SourceRow(record(p, config, winner=example.name), padded=True) for p in (row, largest))
    default_dispatcher()._add(LoadedTable("aiter.csv", "0" * 12, rows))
    x, w = torch.randn(13, 20), torch.randn(8, 20)
    torch.testing.assert_close(tritongemm.mm(x, w), x @ w.T)
    assert tritongemm.explain(x, w).startswith("bucket: M 16, the padded M of 13: ")
    large = tritongemm.explain(torch.randn(9000, 4), torch.randn(4104, 4))
    assert large.startswith("bucket: M 8192, the padded M of 9000: ")
    assert tritongemm.explain(torch.randn(33, 20), torch.randn(8, 20)).startswith("fallback: 33x8x20")


@pytest.fixture
def library(monkeypatch: Patch) -> StandInLibrary:
    found = StandInLibrary()
    monkeypatch.setattr(source_row, "find_winner", lambda record: found)
    return found


@pytest.mark.parametrize("right", [True, False])
def test_algorithms_are_checked_before_calls_use_them(right: bool, library: StandInLibrary, monkeypatch: Patch) -> None:
    """A library loads it when it is first called, which must not be while a graph is captured."""
    checked: list[Record] = []

    def check(kernel: LoadedKernel, record: Record, device: Any) -> Support:
        checked.append(record)
        return SUPPORTED if right else Support("wrong")

    monkeypatch.setattr(stored_kernels, "check_kernel", check)
    gone, here = (record(problem(m, 8, 16), OTHER, winner="library") for m in (2, 4))
    loaded, _ = kernel_loading.load_kernels(stand_in_device(), [gone, here])
    assert loaded[gone.problem] == Support("not for 3 rows") and checked == [here]
    assert isinstance(loaded[here.problem], StandInKernel) if right else loaded[here.problem] == Support("wrong")


def test_a_record_costs_its_own_size_whatever_is_wrong_with_it(library: StandInLibrary, monkeypatch: Patch) -> None:
    """One that loads with an unforeseen error, and one whose check fails so; one warning."""
    load = lambda self, record, device_index, device: {m: StandInKernel() for m in (2, 3)}[record.problem.m]
    check = lambda kernel, record, device: Support(str(1 // (record.problem.m - 2)) and "")
    monkeypatch.setattr(StandInLibrary, "load", load)
    monkeypatch.setattr(stored_kernels, "check_kernel", check)
    records = [record(problem(m, 8, 16), OTHER, winner="library") for m in (1, 2, 3)]
    with pytest.warns(UserWarning, match="PyTorch computes 2 of 3 tuned sizes: 1x8x16_bf16_TN: KeyError: ") as reported:
        loaded, _ = kernel_loading.load_kernels(stand_in_device(), records)
    assert len(reported) == 1 and "2x8x16_bf16_TN: ZeroDivisionError: " in str(reported[0].message)
    assert [isinstance(loaded[r.problem], StandInKernel) for r in records] == [False, False, True]


class Counting(StandInKernel):
    """A kernel whose programs share counters."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def bytes(self, buffer: str) -> int:
        return self.nbytes if buffer == "semaphore" else 0


def test_counters_without_memory_cost_the_kernel_that_wants_most(monkeypatch: Patch) -> None:
    reserved: list[tuple[int, int]] = []

    def reserve(self: Any, workspace_bytes: int, counter_bytes: int) -> None:
        if counter_bytes > 100:
            raise WorkspaceError(f"no memory for {counter_bytes} bytes")
        reserved.append((workspace_bytes, counter_bytes))

    monkeypatch.setattr("tritongemm.serving.serving_device.ServingDevice.reserve_workspaces", reserve)
    kernels: dict[Problem, LoadedKernel | Support] = {problem(m, 8, 16): Counting(m) for m in (10, 10**6, 10**9)}
    kernel_loading._reserve_workspaces(stand_in_device(), kernels)
    assert reserved == [(0, 10)]
    refused = [str(kernel) for kernel in kernels.values() if isinstance(kernel, Support)]
    assert refused == ["no memory for 1000000 bytes", "no memory for 1000000000 bytes"]


def test_memory_that_kernels_rely_on_is_never_taken_back() -> None:
    """Kernels of sizes and those of ranges reserve one after the other, and neither needs the most of both."""
    device = stand_in_device()
    device.reserve_workspaces(10**6, 64)
    device.reserve_workspaces(10, 10**4)
    assert device.workspaces is not None and device.workspaces.holds(10**6, 10**4)


def test_who_won_decides_what_is_launched_and_the_later_of_equal_records() -> None:
    p = problem(4, 8, 16)
    own, ours = registry.baseline().name, record(p)
    assert source_row.is_launchable(ours) and not source_row.baseline_won(ours)
    for lost in (record(p, winner=own), record(p, winner="a_library", library="a_library")):
        assert source_row.baseline_won(lost) and f"{lost.winner} won the tuning of {p.key} on sm90" in str(
            source_row.is_launchable(lost)
        )
    assert "prediction" in str(source_row.is_launchable(record(p, timer=PREDICTED)))
    for strange in (record(p, winner="absent"), record(p, winner=ours.config.backend, config=OTHER)):
        assert (
            str(source_row.is_launchable(strange)) == f"{p.key}: its winner {strange.winner} can't be called from here"
        )
    first, later, elsewhere = (
        record(problem(4, 8, 16)),
        record(problem(4, 8, 16), seconds=1.0),
        record(problem(5, 8, 16)),
    )
    table = RecordTable([first]).extend([elsewhere]).extend([later])
    assert table.list_records("sm90", 1) == [later, elsewhere] and table.list_records("gfx942", 1) == []
    assert str(table.find(first.problem, "gfx942", 1)).endswith("was tuned for sm90; the device is gfx942")


# --- Kernels of another toolchain, or that a library loads late, are run before they serve ----------------------------


DENSE = Problem(8, 128, 256, *matrices("fp32"))
FP8 = Problem(8, 128, 256, *matrices("fp8e4m3fn", c="bf16", layout="TN"))
PROBLEMS = [DENSE, *(registry.get(Family, name).problem(FP8) for name in ("a8w8", "a8w8_blockscale"))]


def computing(of: Problem, off: float = 0.0, lost: str = "") -> HostKernel:
    """A kernel that is `off` beside the truth, or reads ones instead of an operand."""
    family = registry.get(Family, of.family)
    made = family.make_inputs(of, "cpu")
    exact = family.reference(of, made | ({lost: torch.ones_like(made[lost])} if lost else {}))
    return HostKernel((exact + off).to(getattr(torch, of.c.type.torch)))


@each("of", PROBLEMS)
def test_what_serves_and_what_does_not(of: Problem, monkeypatch: Patch) -> None:
    run_on_cpu(monkeypatch)
    check = partial(check_kernel, record=record(of), device=stand_in_device())
    right = computing(of)
    assert check(right) and len(right.launched) == 2 and all(right.launched[0][name] for name in of.operands)
    wrong = [computing(of, off=99.0)] + ([computing(of, lost="scale_b")] if of.b.scaling else [])
    assert all("wrong with Triton " in check(one).reason for one in wrong)
    monkeypatch.setattr(HostKernel, "prepare", raising(DriverError("launch", 1, "REFUSED", "not on Mondays")))
    assert "not on Mondays" in check(right).reason


def test_what_was_accepted_with_an_error_ratio_still_serves(monkeypatch: Patch) -> None:
    """Its error was beyond the tolerance, in few elements; it must not have grown."""
    run_on_cpu(monkeypatch)
    check = partial(check_kernel, device=stand_in_device())
    accepted = replace(record(DENSE), error=0.1, tolerance=1e-3)
    assert not check(computing(DENSE, 0.5), replace(accepted, error=1e-7)) and check(computing(DENSE, 0.5), accepted)
    assert not check(computing(DENSE, 9.0), accepted)
