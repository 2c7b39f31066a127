import math
import re
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tritongemm
from tests.support import ROOT
from tests.support.evaluators import FakeEvaluator, passed
from tests.support.nouns import Capsys, Defaults, Machine, Patch, Problem, apart, cases, load_target, matrices, refuses
from tritongemm.core.errors import InputError, RemarkWarning
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.report.progress import RunProgress
from tritongemm.results import journal
from tritongemm.tune import cluster, session
from tritongemm.tune.request import SearchScope, SizeSource, TuneRequest
from tritongemm.workloads import sizes

TARGET = load_target("gfx1100")  # with the smallest space, so that planning takes no time
OFFLINE = Machine(TARGET, "", (), "", "no GPU here")
GPU = Machine(TARGET, "amd", (0,), "W7900", "a GPU")

autotune = partial(tritongemm.autotune, target="gfx1100", budget=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch, without_gpu: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    return tmp_path


def test_sizes_of_every_kind(capfd: Capsys) -> None:
    given = Problem(5, 16, 16, *matrices())
    results = autotune([(16, 16, 16), {"M": 8, "N": 16, "K": 16, "bias": "n"}, given], output="out.yaml")
    assert capfd.readouterr() == ("", "")
    assert [r.problem.key for r in results] == ["5x16x16_fp16_TT", "16x16x16_bf16_TN", "8x16x16_bf16_TN_biasn"]
    assert results[1].predicted and len(results) == 3 and not results.failures
    assert str(results).startswith("Predicted, not measured") and "8x16x16_bf16_TN_biasn" in repr(results)
    assert results._repr_html_().startswith("<pre>Predicted")
    assert tuple(row.record for row in sizes.from_file(Path("out.yaml"), Defaults())) == results.records
    results.report("page.html")
    assert "8x16x16_bf16_TN_biasn" in Path("page.html").read_text(encoding="utf-8")
    assert str(results.load()).startswith("0 of 3 rows serve")


def test_saved_results_stand_beside_others() -> None:
    first, second = (autotune([(m, 16, 16)], output=f"{m}.yaml") for m in (16, 8))
    for results in (first, second, second):
        results.save("both.yaml")
    assert [row.record for row in sizes.from_file(Path("both.yaml"), Defaults())] == [*first, *second]
    measured = replace(first[0], timer="graph-events", winner="torch", library="torch", library_seconds=8e-6)
    with pytest.warns(RemarkWarning, match="8x16x16_bf16_TN: its time is a prediction"):
        replace(first, records=(measured, second[0])).save("bf16_tuned_gemm.csv")
    with pytest.raises(InputError, match=r"none\.csv is not written, .*16x16x16_bf16_TN: its time is a prediction"):
        first.save("bf16_tuned_gemm_none.csv")
    blocks = ", ".join(f"{name}: 16" for name in ("M", "N", "K", *(f"BLOCK_SIZE_{axis}" for axis in "MNK")))
    launch = "GROUP_SIZE_M: 1, SPLIT_K: 1, num_warps: 2, num_stages: 2"
    Path("sizes.yaml").write_text(f"- {{{blocks}, dtype_a: bf16, {launch}}}\n")
    refuses(r"sizes\.yaml holds sizes without a result", first.save, "sizes.yaml")


def test_an_interrupt_in_the_callback_loses_nothing() -> None:
    """A second call continues, also in a thread, where no signal can be handled."""
    asked = [(m, 16, 16) for m in (16, 8, 5, 4)]

    def stop(progress: RunProgress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"stopped; what is done is in out\.yaml"):
        autotune(asked, output="out.yaml", progress=stop)
    done = sizes.from_file(Path("out.yaml"), Defaults())
    before = journal.read(Path("out.yaml.journal")).lines
    assert 1 <= len(done) < 4 and len(before) > 1
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(autotune(asked, output="out.yaml")))
    thread.start()
    thread.join()
    (results,) = found
    assert [r.problem.m for r in results] == [16, 8, 5, 4] and all(row.record in results for row in done)
    assert f"{len(done)} of 4 sizes are in out.yaml already" in " ".join(results.remarks)
    after = journal.read(Path("out.yaml.journal")).lines
    assert [after[number] for number in before] == list(before.values()), "nothing is tried twice"


def test_gains_are_those_over_the_library(monkeypatch: Patch) -> None:
    """On a stand-in for a GPU, which takes as many microseconds as a tile has rows and one more."""

    class Gpu(FakeEvaluator):
        def __init__(self, *_: object) -> None:
            super().__init__("gfx1100", baseline_seconds=170e-6, rounds=12)

    monkeypatch.setattr(cluster, "find_machine", lambda *_: GPU)
    monkeypatch.setattr(session, "GpuEvaluator", Gpu)
    reported: list[RunProgress] = []
    request = TuneRequest(SizeSource(given=((16, 16, 16),)), search=SearchScope(budget=(1, 0), libtype="triton"))
    results = tritongemm.autotune(request, progress=reported.append)
    (record,) = results
    assert record.winner == "triton" and record.speedup and record.speedup > 1
    assert reported[-1].gain == pytest.approx(record.speedup) and "1 of 1 sizes won" in str(results)
    assert reported[-1] == RunProgress(1, 1, reported[-1].gain, None)
    assert results.path == Path("output/tuning_results_gfx1100.yaml")


def test_a_request_has_all_that_it_needs_and_the_import_stays_light() -> None:
    with pytest.raises(TypeError, match="budget, target, output and invariant of its own"):
        tritongemm.autotune(TuneRequest(SizeSource(given=((16, 16, 16),))), effort="quick")
    heavy = ("tritongemm.tune", "tritongemm.cli", "torch", "rich", "numpy")
    code = f"import sys, tritongemm\nprint([name for name in sys.modules if name.startswith({heavy})])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@cases(
    (TuneRequest, {"timeout_s": -1.0}, "timeout_s must be a positive number"),
    (TuneRequest, {"stop": "compiling"}, "stop must be empty, generate or compile"),
    (TuneRequest, {"invariant_runs": 3}, "invariant_runs must be 1, 2, 4 or 8"),
    (SizeSource, {"m_range": (5, 1)}, "m_range must be the least and the largest M"),
    (SearchScope, {"budget": 90}, "budget must be a number of configs and one of seconds"),
    (SearchScope, {"margin": math.nan}, "margin must be a finite number"),
)
def test_a_request_holds_what_its_fields_say(part: type, given: dict[str, Any], complaint: str, /) -> None:
    refuses(complaint, part, **given)


@cases(
    ("quick", ("exhaustive", 16), ("guided", 32)),
    ("normal", ("exhaustive", 64), ("guided", 0)),
    ("full", ("exhaustive", 0), ("exhaustive", 0)),
)
def test_levels_of_effort(effort: str, offline: tuple[str, int], timed: tuple[str, int], /) -> None:
    request = TuneRequest(search=SearchScope(effort=effort))
    for machine, expected in ((OFFLINE, offline), (GPU, timed)):
        protocol = session.make_protocol(request, machine)
        for own in ({}, {"budget": (7, 0)}, {"strategy": "genetic", "budget": (0, 0)}):
            asked = replace(request, search=replace(request.search, **own))
            plan = session.make_options(asked, machine, ("triton",), protocol, Path("out.yaml"))
            wanted = own.get("strategy", expected[0]), own.get("budget", expected[1:])[0]
            assert (plan.strategy, plan.budget) == wanted


@apart(
    ([], {}, "there are no sizes to tune"),
    ([(16, 16)], {}, r"\(16, 16\) is no size"),
    ([(16, 16, 16), (0, 1, 1)], {}, "row 2 .line 2. M must be at least 1"),
    ([{"M": 16, "N": 16}], {}, "has no K"),
    ([(16, 16, 16)], {"dtype": "fp7"}, "unknown dtype 'fp7'; there are: fp16"),
    ([(16, 16, 16)], {"effort": "mad"}, "no effort 'mad'; there are: quick, normal, full"),
    ([(16, 16, 16)], {"budget": "soon"}, "'soon' is neither a number of configs"),
    ("absent.yaml", {}, "absent.yaml"),
    ((16, 16, 16), {}, "16 is no size"),
    (None, {}, "sizes is None; give a list"),
    ([(16, 16, 16)], {"output": "."}, "'.' is a folder; name a file in it"),
)
def test_what_can_not_be_tuned(asked: Any, more: dict[str, Any], complaint: str, /, folder: Path) -> None:
    refuses(complaint, autotune, asked, **more)
    assert not [*folder.iterdir()]


def test_the_example_of_the_page_runs(monkeypatch: Patch) -> None:
    monkeypatch.setattr(tritongemm, "autotune", autotune)
    text = (ROOT / "docs/how-to/python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found: dict[str, Any] = {}
    exec(example.replace("4096", "16"), found)
    assert len(found["results"]) == 3 and Path("report.html").exists() and Path("served.yaml").exists()
