from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluators import FakeEvaluator
from tests.support.formats import read_text, write_text
from tests.support.nouns import Artifact, Config, Problem, RaceResult, Record, Support, each, load_target
from tests.support.racing import SIZE
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.measure.choose import MARGIN
from tritongemm.serving.source_row import baseline_won, is_launchable
from tritongemm.tune.final_race import RaceWork, decide, race_again, run_race
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.task import Task, make_record

KERNEL = Config("tile", 16, 16, 16)
ALGORITHM = Config("heuristic", 16, 16, 16, backend="blaslt")


@each(("gain", "winner"), [(MARGIN / 2, "blaslt"), (-0.1, "blaslt"), (2 * MARGIN, "triton"), (0.5, "triton")])
def test_a_kernel_must_beat_the_librarys_best_algorithm_by_the_margin(gain: float, winner: str, tmp_path: Path) -> None:
    """Beyond the noise, of which there is none here; both beat the baseline by far."""
    rounds = [1 + i * 1e-6 for i in range(20)]
    seconds = {KERNEL.name: 1e-5, ALGORITHM.name: 1e-5 * (1 + gain), BASELINE_ENTRY: 3e-5}
    samples = {name: tuple(s * r for r in rounds) for name, s in seconds.items()}
    trials = tuple(Trial(c, "ok", "", samples[c.name], "sundial", "final", 0.0, 0.1) for c in (KERNEL, ALGORITHM))
    race, options = RaceResult(trials, samples, cold=True), TuningOptions(tmp_path, library="torch")
    record = make_record(SIZE, race, load_target("gfx942"), options, frozenset({"blaslt", "torch"}), "by eye")
    assert (record.winner, record.config.backend) == (winner, winner) and not record.tie
    assert record.library == "torch" and record.library_seconds == pytest.approx(3e-5, rel=1e-3)


def test_a_library_whose_result_is_wrong_loses(tmp_path: Path) -> None:
    evaluator = FakeEvaluator(baseline_seconds=1e-9, rounds=20, library_wrong="error 0.5 > 0.008")
    race = evaluator.race(SIZE, [Artifact(KERNEL, "")], "torch")
    options = TuningOptions(tmp_path, library="torch", toolchain={"torch": "2.13.0"})
    record = make_record(SIZE, race, evaluator.target, options, frozenset(), "by eye")
    assert (record.winner, record.library, record.library_seconds) == ("triton", "torch", None)
    assert record.library_fault == f"{SIZE.key} (torch 2.13.0: error 0.5 > 0.008)"
    assert Record.from_json(record.to_json()) == record
    (row,) = read_text(write_text(record))
    assert row.record == record and is_launchable(record) and not baseline_won(record)


def test_where_nothing_is_right_nothing_wins(tmp_path: Path) -> None:
    """The reason says that the library is wrong too; a candidate that is verified when its turn comes would win."""

    class Nothing(FakeEvaluator):
        """A device on which every result is wrong."""

        def race(self, problem: Problem, artifacts: Sequence[Artifact], *_: Any, **__: Any) -> RaceResult:
            trials = tuple(Trial(a.config, "wrong", "error 9 > 0.1", stage="final") for a in artifacts)
            return RaceResult(trials, {}, True, library_wrong="error 0.5 > 0.008")

    evaluator, options, artifact = Nothing(), TuningOptions(tmp_path, library="torch"), Artifact(KERNEL, "")
    outcome = run_race(RaceWork(SIZE, (artifact,), ()), evaluator, options)
    task = Task(SIZE)
    task.trials["first"] = Trial(KERNEL, "compile_failed", f"{KERNEL.name} can't compute it")
    assert decide(task, outcome, evaluator.target, options) is None
    assert f"{KERNEL.name}: can't compute it" in task.failure, "the config once"
    assert "no candidate passed" in task.failure and "torch is wrong too: error 0.5 > 0.008" in task.failure
    again = race_again(evaluator, SIZE, [artifact], options)
    assert isinstance(again, Support) and again.reason.endswith("torch is wrong too: error 0.5 > 0.008")
