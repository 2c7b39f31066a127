import csv
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support import raising
from tests.support.call_logs import line
from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import BASELINE_ENTRY, Artifact, Defaults, Evaluator, Patch, Problem, RaceResult, apart, cases
from tests.support.refusals import fails, refuses
from tritongemm.campaigns import tables, weights
from tritongemm.campaigns.campaign import Campaign
from tritongemm.campaigns.stages import configs
from tritongemm.campaigns.weights import BaselineTimes
from tritongemm.core.errors import InputError, OutputError, TargetError, TritonGemmError
from tritongemm.search.cost_model import model
from tritongemm.search_spaces import loader as target_files
from tritongemm.workloads import sizes

A, B, C = 1024, 512, 64  # M of the guide's example: 100 us ten times, 10 us twice 25 times, 1 us once
EXAMPLE = {A: 100e-6, B: 10e-6, C: 1e-6}


def size(m: int, **changes: object) -> str:
    return line(m=64, n=m, k=64, **changes)  # type: ignore[arg-type]


def example() -> str:
    return size(A, count=10) + size(B, count=25) + size(C, count=1) + size(B, count=25)


class Timed(FakeEvaluator):
    def __init__(self, seconds: dict[int, float], fails: Sequence[int] = ()) -> None:
        super().__init__()
        self.by_m, self.fails = seconds, fails
        self.timed: list[int] = []

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        assert not artifacts and baseline == "torch"
        self.timed.append(problem.m)
        if problem.m in self.fails:
            raise TritonGemmError("out of memory")
        seconds = self.by_m.get(problem.m)
        return RaceResult((), {BASELINE_ENTRY: (seconds, seconds, seconds)} if seconds else {}, True)


@dataclass
class Rig:
    folder: Path
    evaluators: Sequence[Evaluator] = ()
    said: list[str] = field(default_factory=list)

    def campaign(self, text: str | None = None, threshold: float = 0.1) -> Campaign:
        log = self.folder / "job.log"
        if text is not None:
            log.write_text(text)

        @contextmanager
        def open_evaluators() -> Iterator[Sequence[Evaluator]]:
            yield self.evaluators

        refuse = raising(AssertionError("nothing is tuned here"))
        return Campaign(
            self.folder / "tunings", log, threshold, target_files.load_target("gfx942"),
            tuple(range(len(self.evaluators))), self.said.append,
            open_evaluators, refuse, refuse,
            {"torch": "2.9"}, ("--strategy", "genetic", "--target", "gfx942"),
        )  # fmt: skip


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def measuring(tmp_path: Path) -> Rig:
    return Rig(tmp_path, [Timed(EXAMPLE), Timed(EXAMPLE)])


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tunings" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_guide_s_arithmetic_columns_and_configs(measuring: Rig) -> None:
    """Percents of measured time; equal problems are summed before the threshold."""
    configs.run(measuring.campaign(example()))
    summary = rows(measuring.folder, "summary.csv")
    assert [float(row["% of total"]) for row in summary] == pytest.approx([66.62, 33.31, 0.067], abs=0.005)
    assert [row["call_count"] for row in summary] == ["10", "50", "1"]
    assert [(row["us"], row["total (us)"], row["baseline"]) for row in summary] == [
        ("100", "1000", "measured"), ("10", "500", "measured"), ("1", "1", "measured"),
    ]  # fmt: skip
    assert [row["note"] for row in summary] == ["", "", "below 0.1 %"]
    assert [row["config"] for row in rows(measuring.folder, "gemms.csv")] == ["BBS_TN_0", "BBS_TN_1"]
    assert "to tune: 2 GEMMs, 99.93 % of the time" in measuring.said
    assert "below 0.1 %: 1 GEMMs, 0.07 % of the time together" in measuring.said
    assert f"{measuring.folder / 'job.log'}: 3 GEMMs in 61 calls take 1.501 ms, measured" in measuring.said
    gemms = rows(measuring.folder, "gemms.csv")
    theirs = ["transA", "transB", "batch_count", "m", "n", "k", "a_type", "b_type", "c_type", "d_type", "compute_type"]
    assert list(gemms[0])[: len(theirs)] == theirs
    assert [gemms[0][name] for name in theirs] == (
        ["T", "N", "1", "64", str(A), "64", "bf16_r", "bf16_r", "bf16_r", "bf16_r", "c_f32_r"]
    )
    folder = measuring.folder / "tunings"
    (row,) = sizes.from_file(folder / "BBS_TN_1.yaml", Defaults())
    assert (row.problem.key, row.count) == (gemms[1]["problem"], 50) == (f"{B}x64x64_bf16_TN", 50)
    assert (folder / "BBS_TN_0.sh").stat().st_mode & 0o111


def test_predictions_that_take_long_say_how_far_they_are(rig: Rig, monkeypatch: Patch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(weights, "monotonic", lambda: next(clock))
    monkeypatch.setattr(model, "_AT_ONCE", 1)
    configs.run(rig.campaign("".join(size(m) for m in range(64, 72)), threshold=0))
    reported = [text for text in rig.said if text.startswith("predicted: ")]
    assert reported == [f"predicted: {n} of 8 GEMMs" for n in (2, 4, 6, 8)]


def test_a_threshold_is_of_sums(measuring: Rig) -> None:
    """Row by row the second of the guide's products would be below it."""
    configs.run(measuring.campaign(example(), threshold=20))
    assert len(rows(measuring.folder, "gemms.csv")) == 2


def test_the_script_runs_the_config_alone(rig: Rig, tmp_path: Path) -> None:
    configs.run(rig.campaign(size(A)))
    stand_in = tmp_path / "a python"
    stand_in.write_text('#!/bin/sh\npwd; printf "<%s>" "$@"\n')
    stand_in.chmod(0o755)
    script = rig.folder / "tunings" / "BBS_TN_0.sh"
    done = subprocess.run(
        [script, "--verbose"], env={"PYTHON": str(stand_in), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    place, words = done.stdout.split("\n")
    assert Path(place) == script.parent
    assert words == (
        "<-m><tritongemm.tune><--gemm_size_file><BBS_TN_0.yaml><-o><alone/BBS_TN_0.yaml><--strategy><genetic>"
        "<--target><gfx942><--verbose>"
    )


def test_that_a_large_log_is_read_is_said(rig: Rig, monkeypatch: Patch) -> None:
    monkeypatch.setattr(configs, "_LARGE_BYTES", 100)
    configs.run(rig.campaign(size(A)))
    assert rig.said[0].endswith("reading 0 MiB")


def test_scripts_are_open_to_whom_the_umask_says(rig: Rig) -> None:
    before = os.umask(0o077)
    try:
        configs.run(rig.campaign(size(A)))
    finally:
        os.umask(before)
    assert (rig.folder / "tunings" / "BBS_TN_0.sh").stat().st_mode & 0o777 == 0o700


def test_what_can_t_be_computed_is_reported_with_its_share(measuring: Rig) -> None:
    configs.run(measuring.campaign(example() + size(A, count=10, beta="1.0") + size(B, activation="gelu")))
    reported = [line for line in measuring.said if line.startswith("not computed here")]
    assert reported.pop().startswith("not computed here: 2 GEMMs, about ")
    assert len(reported) == 2 and "line 5: bf16_r to bf16_r TN 64 x 1024 x 64: about" in reported[0]
    assert reported[0].endswith("its beta is 1; here it is 0") and reported[1].endswith("it applies gelu")
    left = [row for row in rows(measuring.folder, "summary.csv") if row["baseline"] == "roofline"]
    assert {row["note"] for row in left} == {"its beta is 1; here it is 0", "it applies gelu"}
    assert all(not row["config"] and float(row["% of total"]) > 0 for row in left)
    assert sum(float(r["% of total"]) for r in rows(measuring.folder, "summary.csv")) == pytest.approx(100, abs=0.01)


def test_what_the_table_says_of_many_rows_and_without_a_gpu(rig: Rig) -> None:
    configs.run(rig.campaign(size(A) + "".join(size(m, beta="1.0") for m in range(1, 41))))
    reported = [line for line in rig.said if line.startswith("not computed here")]
    assert len(reported) == 22 and reported[-2] == "not computed here: 20 others; summary.csv has their reasons"
    assert sum(row["note"].startswith("its beta is 1") for row in rows(rig.folder, "summary.csv")) == 40
    configs.run(rig.campaign(example()))
    assert {row["baseline"] for row in rows(rig.folder, "summary.csv")} == {"model"}
    assert any(line.endswith("ms, predicted") for line in rig.said)
    assert not (rig.folder / "tunings" / "baseline.journal").exists()


def test_devices_share_the_measuring_and_none_is_measured_twice(measuring: Rig) -> None:
    configs.run(measuring.campaign(example()))
    first, second = measuring.evaluators
    assert isinstance(first, Timed) and isinstance(second, Timed)
    assert sorted(first.timed + second.timed) == [C, B, A]
    configs.run(measuring.campaign(example() + size(32)))
    assert sorted(first.timed + second.timed) == [32, C, B, A], "what is known is not measured again"
    assert any("32x64x64_bf16_TN: torch does not compute it" in line for line in measuring.said)
    measuring.said.clear()
    campaign = measuring.campaign(example() + size(32))
    configs.run(campaign)
    assert not any("does not compute it" in line for line in measuring.said), "neither is what the baseline has not"
    assert len(first.timed + second.timed) == 4 and not configs.why_again(campaign)


def test_a_baseline_that_fails_costs_itself(tmp_path: Path) -> None:
    rig = Rig(tmp_path, [Timed(EXAMPLE, fails=[B])])
    configs.run(rig.campaign(example()))
    assert {row["call_count"]: row["baseline"] for row in rows(tmp_path, "summary.csv")} == {
        "10": "measured", "50": "model", "1": "measured",
    }  # fmt: skip
    assert any("its baseline can't be measured, and the cost model says" in line for line in rig.said)
    assert any(line.endswith("ms, 2 of them measured") for line in rig.said)
    assert "predicted times of 1 GEMMs, and a GPU is here: done again" in configs.why_again(rig.campaign(example()))
    rig.evaluators = [Timed(EXAMPLE)]
    configs.run(rig.campaign(example()))
    assert not configs.why_again(rig.campaign(example()))
    (tmp_path / "tunings" / "summary.csv").write_text("")
    assert configs.why_again(rig.campaign(example())).endswith("done again")
    refuses("name the LOG to have it written again", configs.why_again, replace(rig.campaign(example()), log=None))


def test_a_gpu_that_vanishes_is_given_up(tmp_path: Path) -> None:
    many = {m: 1e-6 * m for m in range(1, 21)}
    lost, good = Timed({}, fails=list(many)), Timed(many)
    rig = Rig(tmp_path, [lost, good])
    configs.run(rig.campaign("".join(size(m) for m in many)))
    assert {row["baseline"] for row in rows(tmp_path, "summary.csv")} == {"measured"}
    assert len(lost.timed) == 2 and sorted(good.timed) == list(many)
    assert "the device at place 0 of those named is given up: out of memory" in rig.said


def test_when_nothing_can_be_measured_nothing_is_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, [Timed({}, fails=[A, B, C]), Timed({}, fails=[A, B, C])])
    fails(TargetError, "no baseline could be measured; the first: out of memory", configs.run, rig.campaign(example()))
    assert not (tmp_path / "tunings" / "summary.csv").exists()


def test_nothing_above_the_threshold(rig: Rig) -> None:
    """The table says what took which share all the same; who has to choose a threshold needs it."""
    table = rig.folder / "tunings" / "summary.csv"
    with pytest.raises(
        InputError, match=r"no GEMM takes 60 % of the time; the largest \(line \d\) takes 5\d.* %: lower"
    ):
        configs.run(rig.campaign(size(A) + size(A, trans_a="N"), threshold=60))
    assert [path.name for path in table.parent.glob("*")] == ["summary.csv"]
    assert [row["note"] for row in csv.DictReader(table.open(encoding="utf-8"))] == ["below 60 %"] * 2
    with pytest.raises(InputError, match=r"none of its 1 GEMMs can be computed for gfx942; .*gelu; .*summary.csv has"):
        configs.run(rig.campaign(size(A, activation="gelu")))
    assert [row["note"] for row in csv.DictReader(table.open(encoding="utf-8"))] == ["it applies gelu"]


def test_configs_of_before_are_swept_and_other_files_stay(measuring: Rig) -> None:
    folder = measuring.folder / "tunings"
    configs.run(measuring.campaign(example(), threshold=0.01))
    (folder / "BBS_TN_9.yaml").write_text("mine")
    configs.run(measuring.campaign(example(), threshold=50))
    assert {path.name for path in folder.glob("BBS*")} == {"BBS_TN_0.yaml", "BBS_TN_0.sh", "BBS_TN_9.yaml"}


@apart(
    ("summary.csv", "transA,transB,batch_count,m,n,k,us,call_count,total (us),% of total\n"),
    ("gemms.csv", "transA,transB,batch_count,m,n,k,a_type,b_type,c_type,d_type,compute_type\n"),
    ("BBS_TN_0.yaml", "GlobalParameters:\n  MinimumRequiredVersion: 4.33.0\n"),
    ("BBS_TN_1.sh", "#!/bin/bash\n/path/to/Tensile BBS_TN_1.yaml\n"),
)
def test_what_tuningdriver_wrote_is_not_replaced(name: str, text: str, /, measuring: Rig) -> None:
    """It has the same names for its files, in a folder that is called so as well."""
    folder = measuring.folder / "tunings"
    folder.mkdir()
    (folder / name).write_text(text)
    fails(OutputError, rf"{name} is not .*; choose another folder with -o", configs.run, measuring.campaign(example()))
    assert (folder / name).read_text() == text and not {"summary.csv", "gemms.csv"} - {name} & set(os.listdir(folder))
    (folder / name).unlink()
    for _ in range(2):
        configs.run(measuring.campaign(example()))


@pytest.mark.parametrize("wrong", ["../../etc/passwd", "a/b", "", "BBS_TN_0.yaml"])
def test_a_table_names_no_other_file(rig: Rig, wrong: str) -> None:
    """Whatever a table says, nothing outside the folder is read or deleted."""
    configs.run(rig.campaign(size(A)))
    folder = rig.folder / "tunings"
    (folder / "gemms.csv").write_text(f"config,problem\n{wrong},16x16x16_bf16_TN\n")
    refuses(r"gemms.csv: row 1 \(line 2\): config .* is no name of a config", tables.read_gemms, folder)
    configs.run(rig.campaign(size(A)))
    assert tables.read_gemms(folder)[0].config == "BBS_TN_0"


@cases(
    lambda text: text[:-9], lambda text: text + '{"problem": 5}\n[1]\n\x00\n', lambda text: text.replace("2.9", "2.10")
)
def test_baseline_times_survive_damage(damage: Callable[[str], str], /, tmp_path: Path) -> None:
    path, with_ = tmp_path / "baseline.journal", {"torch": "2.9"}
    with closing(BaselineTimes(path, with_)) as times:
        times.add("a", 1.0)
        times.add("b", 2.0)
    path.write_text(damage(path.read_text()))
    with closing(BaselineTimes(path, with_)) as times:
        assert times.get("b") in (None, 2.0)
        times.add("c", 3.0)
    with closing(BaselineTimes(path, with_)) as times:
        assert times.get("c") == 3.0 and "d" not in times
    shutil.copy(path, tmp_path / "other.journal")
    with closing(BaselineTimes(tmp_path / "other.journal", {"torch": "2.11"})) as times:
        assert times.get("c") is None, "other versions have other times"


def test_a_file_of_another_program_stays(tmp_path: Path) -> None:
    path = tmp_path / "baseline.journal"
    path.write_text("mine\n")
    fails(OutputError, "is not a journal of tritongemm; move it away", BaselineTimes, path, {})
    assert path.read_text() == "mine\n"
