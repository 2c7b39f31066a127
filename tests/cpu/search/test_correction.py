import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from tests.support import ROOT
from tests.support.covering import pairwise
from tests.support.kernel_cases import GFX942, SM90
from tests.support.nouns import Capsys, Config, Groups, InputError, Patch, Problem, Target, cases, each, matrices, space
from tritongemm.plugins.validity import check_config
from tritongemm.search.cost_model import correction, model
from tritongemm.search.pruning import prune
from tritongemm.search_spaces import loader as target_files

H200 = target_files.load_target("sm90", "H200")
BF16 = Problem(256, 4096, 4096, *matrices("bf16", layout="TN"))
CONFIGS = tuple(
    Config(template, 64, n, 128, 4, 1, 4, stages, options=(("ahead", 1), ("early", 0), ("poll", 0), ("swap_ab", 0)))
    for template in ("tile", "tma")
    for n in (64, 128)
    for stages in (2, 4, 6)
)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:  # processes are lent to tests of the same path alone
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("fit_correction")


def seconds(problem: Problem, configs: tuple[Config, ...] = CONFIGS, warm: bool = False) -> dict[Config, float]:
    return {p.config: p.seconds for p in model.rank(configs, problem, H200, warm=warm)}


def analytical(monkeypatch: Patch, problem: Problem, warm: bool = False) -> dict[Config, float]:
    with monkeypatch.context() as patch:
        patch.setattr(correction, "fitted", lambda target: None)
        return seconds(problem, warm=warm)


def figures(script: ModuleType, *names: str) -> tuple[list[list[float]], list[list[float]]]:
    """Quality of each table by the analytical model, and by a correction that has seen no table of its (N, K)."""
    tables = [(name, table) for name in names for table in script.read(script.DATA / f"h200_{name}.jsonl.gz")]
    templates = sorted({c.template for _, table in tables for c in table.times})
    given = script.examples(tables, templates)
    return [script.quality(e, None) for e in given], script.held_out(given, script.Fit(given, templates))


def means(table: list[list[float]]) -> list[float]:
    return [float(v) for v in np.exp(np.log(table).mean(axis=0))]


def test_first_picks_at_sizes_it_has_not_seen(script: ModuleType, monkeypatch: Patch) -> None:
    monkeypatch.setattr(script, "FASTEST", 50)
    monkeypatch.setattr(script, "OTHERS", 10)
    with threadpool_limits(1):  # where other tests hold the cores, threads that wait for each other cost more
        before, after = figures(script, "bf16_sample", "fp8_blocks")
    assert means(after)[0] > 0.93 > means(before)[0] + 0.1 and means(after)[1] > 0.98 > means(before)[1]
    assert min(first for first, _ in after) > 0.6 and min(eight for _, eight in after) > 0.8


@pytest.mark.heavy
def test_what_is_shipped_is_what_all_tables_teach(script: ModuleType) -> None:
    tables = [(path.name, table) for path in sorted(script.DATA.glob("h200_*.jsonl.gz")) for table in script.read(path)]
    shipped = correction.fitted("sm90")
    assert shipped is not None
    given = script.examples(tables, shipped.templates)
    fit = script.Fit(given, shipped.templates)
    again, after = fit.without(), script.held_out(given, fit)
    for example in given:
        factors = [c.factors(example.configs, example.rows) for c in (shipped, again)]
        assert factors[0] == pytest.approx(factors[1], rel=0.05)
    assert means(after)[0] > 0.93 and means(after)[1] > 0.97
    entire = means([a for e, a in zip(given, after, strict=True) if "complete" in e.name])
    assert entire[0] > 0.92 and entire[1] > 0.97


@cases(
    replace(BF16, a=BF16.a._replace(dtype="fp16"), b=BF16.b._replace(dtype="fp16")),
    replace(BF16, b=BF16.b._replace(row_major=True)),
    replace(BF16, batch=4),
    replace(BF16, groups=Groups(2)),
)
def test_problems_without_a_table_are_the_analytical_models(problem: Problem, /, monkeypatch: Patch) -> None:
    assert seconds(problem) == analytical(monkeypatch, problem)
    assert seconds(BF16, warm=True) == analytical(monkeypatch, BF16, warm=True)


def test_factors_are_of_recorded_templates_within_bounds_and_read_back() -> None:
    fitted = correction.fitted("sm90")
    assert fitted is not None and correction.fitted("gfx942") is None
    _, rows = model.features(CONFIGS, BF16, H200, fitted.templates)
    assert all(fitted.factors([replace(c, template="not_recorded") for c in CONFIGS], rows) == 1)
    assert all(fitted.factors([replace(c, backend="cutlass") for c in CONFIGS], rows) == 1)
    assert len(set(fitted.factors(CONFIGS, rows).tolist())) > 1 and fitted is not None
    for size in [(1, 1, 1), (1, 16, 65536), (70000, 70000, 16), (33, 100003, 77)]:
        _, rows = model.features(CONFIGS, replace(BF16, m=size[0], n=size[1], k=size[2]), H200, fitted.templates)
        factors = fitted.factors(CONFIGS, rows)
        assert np.isfinite(factors).all() and abs(np.log(factors)).max() <= fitted.most
    assert fitted is not None
    data = fitted.to_json()
    again = correction.Correction.from_json(data)
    _, rows = model.features(CONFIGS, BF16, H200, fitted.templates)
    assert again.factors(CONFIGS, rows) == pytest.approx(fitted.factors(CONFIGS, rows))
    with pytest.raises(InputError, match="fit it again"):
        correction.Correction.from_json({**data, "features": data["features"][1:]})


def test_the_script_says_what_a_fit_is_worth(script: ModuleType, capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setattr(script, "FASTEST", 30)
    monkeypatch.setattr(script, "OTHERS", 10)
    assert script.main([str(Path(script.DATA) / "h200_bf16_sample.jsonl.gz"), "--each"]) == 0
    printed = capsys.readouterr().out
    assert "h200_bf16_sample" in printed and "1x4096x4096" in printed


BATCH = Problem(16, 512, 512, *matrices("bf16", layout="TN"), batch=128)


@each(("target", "m", "shared"), pairwise([SM90, GFX942], [1, 16, 256], ["", "a", "b"]))
def test_no_prediction_is_beyond_the_roofline(target: Target, m: int, shared: str) -> None:
    problem = replace(BATCH, m=m, a=BATCH.a._replace(shared=shared == "a"), b=BATCH.b._replace(shared=shared == "b"))
    predictions = model.rank(prune.prune(space(problem, target), problem, target).kept, problem, target)
    least = target.roofline_seconds(problem.flops, problem.bytes, problem.a.type)
    assert least < predictions[0].seconds < 20 * least + 2e-5
    assert {c.template for c in predictions.configs} <= {"tile", "gemv", "tma"}


def test_batches_fill_the_gpu_shared_operands_are_read_once_and_what_is_kept_compiles() -> None:
    """No budget goes to configs that are refused: descriptors would read the next product's rows."""
    one = replace(BATCH, batch=1, n=64, k=4096)
    alone, together = (
        {c.split_k for c in prune.prune(space(p, SM90), p, SM90).kept} for p in (one, replace(one, batch=128))
    )
    assert max(alone) > 1 and together == {1}
    config = model.rank(prune.prune(space(BATCH, SM90), BATCH, SM90).kept, BATCH, SM90).configs[0]
    own, shared = (
        model.predict(config, p, SM90).seconds for p in (BATCH, replace(BATCH, b=BATCH.b._replace(shared=True)))
    )
    assert shared < own
    problem = Problem(64, 512, 192, *matrices(layout="NT"), batch=4)
    kept = prune.prune(space(problem, SM90), problem, SM90).kept
    assert any(config.template == "tma" for config in kept)
    assert not [config for config in kept if not check_config(config, problem, SM90)]
