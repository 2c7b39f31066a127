import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluators import FakeEvaluator, Waiting
from tests.support.nouns import BuildPool, Machine, Problem, Record, Support, cases, loader, matrices, results_format
from tests.support.refusals import fails, refuses
from tests.support.stand_in_campaigns import stored
from tritongemm.build.cache import ArtifactCache
from tritongemm.campaigns import merging
from tritongemm.campaigns.campaign import MERGED, MeasuringTools
from tritongemm.campaigns.merging import Conflict, RaceLog, merge_results, race_conflicts
from tritongemm.campaigns.stages.benchmark import read_records
from tritongemm.core.errors import OutputError
from tritongemm.core.protocol import MeasureProtocol, RaceResult
from tritongemm.results.run_files import RunFiles
from tritongemm.system import settings

pytestmark = pytest.mark.usefixtures("without_gpu")

PROBLEMS = [Problem(16 * (i + 1), 64, 128, *matrices("bf16", layout="TN")) for i in range(4)]


def write(path: Path, *records: Record) -> Path:
    path.write_text(results_format().write(records), encoding="utf-8")
    return path


def indices(path: Path) -> dict[int, int]:
    return {r.problem.m: r.config.option("index") for r in read_records(path)}


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """Of 16 both have one kernel, of 32 mine is faster, of 48 theirs is, and 64 is theirs alone."""
    mine = write(tmp_path / "mine.yaml", *(stored(PROBLEMS[number], 1, 5) for number in (1, 0, 2)))
    also = [stored(PROBLEMS[0], 1, 4), stored(PROBLEMS[1], 2, 6), stored(PROBLEMS[2], 2, 4), stored(PROBLEMS[3], 2, 4)]
    return mine, write(tmp_path / "theirs.yaml", *also)


def test_recorded_times_decide_without_a_gpu(sources: tuple[Path, Path], tmp_path: Path) -> None:
    texts = [path.read_bytes() for path in sources]
    merged = merge_results(*sources, tmp_path / "out.yaml")
    assert indices(tmp_path / "out.yaml") == {32: 1, 16: 1, 48: 2, 64: 2}
    assert [r.problem.m for r in merged.records] == [32, 16, 48, 64], "mine first, in their order"
    kept, replaced = merged.notes
    assert "blaslt.Cijk_1 +2 5 us in " in kept and "blaslt.Cijk_1 +2 is kept, by the recorded times" in kept
    assert "blaslt.Cijk_2 +2 is kept" in replaced and "nothing here can measure them" in replaced
    assert [path.read_bytes() for path in sources] == texts, "the sources stay"
    again = merge_results(tmp_path / "out.yaml", sources[1], tmp_path / "out.yaml")
    assert indices(tmp_path / "out.yaml") == {32: 1, 16: 1, 48: 2, 64: 2} and len(again.notes) == 1


def test_a_measured_result_goes_before_a_predicted_one(tmp_path: Path) -> None:
    mine = write(tmp_path / "a.yaml", stored(PROBLEMS[0], 1, 1, timer="model"), stored(PROBLEMS[1], 1, 9))
    theirs = write(tmp_path / "b.yaml", stored(PROBLEMS[0], 1, 5), stored(PROBLEMS[1], 1, 1, compute_units=80))
    merged = merge_results(mine, theirs, mine)
    assert [r.timer for r in merged.records] == ["graph-events"] * 3, "another device's result is another row"


def tools(*gpus: FakeEvaluator, pool: BuildPool) -> MeasuringTools:
    machine = Machine(loader.load_target("gfx942"), "amd", (0,), "AMD Instinct MI300X", "")
    return MeasuringTools(machine, [partial(next, iter([gpu])) for gpu in gpus], pool, MeasureProtocol())


@pytest.fixture
def raced(tmp_path: Path) -> Callable[..., list[Record | Support]]:
    def race(conflicts: Sequence[Conflict], *gpus: FakeEvaluator) -> list[Record | Support]:
        with closing(BuildPool(ArtifactCache(settings.cache_folder()), jobs=1)) as pool:
            measuring = tools(*gpus, pool=pool)
            with closing(RaceLog(tmp_path / "races", measuring)) as log:
                return race_conflicts(measuring, print, conflicts, log)

    return race


def test_who_disagrees_races_again(sources: tuple[Path, Path], tmp_path: Path, raced: Any) -> None:
    """On this machine algorithm 2 is the faster, whatever was recorded; one product does not fit here."""
    gpu = FakeEvaluator(seconds=lambda one: (9 - one.option("index")) * 1e-6, fits=lambda problem: problem.m != 48)
    asked = list[Conflict]()

    def remeasure(conflicts: Sequence[Conflict]) -> Sequence[Record | Support]:
        asked.extend(conflicts)
        found: list[Record | Support] = raced(conflicts, gpu)
        return found

    merged = merge_results(*sources, tmp_path / "out.yaml", remeasure)
    assert [c.mine.problem.m for c in asked] == [32, 48], "who agrees does not race"
    assert indices(tmp_path / "out.yaml") == {32: 2, 16: 1, 48: 2, 64: 2}
    new = merged.records[0]
    assert new.seconds == 7e-6 and new.timer == "sundial" and new.toolchain["device"] == "AMD Instinct MI300X"
    assert "blaslt.Cijk_2 +2 is kept, raced again: blaslt.Cijk_2 +2 7 us" in merged.notes[0]
    assert "by the recorded times (out of memory)" in merged.notes[1]


def test_what_a_race_does_not_measure_stays(raced: Any) -> None:
    mine = stored(PROBLEMS[0], 1, 5, m_from=3, notes={"of_mine": 1})
    elsewhere = replace(Conflict(mine, stored(PROBLEMS[0], 2, 5)), mine=replace(mine, compute_units=80))
    gpu = FakeEvaluator(seconds=lambda config: config.option("index") * 1e-6)
    found, refused = raced([Conflict(mine, stored(PROBLEMS[0], 2, 5)), elsewhere], gpu)
    assert isinstance(found, Record) and (found.m_from, found.notes) == (3, {"of_mine": 1})
    assert isinstance(refused, Support) and "this GPU is a gfx942 of 304 compute units" in refused.reason


def test_conflicts_race_on_all_devices(sources: tuple[Path, Path], tmp_path: Path, raced: Any) -> None:
    Waiting.both = threading.Barrier(2, timeout=20)
    gpus = [Waiting(seconds=lambda config: config.option("index") * 1e-6) for _ in range(3)]
    merged = merge_results(*sources, tmp_path / "out.yaml", lambda conflicts: raced(conflicts, *gpus))
    assert indices(tmp_path / "out.yaml") == {32: 1, 16: 1, 48: 1, 64: 2}
    assert [len(gpu.raced) for gpu in gpus] == [2, 2, 0] and all("raced again" in note for note in merged.notes)


def test_a_merge_that_is_killed_goes_on(raced: Any) -> None:
    conflicts = [Conflict(stored(PROBLEMS[i], 1, 5, notes={"n": i}), stored(PROBLEMS[i], 2, 5)) for i in range(3)]

    class Dying(FakeEvaluator):
        def race(self, problem: Problem, *args: Any, **more: Any) -> RaceResult:
            if problem == PROBLEMS[2]:
                raise KeyboardInterrupt
            return super().race(problem, *args, **more)

    fits = lambda problem: problem != PROBLEMS[1]
    with pytest.raises(KeyboardInterrupt):
        raced(conflicts, Dying(seconds=lambda config: config.option("index") * 1e-6, fits=fits))
    gpu = FakeEvaluator(seconds=lambda config: (9 - config.option("index")) * 1e-6)
    found = raced(conflicts, gpu)
    assert [one.config.option("index") for one in found] == [1, 2, 2] and found[0].notes == {"n": 0}
    assert [one.seconds for one in found] == [1e-6, 7e-6, 7e-6]
    other = Conflict(conflicts[0].mine, stored(PROBLEMS[0], 3, 5))
    assert raced([other, *conflicts], gpu)[0].config.option("index") == 3, "these have not raced"
    gpu.seconds = lambda config: 1e-6
    assert [one.seconds for one in raced(conflicts, gpu)] == [1e-6, 7e-6, 7e-6], "all are known"


@cases(
    (None, "there is no such file"),
    ("- {M: 16, N: 64, K: 128, dtype_a: bf16}\n", "has no results, only sizes"),
    ("- {M: 16, N: 64, K: 0, time(us): 3}\n", r"row 1 \(line 1\) K must"),
)
def test_what_can_not_be_read_changes_nothing(text: str | None, complaint: str, /, tmp_path: Path) -> None:
    mine, theirs = write(tmp_path / "mine.yaml", stored(PROBLEMS[0], 1, 5)), tmp_path / "theirs.yaml"
    if text is not None:
        theirs.write_text(text, encoding="utf-8")
    before = mine.read_bytes()
    refuses(complaint, merge_results, mine, theirs, mine)
    assert mine.read_bytes() == before
    assert merge_results(mine, write(theirs, stored(PROBLEMS[1], 1, 5)), mine).records, "nothing holds it"


def _hold(path: Path, held: object, done: object) -> None:
    files = RunFiles(path)
    files.hold()
    held.set()  # type: ignore[attr-defined]
    done.wait(20)  # type: ignore[attr-defined]
    files.release()


def test_two_merges_at_once(sources: tuple[Path, Path], tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    held, done = spawn.Event(), spawn.Event()
    other = spawn.Process(target=_hold, args=(tmp_path / "out.yaml", held, done))
    other.start()
    try:
        assert held.wait(20)
        fails(OutputError, "is held by another run", merge_results, *sources, tmp_path / "out.yaml")
        assert not (tmp_path / "out.yaml").exists()
    finally:
        done.set()
        other.join()


def test_a_campaign_takes_over_another_ones_results(sources: tuple[Path, Path], tmp_path: Path) -> None:
    folder, said = tmp_path / "tunings", list[str]()
    folder.mkdir()
    sources[0].rename(folder / MERGED)
    merged = merging.merge_campaign(folder, sources[1], None, said.append)
    assert len(merged.records) == 4 and said[-1].endswith("2 conflicts") and indices(folder / MERGED)[64] == 2


def test_a_campaign_races_what_disagrees_once(sources: tuple[Path, Path], tmp_path: Path) -> None:
    """A merge that is begun again, as after a kill, takes the races that are over from their journal."""
    folder, text = tmp_path / "tunings", sources[0].read_bytes()
    folder.mkdir()
    gpu = FakeEvaluator(seconds=lambda config: config.option("index") * 1e-6)
    for conflicts in (2, 0):
        (folder / MERGED).write_bytes(text)
        gpu.raced = []

        @contextmanager
        def open_tools(what: str) -> Iterator[MeasuringTools]:
            with closing(BuildPool(ArtifactCache(settings.cache_folder()), jobs=1)) as pool:
                yield tools(gpu, pool=pool)

        merged = merging.merge_campaign(folder, sources[1], open_tools, list[str]().append)
        assert len(gpu.raced) == conflicts and indices(folder / MERGED) == {32: 1, 16: 1, 48: 1, 64: 2}
        assert all("raced again: blaslt.Cijk_1 +2 1 us" in note for note in merged.notes) and len(merged.notes) == 2
