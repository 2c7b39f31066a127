"""The figures of a report: what they say, that plotly takes them, and that text from files stays text."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import DATA
from tests.support.reports import H200, HOSTILE, problem, result, table, write_run
from tests.support.stores import ONE, record
from tritongemm.core.errors import InputError
from tritongemm.core.target import Target
from tritongemm.report.page import tables, writing
from tritongemm.report.page.figure import Figure, plain
from tritongemm.report.page.report_data import MeasuredDevice, ReportData, device_of, uplift_of
from tritongemm.results import history
from tritongemm.search_spaces import loader
from tritongemm.system.printable import printable

DEVICE = MeasuredDevice("sm90", 132, "NVIDIA H200")
H200_FACTS: dict[MeasuredDevice, Target] = {DEVICE: loader.load_target("sm90", "NVIDIA H200", compute_units=132)}


@pytest.fixture
def entire(tmp_path: Path) -> ReportData:
    """A report of which nothing is missing."""
    records = [*table(4096, 4096), *table(1024, 8192)]
    run = write_run(tmp_path / "out.yaml", records, "register spills 12 > 0")
    reported = {"out.yaml.journal": history.read(run.with_name("out.yaml.journal"))}
    return ReportData(tuple(records), reported, H200_FACTS)


def drawn(data: ReportData) -> dict[str, Figure]:
    return {figure.name: figure for figure in writing.draw_all(data)}


def test_every_figure_is_drawn_where_nothing_is_missing(entire: ReportData) -> None:
    assert {name for name, figure in drawn(entire).items() if not figure.traces} == set()


def test_plotly_takes_every_figure(entire: ReportData) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    for figure in drawn(entire).values():
        reported = graph_objects.Figure({"data": list(figure.traces), "layout": dict(figure.layout)})
        assert len(reported.data) == len(figure.traces), "it refuses properties that it does not know"


def test_what_is_missing_is_said() -> None:
    """A result alone, of an architecture that no one knows, without a library's time."""
    figures = drawn(ReportData((record(ONE, target="gfx9999"),)))
    assert {name for name, figure in figures.items() if figure.traces} == {"roofline", "winners"}
    assert all("Not drawn: " in figure.caption for figure in figures.values() if not figure.traces)
    assert "neither floor nor roof" in figures["roofline"].caption


def test_a_real_journal_is_drawn() -> None:
    reported = history.read(DATA / "h200_fp8_journal.jsonl")
    figures = drawn(
        ReportData(reported.records, {"run": reported}, {device_of(reported.records[0]): H200_FACTS[DEVICE]})
    )
    assert {name for name, figure in figures.items() if not figure.traces} == {"ranges", "regret"}
    ours, library, floor = figures["roofline"].traces[-3:]
    assert all(o > w for o, w in zip(ours["y"], library["y"], strict=True)), "the library lost all five"
    assert all(f >= o for f, o in zip(floor["y"], ours["y"], strict=True)), "nothing is faster than the floor"
    assert sum(sum(trace["x"]) for trace in figures["failures"].traces) == len(
        [tried for tried in reported.tried if tried.trial.status != "ok"]
    )


def test_the_uplift_is_weighed_by_calls() -> None:
    """A quarter of the first size's time is saved, which is two thirds of all, and nothing of the second's."""
    fast, same = result(problem(16), 3e-6, library_seconds=4e-6), result(problem(32), 1e-6, library_seconds=1e-6)
    data = ReportData((fast, same), calls={fast.problem: 1.0, same.problem: 2.0})
    uplift = uplift_of(data)
    assert uplift and uplift.weighted == pytest.approx(1 / 6) and uplift.average == pytest.approx(1 / 6)
    (steps,) = drawn(data)["uplift"].traces
    assert steps["x"][0] == pytest.approx(6e-3) and steps["x"][-1] == pytest.approx(5e-3)
    assert steps["x"][0] + sum(steps["x"][1:-1]) == pytest.approx(steps["x"][-1])
    assert uplift_of(ReportData((fast,), calls={same.problem: 1.0})) is None


def test_a_library_that_won_loses_nothing() -> None:
    lost = result(problem(16), 2e-6, library_seconds=1e-6, winner="torch")
    uplift = uplift_of(ReportData((lost,)))
    assert uplift == (0, 0, 0)


def test_runs_of_m_with_one_config_are_one_bar(entire: ReportData) -> None:
    figure = drawn(entire)["ranges"]
    bars = {trace["name"]: list(zip(trace["base"], trace["x"], strict=True)) for trace in figure.traces}
    assert bars == {
        "triton: gemv": [(1, 16)] * 2, "triton: tile": [(17, 80)] * 2, "triton: ws_tma": [(97, 416)] * 2,
        "torch": [(513, 3584)] * 2,
    }  # fmt: skip


def test_results_of_several_devices_are_not_added_up() -> None:
    """Each device has figures and numbers of its own; what the one lost is not taken from what the other gained."""
    lost = result(problem(16), 2e-6, library_seconds=1e-6, winner="torch")
    other = result(problem(16), 1e-6, target="sm100", toolchain={**H200, "device": "NVIDIA B200"})
    figures = drawn(ReportData((lost, other)))
    titles = [figures[f"uplift-{place}"].title for place in (1, 2)]
    assert titles == ["Weighted uplift: NVIDIA H200 (sm90)", "Weighted uplift: NVIDIA B200 (sm100)"]
    assert [figures[f"uplift-{place}"].traces[0]["text"][-1] for place in (1, 2)] == ["100.0%", "80.0%"]
    first, second, _ = writing.tile_groups(ReportData((lost, other)))
    assert first[0] == "NVIDIA H200 (sm90)" and {("0", "won from the library"), ("1", "lost to it")} <= set(first[1])
    assert second[0] == "NVIDIA B200 (sm100)" and ("1", "won from the library") in second[1]


def test_calls_at_any_m_of_a_range_count() -> None:
    """The narrowest range that has the M serves it, where no result is of the M itself."""
    narrow, wide = result(problem(96), 1e-6, m_from=17), result(problem(512), 2e-6, m_from=17)
    own, other = result(problem(20), 3e-6), result(problem(512, 1024), 2e-6)
    called = {problem(m): float(m) for m in (16, 20, 50, 96, 97, 600)}
    data = ReportData((wide, narrow, own, other), calls=called)
    assert [data.weight(record) for record in (narrow, wide, own, other)] == [50 + 96, 97, 20, 0]
    assert data.unserved == (problem(16), problem(600))
    rows = [[cell.text for cell in row[1:3]] for row in tables.tabulate_sizes(data).rows]
    assert rows == [["17", "512"], ["17", "96"], ["-", "20"], ["-", "512"]]


def test_no_regret_is_drawn_on_an_axis_of_a_few_percent() -> None:
    exact = result(problem(16), 1e-6, m_from=1, held_out={"5": (0.0, 1.1)})
    assert drawn(ReportData((exact,)))["regret"].layout["yaxis"]["range"][1] == 0.05


def test_reasons_with_other_numbers_are_one(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a.yaml", [result(problem(16), 1e-6)], "shared memory 263200 > 232448 bytes")
    two = write_run(tmp_path / "b.yaml", [result(problem(16), 1e-6)], "shared memory 300000 > 232448 bytes\nmore")
    reported = {path.name: history.read(path.with_name(path.name + ".journal")) for path in (one, two)}
    found = tables.tabulate_reasons(ReportData(tuple(reported["a.yaml"].records), reported))
    assert found and [[cell.text for cell in row[:4]] for row in found.rows] == [
        ["2", "triton", "compile_failed", "shared memory 263200 > 232448 bytes"]
    ]


def test_extreme_times_are_drawn() -> None:
    """The least and the greatest time that a file may hold, in both ways; others are refused."""
    records = tuple(
        result(problem(m), ours, library_seconds=theirs, held_out={"5": [1e13, 1e13], "7": [1e13, 0.0]}, m_from=1)
        for m, (ours, theirs) in enumerate([(1e-9, 1e4), (1e4, 1e-9), (1e-9, 1e-9)], 8)
    )
    with pytest.raises(InputError, match="library_seconds must be a time from 1 ns to 10,000 s, or null, not 1e-300"):
        replace(records[0], library_seconds=1e-300)
    for figure in drawn(ReportData(records, targets=H200_FACTS)).values():
        json.dumps([figure.traces, figure.layout], allow_nan=False)


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    """In no figure is there a tag that was not written here, and the page holds no script but its own two."""
    pytest.importorskip("plotly", reason="plotly is not installed")
    hostile = result(problem(16), 1e-6, target=HOSTILE, winner=HOSTILE, library=HOSTILE, timer=HOSTILE,
                     toolchain={"device": HOSTILE, HOSTILE: HOSTILE})  # fmt: skip
    run = write_run(tmp_path / "out.yaml", [result(problem(16), 1e-6)], HOSTILE)
    reported = {HOSTILE: history.read(run.with_name("out.yaml.journal"))}
    data = ReportData((hostile, result(problem(16), 1e-6)), reported, sources=(HOSTILE,), notes=(HOSTILE,))
    for figure in drawn(data).values():
        tags = set(re.findall(r"<[^>]*>", json.dumps([figure.traces, figure.layout])))
        assert tags <= {"<br>", "<extra>", "</extra>"}, figure.name
    page = writing.compose(data, HOSTILE)
    assert page.count("<script") == 3, "the data, plotly and ours"
    assert HOSTILE not in page and "<img" not in page.split('id="drawn">')[0]


@given(st.text())
def test_any_text_is_embedded_and_read_back(text: str) -> None:
    """A browser reads labels back as they are printed, and values as they were, and finds no end of an element."""
    assert html.unescape(plain(text)) == printable(text, 120) and not {"<", ">"} & set(plain(text))
    embedded = writing.embed({text: [text]})
    assert json.loads(embedded) == {text: [text]} and not {"<", ">", "&"} & set(embedded)


def test_long_labels_are_cut() -> None:
    assert len(plain("x" * 10**6)) <= 120
