"""Fits the cost model's correction to recorded tables: ``python benchmarks/fit_correction.py [TABLES.jsonl.gz …]``.

It prints how good the first picks are at sizes whose tables the fit has not seen: of each (N, K) in turn all tables are
held out. A pick is the config, of those recorded, that ranks first; its figure is the time of the best over its own.
``--write`` fits all tables and writes search_spaces/TARGET.correction.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _common import BENCHMARKS
from numpy.typing import NDArray
from replay_tables import Table, read

from tritongemm.codegen.template_facts import MOST_PADDED, columns_at_once, padded_columns
from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.search.cost_model import model
from tritongemm.search.cost_model.correction import Correction
from tritongemm.search_spaces import loader as target_files

DATA = BENCHMARKS / "data"
# A config that takes twice the best's time counts for a quarter: what matters is the order of the fast ones.
WEIGHT_POWER = 2.0
# How many of a table's fastest configs a fit uses at most, and how many spread over the rest.
FASTEST, OTHERS = 300, 300
# Number of configs from which a table weighs 1.
ENTIRE = 1000
# Weight that holds coefficients to 0, where all configs of a complete table together weigh 1.
RIDGE = 0.02
# Features are clipped at this number of standard deviations from their mean.
WIDEST = 2.5
# The largest factor is e to this power.
MOST = 0.7
PICKS = (1, 8)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Example:
    """One table as the fit takes it; each column has an entry for each config that ran.

    Attributes:
        problem: what was computed.
        name: of the file it is from.
        configs: those that ran, in the order that `rank` gives equal predictions.
        measured, predicted: seconds.
        rows: features, [n, features].
    """

    problem: Problem
    name: str
    configs: tuple[Config, ...]
    measured: Floats
    predicted: Floats
    rows: Floats

    @property
    def taught(self) -> NDArray[np.intp]:
        """Places of the configs that the fit learns from."""
        by_time = np.argsort(self.measured, kind="stable")
        rest = by_time[FASTEST:]
        return np.concatenate([by_time[:FASTEST], rest[:: max(1, cdiv(len(rest), OTHERS))]])

    @property
    def weights(self) -> Floats:
        """Weight of each of them; the more configs a table has, the more they weigh together, up to 1."""
        weights = (self.measured.min() / self.measured[self.taught]) ** WEIGHT_POWER
        return np.asarray(weights / weights.sum() * min(1.0, len(self.configs) / ENTIRE) ** 0.5)


def examples(tables: Iterable[tuple[str, Table]], templates: Sequence[str]) -> list[Example]:
    """Tables with what the model expects of their configs."""
    found = []
    for name, table in tables:
        target = target_files.load_target(table.target, device_name=table.device)
        columns = columns_at_once(table.problem)
        ran = {c: t for c, t in table.times.items() if isinstance(t, float) and c.template in templates}
        if columns < MOST_PADDED:  # when these were recorded, tiles that are padded now were two parts
            ran = {c: t for c, t in ran.items() if not padded_columns(c, columns)}
        configs = tuple(sorted(ran, key=lambda c: (-c.block_m * c.block_n, -c.block_m, c)))
        predicted, rows = model.features(configs, table.problem, target, templates)
        found.append(Example(table.problem, name, configs, np.array([ran[c] for c in configs]), predicted, rows))
    return found


class Fit:
    """Least squares over tables, of which any may be left out: what each adds to the normal equations is kept."""

    def __init__(self, given: Sequence[Example], templates: Sequence[str]) -> None:
        self.given = given
        every = np.vstack([e.rows[e.taught] for e in given])
        weights = np.concatenate([e.weights for e in given])
        mean = weights @ every / weights.sum()
        spread = np.sqrt(weights @ (every - mean) ** 2 / weights.sum())
        spread = np.where(spread > 1e-9, spread, 1.0)
        low = np.maximum(every.min(axis=0), mean - WIDEST * spread)
        high = np.minimum(every.max(axis=0), mean + WIDEST * spread)
        width = every.shape[1]
        dtypes = frozenset((e.problem.a.type.name, e.problem.b.type.name) for e in given)
        self.blank = Correction(
            tuple(templates), dtypes, low, high, mean, spread, np.zeros(width), np.zeros((width, width)), MOST
        )
        self._pairs = np.triu_indices(width)
        self._sums = {id(e): self._normal_equations(e) for e in given}
        self._all = [sum(parts) for parts in zip(*self._sums.values(), strict=True)]

    def _normal_equations(self, example: Example) -> tuple[Floats, Floats]:
        taught, weights = example.taught, example.weights
        logs = np.log(example.measured[taught] / example.predicted[taught])
        logs -= weights @ logs / weights.sum()  # how fast all kernels of a size are is nothing that orders them
        unit = self.blank.scaled(example.rows[taught])
        one, other = self._pairs
        columns = np.hstack([np.ones((len(unit), 1)), unit, unit[:, one] * unit[:, other]])
        columns -= weights @ columns / weights.sum()
        weighted = columns * weights[:, None]
        return weighted.T @ columns, weighted.T @ logs

    def without(self, held_out: Iterable[Example] = ()) -> Correction:
        """The correction that all tables but these teach."""
        matrix, right = (entire.copy() for entire in self._all)
        for example in held_out:
            matrix -= self._sums[id(example)][0]
            right -= self._sums[id(example)][1]
        found = np.linalg.solve(matrix + RIDGE * np.eye(len(right)), right)
        width = len(self.blank.linear)
        products = np.zeros((width, width))
        products[self._pairs] = found[1 + width :]
        return Correction(**{**vars(self.blank), "linear": found[1 : 1 + width], "products": products})


def quality(example: Example, correction: Correction | None) -> list[float]:
    """Time of the best recorded config over that of the best of the first picks, for each of `PICKS`."""
    factors = correction.factors(example.configs, example.rows) if correction else 1.0
    order = np.argsort(example.predicted * factors, kind="stable")
    return [float(example.measured.min() / example.measured[order[:count]].min()) for count in PICKS]


def held_out(given: Sequence[Example], fit: Fit) -> list[list[float]]:
    """The `quality` of each table by a correction that has seen no table of its (N, K)."""
    families: dict[tuple[int, int], list[Example]] = {}
    for example in given:
        families.setdefault((example.problem.n, example.problem.k), []).append(example)
    found = {id(e): quality(e, fitted) for part in families.values() for fitted in [fit.without(part)] for e in part}
    return [found[id(e)] for e in given]


def summary(figures: Sequence[Sequence[float]]) -> str:
    """Geometric mean and worst of each of `PICKS`."""
    table = np.array(figures)
    pairs = zip(np.exp(np.log(table).mean(axis=0)), table.min(axis=0), strict=True)
    return "  ".join(f"{mean:.3f} (worst {worst:.2f})" for mean, worst in pairs)


def main(argv: list[str] | None = None) -> int:
    """Fit, print what it is worth, and write it where asked; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", type=Path, nargs="*", help="default: benchmarks/data/h200_*.jsonl.gz")
    parser.add_argument("--each", action="store_true", help="print each table's figures")
    parser.add_argument("--write", action="store_true", help="write search_spaces/TARGET.correction.json")
    args = parser.parse_args(argv)
    paths = args.tables or sorted(DATA.glob("h200_*.jsonl.gz"))
    tables = [(path.name.split(".")[0], table) for path in paths for table in read(path)]
    targets = {table.target for _, table in tables}
    if len(targets) > 1:
        parser.error(f"tables of one target at a time, not of {', '.join(sorted(targets))}")
    templates = sorted({c.template for _, table in tables for c in table.times})
    given = examples(tables, templates)
    fit = Fit(given, templates)
    before, after = [quality(e, None) for e in given], held_out(given, fit)
    print(f"{'tables':<20} {'count':>5}  first pick; best of {PICKS[-1]}: analytical | corrected, each (N, K) held out")
    for name in [*dict.fromkeys(e.name for e in given), "all"]:
        chosen = [i for i, e in enumerate(given) if name in (e.name, "all")]
        shown = " | ".join(summary([figures[i] for i in chosen]) for figures in (before, after))
        print(f"{name:<20} {len(chosen):>5}  {shown}")
    if args.each:
        for example, old, new in zip(given, before, after, strict=True):
            print(f"{example.problem.key:<60} {old[0]:.3f} {old[1]:.3f} | {new[0]:.3f} {new[1]:.3f}")
    if args.write:
        out = target_files.SPACES / f"{targets.pop()}.correction.json"
        out.write_text(json.dumps(fit.without().to_json(), separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"wrote {out.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
