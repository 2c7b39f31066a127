"""Replay recorded tables to compare search strategies: ``python benchmarks/compare_strategies.py [TABLES …]``.

No GPU: a strategy asks for configs and gets their outcomes when the table was recorded, so the replayed space
is the table's configs and nothing else. Best-so-far is given over the table's best, against the exact expectation of
random search without replacement. Score P(t) = (S(t) - R(t)) / (best - R(t)): S is best-so-far, R random's expectation,
t goes from 1 config to as many as random needs to get from the median 96 % of the way to the best; averaged over
problems, then over t. 0 is random, 1 finds the best at once. A table that samples its space separates strategies less
well: the neighbours of a leader are mostly missing from it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
from _common import BENCHMARKS
from numpy.typing import NDArray
from replay_tables import Table, read

from tritongemm.core.config import AXES, Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.space import Space
from tritongemm.core.trial import Trial
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import SearchPlan, Strategy
from tritongemm.plugins.contracts.searching import Predictions
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.cost_model.correction import Correction
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files

Floats = NDArray[np.float64]
TABLES = (BENCHMARKS / "data" / "h200_bf16_complete.jsonl.gz",)
STRATEGIES = ("exhaustive", "guided", "genetic")
# Budgets that are compared, as shares of the table's configs.
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2)
# Random search is patient until it is this share of the way from the median to the best.
NEAR_SHARE = 0.96
# P(t) is averaged at a number of points.
POINTS = 100


def _recorded_part(space: Space, table: Table) -> Space:
    """The space without what the table has nothing of: options and values that came later would lead nowhere."""
    kept = []
    for axes in space.axes:
        configs = [c for c in table.times if c.template == axes.template]
        seen = {name: {dict(c.options).get(name, getattr(c, name, None)) for c in configs} for name, _ in axes.values}
        values = {name: tuple(v for v in values if v in seen[name]) for name, values in axes.values}
        # Every config has its place on these, also where none of its values is tried any more.
        values |= {name: tuple(sorted(seen[name])) for name in AXES if not values[name]}
        if configs:
            kept.append(replace(axes, values=tuple((name, v) for name, v in values.items() if v)))
    return replace(space, axes=tuple(kept))


@dataclass(frozen=True)
class Replay:
    """One table made ready: its space, the model's order, and what random search expects."""

    table: Table
    space: Space
    expected: Predictions

    @property
    def order(self) -> tuple[Config, ...]:
        """The table's configs, the predicted best first."""
        return self.expected.configs

    @classmethod
    def prepare(cls, table: Table, fitted: Correction | None = None) -> Replay:
        """Rank a table's configs, by another correction than the target's where one is given; cut its space to them."""
        chip = target_files.load_target(table.target, device_name=table.device)
        expected = cost_model.rank(table.times, table.problem, chip)
        if fitted:
            analytical, rows = cost_model.features(expected.configs, table.problem, chip, fitted.templates)
            seconds = analytical * fitted.factors(expected.configs, rows)
            order = np.argsort(seconds, kind="stable")
            configs = tuple(expected.configs[i] for i in order)
            expected = Predictions(configs, seconds[order], expected.terms[order])
        return cls(table, _recorded_part(space(table.problem, chip), table), expected)

    @cached_property
    def random(self) -> Floats:
        """Seconds random search expects of its best after 1, 2 … all configs.

        Best-so-far has the i-th fastest value with the chance that k draws without replacement miss all faster ones but
        not this one. Failures count as the slowest success, as they do in `best_so_far`.
        """
        ok = sorted(t for t in self.table.times.values() if isinstance(t, float))
        values = np.array(ok + [ok[-1]] * (len(self.table.times) - len(ok)))
        count, expected, missed = len(values), np.empty(len(values)), np.ones(len(values) + 1)
        # missed[i]: chance that the i fastest are all missed by the draws so far.
        left = count - np.arange(count + 1)
        for k in range(count):
            missed = missed * np.maximum(left - k, 0) / (count - k)
            expected[k] = (missed[:-1] - missed[1:]) @ values
        return expected

    def batches(
        self, strategy: str, budget: int = 0, seeds: Sequence[Config] = (), population: int = 0
    ) -> Iterator[list[Trial]]:
        """The trials of each batch that a strategy asks for; `population` 0 is the strategy's own."""
        plan = SearchPlan(self.space, self.expected, tuple(seeds), population=population)
        search = registry.get(Strategy, strategy).search(plan, budget)
        batch = next(search)
        with suppress(StopIteration):
            while True:
                trials = [self.table.trial(c) for c in batch]
                yield trials
                batch = search.send(trials)

    def run(self, strategy: str, budget: int = 0, seeds: Sequence[Config] = ()) -> tuple[Floats, int]:
        """Best-so-far in seconds after each config, and the number of batches."""
        worst = max(t for t in self.table.times.values() if isinstance(t, float))
        batches = list(self.batches(strategy, budget, seeds))
        found = [t.seconds if t.status == "ok" else worst for trials in batches for t in trials]
        return np.minimum.accumulate(found), len(batches)

    def patience(self) -> int:
        """Configs after which random search expects to be NEAR_SHARE of the way to the best."""
        ok = [t for t in self.table.times.values() if isinstance(t, float)]
        goal = self.table.best + (float(np.median(ok)) - self.table.best) * (1 - NEAR_SHARE)
        return int(np.argmax(self.random <= goal)) + 1


def best_after(curve: Floats, count: int) -> float:
    """Best-so-far after `count` configs; a strategy that has stopped keeps what it has."""
    return float(curve[min(count, len(curve)) - 1])


def score(replays: Sequence[Replay], curves: Sequence[Floats]) -> float:
    """P(t), averaged over problems and then over time."""
    points = np.linspace(1 / POINTS, 1, POINTS)
    scores = []
    for replay, curve in zip(replays, curves, strict=True):
        counts = [max(1, ceil(p * replay.patience())) for p in points]
        found = np.array([best_after(curve, c) for c in counts])
        chance = replay.random[np.array(counts) - 1]
        scores.append((found - chance) / (replay.table.best - chance))
    return float(np.mean(scores))


def solved(replay: Replay, replays: Sequence[Replay], count: int = 3) -> list[Config]:
    """Best configs of the tables nearest in size, as though those had been tuned before."""

    def apart(other: Replay) -> float:
        mine, theirs = replay.table.problem, other.table.problem
        return sum(abs(log2(getattr(mine, x) / getattr(theirs, x))) for x in "mnk")

    near = sorted((r for r in replays if r is not replay), key=apart)[:count]
    return [min(r.order, key=lambda c: (_seconds(r.table, c), c)) for r in near]


def _seconds(table: Table, config: Config) -> float:
    found = table.times[config]
    return found if isinstance(found, float) else float("inf")


def regret(replays: Sequence[Replay], found: Sequence[float]) -> tuple[float, float]:
    """How far above the best, on average and at worst."""
    over = [f / r.table.best - 1 for r, f in zip(replays, found, strict=True)]
    return float(np.mean(over)), max(over)


def compare(replays: Sequence[Replay], strategies: Sequence[str], seeded: bool) -> list[dict[str, Any]]:
    """One row a competitor: regret at each fraction of the space, and what its own default budget brings."""
    counts = {f: [max(1, round(f * len(r.order))) for r in replays] for f in FRACTIONS}
    seeds = [solved(r, replays) if seeded else [] for r in replays]
    chance = {
        f: regret(replays, [best_after(r.random, c) for r, c in zip(replays, n, strict=True)])
        for f, n in counts.items()
    }
    rows: list[dict[str, Any]] = [{"strategy": "random (exact)", "at": chance, "score": 0.0}]
    for name in strategies:
        reached = {}
        for fraction, budgets in counts.items():
            curves = [r.run(name, b, s)[0] for r, b, s in zip(replays, budgets, seeds, strict=True)]
            reached[fraction] = regret(replays, [float(c[-1]) for c in curves])
        patient = [r.run(name, r.patience(), s)[0] for r, s in zip(replays, seeds, strict=True)]
        own = [r.run(name, 0, s) for r, s in zip(replays, seeds, strict=True)]
        rows.append(
            {
                "strategy": name,
                "at": reached,
                "score": score(replays, patient),
                "own": regret(replays, [float(c[-1]) for c, _ in own]),
                "trials": float(np.mean([len(c) for c, _ in own])),
                "share": float(np.mean([len(c) / len(r.order) for (c, _), r in zip(own, replays, strict=True)])),
                "rounds": max(n for _, n in own),
                "curves": {r.table.problem.key: c.tolist() for r, (c, _) in zip(replays, own, strict=True)},
            }
        )
    return rows


def plot(path: Path, replays: Sequence[Replay], rows: Sequence[dict[str, Any]]) -> None:
    """Mean best-so-far over the best, against configs tried."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    longest = max((len(c) for row in rows[1:] for c in row["curves"].values()), default=1)
    ticks = range(1, min(longest, max(len(r.order) for r in replays) // 2) + 1)
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for row in rows:
        curves = [np.array(row["curves"][r.table.problem.key]) if "curves" in row else r.random for r in replays]
        mean = [100 * regret(replays, [best_after(c, n) for c in curves])[0] for n in ticks]
        axis.plot(ticks, mean, label=row["strategy"])
    axis.set(xlabel="configs tried", ylabel="above the best, mean (%)", xscale="log", ylim=(0, 60))
    axis.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(argv: list[str] | None = None) -> int:
    """Replay the tables and print how the strategies compare; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", type=Path, nargs="*", default=TABLES, help="files as replay_tables.py writes them")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seeded", action="store_true", help="pass the best of the tables nearest in size as seeds")
    parser.add_argument("--json", type=Path, help="write the figures and every curve here")
    parser.add_argument("--plot", type=Path, help="draw mean best-so-far here; needs matplotlib")
    args = parser.parse_args(argv)
    try:
        replays = [Replay.prepare(t) for path in args.tables for t in read(path)]
    except TritonGemmError as error:
        parser.error(str(error))
    rows = compare(replays, [s for s in args.strategies.split(",") if s], args.seeded)
    sizes = [len(r.order) for r in replays]
    coverage = sum(sizes) / sum(max(r.table.kept, len(r.order)) for r in replays)
    print(f"{len(replays)} problems, {min(sizes)} to {max(sizes)} configs each: {coverage:.0%} of their kept configs")
    print("above the best, mean/worst %, given a budget of this share of the configs; then its own budget")
    print(f"{'strategy':<16}" + "".join(f"{f:>15.0%}" for f in FRACTIONS) + f"{'P':>7}{'own budget':>15}  trials")
    for row in rows:
        line = f"{row['strategy']:<16}" + "".join(_pair(row["at"][f]) for f in FRACTIONS) + f"{row['score']:>7.2f}"
        own = f"{_pair(row['own'])}{row['trials']:>8.0f} in {row['rounds']} batches at most" if "own" in row else ""
        print(line + own)
    if args.json:
        args.json.write_text(json.dumps({"problems": len(replays), "coverage": coverage, "rows": rows}))
    if args.plot:
        try:
            plot(args.plot, replays, rows)
        except ImportError:
            print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
            return 1
    return 0


def _pair(regrets: tuple[float, float]) -> str:
    return f"{100 * regrets[0]:>7.2f}/{100 * regrets[1]:>6.1f} "


if __name__ == "__main__":
    sys.exit(main())
