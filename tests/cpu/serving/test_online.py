import csv
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import raising
from tests.support.linear_layers import ComputingKernel, attach_device, problem, record, run_on_cpu, stand_in_device
from tests.support.nouns import Config, LibraryBackend, Operands, Patch, Problem, Record, Support, apart, each, refuses
from tritongemm.core.errors import DriverError
from tritongemm.core.served_call import CallSignature, LoadedKernel
from tritongemm.plugins.contracts import Capabilities
from tritongemm.serving import online, online_race
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.launching import FastCall
from tritongemm.serving.online import CSV_FILE, CSV_HEADER, FILE, OnlineBudget, OnlineKernel, OnlineStore, OnlineTuner
from tritongemm.serving.online_race import AlgorithmRace, Run
from tritongemm.system import settings

SIZE = problem(6, 20, 32, "n", "fp32")
CALL = CallSignature(SIZE, "tf32")
FIRST_US = 10.0


class ToyLibrary(LibraryBackend):
    """A library whose algorithms are what their names say."""

    summary = "stands in for a library"
    capabilities = Capabilities()
    name = "toy_library"

    def __init__(self, *offered: tuple[str, float], version: str = "1") -> None:
        self.offered, self.now, self.asked = dict(offered), version, 0
        self.loaded_adds = 0.0

    def version(self) -> str:
        return self.now

    def _list_algorithms(self, problem: Problem, operands: Operands, limit: int) -> Iterable[Config]:
        self.asked += 1
        options = [(("index", 100 + number), ("version", 1)) for number in range(len(self.offered))]
        return [
            Config(name, 16, 16, 16, options=option, backend=self.name)
            for name, option in zip(self.offered, options, strict=True)
        ]

    def operation(self, problem: Problem, operands: Operands, config: Config | None = None) -> Run | None:
        name = "first" if config is None else config.template
        if name == "refused":
            return None
        return TimedRun(name, self.offered.get(name, FIRST_US), operands)

    def load(self, record: Record, device_index: int, device: Any) -> LoadedKernel | Support:
        return ComputingKernel(record.problem, self.loaded_adds)


class TimedRun:
    def __init__(self, name: str, us: float, operands: Operands) -> None:
        self.name, self.seconds, self.operands = name, us * 1e-6, operands

    def __call__(self) -> None:
        if self.name == "failing":
            raise DriverError("cublasLtMatmul", 13, "CUBLAS_STATUS_EXECUTION_FAILED")
        if self.name != "idle":
            operands = self.operands
            product = operands["a"] @ operands["b"] + operands.get("bias", torch.zeros(()))
            operands["c"].copy_(product if self.name != "wrong" else product * 1.5)


def clock(run: Run, launches: int) -> list[float]:
    """The times that stand-ins say, with a spread."""
    run()
    assert isinstance(run, TimedRun)
    return [run.seconds * (1 + 0.001 * number) for number in range(launches)]


def race_of(
    first: str, problem_: Problem, library: LibraryBackend, baseline: LibraryBackend, device: torch.device
) -> AlgorithmRace:
    assert baseline.baseline
    return AlgorithmRace(problem_, library, ToyLibrary((first, FIRST_US)), device, clock)


Tuner = Callable[..., OnlineTuner]


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: Patch) -> Tuner:
    """Makes what tries a library's algorithms, as one process after the other would."""
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(online_race, "_COMPARED_ELEMENTS", 3 * SIZE.k)  # few columns and rows at a time

    def make(
        library: ToyLibrary, seconds: tuple[float, float] = (60, 60), baseline: str = "first", **device: Any
    ) -> OnlineTuner:
        store, race = OnlineStore(tmp_path / "cache" / FILE, tmp_path / CSV_FILE), partial(race_of, baseline)
        return OnlineTuner(stand_in_device(**device), store, OnlineBudget(*seconds), library, race)

    return make


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "cache" / FILE).read_text().splitlines()]


def test_the_fastest_that_is_right_serves(tuner: Tuner, tmp_path: Path) -> None:
    """What fails at once takes no time, and what computes nothing or something else is as fast; none is chosen."""
    offered = (("good", 9.0), ("failing", 0.0), ("idle", 0.1), ("wrong", 0.1), ("refused", 0.1), ("best", 8.0))
    found = tuner(ToyLibrary(*offered, ("slow", 30.0))).find(CALL)
    assert isinstance(found, OnlineKernel)
    assert found.record.config.template == "best" and found.record.winner == "toy_library"
    assert found.record.speedup == pytest.approx(FIRST_US / 8.0, rel=0.01)
    assert "7 algorithms" in found.record.verified
    (line,) = lines(tmp_path)
    assert (line["target"], line["compute_units"]) == ("sm90", 132)
    assert line["toolchain"]["toy_library"] == "1" and line["config"].startswith("toy_library.best__")


def test_what_is_kept_for_aiter(tuner: Tuner, tmp_path: Path) -> None:
    """Column-major: m counts the columns of the result; the kernel's index and name."""
    tuner(ToyLibrary(("good", 9.0), ("best", 8.0))).find(CALL)
    text = (tmp_path / CSV_FILE).read_text()
    head, row = csv.reader(text.splitlines(), skipinitialspace=True)
    assert len(head) == len(row) == 20 and text.startswith(CSV_HEADER + "\n") and text.endswith("\n")
    assert ",".join(row) == "false,false,T,N,20,6,32,f32_r,32,0,f32_r,32,0,f32_r,20,0,f32_r,1,101,best"


def test_a_second_process_tries_nothing(tuner: Tuner, tmp_path: Path) -> None:
    tuner(ToyLibrary(("best", 8.0))).find(CALL)
    kept, table = (tmp_path / "cache" / FILE).read_bytes(), (tmp_path / CSV_FILE).read_bytes()
    again = ToyLibrary(("best", 8.0))
    found = tuner(again, (0, 0)).find(CALL)
    assert isinstance(found, OnlineKernel) and found.record.config.template == "best" and again.asked == 0
    assert ((tmp_path / "cache" / FILE).read_bytes(), (tmp_path / CSV_FILE).read_bytes()) == (kept, table)


def test_a_process_that_runs_already_reads_it_too(tuner: Tuner) -> None:
    other = ToyLibrary(("best", 8.0))
    second = tuner(other)
    second.find(replace(CALL, problem=problem(1, 4, 8, dtype="fp32")))
    tuner(ToyLibrary(("best", 8.0))).find(CALL)
    assert isinstance(second.find(CALL), OnlineKernel) and other.asked == 1


def test_results_are_of_a_device_and_a_library(tuner: Tuner) -> None:
    tuner(ToyLibrary(("best", 8.0))).find(CALL)
    newer, same = ToyLibrary(("best", 8.0), version="2"), ToyLibrary(("best", 8.0))
    for library, tried in ((newer, tuner(newer)), (same, tuner(same, compute_units=80))):
        assert isinstance(tried.find(CALL), OnlineKernel) and library.asked == 1
    unlike = ToyLibrary(("best", 8.0))
    tuner(unlike).find(CallSignature(replace(SIZE, bias="none"), "tf32"))
    assert unlike.asked == 1, "a bias is another problem"


def test_the_baseline_stays_where_none_is_faster_by_the_margin(tuner: Tuner, tmp_path: Path) -> None:
    found = tuner(ToyLibrary(("almost", FIRST_US * (1 - online_race.MARGIN / 2)), ("slower", 11.0))).find(CALL)
    assert isinstance(found, Support) and "torch was the fastest" in found.reason
    assert [line["winner"] for line in lines(tmp_path)] == ["torch"]
    assert (tmp_path / CSV_FILE).read_text().endswith(",100,almost\n"), "the library's best guess"
    again = ToyLibrary(("best", 1.0))
    assert not tuner(again).find(CALL) and again.asked == 0


def test_a_baseline_that_is_wrong_loses(tuner: Tuner, tmp_path: Path) -> None:
    """However fast it is; and where no algorithm is right either, nothing is kept."""
    with pytest.warns(UserWarning, match=r"6x20x32\S*: torch \S+ is wrong: error"):
        found = tuner(ToyLibrary(("wrong", 0.1), ("idle", 0.1)), baseline="wrong").find(CALL)
    assert isinstance(found, Support) and found.reason.endswith("none of 2 algorithms is right")
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="is wrong"):
        found = tuner(ToyLibrary(("good", 30.0), ("better", 20.0)), baseline="wrong").find(CALL)
    assert isinstance(found, OnlineKernel) and found.record.config.template == "better"
    (line,) = lines(tmp_path)
    assert (line["winner"], line["library"], line["library_seconds"]) == ("toy_library", "torch", None)
    assert line["library_wrong"].startswith("error ") and found.record.library_fault.startswith("6x20x32_")


def test_what_is_launched_otherwise_is_checked_too(tuner: Tuner) -> None:
    library = ToyLibrary(("best", 8.0))
    library.loaded_adds = 3.0
    found = tuner(library).find(CALL)
    assert isinstance(found, Support) and "its result is wrong: error" in found.reason


def test_nothing_is_tried_during_a_capture(tuner: Tuner, monkeypatch: Patch, tmp_path: Path) -> None:
    library = ToyLibrary(("best", 8.0))
    tried = tuner(library)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "a graph is being captured" in tried.find(CALL).reason  # type: ignore[union-attr]
    assert library.asked == 0 and not list(tmp_path.iterdir())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert isinstance(tried.find(CALL), OnlineKernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert isinstance(tried.find(CALL), OnlineKernel), "what is loaded serves"


@apart(
    (CallSignature(SIZE, "fp32"), "while PyTorch multiplies float32 in full"),
    (replace(CALL, vector=True), "x is a vector"),
    (CallSignature(problem(513, 20, 32), frequent=False), "more than 512 rows are tried at call 64"),
)
def test_calls_that_are_not_tried(call: CallSignature, reason: str, /, tuner: Tuner) -> None:
    library = ToyLibrary(("best", 8.0))
    found = tuner(library).find(call)
    assert isinstance(found, Support) and reason in found.reason and library.asked == 0


def test_the_budget(tuner: Tuner, monkeypatch: Patch, tmp_path: Path) -> None:
    passed = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(passed)))
    tried = tuner(ToyLibrary(("good", 9.0), ("best", 8.0)), (0.5, 3))
    assert "no algorithm could be tried in time" in tried.find(CALL).reason  # type: ignore[union-attr]
    assert not list(tmp_path.iterdir())
    other = CallSignature(problem(5, 20, 32, "n", "fp32"), "tf32")
    assert "the 3 s for trying algorithms are spent" in tried.find(other).reason  # type: ignore[union-attr]


def test_a_library_that_fails_is_a_reason(tuner: Tuner, monkeypatch: Patch) -> None:
    monkeypatch.setattr(ToyLibrary, "operation", raising(torch.cuda.OutOfMemoryError("no memory\n for it")))
    assert str(tuner(ToyLibrary()).find(CALL)) == "no algorithms could be tried: no memory for it"
    monkeypatch.setattr(ToyLibrary, "operation", lambda *_: None)
    assert "toy_library has nothing for 6x20x32" in str(tuner(ToyLibrary()).find(CALL))


def test_another_thread_does_not_wait(tuner: Tuner, monkeypatch: Patch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    library = ToyLibrary(("best", 8.0))
    listed = library._list_algorithms

    def wait(*given: Any) -> Iterable[Config]:
        begun.set()
        assert go_on.wait(30)
        return listed(*given)

    monkeypatch.setattr(library, "_list_algorithms", wait)
    tried = tuner(library)
    thread = threading.Thread(target=tried.find, args=(CALL,))
    thread.start()
    assert begun.wait(30) and str(tried.find(CALL)) == "another thread is trying algorithms"
    go_on.set()
    thread.join()
    assert isinstance(tried.find(CALL), OnlineKernel)


def test_mm_calls_it_from_the_first_call_on(tuner: Tuner, monkeypatch: Patch) -> None:
    dispatcher = Dispatcher()
    dispatcher._records = dispatcher._records.extend([record(problem(3, 20, 32), winner="torch")])
    dispatcher._devices[-1] = kernels = attach_device(dispatcher)  # what a tensor on the CPU says that its device is
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr("tritongemm.serving.dispatcher.float32_precision", lambda: "tf32")
    x, w, bias = torch.randn(6, 32), torch.randn(20, 32), torch.randn(20)
    assert "online_algorithm declines: no algorithms are tried at run time (TRITONGEMM_ONLINE=1)" in str(
        dispatcher.explain(x, w, bias)
    )
    kernels.online = tuner(ToyLibrary(("best", 8.0)))
    torch.testing.assert_close(dispatcher.run(x, w, bias, None), torch.nn.functional.linear(x, w, bias))
    (call,) = dispatcher.calls.table.values()
    assert isinstance(call, FastCall)
    assert str(dispatcher.explain(x, w, bias)).startswith("exact: toy_library.best__")
    tuned = torch.randn(3, 32, dtype=torch.bfloat16), torch.randn(20, 32, dtype=torch.bfloat16)
    assert str(dispatcher.explain(*tuned)).startswith("library: ")


def test_settings(monkeypatch: Patch) -> None:
    for name in ("TRITONGEMM_ONLINE", "HIP_ONLINE_TUNING", "TRITONGEMM_ONLINE_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    assert not settings.online() and settings.online_seconds() == (1.0, 60.0)
    monkeypatch.setenv("HIP_ONLINE_TUNING", "0")
    assert not settings.online()
    for name in ("TRITONGEMM_ONLINE", "HIP_ONLINE_TUNING"):
        monkeypatch.setenv(name, "1")
        assert settings.online()
    for text, seconds in (("2", (2.0, 60.0)), ("0.5:300", (0.5, 300.0)), ("", (1.0, 60.0))):
        monkeypatch.setenv("TRITONGEMM_ONLINE_SECONDS", text)
        assert settings.online_seconds() == seconds
    for text in ("fast", "1:", "-1", "1e9", "nan", "1:2:3"):
        monkeypatch.setenv("TRITONGEMM_ONLINE_SECONDS", text)
        refuses("TRITONGEMM_ONLINE_SECONDS must be seconds", settings.online_seconds)


# --- What is kept, whatever happens to the file -----------------------------------------------------------------------


def kept(of: Problem, template: str = "best") -> Record:
    config = Config(template, 16, 16, 16, options=(("index", 7),), backend="toy_library")
    return record(of, config, winner="toy_library", compute_units=132) if of else record(of)


def add(store: OnlineStore, record_: Record) -> None:
    store.add(replace(record_, toolchain={"toy_library": "1"}), record_.config)


def find(store: OnlineStore, of: Problem) -> Record | None:
    return store.find(of, "sm90", 132, "toy_library", "1")


def test_damaged_lines_cost_themselves(tmp_path: Path) -> None:
    path = tmp_path / FILE
    add(OnlineStore(path, tmp_path / CSV_FILE), kept(SIZE))
    good = path.read_bytes()
    damaged = [b"\xff\xfe", b"[" * 100_000, b'{"problem": 1}', b"null", good[:-20].rstrip(), good.replace(b"1", b'"1"')]
    path.write_bytes(b"\n".join(damaged) + b"\n" + good + b'{"torn": ')
    store = OnlineStore(path, tmp_path / CSV_FILE)
    assert find(store, SIZE)
    other = problem(1, 2, 3)
    add(store, kept(other))  # it begins a line of its own
    assert find(store, other) and find(OnlineStore(path, tmp_path / CSV_FILE), other)


def test_processes_append_at_once(tmp_path: Path) -> None:
    sizes = [problem(m, 20, 32) for m in range(1, 9)]

    def work() -> None:
        store = OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE)
        for size in sizes:
            add(store, kept(size))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / FILE).read_text().splitlines()) == 4 * len(sizes)
    rows = (tmp_path / CSV_FILE).read_text().splitlines()
    assert rows.count(CSV_HEADER) == 1 and len(rows) == 1 + len(sizes) == len(set(rows))
    assert all(find(OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), size) for size in sizes)


def test_files_of_others_and_aiters_own_rows_stay(tmp_path: Path) -> None:
    theirs = f"{CSV_HEADER}\nfalse,false,T,N,1280,16,8192,bf16_r,8192,0,bf16_r,8192,0,bf16_r,1280,0,f32_r,1,9,Cijk"
    (tmp_path / CSV_FILE).write_text(theirs)  # without an end
    add(OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), kept(SIZE))
    assert (tmp_path / CSV_FILE).read_text().startswith(theirs + "\nfalse,")
    (tmp_path / CSV_FILE).write_text("my notes\n")
    with pytest.warns(UserWarning, match="it begins with another line"):
        add(OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), kept(SIZE))
    assert (tmp_path / CSV_FILE).read_text() == "my notes\n"

    def types(dtype: str) -> list[str]:
        row = online.csv_row(problem(16, 1280, 8192, dtype=dtype), kept(SIZE).config).split(",")
        return [row[7], row[10], row[13], row[16]]

    assert types("bf16") == ["bf16_r"] * 3 + ["f32_r"] and types("fp16") == ["f16_r"] * 3 + ["f32_r"]


@each("name", [FILE, CSV_FILE])
def test_what_can_not_be_written_is_reported(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.warns(UserWarning, match=f"{name} can't be written: "):
        add(OnlineStore(tmp_path / FILE, tmp_path / CSV_FILE), kept(SIZE))
