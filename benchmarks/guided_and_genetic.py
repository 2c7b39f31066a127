"""Replay genetic and guided search on recorded tables: ``python benchmarks/guided_and_genetic.py [TABLES …]``.

No GPU: `compare_strategies.py` says how a table answers a search. Of each search it prints the configs measured, the
seconds that compiling and timing them would take, and how far its best is above the table's; then after what share of
genetic search's seconds guided search ended, and after what share it first was within 1 % of genetic search's best.

Compilers start anew with each batch: it takes as many turns as its kernels that are not compiled yet need on all cores.
What both do alike is left out: listing and ranking the space, verification and the race of the best. No table teaches
the cost model's correction that ranks it: for each (N, K) one is fitted to all other recorded tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import _common  # noqa: F401 (it puts the checkout on Python's path)
import fit_correction
import numpy as np
from compare_strategies import TABLES, Replay
from replay_tables import Table, read

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.integers import cdiv
from tritongemm.core.trial import Trial
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Strategy
from tritongemm.search.cost_model import correction

# One kernel takes one core these seconds to compile, and one screening these
# (docs/measurements/h200-tuner-speed.md).
COMPILE_SECONDS, SCREEN_SECONDS = 0.42, 1 / 550
# A search has found the same where its best takes at most this multiple of the other's.
SAME = 1.01
HEADINGS = ("problem", "configs", "kernels", "seconds", "above", "configs", "kernels", "seconds", "above", "end", "1 %")


@dataclass(frozen=True)
class Course:
    """How one search of one table went.

    Attributes:
        best: least seconds of a kernel after each batch.
        spent: seconds of searching until then.
        configs: measured in all.
        kernels: compiled in all.
    """

    best: tuple[float, ...]
    spent: tuple[float, ...]
    configs: int
    kernels: int

    def until(self, goal: float) -> float:
        """Seconds of searching until a kernel takes at most `goal`; infinite where none does."""
        return next((spent for spent, best in zip(self.spent, self.best, strict=True) if best <= goal), inf)


def course(batches: Iterable[Sequence[Trial]], cores: int) -> Course:
    """Follow the batches of a search.

    Args:
        batches: trials, in the order of the search.
        cores: that compile at once.
    """
    compiled: set[str] = set()
    best, spent, configs = [inf], [0.0], 0
    for trials in batches:
        kernels = {t.config.kernel_name for t in trials} - compiled
        compiled |= kernels
        configs += len(trials)
        turns = cdiv(len(kernels), cores)
        spent.append(spent[-1] + turns * COMPILE_SECONDS + len(trials) * SCREEN_SECONDS)
        best.append(min([best[-1], *(t.seconds for t in trials if t.status == "ok")]))
    return Course(tuple(best), tuple(spent), configs, len(compiled))


def held_out(tables: Sequence[Table]) -> list[Replay]:
    """Replays whose model is fitted to no table of their (N, K)."""
    if not correction.fitted(tables[0].target):
        return [Replay.prepare(t) for t in tables]
    named = [(p.name, t) for p in sorted(fit_correction.DATA.glob("h200_*.jsonl.gz")) for t in read(p)]
    templates = sorted({c.template for _, t in named for c in t.times})
    given = fit_correction.examples(named, templates)
    fit = fit_correction.Fit(given, templates)
    found: dict[tuple[int, int], correction.Correction] = {}
    for sizes in {(t.problem.n, t.problem.k) for t in tables}:
        found[sizes] = fit.without(e for e in given if (e.problem.n, e.problem.k) == sizes)
    return [Replay.prepare(t, found[t.problem.n, t.problem.k]) for t in tables]


def compare(replay: Replay, args: argparse.Namespace) -> dict[str, Any]:
    """Both searches of one table, and how guided search stands beside genetic."""
    size = args.population or registry.get(Strategy, "genetic").population
    genetic = course(replay.batches("genetic", size * args.generations, population=args.population), args.cores)
    guided = course(replay.batches("guided", args.budget), args.cores)
    return {
        "problem": replay.table.problem.key,
        "table": replay.table.best,
        "genetic": genetic,
        "guided": guided,
        "end": guided.spent[-1] / genetic.spent[-1],
        "same": guided.until(SAME * genetic.best[-1]) / genetic.spent[-1],
    }


def line(row: dict[str, Any]) -> str:
    """A line of text with the figures of one table."""
    cells = [f"{row['problem']:<24}"]
    for searched in (row["genetic"], row["guided"]):
        above = searched.best[-1] / row["table"] - 1
        cells.append(f"{searched.configs:>8}{searched.kernels:>8}{searched.spent[-1]:>8.1f}{above:>8.1%}")
    never = "never" if row["same"] == inf else f"{row['same']:.0%}"
    return "  ".join([*cells, f"{row['end']:>5.0%}{never:>7}"])


def total(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What all tables come to."""
    said, seconds = [], {}
    for name in ("genetic", "guided"):
        found = [row[name] for row in rows]
        above = [c.best[-1] / row["table"] - 1 for c, row in zip(found, rows, strict=True)]
        seconds[name] = sum(c.spent[-1] for c in found)
        said.append(
            f"{name}: {sum(c.configs for c in found)} configs, {sum(c.kernels for c in found)} kernels, "
            f"{seconds[name]:.0f} s; above the table's best {np.mean(above):.2%}, at worst {max(above):.2%}"
        )
    same = [row["same"] for row in rows if row["same"] < inf]
    first = f", there first so after {np.mean(same):.1%} of its seconds on average" if same else ""
    said.append(
        f"guided search ends after {seconds['guided'] / seconds['genetic']:.1%} of genetic search's seconds; its best "
        f"is within 1 % of genetic search's in {len(same)} of {len(rows)} tables{first}"
    )
    return said


def main(argv: list[str] | None = None) -> int:
    """Replay both on the tables and print them side by side; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", type=Path, nargs="*", default=TABLES, help="files as replay_tables.py writes them")
    parser.add_argument("--population", type=int, default=0, help="of genetic search; 0: its own, 32")
    parser.add_argument("--generations", type=int, default=8, help="of genetic search, at most (8)")
    parser.add_argument("--budget", type=int, default=0, help="configs of guided search; 0: its own choice")
    parser.add_argument("--cores", type=int, default=16, help="that compile at once (16)")
    args = parser.parse_args(argv)
    try:
        tables = [t for path in args.tables for t in read(path)]
        replays = held_out(tables)
    except TritonGemmError as error:
        parser.error(str(error))
    print(f"{HEADINGS[0]:<24}{'genetic':>34}{'guided':>34}{'guided / genetic':>20}")
    print(" " * 24 + "".join(f"{name:>8}" for name in HEADINGS[1:9]) + "".join(f"{name:>7}" for name in HEADINGS[9:]))
    rows = [compare(replay, args) for replay in replays]
    print("\n".join([*map(line, rows), *total(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
