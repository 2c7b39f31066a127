import html
import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import DATA
from tests.support.nouns import InputError, Target, loader
from tests.support.reports import H200, HOSTILE, problem, result, table, write_run
from tests.support.stores import ONE, record
from tritongemm.report.page import tables, writing
from tritongemm.report.page.figure import Figure, plain
from tritongemm.report.page.report_data import MeasuredDevice, ReportData, device_of, uplift_of
from tritongemm.results import history
from tritongemm.results.server_comparison import QUANTITIES, Agreement, ComparedLoad, Quantity, ServerComparison
from tritongemm.system.printable import printable

DEVICE = MeasuredDevice("sm90", 132, "NVIDIA H200")
H200_FACTS: dict[MeasuredDevice, Target] = {DEVICE: loader.load_target("sm90", "NVIDIA H200", compute_units=132)}


@pytest.fixture
def entire(tmp_path: Path) -> ReportData:
    records = [*table(4096, 4096), *table(1024, 8192)]
    run = write_run(tmp_path / "out.yaml", records, "register spills 12 > 0")
    return ReportData(tuple(records), {"out.yaml.journal": history.read(run.with_name("out.yaml.journal"))}, H200_FACTS)


def drawn(data: ReportData) -> dict[str, Figure]:
    return {figure.name: figure for figure in writing.draw_all(data)}


def test_every_figure_is_drawn_where_nothing_is_missing(entire: ReportData) -> None:
    assert {name for name, figure in drawn(entire).items() if not figure.traces} == set()
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    for figure in drawn(entire).values():
        reported = graph_objects.Figure({"data": list(figure.traces), "layout": dict(figure.layout)})
        assert len(reported.data) == len(figure.traces), "it refuses properties that it does not know"
    figure = drawn(entire)["ranges"]
    bars = {trace["name"]: list(zip(trace["base"], trace["x"], strict=True)) for trace in figure.traces}
    assert bars == {
        "triton: gemv": [(1, 16)] * 2, "triton: tile": [(17, 80)] * 2, "triton: ws_tma": [(97, 416)] * 2,
        "torch": [(513, 3584)] * 2,
    }  # fmt: skip


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


def test_gains_at_an_m_are_weighed_by_the_calls_at_any_m() -> None:
    """One product is twice as fast, and called three times where the other one, which the library serves, is once."""
    fast = result(problem(64), 1e-6, library_seconds=2e-6, m_from=17)
    same = result(problem(16, 512), 2e-6, library_seconds=1e-6, winner="torch", m_from=1)
    data = ReportData((fast, same, result(problem(16, 1024), 1e-6)), layers={"4096x4096_bf16_TN": "up_proj"})
    assert data.predicted_gains([65, 20]) == {20: pytest.approx(2)}
    weighed = replace(data, calls={problem(2): 3.0, problem(300, 512): 1.0, problem(64): 0.0})
    exact = result(problem(8), 1e-6, library_seconds=1e-6)
    for records in ((replace(fast, m_from=1), same, exact), (exact, replace(fast, m_from=1), same)):
        gains = replace(weighed, records=records).predicted_gains([16, 8, 4])
        assert gains == {4: gains[16], 8: pytest.approx(1), 16: pytest.approx(7 / 4)}, "an M's row, then a range"
    assert replace(data, records=(fast, replace(same, compute_units=78))).predicted_gains([20]) == {}
    (cells,) = drawn(data)["ratios"].traces
    assert cells["y"][-1] == "all of them" and "4096x4096_up_proj bf16_TN" in cells["y"]
    assert cells["text"][-1] == ["1.12", "2.00"]
    ranges = [result(problem(10 * end), 1e-6, library_seconds=2e-6, m_from=10 * end - 9) for end in range(1, 41)]
    (cells,) = drawn(ReportData(tuple(ranges)))["ratios"].traces
    assert cells["x"] == ["1", "2", "4", "8", "16", "32", "64", "128", "256"] and set(cells["text"][0]) == {"2.00"}


def test_no_regret_is_drawn_on_an_axis_of_few_percent_and_labels_are_cut() -> None:
    exact = result(problem(16), 1e-6, m_from=1, held_out={"5": (0.0, 1.1)})
    assert drawn(ReportData((exact,)))["regret"].layout["yaxis"]["range"][1] == 0.05
    assert len(plain("x" * 10**6)) <= 120
    data = ReportData((result(problem(16), 20e-6), result(problem(16, 512), 1e-9)), targets=H200_FACTS)
    floor, above = drawn(data)["left"].traces
    assert floor["x"][-1] + above["x"][-1] == pytest.approx(20e-3, 1e-4) and above["x"][0] == 0, "faster than the floor"
    assert floor["x"][-1] * 1e-3 == pytest.approx(data.floor_seconds(data.records[0]), 1e-4)


def test_changes_against_older_results_and_a_server_before_and_after() -> None:
    new = (result(problem(16), 1e-6), result(problem(32), 1e-6), result(problem(64), 1e-6), result(problem(8), 1e-6))
    old = [result(problem(m), seconds) for m, seconds in ((16, 2e-6), (32, 0.9e-6), (64, 1.015e-6), (128, 1e-6))]
    table = tables.tabulate_changes(ReportData(new, calls={r.problem: 10.0 for r in new}, older=tuple(old)))
    assert table and {row[0].text.split("x")[0]: (row[1].text, row[6].text) for row in table.rows} == {
        "16": ("faster", "0.01"), "32": ("slower", "-0.001"), "64": ("alike", "0.00015"), "8": ("new", "0"),
        "128": ("gone", "0"),
    }  # fmt: skip
    assert "1 faster, 1 slower, 1 alike, 1 new, 1 gone; " in table.caption
    assert "all calls of sizes in both take 0.03 ms instead of 0.03915 ms, -23.4%" in table.caption
    assert tables.tabulate_changes(ReportData(new)) is None
    assert "no size that is called is in both" in (tables.tabulate_changes(ReportData(new, older=())) or table).caption
    times = {"step_ms": ([2.0, 2.01], [1.9, 1.92])}
    quantities = tuple(Quantity(name, *times.get(name, ([1.0], [1.0]))) for name in QUANTITIES)
    loads = (ComparedLoad("batch 1", 1, quantities, 1.2), ComparedLoad("prompt 512", 512, quantities))
    compared = ServerComparison([HOSTILE], HOSTILE, HOSTILE, loads, {HOSTILE: Agreement(2, 1, 0.5, 0.1)}, [HOSTILE])
    data = ReportData((result(problem(16), 1e-6),), server=compared)
    figure = drawn(data)["server"]
    step, predicted = figure.traces[0], figure.traces[-1]
    gain, _, most = quantities[0].gain
    assert step["x"] == pytest.approx([gain - 1] * 2, 1e-3)
    assert step["error_x"]["array"] == pytest.approx([most - gain] * 2, 1e-3)
    assert (predicted["x"], predicted["y"]) == ([1.2], ["batch 1"]) and "up to 0.5% apart" in figure.caption
    name, numbers = next(iter(writing.tile_groups(data)))
    assert name and numbers == [("1.050", "step, batch 1"), ("1.000", "first token, prompt 512")]
    if find_spec("plotly"):
        assert HOSTILE not in writing.compose(data, "server")


def test_results_of_several_devices_are_not_added_up() -> None:
    lost = result(problem(16), 2e-6, library_seconds=1e-6, winner="torch")
    assert uplift_of(ReportData((lost,))) == (0, 0, 0)
    # Each device has figures and numbers of its own; what the one lost is not taken from what the other gained.
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
    data = ReportData((wide, narrow, own, other), calls={problem(m): float(m) for m in (16, 20, 50, 96, 97, 600)})
    assert [data.weight(record) for record in (narrow, wide, own, other)] == [50 + 96, 97, 20, 0]
    assert data.unserved == (problem(16), problem(600))
    rows = [[cell.text for cell in row[1:3]] for row in tables.tabulate_sizes(data).rows]
    assert rows == [["17", "512"], ["17", "96"], ["-", "20"], ["-", "512"]]


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
