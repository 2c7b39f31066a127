"""Recorded tables of timings, and the scripts of benchmarks/ that replay them and score the cost model by them."""

import importlib
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import DATA, ROOT
from tests.support.nouns import Capsys, Config, Patch, Problem, Trial, apart, fails, load_target, matrices
from tritongemm.search.cost_model import correction

BENCHMARKS = ROOT / "benchmarks"
RECORDED = BENCHMARKS / "data" / "h200_bf16_sample.jsonl.gz"


@pytest.fixture(scope="module")
def scripts() -> Any:
    return importlib.import_module("replay_tables"), importlib.import_module("compare_strategies")


def test_tables_survive_writing_and_reading(scripts: Any, tmp_path: Path) -> None:
    tables, _ = scripts
    a, b = Config("tile", 64, 64, 32), Config("tma", 64, 64, 64)
    problem = Problem(16, 32, 64).to_json()
    screen = [Trial(a, "ok", samples=(3e-6, 1e-6, 2e-6)).to_json(), Trial(b, "timeout").to_json()]
    source = tmp_path / "run.json"
    source.write_text(json.dumps([{"problem": problem, "screen": screen}]))
    assert tables.main([str(source), str(tmp_path / "out.jsonl.gz")]) == 0
    tables.write(tmp_path / "plain.jsonl", tables.read(tmp_path / "out.jsonl.gz"))
    for name in ("out.jsonl.gz", "plain.jsonl"):
        (table,) = tables.read(tmp_path / name)
        assert table.problem == Problem(16, 32, 64) and table.times == {a: 2e-6, b: "timeout"} and table.kept > 100
        assert table.trial(a).seconds == 2e-6 and table.trial(b).status == "timeout"
    journal = tmp_path / "results.yaml.journal"
    lines = [json.dumps({"problem": problem, "trial": t}) for t in screen]
    journal.write_text("\n".join([json.dumps({"header": {}}), *lines, ""]))
    tables.main([str(journal), str(tmp_path / "again.jsonl")])
    assert tables.read(tmp_path / "again.jsonl")[0].times == {a: 2e-6, b: "timeout"}


def test_random_search_is_expected_exactly_and_another_correction_reorders(scripts: Any) -> None:
    tables, script = scripts
    found: tuple[float | str, ...] = (5.0, 1.0, "timeout", 2.0, 2.0, 9.0)
    times = {Config("tile", 64, 64, 32, group_m=i): t for i, t in enumerate(found, 1)}
    replay = script.Replay.prepare(tables.Table(Problem(64, 64, 64), "sm90", "", 6, times))
    values = [9.0 if isinstance(t, str) else t for t in found]
    for k in range(1, 7):
        assert replay.random[k - 1] == pytest.approx(np.mean([min(drawn) for drawn in combinations(values, k)]))
    table = tables.read(RECORDED)[6]
    shipped = script.Replay.prepare(table)
    fitted = correction.fitted("sm90")
    assert script.Replay.prepare(table, fitted).order == shipped.order
    none = correction.Correction(**{**vars(fitted), "most": 0.0})
    assert set(script.Replay.prepare(table, none).order) == set(shipped.order) != shipped.order


def test_strategies_are_compared_on_tables(scripts: Any, tmp_path: Path, capsys: Capsys) -> None:
    tables, script = scripts
    few, out = tmp_path / "few.jsonl", tmp_path / "out.json"
    tables.write(few, tables.read(RECORDED)[6:8])
    assert script.main([str(few), "--strategies", "exhaustive,guided", "--json", str(out), "--seeded"]) == 0
    assert "random (exact)" in capsys.readouterr().out
    rows = {r["strategy"]: r for r in json.loads(out.read_text())["rows"]}
    assert rows["guided"]["score"] > 0.5 and rows["guided"]["own"][0] <= 0.01
    assert rows["exhaustive"]["own"] == [0.0, 0.0]


HEAD = '{"version": 1, "target": "sm90", "device": ""}\n'


@apart(
    ("not json\n", "line 1: Expecting value"),
    ('{"version": 1}\n', "line 1: lacks 'target'"),
    (HEAD.replace("1", "9"), "version 9 of the table format"),
    (HEAD, "holds no tables"),
    (HEAD + '\n{"problem": {"m": 1}, "times": {"what": 1.0}}\n', "line 3: 'what' is not a config name"),
    (
        HEAD + '{"problem": {}, "kept": 1, "times": {"tile__bm16__bn16__bk16__gm1__sk1__w1__s2": "odd"}}\n',
        "status: odd",
    ),
)
def test_a_broken_table_is_named(text: str, said: str, /, scripts: Any, tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text(text)
    fails(SystemExit, "", scripts[1].main, [str(file)])
    error = capsys.readouterr().err
    assert str(file) in error and said in error


def test_a_replay_goes_along_the_axes_of_its_table(scripts: Any) -> None:
    """What came to the space later would only lead to configs without a time."""
    tables, script = scripts
    times = {Config("tile", 64, n, 32, options=(("swap_ab", 0),)): 1.0 + n for n in (64, 128)}
    (axes,) = script.Replay.prepare(tables.Table(Problem(64, 512, 512), "sm90", "", 2, times)).space.axes
    values = dict(axes.values)
    assert values["block_n"] == (64, 128) and values["block_m"] == (64,) and values["swap_ab"] == (0,)
    assert "poll" not in values and all(axes.config(axes.point(c)) == c for c in times)


def test_a_replay_keeps_axes_whose_values_are_no_longer_tried(scripts: Any) -> None:
    """Recorded gemv kernels had stages, which are always 1 now; their neighbours are looked for all the same."""
    tables, script = scripts
    options = (("ahead", 0), ("early", 0), ("prefetch", 1))
    times = {Config("gemv", 1, n, 256, num_stages=3, options=options): 1.0 + n for n in (4, 8)}
    replay = script.Replay.prepare(tables.Table(Problem(1, 512, 512), "sm90", "", 2, times))
    (axes,) = replay.space.axes
    assert dict(axes.values)["num_stages"] == (3,) and all(axes.config(axes.point(c)) == c for c in times)
    assert set(times) <= set(replay.space.neighbours(next(iter(times)))) | {next(iter(times))}


@pytest.fixture(scope="module")
def side_by_side() -> Any:
    return importlib.import_module("guided_and_genetic")


def test_compilers_start_anew_with_each_batch(side_by_side: Any) -> None:
    """Three kernels on two cores take two turns; a kernel that only walks its tiles otherwise is compiled already."""
    first = [Trial(Config("tile", m, 64, 64), "ok", samples=(m * 1e-6,)) for m in (64, 32, 128)]
    second = [
        Trial(Config("tile", 64, 64, 64, group_m=4), "ok", samples=(30e-6,)),
        Trial(Config("tile", 16, 64, 64), "timeout"),
    ]
    found = side_by_side.course([first, second], cores=2)
    turn, screen = side_by_side.COMPILE_SECONDS, side_by_side.SCREEN_SECONDS
    assert found.spent == pytest.approx((0, 2 * turn + 3 * screen, 3 * turn + 5 * screen))
    assert found.best == (np.inf, 32e-6, 30e-6) and (found.configs, found.kernels) == (5, 4)
    assert found.until(32e-6) == found.spent[1] and found.until(31e-6) == found.spent[2]
    assert found.until(1e-6) == np.inf


def test_guided_and_genetic_search_side_by_side(
    scripts: Any, side_by_side: Any, tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    tables, script = scripts
    few = tmp_path / "few.jsonl"
    tables.write(few, tables.read(RECORDED)[6:8])
    # Fitting a correction for each (N, K) takes as many seconds as all other tests of this file.
    monkeypatch.setattr(side_by_side, "held_out", lambda given: [script.Replay.prepare(t) for t in given])
    assert side_by_side.main([str(few), "--population", "40", "--generations", "3", "--budget", "48"]) == 0
    printed = capsys.readouterr().out.splitlines()
    genetic, guided, outcome = printed[-3:]
    assert genetic.startswith("genetic: 240 configs") and guided.startswith("guided: ")
    assert int(guided.split()[1]) <= 96 and "in 2 of 2 tables" in outcome
    assert [row.split()[0] for row in printed[2:4]] == ["1024x1280x8192_bf16_TN", "1024x4096x4096_bf16_TN"]


FIXTURE = DATA / "score_model.yaml"
TUNED = DATA / "tune_gemm" / "fallback_tuned_configs_gfx942.yaml"  # AMD's
GFX942 = load_target("gfx942")


@pytest.fixture(scope="module")
def script() -> Any:
    return importlib.import_module("score_model")


def test_rows_have_defaults_and_rank_among_what_the_tuner_tried(script: Any) -> None:
    rows = script.read(FIXTURE)
    assert [r.tile for r in rows] == [(256, 256, 64), (32, 32, 128), (256, 16, 64)]
    assert [r.num_sms for r in rows] == [0, 304, 0]
    assert rows[0].problem.layout == "TN" and rows[1].problem.layout == "TN"
    scores = script.score(script.read(FIXTURE), GFX942)
    assert scores[0].rank == 1 and scores[1].rank > 0 and scores[2].rank == 0
    assert script.agreement(scores)[1] == pytest.approx(sum(s.rank == 1 for s in scores) / 3)
    scores = script.score(script.read(TUNED)[1::6], GFX942)
    assert all(s.rank for s in scores)
    top = script.agreement(scores)
    assert top[5] >= 0.9 and top[10] == 1
    row = script.Row(Problem(512, 1024, 5120, *matrices()), (64, 32, 128), 0)
    assert script.order(row, GFX942) != script.order(row, GFX942, script.Conditions(tried=False))
    assert script.order(row, GFX942) != script.order(row, GFX942, script.Conditions(warm=False))


def test_command_line(script: Any, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "score.json"
    assert script.main([str(FIXTURE), "--target", "gfx942", "--json", str(out), "--worst", "1"]) == 0
    printed = capsys.readouterr().out
    assert "top-10" in printed and "16x512x512_fp16_TN: tuned (256, 16, 64) ranks pruned" in printed
    data = json.loads(out.read_text())
    assert data["rows"] == 3 and set(data["agreement"]["all"]) == {"top_1", "top_5", "top_10", "top_20"}


def test_stream_k_rows_are_ranked_by_full_tiles_of_programs_on_a_compute_unit_each(script: Any) -> None:
    row = script.Row(Problem(4864, 4096, 4096, *matrices(layout="TN")), (256, 256, 64), 304)
    assert script.score([row], GFX942)[0].rank == 1
    assert script.score([row], GFX942, script.Conditions(cut_k=True))[0].rank == 1  # nothing is left over to cut
    row = script.Row(Problem(512, 1024, 5120, *matrices(layout="TN")), (64, 32, 256), 304)
    entire, cut = script.order(row, GFX942), script.order(row, GFX942, script.Conditions(cut_k=True))
    assert entire[0] == row.tile  # 256 tiles, each a program's
    assert cut[0] != row.tile and cut.index(row.tile) > 3  # larger tiles, cut so that 304 programs have a share
    # Small tiles gain nothing by sharing compute units, as they do where each has a program of its own.
    problem = Problem(2048, 2048, 512, *matrices(layout="TN"))
    alone = script.order(script.Row(problem, (64, 64, 64), 304), GFX942)
    shared = script.order(script.Row(problem, (64, 64, 64), 0), GFX942)
    assert alone.index((64, 64, 64)) > shared.index((64, 64, 64))


NAME = "N=1536,K=7168,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape=[128,128].json"


def test_tables_of_tiles_rank_what_they_name(script: Any, tmp_path: Path, capsys: Capsys) -> None:
    """Tiles of 32 rows are the least that the table's tuner had, so no rule drops them where there is one row."""
    rows = {1: (32, 32), 512: (32, 64), 4096: (64, 128)}
    common = {"BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 2}
    table = {str(m): {"BLOCK_SIZE_M": high, "BLOCK_SIZE_N": wide, **common} for m, (high, wide) in rows.items()}
    file = tmp_path / NAME
    file.write_text(json.dumps(table))
    read = script.read(file)
    assert [(r.problem.m, r.tile[:2], r.problem.a.type.name) for r in read] == [
        (m, tile, "fp8e4m3fnuz") for m, tile in rows.items()
    ]
    named = script.Conditions(named=frozenset(r.tile for r in read))
    assert [s.tiles for s in script.score(read, GFX942, named)] == [3, 3, 3]
    assert script.score(read, GFX942)[0].rank == 0 and script.score(read, GFX942, named)[0].rank == 1
    assert script.main([str(file), str(FIXTURE), "--named"]) == 0 and "all            6" in capsys.readouterr().out
