import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.call_logs import line
from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import Defaults, InputError, OutputError, Patch, Problem, UnavailableError, results_format
from tests.support.nouns import loader as target_files
from tests.support.refusals import fails, refuses
from tests.support.stand_in_campaigns import Rig, result
from tritongemm.campaigns import driver, stages
from tritongemm.campaigns.device_load import CountedEvaluator, describe_loads
from tritongemm.campaigns.driver import STAGES, run_campaign
from tritongemm.campaigns.merging import RACES
from tritongemm.results.run_files import RunFiles
from tritongemm.workloads import sizes

LOG = line(count=2) + line(n=113) + line(n=128)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def last_stages(monkeypatch: Patch, tmp_path: Path) -> None:
    """Stand-ins for the last two stages, whatever there is; they need no GPU."""
    monkeypatch.setattr(driver, "_MEASURES", "")
    folder = tmp_path / "more_stages"
    folder.mkdir()
    for name in STAGES[3:]:
        text = "def run(campaign):\n    campaign.say(f'{__name__} runs')\n\ndef why_again(campaign):\n    return ''\n"
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(stages, "__path__", [str(folder), *stages.__path__])
    for name in STAGES[3:]:
        monkeypatch.delitem(__import__("sys").modules, f"{stages.__name__}.{name}", raising=False)


@pytest.mark.usefixtures("last_stages")
def test_all_stages_are_done_once(rig: Rig) -> None:
    run_campaign(rig.campaign(LOG))
    assert rig.done() == list(STAGES) and sorted(rig.tuned) == [109, 113, 128]
    assert [row.problem.m for row in sizes.from_file(rig.folder / "merged.yaml", Defaults())] == [109, 113, 128]
    before = {path.name: path.read_bytes() for path in rig.folder.iterdir() if path.is_file()}
    rig.said.clear()
    run_campaign(rig.campaign())
    assert [line.split(":")[0] for line in rig.said] == list(STAGES) and "done already" in rig.said[0]
    assert {path.name: path.read_bytes() for path in rig.folder.iterdir() if path.is_file()} == before


def test_a_stage_that_is_missing_is_reported_and_what_is_done_stays(rig: Rig, monkeypatch: Patch) -> None:
    monkeypatch.setattr(driver, "STAGES", ("configs", "tune", "merge", "polish"))
    with pytest.raises(UnavailableError, match=r"the stage polish is not part of this installation; .*tunings"):
        run_campaign(rig.campaign(LOG))
    assert rig.done() == ["configs", "tune", "merge"]


def test_a_campaign_that_is_stopped_goes_on(rig: Rig) -> None:
    rig.killed_after = 1
    with pytest.raises(KeyboardInterrupt):
        run_campaign(rig.campaign(LOG), "configs")
        run_campaign(rig.campaign(), "tune")
    assert rig.done() == ["configs"] and len(rig.tuned) == 1
    assert len(sizes.from_file(rig.folder / "tuned.yaml", Defaults())) == 1, "what was done is merged"
    rig.killed_after = -1
    run_campaign(rig.campaign(), "tune")
    assert sorted(rig.tuned) == [109, 113, 128], "nothing is tuned twice"
    assert any("1 of 3 GEMMs are in" in line for line in rig.said)


def test_a_gemm_that_fails_costs_itself(rig: Rig) -> None:
    rig.fails = (113,)
    campaign = rig.campaign(LOG)
    for stage in STAGES[:3]:
        run_campaign(campaign, stage)
    assert campaign.failures == ["failed: 113x16032x16384_bf16_TN: nothing compiles"]
    assert "no result: 113x16032x16384_bf16_TN" in rig.said
    rig.fails = (109, 113, 128)
    (rig.folder / "tuned.yaml").unlink()
    (rig.folder / "tuned.yaml.journal").unlink()
    refuses("no GEMM could be tuned; the first: nothing compiles", run_campaign, rig.campaign(), "tune")
    assert rig.done() == ["configs"]


@pytest.mark.usefixtures("last_stages")
def test_what_failed_is_tried_by_the_same_command(rig: Rig) -> None:
    rig.fails = (113,)
    run_campaign(rig.campaign(LOG))
    rig.fails = ()
    run_campaign(rig.campaign(LOG))
    assert "tune: 1 of 3 GEMMs have no result: done again" in rig.said and sorted(rig.tuned) == [109, 113, 128]
    assert len(sizes.from_file(rig.folder / "merged.yaml", Defaults())) == 3 and rig.done() == list(STAGES)


def test_stages_need_those_before(rig: Rig) -> None:
    for stage in STAGES[1:]:
        refuses(f"the stage {stage} needs configs", run_campaign, rig.campaign(LOG), stage)
    run_campaign(rig.campaign(), "configs")
    refuses("the stage merge needs tune", run_campaign, rig.campaign(), "merge")


def test_a_folder_without_a_campaign(rig: Rig) -> None:
    refuses("there is no campaign in .* to go on with: name the LOG", run_campaign, rig.campaign())
    refuses("there is no such file", run_campaign, replace(rig.campaign(), log=rig.place / "absent.log"))
    assert not rig.folder.exists()


def test_a_folder_is_of_one_log_and_one_target(rig: Rig) -> None:
    run_campaign(rig.campaign(LOG), "configs")
    with pytest.raises(OutputError, match=r"the campaign of what .*job\.log held before it was changed"):
        run_campaign(rig.campaign(LOG + line()), "configs")
    (rig.place / "other.log").write_text(LOG + line())
    with pytest.raises(OutputError, match=r"has the campaign of another log, .*job\.log: choose another folder"):
        run_campaign(replace(rig.campaign(), log=rig.place / "other.log"), "configs")
    rig.campaign(LOG)
    other = replace(rig.campaign(LOG), target=target_files.load_target("gfx950"))
    fails(OutputError, "has the campaign of another target, gfx942", run_campaign, other, "configs")


def test_a_table_that_is_cut_loses_no_gemm_in_silence(rig: Rig) -> None:
    """The same command writes it again, from the log."""
    run_campaign(rig.campaign(LOG), "configs")
    path = rig.folder / "gemms.csv"
    entire = path.read_text()
    path.write_text(entire[: entire.index("_bf16_TN,") + 12])
    with pytest.raises(InputError, match=r"gemms.csv: row 1 \(line 2\) has 14 cells, the head 18; it may be cut"):
        run_campaign(rig.campaign(), "tune")
    run_campaign(rig.campaign(LOG))
    assert path.read_text() == entire and len(rig.tuned) == 3


def test_merged_results_that_are_gone_are_merged_again(rig: Rig) -> None:
    run_campaign(rig.campaign(LOG))
    merged = (rig.folder / "merged.yaml").read_bytes()
    (rig.folder / "merged.yaml").unlink()
    run_campaign(rig.campaign(LOG))
    assert (rig.folder / "merged.yaml").read_bytes() == merged and len(rig.tuned) == 3


def test_a_stage_that_is_done_again(rig: Rig) -> None:
    """It undoes those behind it; races of a merge are kept until it is over, so that who merges again measures."""
    for stage in STAGES[:3]:
        run_campaign(rig.campaign(LOG), stage)
    (rig.folder / RACES).touch()
    run_campaign(rig.campaign(), "tune")
    assert rig.done() == ["configs", "tune"] and len(rig.tuned) == 3
    run_campaign(rig.campaign(), "merge")
    assert not (rig.folder / RACES).exists()


def test_another_threshold_begins_anew_and_keeps_what_was_tuned(rig: Rig) -> None:
    for stage in STAGES[:2]:
        run_campaign(rig.campaign(LOG), stage)
    run_campaign(rig.campaign(LOG, threshold=40), "configs")
    assert "the threshold was 0.1 % and is 40 %: all stages are done again" in rig.said and rig.done() == ["configs"]
    run_campaign(rig.campaign(threshold=40), "tune")
    assert len(rig.tuned) == 3 and "tuned: 1 of 1 GEMMs" in rig.said[-1]


def test_another_threshold_needs_the_log(rig: Rig) -> None:
    """And a stage that can't be done changes nothing of what is known to be done."""
    for stage in STAGES[:2]:
        run_campaign(rig.campaign(LOG), stage)
    refuses(r"has the configs of --thr 0.1: name the LOG", run_campaign, replace(rig.campaign(threshold=40), log=None))
    refuses("the stage tune needs configs", run_campaign, rig.campaign(threshold=40), "tune")
    assert rig.done() == ["configs", "tune"]


@pytest.mark.usefixtures("last_stages")
def test_who_has_a_gpu_goes_on_from_no_prediction(rig: Rig) -> None:
    """Shares and results are measured anew, once; without the log the shares stay predictions, which is said."""
    without = rig.campaign(LOG)
    for stage in STAGES[:3]:
        run_campaign(without, stage)
    for name in ("tuned.yaml", "tuned.yaml.journal"):
        text = (rig.folder / name).read_text()
        (rig.folder / name).write_text(re.sub('"timer": "[a-z-]+', '"timer": "model', text))
    (rig.folder / "tuned.yaml.journal").unlink()
    times = {"tuned": rig.folder / "tuned.yaml", "old": rig.folder / "tuned.yaml.old"}
    predicted = times["tuned"].read_text()
    opened = nullcontext([FakeEvaluator(baseline_seconds=1e-6)])
    gpu = replace(without, devices=(0,), open_evaluators=lambda: opened)
    run_campaign(replace(gpu, log=None))
    assert any("name the LOG to have them measured" in one for one in rig.said)
    assert len(rig.tuned) == 6 and times["old"].read_text() == predicted != times["tuned"].read_text()
    run_campaign(gpu)
    assert any("has predicted times of 3 GEMMs, and a GPU is here: done again" in one for one in rig.said)
    assert len(rig.tuned) == 6 and "measured" in (rig.folder / "summary.csv").read_text()
    rig.said.clear()
    run_campaign(gpu)
    assert not any("done again" in one for one in rig.said)


def test_tuning_anew_sets_aside_what_is_there(rig: Rig) -> None:
    for stage in STAGES[:3]:
        run_campaign(rig.campaign(LOG), stage)
    run_campaign(replace(rig.campaign(LOG), resume=False), "tune")
    assert len(rig.tuned) == 6 and (rig.folder / "tuned.yaml.journal.old").exists()
    assert rig.done() == ["configs", "tune"]
    held = RunFiles(rig.folder / "tuned.yaml")
    held.hold()
    fails(OutputError, "is held by another run", run_campaign, replace(rig.campaign(LOG), resume=False), "tune")
    held.release()


@pytest.mark.usefixtures("last_stages")
def test_results_of_other_campaigns_are_merged_in_once_and_stay(rig: Rig) -> None:
    run_campaign(rig.campaign(LOG))
    texts = [results_format().write([result(Problem(m, 7, 7))]) for m in (7, 8)]
    others = [rig.place / "one" / "tuned.yaml", rig.place / "two" / "tuned.yaml"]
    for path, text in zip(others, texts, strict=True):
        path.parent.mkdir()
        path.write_text(text)

    def merged(*names: Path, only: str = "") -> list[int]:
        rig.said.clear()
        run_campaign(replace(rig.campaign(), others=names), only)
        return [row.problem.m for row in sizes.from_file(rig.folder / "merged.yaml", Defaults())]

    assert merged(others[0]) == [109, 113, 128, 7] and rig.done() == list(STAGES)
    assert f"merge: {others[0]} is to be merged in: done again" in rig.said
    assert merged(others[0]) == [109, 113, 128, 7] and all("done already" in line for line in rig.said)
    assert sorted(merged(others[1])) == [7, 8, 109, 113, 128]
    others[0].unlink()
    assert sorted(merged(only="merge")) == [7, 8, 109, 113, 128]
    others[1].write_text("- {M: 7}")
    refuses(r"two.tuned.yaml", merged, others[1])
    assert len(sizes.from_file(rig.folder / "merged.yaml", Defaults())) == 5 and "merge" in rig.done()


def test_results_that_can_t_be_merged_in_are_reported_before_hours_of_tuning(rig: Rig) -> None:
    rig.campaign(LOG)
    with pytest.raises(InputError, match=r"absent\.yaml: there is no such file"):
        run_campaign(replace(rig.campaign(), others=(rig.place / "absent.yaml",)))
    assert not rig.tuned and not rig.folder.exists()


@pytest.mark.usefixtures("last_stages")
@pytest.mark.parametrize("text", ["", "config,problem\n", "config,problem\n../x,1x1x1\n", None])
def test_a_damaged_table_is_written_again(rig: Rig, text: str | None) -> None:
    """By the same command; without the LOG it is said that this is needed."""
    run_campaign(rig.campaign(LOG))
    table = rig.folder / "gemms.csv"
    before = table.read_bytes()
    table.unlink() if text is None else table.write_text(text)
    refuses(r"gemms\.csv.* name the LOG", run_campaign, replace(rig.campaign(), log=None))
    run_campaign(rig.campaign())
    assert table.read_bytes() == before and rig.done() == list(STAGES) and len(rig.tuned) == 3


def test_a_damaged_or_newer_state_is_reported(rig: Rig) -> None:
    run_campaign(rig.campaign(LOG), "configs")
    path = rig.folder / driver.NAME
    newer = path.read_text().replace('"schema": 1', '"schema": 2')
    for text in ("", "{", "[]", '{"schema": 1}', "null", "[" * 100000, newer):
        path.write_text(text)
        complaint = "a newer version .*schema 2; this one reads up to 1" if text == newer else "is damaged .*delete it"
        refuses(rf"campaign\.json:? {complaint}", run_campaign, rig.campaign())


def test_two_campaigns_in_one_folder(rig: Rig) -> None:
    with driver.holding(rig.folder), pytest.raises(OutputError, match="another campaign runs in"):
        run_campaign(rig.campaign(LOG))
    run_campaign(rig.campaign(), "configs")


def test_a_config_that_was_deleted_is_left_out(rig: Rig) -> None:
    run_campaign(rig.campaign(LOG), "configs")
    (rig.folder / "BBS_TN_1.yaml").unlink()
    run_campaign(rig.campaign(), "tune")
    assert len(rig.tuned) == 2 and f"left out: {rig.folder / 'BBS_TN_1.yaml'} is not there" in rig.said
    for path in rig.folder.glob("BBS_*.yaml"):
        path.unlink()
    refuses("has none of the configs", run_campaign, rig.campaign(), "tune")


def test_merge_keeps_the_better_result(rig: Rig) -> None:
    """A measured one before a predicted one, the faster before the slower; others' results are left out."""
    for stage in STAGES[:2]:
        run_campaign(rig.campaign(LOG), stage)
    tuned = {row.problem.m: row.record for row in sizes.from_file(rig.folder / "tuned.yaml", Defaults())}
    ours = tuned[109]
    assert ours is not None
    faster, predicted = replace(ours, seconds=ours.seconds / 2), replace(ours, seconds=1e-9, timer="model")
    others = [result(Problem(7, 7, 7)), replace(ours, target="gfx950")]
    (rig.folder / "alone").mkdir()
    for name, records in (("BBS_TN_0", [faster, *others]), ("BBS_TN_1", [predicted]), ("BBS_TN_7", [predicted])):
        (rig.folder / "alone" / f"{name}.yaml").write_text(results_format().write(records))
    rig.said.clear()
    run_campaign(rig.campaign(), "merge")
    merged = {row.problem.m: row.record for row in sizes.from_file(rig.folder / "merged.yaml", Defaults())}
    assert merged.keys() == {109, 113, 128}
    kept = merged[109]
    assert kept is not None and kept.seconds == pytest.approx(faster.seconds)
    assert sum("has two results" in line for line in rig.said) == 2
    assert sum("is not of this campaign" in line for line in rig.said) == 2


def test_loads_are_reported_for_each_device() -> None:
    first, second = CountedEvaluator(FakeEvaluator(baseline_seconds=1e-6)), CountedEvaluator(FakeEvaluator())
    first.race(Problem(16, 16, 16), [], "torch")
    first.busy_seconds = 7.5
    assert describe_loads((2, 5), [first, second], 10.0) == [
        "device 2: busy 7.5 of 10.0 s (75 %), 1 final races",
        "device 5: busy 0.0 of 10.0 s (0 %), 0 final races",
    ]
    assert describe_loads((), [first], 10.0) == []
