"""benchmarks/score_model.py on a fixture of our own, and on AMD's tuned file."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import DATA
from tritongemm.core.problem import Problem, matrices
from tritongemm.search_spaces import loader as target_files

FIXTURE = DATA / "score_model.yaml"
TUNED = DATA / "tune_gemm" / "fallback_tuned_configs_gfx942.yaml"  # AMD's
GFX942 = target_files.load_target("gfx942")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("score_model")


def test_rows_with_defaults_and_extra_keys(script: ModuleType) -> None:
    rows = script.read(FIXTURE)
    assert [r.tile for r in rows] == [(256, 256, 64), (32, 32, 128), (256, 16, 64)]
    assert [r.num_sms for r in rows] == [0, 304, 0]
    assert rows[0].problem.layout == "TN" and rows[1].problem.layout == "TN"


def test_a_pruned_tile_is_a_miss(script: ModuleType) -> None:
    scores = script.score(script.read(FIXTURE), GFX942)
    assert scores[0].rank == 1 and scores[1].rank > 0 and scores[2].rank == 0
    assert script.agreement(scores)[1] == pytest.approx(sum(s.rank == 1 for s in scores) / 3)


def test_command_line(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "score.json"
    assert script.main([str(FIXTURE), "--target", "gfx942", "--json", str(out), "--worst", "1"]) == 0
    printed = capsys.readouterr().out
    assert "top-10" in printed and "16x512x512_fp16_TN: tuned (256, 16, 64) ranks pruned" in printed
    data = json.loads(out.read_text())
    assert data["rows"] == 3 and set(data["agreement"]["all"]) == {"top_1", "top_5", "top_10", "top_20"}


def test_amd_tuned_tiles_are_kept_and_rank_early(script: ModuleType) -> None:
    scores = script.score(script.read(TUNED)[1::6], GFX942)
    assert all(s.rank for s in scores)
    top = script.agreement(scores)
    assert top[5] >= 0.9 and top[10] == 1


def test_stream_k_rows_whose_tiles_fill_the_programs(script: ModuleType) -> None:
    row = script.Row(Problem(4864, 4096, 4096, *matrices(layout="TN")), (256, 256, 64), 304)
    assert script.score([row], GFX942)[0].rank == 1
    assert script.score([row], GFX942, script.Conditions(cut_k=True))[0].rank == 1  # nothing is left over to cut


def test_stream_k_rows_are_ranked_by_full_tiles_by_default(script: ModuleType) -> None:
    row = script.Row(Problem(512, 1024, 5120, *matrices(layout="TN")), (64, 32, 256), 304)
    entire, cut = script.order(row, GFX942), script.order(row, GFX942, script.Conditions(cut_k=True))
    assert entire[0] == row.tile  # 256 tiles, each a program's
    assert cut[0] != row.tile and cut.index(row.tile) > 3  # larger tiles, cut so that 304 programs have a share


def test_programs_of_stream_k_rows_have_a_compute_unit_to_themselves(script: ModuleType) -> None:
    """Small tiles gain nothing by sharing compute units, as they do where each has a program of its own."""
    problem = Problem(2048, 2048, 512, *matrices(layout="TN"))
    alone = script.order(script.Row(problem, (64, 64, 64), 304), GFX942)
    shared = script.order(script.Row(problem, (64, 64, 64), 0), GFX942)
    assert alone.index((64, 64, 64)) > shared.index((64, 64, 64))


NAME = "N=1536,K=7168,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape=[128,128].json"


def test_tables_of_tiles_rank_what_they_name(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert script.main([str(file), str(FIXTURE), "--named"]) == 0
    assert "all            6" in capsys.readouterr().out


def test_ranks_only_what_the_tuner_tried_by_default(script: ModuleType) -> None:
    row = script.Row(Problem(512, 1024, 5120, *matrices()), (64, 32, 128), 0)
    assert script.order(row, GFX942) != script.order(row, GFX942, script.Conditions(tried=False))
    assert script.order(row, GFX942) != script.order(row, GFX942, script.Conditions(warm=False))
