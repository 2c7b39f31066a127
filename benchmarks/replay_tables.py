"""Recorded timings of spaces, kept as JSON lines: ``python benchmarks/replay_tables.py SOURCE OUT.jsonl[.gz]``.

SOURCE is the ``.journal`` that a run with the exhaustive strategy left beside its results, or a JSON list of maps
``{problem, screen: [trial, ...]}`` with trials as `Trial.to_json` writes them.

Line one of a table file describes the run: ``{"version": 1, "target": "sm90", "device": "", "note": ""}``. Every other
line is one problem: ``{"problem": {...}, "kept": 6490, "times": {config name: seconds | status}}``. `kept` is the
number of configs the rules left; where it is larger than `times`, the table is a sample of the space. Seconds are the
median of a screening, which stops after one sample of a config more than twice as slow as the best.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import _common  # noqa: F401 (it puts the checkout on Python's path)

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.trial import STATUSES, Trial
from tritongemm.search.pruning import prune
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files

VERSION = 1


@dataclass(frozen=True)
class Table:
    """The outcome of every config tried for one problem.

    Attributes:
        problem: what was tuned.
        target: architecture, the stem of its file in search_spaces/.
        device: sibling of the architecture by its driver's name, "" for the file's own.
        kept: configs the rules left when it was recorded.
        times: seconds of each config, or the status of its failure.
    """

    problem: Problem
    target: str
    device: str
    kept: int
    times: dict[Config, float | str] = field(hash=False)

    @property
    def best(self) -> float:
        """Shortest seconds in the table."""
        return min(t for t in self.times.values() if isinstance(t, float))

    def trial(self, config: Config) -> Trial:
        """What trying a config again would bring, without the noise."""
        found = self.times[config]
        if isinstance(found, str):
            return Trial(config, found, "recorded")
        return Trial(config, "ok", samples=(found,), timer="recorded")


def read(path: Path) -> list[Table]:
    """Tables of one file.

    Raises:
        InputError: it can't be read, is of another version, or has a line that is no table; says which.
    """
    try:
        with _open(path, "rt") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}") from None
    head: dict[str, Any] = {}
    tables = []
    for number, line in lines:
        try:
            row = json.loads(line)
            if head:
                tables.append(_table(head, row))
                continue
            head = {"target": row["target"], "device": row["device"], "version": row["version"]}
        except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else error
            raise InputError(f"{path}, line {number}: {what}; benchmarks/replay_tables.py writes such files") from None
        if head["version"] != VERSION:
            raise InputError(f"{path}: version {head['version']} of the table format; this reads {VERSION}")
    if not tables:
        raise InputError(f"{path} holds no tables")
    return tables


def _table(head: dict[str, Any], row: dict[str, Any]) -> Table:
    times = {Config.parse(name): found for name, found in row["times"].items()}
    odd = {found for found in times.values() if isinstance(found, str)} - set(STATUSES)
    if odd:
        raise InputError(f"not a status: {', '.join(sorted(odd))}")
    return Table(Problem.from_json(row["problem"]), head["target"], head["device"], row["kept"], times)


def write(path: Path, tables: Iterable[Table], note: str = "") -> None:
    """Write tables of one target to one file; gzipped when it is called ``.gz``."""
    tables = list(tables)
    head = {"version": VERSION, "target": tables[0].target, "device": tables[0].device, "note": note}
    with _open(path, "wt") as out:
        out.write(json.dumps(head) + "\n")
        for table in tables:
            defaults = Problem(1, 1, 1).to_json()
            sizes = {k: v for k, v in table.problem.to_json().items() if k in "mnk" or v != defaults.get(k)}
            times = {c.name: float(f"{t:.4g}") if isinstance(t, float) else t for c, t in table.times.items()}
            row = {"problem": sizes, "kept": table.kept, "times": times}
            out.write(json.dumps(row, separators=(",", ":")) + "\n")


def _open(path: Path, mode: str) -> IO[str]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: IO[str] = opener(path, mode)
    return file


def record(problem: Problem, trials: Iterable[Trial], arch: str, device: str) -> Table:
    """The table of one problem's screening."""
    chip = target_files.load_target(arch, device_name=device)
    kept = len(prune.prune(space(problem, chip), problem, chip).kept)
    times: dict[Config, float | str] = {}
    for trial in trials:
        if trial.stage == "screen" and trial.config.backend == "triton":
            times[trial.config] = trial.seconds if trial.status == "ok" else trial.status
    return Table(problem, arch, device, kept, times)


def _sources(source: Path) -> Iterator[tuple[Problem, list[Trial]]]:
    if source.suffix == ".journal":
        found: dict[Problem, dict[Config, Trial]] = {}
        for entry in map(json.loads, source.read_text().splitlines()):
            if "trial" in entry:
                trial = Trial.from_json(entry["trial"])
                if trial.stage == "screen":
                    found.setdefault(Problem.from_json(entry["problem"]), {})[trial.config] = trial
        yield from ((problem, list(trials.values())) for problem, trials in found.items())
        return
    for row in json.loads(source.read_text()):
        yield Problem.from_json(row["problem"]), [Trial.from_json(t) for t in row["screen"]]


def main(argv: list[str] | None = None) -> int:
    """Write the tables of a run; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="sm90")
    parser.add_argument("--device", default="", help="sibling of the target, e.g. H200")
    parser.add_argument("--note", default="", help="kept in line one: clocks, versions, what was sampled")
    args = parser.parse_args(argv)
    tables = [record(problem, trials, args.target, args.device) for problem, trials in _sources(args.source)]
    if not tables:
        parser.error(f"{args.source} holds no trials")
    write(args.out, tables, args.note)
    for t in tables:
        print(f"{t.problem.key:<28} {len(t.times):>6} of {t.kept:>6} kept, best {t.best * 1e6:.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
