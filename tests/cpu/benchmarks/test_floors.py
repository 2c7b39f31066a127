"""benchmarks/floors.py without a GPU: what the best tiles take at given rates."""

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tritongemm.core.problem import Problem, matrices


@pytest.fixture(scope="module")
def floors() -> ModuleType:
    return importlib.import_module("floors")


def bf16(m: int, n: int, k: int) -> Problem:
    return Problem(m, n, k, *matrices("bf16"))


def test_one_tile_is_its_instructions_or_its_blocks(floors: ModuleType) -> None:
    assert floors.Rates(1e12, math.inf, 0).tiles(bf16(64, 8, 64), 1) == pytest.approx(2 * 64 * 8 * 64 / 1e12)
    assert floors.Rates(math.inf, 1e9, 0).tiles(bf16(64, 8, 64), 1) == pytest.approx((64 + 8) * 64 * 2 / 1e9)


def test_columns_come_in_eights_of_either_operand(floors: ModuleType) -> None:
    """104 rows are 13 times 8 columns of the transpose, not two tiles of 64 rows."""
    assert floors.Rates(1e12, math.inf, 0).tiles(bf16(104, 64, 64), 1) == pytest.approx(2 * 104 * 64 * 64 / 1e12)


@pytest.mark.parametrize("size", [(1, 4096, 4096), (256, 8192, 3584), (777, 5120, 5120), (4096, 4096, 4096)])
def test_a_floor_is_above_all_units_at_full_rate_and_falls_with_rates_and_units(
    floors: ModuleType, size: tuple[int, int, int]
) -> None:
    problem = bf16(*size)
    slow, fed, fast = (floors.Rates(7e12, b, 0).tiles(problem, 132) for b in (100e9, 140e9, math.inf))
    assert problem.flops / (132 * 7e12) <= fast <= fed <= slow
    assert floors.Rates(7e12, 140e9, 0).tiles(problem, 264) <= fed


def test_splits_pay_for_their_sums(floors: ModuleType) -> None:
    """The smallest tile can only be shared along K: an eighth of the blocks, and seven eighths of the sums."""
    problem = bf16(64, 8, 8192)
    blocks, sums = (64 + 8) * 2 * 8192, 4 * 64 * 8
    assert floors.Rates(math.inf, 1e9, 0).tiles(problem, 8) == pytest.approx((blocks / 8 + sums * 7 / 8) / 1e9)


def test_columns_come_in_as_powers_of_two(floors: ModuleType) -> None:
    assert floors.Tile(64, 112, 1, False).parts() == [64, 32, 16]
    assert floors.Tile(128, 256, 1, False).parts() == [256]


def test_programs_are_tiles_of_c_or_of_its_transpose_times_splits(floors: ModuleType) -> None:
    problem = bf16(100, 1000, 64)
    assert floors.Tile(64, 256, 2, False).programs(problem) == 2 * 4 * 2
    assert floors.Tile(64, 256, 2, True).programs(problem) == 16 * 1 * 2


def test_a_floor_is_the_longer_of_multiplying_and_bringing_of_the_best_tile(
    floors: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert floor(0.0) == pytest.approx(least[0])
    assert len(asked) == 1
    between = (least[0] + least[10]) / 2
    assert floor(between) == pytest.approx(between)
    assert len(asked) == sum(x < between for x in least)
    assert floor(1.0) == pytest.approx(least[floors.MOST_BROUGHT])
    assert len(asked) == floors.MOST_BROUGHT


@pytest.mark.parametrize(
    ("text", "said"),
    [("- {M: 16, N: 16}\n", "has no K"), ("- {M: 16, N: 16, K: 16}\n", "holds no results, only sizes")],
)
def test_a_file_of_no_results_is_named_before_a_gpu_is_looked_for(
    floors: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    said: str,
) -> None:
    file = tmp_path / "results.yaml"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["floors.py", str(file)])
    with pytest.raises(SystemExit):
        floors.main()
    error = capsys.readouterr().err
    assert str(file) in error and said in error
