import importlib
import math
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tritongemm
from tests.support import ROOT, forked
from tests.support.nouns import Capsys, CompileJob, Defaults, Patch, Problem, apart, fails, loader, matrices, sizes
from tritongemm.build import prepare
from tritongemm.cli import tune


@pytest.fixture(scope="module")
def floors() -> ModuleType:
    return importlib.import_module("floors")


def bf16(m: int, n: int, k: int) -> Problem:
    return Problem(m, n, k, *matrices("bf16"))


def test_tiles_take_their_instructions_blocks_sums_parts_and_programs(floors: ModuleType) -> None:
    assert floors.Rates(1e12, math.inf, 0).tiles(bf16(64, 8, 64), 1) == pytest.approx(2 * 64 * 8 * 64 / 1e12)
    assert floors.Rates(math.inf, 1e9, 0).tiles(bf16(64, 8, 64), 1) == pytest.approx((64 + 8) * 64 * 2 / 1e9)
    # 104 rows are 13 times 8 columns of the transpose, not two tiles of 64 rows.
    assert floors.Rates(1e12, math.inf, 0).tiles(bf16(104, 64, 64), 1) == pytest.approx(2 * 104 * 64 * 64 / 1e12)
    # The smallest tile can only be shared along K: an eighth of the blocks, and seven eighths of the sums.
    problem = bf16(64, 8, 8192)
    blocks, sums = (64 + 8) * 2 * 8192, 4 * 64 * 8
    assert floors.Rates(math.inf, 1e9, 0).tiles(problem, 8) == pytest.approx((blocks / 8 + sums * 7 / 8) / 1e9)
    assert floors.Tile(64, 112, 1, False).parts() == [64, 32, 16]
    assert floors.Tile(128, 256, 1, False).parts() == [256]
    problem = bf16(100, 1000, 64)
    assert floors.Tile(64, 256, 2, False).programs(problem) == 2 * 4 * 2
    assert floors.Tile(64, 256, 2, True).programs(problem) == 16 * 1 * 2


@pytest.mark.parametrize("size", [(1, 4096, 4096), (256, 8192, 3584), (777, 5120, 5120), (4096, 4096, 4096)])
def test_floors_exceed_full_rate_and_fall_with_rates_and_units(floors: ModuleType, size: tuple[int, int, int]) -> None:
    problem = bf16(*size)
    slow, fed, fast = (floors.Rates(7e12, b, 0).tiles(problem, 132) for b in (100e9, 140e9, math.inf))
    assert problem.flops / (132 * 7e12) <= fast <= fed <= slow
    assert floors.Rates(7e12, 140e9, 0).tiles(problem, 264) <= fed


def test_a_floor_is_the_longer_of_multiplying_and_loading_the_best_tile(floors: ModuleType, monkeypatch: Patch) -> None:
    """Tiles are looked at from the one that multiplies fastest on, until none can be better, or enough were."""
    problem, rate, asked = bf16(256, 8192, 3584), floors.Rates(7e12, 142e9, 2e-6), []

    def bringing(bench: object, problem: Problem, tile: object, units: int) -> list[object]:
        asked.append(tile)
        return [tile]

    def floor(coming: float) -> float:
        asked.clear()
        monkeypatch.setattr(floors, "seconds", lambda bench, launch, head: coming)
        return float(floors.brought(None, problem, rate, 132, None))

    monkeypatch.setattr(floors, "bringing", bringing)
    usable = [t for t in floors.all_tiles() if t.rows != 192 and len(t.parts()) <= 3]
    least = sorted(2e-6 + rate.tile(problem, t, 132) for t in usable)
    assert floor(0.0) == pytest.approx(least[0]) and len(asked) == 1
    between = (least[0] + least[10]) / 2
    assert floor(between) == pytest.approx(between) and len(asked) == sum(x < between for x in least)
    assert floor(1.0) == pytest.approx(least[floors.MOST_BROUGHT]) and len(asked) == floors.MOST_BROUGHT


@apart(("- {M: 16, N: 16}\n", "has no K"), ("- {M: 16, N: 16, K: 16}\n", "holds no results, only sizes"))
def test_a_file_of_no_results_is_named_before_a_gpu_is_looked_for(
    text: str, said: str, /, floors: ModuleType, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    file = tmp_path / "results.yaml"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["floors.py", str(file)])
    fails(SystemExit, "", floors.main)
    error = capsys.readouterr().err
    assert str(file) in error and said in error


def test_every_file_is_read_as_its_familys_sizes(tmp_path: Path) -> None:
    files = importlib.import_module("aiter_files")
    for model in files.LAYERS:
        for family in files.COLUMNS:
            if not files.list_rows(model, family):
                continue
            rows = sizes.from_file(files.write_file(tmp_path, model, family), Defaults())
            if family == "fmoe":
                assert len(rows) == 2 * 28 and {row.problem.group_count for row in rows} == {256}
                continue
            assert 27 <= len(rows) <= 64, (model, family, len(rows))
            assert len({row.problem for row in rows}) == len(rows)
            assert {row.problem.layout for row in rows} == {"TN"}
            assert ("batched" in family) == all(row.problem.batch > 1 for row in rows)
    path = files.write_file(tmp_path, "llama_70b", "a8w8", "torch.float8_e4m3fn")
    assert {row.problem.a.dtype for row in sizes.from_file(path, Defaults())} == {"fp8e4m3fn"}


@pytest.mark.heavy
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_its_kernels_are_distinct(arch: str) -> None:
    script, target = importlib.import_module("library_load"), loader.load_target(arch)
    records = script.records(target, 200)
    jobs = [prepare.compile_job(record.problem, record.config, target) for record in records]
    assert len({job.digest for job in jobs if isinstance(job, CompileJob)}) == 200
    assert len({record.problem for record in records}) == 200
    assert {record.problem.kind for record in records} == {"one", "batched"}
    assert sum(record.problem.a.scaling is not None for record in records) >= 10


@pytest.mark.usefixtures("without_gpu")
def test_its_files_are_those_of_a_finished_run(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    script = importlib.import_module("many_rows")
    problems = script.make_problems(9)
    script.write_results(tmp_path, problems)
    assert [row.problem for row in sizes.from_file(tmp_path / "sizes.yaml", Defaults.of("bf16", c="bf16"))] == problems
    assert [row.problem for row in sizes.from_file(tmp_path / "done.yaml", Defaults())] == problems
    before = (tmp_path / "done.yaml").read_bytes()
    monkeypatch.chdir(tmp_path)
    assert tune.main(script.COMMAND) == 0 and "9 of 9 sizes are in done.yaml already" in capsys.readouterr().err
    assert (tmp_path / "done.yaml").read_bytes() == before


TOKENS, EXPERTS, TOPK, HIDDEN, INNER = 7, 4, 2, 256, 128


@pytest.fixture
def mixtures() -> ModuleType:
    return importlib.import_module("_mixtures")


def test_places_leave_room_between_experts(mixtures: ModuleType) -> None:
    cpu = torch.device("cpu")
    contiguous = mixtures.contiguous_places([3, 0, 9], 8, cpu)
    assert contiguous.shape == (24,) and contiguous.at.tolist() == [0, 1, 2, *range(8, 17)]
    assert contiguous.whose.tolist() == [0] * 3 + [-1] * 5 + [2] * 9 + [-1] * 7
    masked = mixtures.masked_places([3, 0, 9], 8, cpu)
    assert masked.shape == (3, 16) and masked.at.tolist() == [0, 1, 2, *range(32, 41)]
    assert masked.whose.tolist() == [3, 0, 9]


@pytest.mark.parametrize(("mode", "most"), [("", 0.02), ("row", 0.08), ("block", 0.08)])
def test_public_calls_are_near_float64(mixtures: ModuleType, mode: str, most: float) -> None:
    torch.manual_seed(0)
    made = mixtures.make_mixture(TOKENS, EXPERTS, TOPK, HIDDEN, INNER, mode, torch.float8_e4m3fn, "cpu")
    exact = mixtures.reference(made)
    assert sum(made.counts) == TOKENS * TOPK
    for result in (mixtures.by_public_calls(made), tritongemm.fused_moe(*made.arguments)):
        assert result.shape == made.x.shape and mixtures.deviation(result, exact) < most
    assert mixtures.deviation(mixtures.by_public_calls(made).flip(1), exact) > 0.5


PADDED_CALLS = """
import _common
import torch
from _mixtures import *
from _mixtures import _wide

def stand_in(left, right, out, places):
    (a, of_a), (w, of_w) = left, right
    a = a.double()
    if of_a is not None:
        assert of_a.shape == (*places.shape, a.shape[-1] // 128) and of_a.stride(-2) == 1
        a = a * of_a.double().repeat_interleave(128, -1)
    out.fill_(float("nan"))  # what is between experts belongs to none
    for expert in range(w.shape[0]):
        b = _wide(w, of_w, expert).T
        if len(places.shape) == 2:
            rows = int(places.whose[expert])
            out[expert, :rows] = (a[expert, :rows] @ b).to(out.dtype)
        else:
            its = places.whose == expert
            assert not its.any() or int(its.nonzero()[0]) %% 16 == 0
            out[its] = (a[its] @ b).to(out.dtype)

torch.manual_seed(0)
for mode, most in (("", 0.02), ("block", 0.12)):  # the interpreter truncates what it makes fp8 of
    mixture = make_mixture(%d, %d, %d, %d, %d, mode, torch.float8_e4m3fn, "cpu")
    exact, cpu = reference(mixture), torch.device("cpu")
    for places in (contiguous_places(mixture.counts, 16, cpu), masked_places(mixture.counts, 16, cpu)):
        error = deviation(PaddedCalls(mixture, places, stand_in)(), exact)
        assert error < most, (mode, places.shape, error)
print("near")
"""


@pytest.mark.heavy  # it interprets kernels; the public calls are quick
def test_products_that_want_room_between_experts_compute_the_same() -> None:
    folders = os.pathsep.join(map(str, (ROOT / "benchmarks", ROOT)))
    program = ["-c", PADDED_CALLS % (TOKENS, EXPERTS, TOPK, HIDDEN, INNER)]
    ran = forked.run(program, ROOT, {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": folders})
    assert ran.stdout == "near\n", ran.stderr[-3000:]


def test_a_run_of_two_sizes(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    script, sizes = importlib.import_module("simulated_run"), tmp_path / "sizes.yaml"
    sizes.write_text("- {M: 16, N: 16, K: 16}\n- {M: 33, N: 64, K: 32}\n")
    waits = [f"--{name}=0.001" for name in ("start", "plan", "compile", "listing", "algorithm", "screen", "race")]
    arguments = [str(sizes), "--devices=2", "--cores=2", "--algorithms=12", *waits]
    monkeypatch.setattr(sys, "argv", ["simulated_run.py", *arguments])
    script.main()
    said = capsys.readouterr().out
    assert "2 sizes on 2 devices: " in said and "99% of the final speed after " in said
    screened = int(said.partition(" kernels")[0].rpartition(" ")[2])
    assert 48 <= screened <= 2 * 128, "as many as guided search tries of each, fewer where they share binaries"


def test_fp8_is_moved_further(capsys: Capsys) -> None:
    importlib.import_module("token_agreement").main(["--hidden", "128", "--layers", "8", "--tokens", "32"])
    bf16, fp8 = (float(line.split("by up to ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines())
    assert 0 < 3 * bf16 < fp8
