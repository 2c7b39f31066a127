"""Stage: trials of every backend → the CSV that --profile_file names, a row for each candidate of each size.

Times are in microseconds: ``screen_us`` is the cheap one of screening, ``us`` that of the final race, which is on one
clock with the time in the baseline's row. A candidate that did not come to the final race has neither ``us`` nor
``error``. ``status`` is that of its last stage; ``reason`` says why it is not ok.
"""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tritongemm.core.errors import OutputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.results.store import Store
from tritongemm.system import files

COLUMNS = (
    "size", "M", "N", "K", "dtype_a", "dtype_b", "dtype_c", "layout", "bias", "batch", "family", "backend", "config",
    "kernel", "solution", "splitK", "status", "stage", "screen_us", "us", "spread", "tflops", "error", "tolerance",
    "outside", "timer", "winner", "reason",
)  # fmt: skip


def check(path: Path, others: Iterable[Path] = ()) -> None:
    """Refuse a path that can't be written, or that holds something else, before hours are spent."""
    if os.path.realpath(path) in map(os.path.realpath, others):
        raise OutputError(f"--profile_file {path} is a file of sizes or results of this run; choose another file")
    try:
        files.check_place(path, _is_csv, "a CSV of candidates", "choose another file")
    except OutputError as error:
        raise OutputError(f"--profile_file {error}") from error


def _is_csv(start: bytes) -> bool:
    """Return whether a file begins as a CSV of candidates, or is empty."""
    return not start or start.startswith(",".join(COLUMNS[:4]).encode())


def write(path: Path, store: Store, problems: Iterable[Problem], unstored: Mapping[Problem, Sequence[Trial]]) -> int:
    """Replace the file with all that is known of the problems, from earlier runs too; return the candidates' number."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    count = 0
    for problem in problems:
        trials = [*store.trials(problem).values(), *unstored.get(problem, ())]
        found = list(rows(problem, trials, store.record(problem)))
        writer.writerows(found)
        count += len(found)
    files.atomic_write(
        path, out.getvalue(), "make room and run the same command again, or choose another --profile_file"
    )
    return count


def rows(problem: Problem, trials: Iterable[Trial], record: Record | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each candidate, the fastest first, and one for the library they raced with."""
    stages: dict[str, dict[str, Trial]] = {}
    for trial in trials:
        stages.setdefault(trial.config.name, {})[trial.stage] = trial
    said = problem.to_json() | {"layout": problem.layout}
    size = {key: said[key] for key in COLUMNS[4:11]}
    size = {"size": problem.key, "M": problem.m, "N": problem.n, "K": problem.k, **size}
    if record is not None and record.library_seconds is not None:
        won = record.winner == record.library
        times = {"us": _us(record.library_seconds), "tflops": _tflops(problem, record.library_seconds)}
        yield {**size, "backend": record.library, "status": "ok", "stage": "final", **times, "timer": record.timer,
               "winner": int(won)}  # fmt: skip
    elif record is not None and record.library_wrong:
        wrong = {"status": "wrong", "stage": "final", "winner": 0, "reason": record.library_wrong}
        yield {**size, "backend": record.library, **wrong}
    made = [_row(problem, stages[name], record) for name in stages]
    for row in sorted(
        made, key=lambda r: (r["status"] != "ok", r["stage"] == "screen", r["us"] or r["screen_us"] or 0)
    ):
        yield {**size, **row}


def _row(problem: Problem, stages: Mapping[str, Trial], record: Record | None) -> dict[str, Any]:
    """Return one candidate's row; the final has more than the screen."""
    screen, last = stages.get("screen"), stages.get("final") or stages["screen"]
    config = last.config
    final = last.stage == "final" and bool(last.samples)
    won = record is not None and record.winner == config.backend and record.config == config
    return {
        "backend": config.backend,
        "config": config.name,
        "kernel": config.kernel_name if config.is_generated else config.template,
        "solution": config.option("index") if "index" in dict(config.options) else "",
        "splitK": config.split_k,
        "status": last.status,
        "stage": last.stage,
        "screen_us": _us(screen.seconds) if screen and screen.samples else "",
        "us": _us(last.seconds) if final else "",
        "spread": f"{last.spread:.4f}" if final else "",
        "tflops": _tflops(problem, last.seconds) if final else "",
        "error": "" if last.error is None else f"{last.error:.4g}",
        "tolerance": "" if last.tolerance is None else f"{last.tolerance:.4g}",
        "outside": "" if last.outside is None else f"{last.outside:.4g}",
        "timer": last.timer,
        "winner": int(won),
        "reason": last.reason,
    }


def _us(seconds: float) -> float:
    return float(f"{seconds * 1e6:.6g}")


def _tflops(problem: Problem, seconds: float) -> str:
    return f"{problem.flops / seconds / 1e12:.4g}"
