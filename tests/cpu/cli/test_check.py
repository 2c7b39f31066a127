import json
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluators import FakeEvaluator, Waiting
from tests.support.nouns import Capsys, Config, Evaluator, Machine, Patch, RaceResult, Record, Trial, fails, loader
from tests.support.stores import TOOLS
from tritongemm.cli import check as command
from tritongemm.cli import library as library_command
from tritongemm.core.problem import Problem, matrices
from tritongemm.export.library import checking
from tritongemm.export.library.checking import Checked
from tritongemm.export.library.storage import open_library
from tritongemm.hip_ext import machine
from tritongemm.results.run_files import RunFiles
from tritongemm.results.store import Store

TARGET = loader.load_target("gfx942")
GPU = Machine(TARGET, "", (0,), "MI300X", "")
TILE = Config("tile", 32, 32, 32, num_warps=2)
FASTER = Config("tile", 16, 32, 32, num_warps=2)
SIZES = [Problem(m, 96, 160, *matrices("bf16", layout="TN")) for m in (40, 48, 64)]


def tuned(problem: Problem, **changes: Any) -> Record:
    units: dict[str, Any] = {"compute_units": TARGET.compute_units}
    made = Record(problem, "gfx942", TILE, "triton", 9e-6, 0.01, "events", toolchain=TOOLS, **units)
    return replace(made, library="torch", library_seconds=9.5e-6, **changes)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A file of two results whose code object is not the one that is made now, and one that a library won."""
    path = tmp_path / "tuned.yaml"
    lost = tuned(SIZES[2], winner="torch", toolchain={"torch": machine.toolchain(GPU)["torch"]})
    with Store.open(path, "gfx942", TOOLS, {}, compute_units=TARGET.compute_units) as store:
        fast = Trial(FASTER, "ok", samples=(1e-6,), timer="events", stage="final")
        store.add_trials(SIZES[0], [fast], tuned(SIZES[0], code="0" * 64))
        store.add_record(tuned(SIZES[1], m_from=41))
        store.merge()
        text = path.read_text()
    with Store.open(path, "gfx942", lost.toolchain, {}, compute_units=TARGET.compute_units, resume=False) as store:
        store.add_record(lost)
        store.merge()
    assert text.splitlines()[1:] == path.read_text().splitlines()[1:3]
    path.with_name("tuned.yaml.journal.old").replace(path.with_name("tuned.yaml.journal"))
    return path


@pytest.fixture
def gpu(monkeypatch: Patch) -> FakeEvaluator:
    evaluator = FakeEvaluator(baseline_seconds=3e-5, rounds=9)

    @contextmanager
    def devices(here: Machine, timeout: float) -> Iterator[Sequence[Evaluator]]:
        yield [evaluator]

    monkeypatch.setattr(command, "_devices", devices)
    monkeypatch.setattr(machine, "find_machine", lambda *_: GPU)
    return evaluator


def test_files_without_results_are_refused_and_stale_reported(results: Path, capsys: Capsys, tmp_path: Path) -> None:
    before = results.read_bytes()
    assert command.main([str(results), "--repair"]) == 1
    said = capsys.readouterr()
    first, second, third = (" ".join(line.split()) for line in said.out.splitlines()[1:4])
    assert first.startswith("40x96x160_bf16_TN 40 gfx942 triton moved triton 3.5.1 → ")
    assert second.startswith("48x96x160_bf16_TN 41-48 gfx942 triton unknown its code object was not recorded")
    assert third == "64x96x160_bf16_TN 64 gfx942 torch holds -"
    assert "1 moved, 1 unknown, 1 holds (triton " in said.out and "no GPU is here" in said.err
    assert command.main([str(results), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["M_from"], one["M"], one["state"]) for one in found["results"]] == [
        (0, 40, "moved"), (41, 48, "unknown"), (0, 64, "holds"),
    ]  # fmt: skip
    assert found["gpu"] is None and found["toolchain"]["triton"] and found["damaged"] == []
    assert results.read_bytes() == before
    (tmp_path / "sizes.yaml").write_text("- {M: 16, N: 16, K: 16}\n")
    assert command.main([str(tmp_path / "sizes.yaml")]) == 2 and command.main([str(tmp_path / "nothing.zip")]) == 2
    err = capsys.readouterr().err
    assert "holds no tuned result: sizes alone in 1 row; tune it first" in err and "there is no such file" in err
    (tmp_path / "tunings").mkdir()
    assert command.main([str(tmp_path / "tunings")]) == 2
    assert "tunings is no library: it has no library.json" in capsys.readouterr().err


def test_repairs_replace_what_moved_and_nothing_else(results: Path, gpu: FakeEvaluator, capsys: Capsys) -> None:
    before = results.read_text().splitlines()
    assert command.main([str(results), "--repair"]) == 0
    assert f"repaired: 40x96x160_bf16_TN: {FASTER.name} 17.00 us (was 9.00 us)" in capsys.readouterr().out
    after = results.read_text().splitlines()
    assert after[3] == before[3] and after[1] != before[1] and len(after) == len(before)
    assert '"M_from": 41' in after[2] and '"code": ' in after[1] and '"code": ' in after[2]
    assert command.main([str(results)]) == 0 and "3 holds" in capsys.readouterr().out


def test_a_library_is_repaired_too(results: Path, gpu: FakeEvaluator, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "library"
    assert library_command.main(["build", str(results), "-o", str(path)]) == 0 and command.main([str(path)]) == 0
    before = {e.record.problem: e for e in open_library(path).entries}
    kernel = before[SIZES[0]].kernel
    assert kernel is not None
    (path / kernel.member).write_bytes(bytes(kernel.size))
    assert command.main([str(path)]) == 1 and "damaged" in capsys.readouterr().out
    assert command.main([str(path), "--repair"]) == 0
    library = open_library(path)
    after = {e.record.problem: e for e in library.entries}
    assert not library.faults() and after.keys() == before.keys() and after[SIZES[2]] == before[SIZES[2]]
    assert after[SIZES[0]].record.timer == "sundial"


def test_all_devices_repair(results: Path, gpu: FakeEvaluator, monkeypatch: Patch, capsys: Capsys) -> None:
    Waiting.both = threading.Barrier(2, timeout=20)

    @contextmanager
    def devices(here: Machine, timeout: float) -> Iterator[Sequence[Evaluator]]:
        yield [Waiting(baseline_seconds=3e-5, rounds=9) for _ in here.devices]

    monkeypatch.setattr(machine, "count_devices", lambda: 2)
    monkeypatch.setattr(machine, "find_machine", lambda _, ids, count: replace(GPU, devices=tuple(range(count or 1))))
    monkeypatch.setattr(command, "_devices", devices)
    assert command.main([str(results), "--repair"]) == 0 and capsys.readouterr().out.count("repaired: ") == 2
    fails(SystemExit, "", command.main, [str(results), "--gpus", "0;1"])
    assert "not a list of numbers of GPUs" in capsys.readouterr().err


class Watched(FakeEvaluator):
    """A GPU that stores the file at a path whenever it races."""

    def __init__(self, path: Path, read: Callable[[Path], list[Any]]) -> None:
        super().__init__(baseline_seconds=3e-5, rounds=9)
        self.path, self.read, self.seen = path, read, list[list[Any]]()

    def race(self, *args: Any, **more: Any) -> RaceResult:
        self.seen.append(self.read(self.path))
        return super().race(*args, **more)


def test_repairs_are_written_at_once(results: Path, gpu: FakeEvaluator, monkeypatch: Patch, capsys: Capsys) -> None:
    """A kill in the next race costs that alone; the file is locked meanwhile, which is reported before any race."""
    watched = Watched(results, lambda path: path.read_text().splitlines())
    monkeypatch.setattr(command, "_devices", lambda *_: nullcontext([watched]))
    before = results.read_text().splitlines()
    other = RunFiles(results)
    other.hold()
    assert command.main([str(results), "--repair"]) == 2 and not watched.seen
    assert "is held by another run" in capsys.readouterr().err
    other.release()
    assert command.main([str(results), "--repair"]) == 0
    first, second = watched.seen
    assert first == before and second[1] != before[1] and second[2:] == before[2:]
    assert results.read_text().splitlines()[:2] == second[:2]


def test_rows_that_others_change_stay(results: Path, gpu: FakeEvaluator, monkeypatch: Patch, capsys: Capsys) -> None:
    compare = checking.check

    def changed(*args: Any) -> list[Checked]:
        found = compare(*args)
        results.write_text(results.read_text().replace("9.0", "8.5", 1))
        return found

    monkeypatch.setattr(checking, "check", changed)
    assert command.main([str(results), "--repair"]) == 1
    assert "40x96x160_bf16_TN: another program has changed it meanwhile" in capsys.readouterr().err
    assert "8.5" in results.read_text().splitlines()[1] and '"code": ' in results.read_text().splitlines()[2]


def test_entries_of_a_library_are_repaired_one_by_one(
    results: Path, gpu: FakeEvaluator, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    """What is damaged stays known until it is repaired, wherever that ends."""
    path = tmp_path / "library.zip"
    assert library_command.main(["build", str(results), "-o", str(path)]) == 0
    members = zipfile.ZipFile(path)
    with zipfile.ZipFile(tmp_path / "cut.zip", "w") as cut:
        for name in (name for name in members.namelist() if not name.startswith("objects/")):
            cut.writestr(name, members.read(name))
    path = tmp_path / "cut.zip"

    def states() -> list[str]:
        capsys.readouterr()
        command.main([str(path)])
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
        return [state for _, state in sorted((row[0], row[4]) for row in rows)]

    assert states() == ["damaged", "damaged", "holds"]

    class Stopped(Watched):
        def race(self, problem: Problem, *args: Any, **more: Any) -> RaceResult:
            if problem == SIZES[1]:
                raise KeyboardInterrupt
            return super().race(problem, *args, **more)

    monkeypatch.setattr(command, "_devices", lambda *_: nullcontext([Stopped(path, lambda _: [])]))
    assert command.main([str(path), "--repair"]) == 130 and states() == ["holds", "damaged", "holds"]
    monkeypatch.setattr(command, "_devices", lambda *_: nullcontext([gpu]))
    assert command.main([str(path), "--repair"]) == 0
    assert states() == ["holds"] * 3 and library_command.main(["verify", str(path)]) == 0


def test_a_damaged_helper_kernel_is_reported(results: Path, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "library"
    scaled = Problem(16, 128, 256, *matrices("int8", c="bf16", layout="TN"), family="a8w8")
    with Store.open(tmp_path / "scaled.yaml", "gfx942", TOOLS, {}, compute_units=TARGET.compute_units) as store:
        store.add_record(tuned(scaled))
        store.merge()
    assert library_command.main(["build", str(tmp_path / "scaled.yaml"), "-o", str(path)]) == 0
    helper = next(iter(open_library(path).helpers.values()))
    (path / helper.member).write_bytes(bytes(helper.size))
    assert command.main([str(path)]) == 1
    assert f"damaged: {path}: {helper.name}: its code object" in capsys.readouterr().err
