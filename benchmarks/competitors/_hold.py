"""Recorded winners, timed again beside the library in a new process: do their gains hold?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _common import open_gpu

from competitors._tuned import compiled
from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.record import Record
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.hip_ext.machine import Machine
from tritongemm.plugins.contracts import Evaluator

NEAR = 0.02


def gains(records: Sequence[Record]) -> list[Record]:
    """Records in which a candidate beat the library."""
    return [r for r in records if r.winner != r.library and r.speedup]


def again(records: Sequence[Record], here: Machine, folder: Path) -> Iterator[dict[str, Any]]:
    """Each record's gain then and now, by the tuner's own protocol; or why it could not be timed."""
    built = compiled(((r.problem, r.config) for r in records), here.target, folder)
    gpu = open_gpu(here)
    try:
        for record in records:
            row: dict[str, Any] = {"key": record.problem.key, "config": record.config.name, "then": record.speedup}
            one = built.get((record.problem, record.config), Artifact(record.config, ""))
            yield row | _now(gpu, record, one)
    finally:
        gpu.close()


def _now(gpu: Evaluator, record: Record, built: Artifact) -> dict[str, Any]:
    if built.status != "ok":
        return {"reason": f"{built.status}: {built.reason}"}
    try:
        race = gpu.race(record.problem, [built], record.library)
    except TritonGemmError as error:
        return {"reason": str(error)}
    ours, library = race.samples.get(record.config.name), race.samples.get(BASELINE_ENTRY)
    if not ours or not library:
        return {"reason": next((t.reason for t in race.trials if t.reason), "no samples")}
    return {"now": median(library) / median(ours), "us": median(ours) * 1e6, "library_us": median(library) * 1e6}


def line(row: dict[str, Any]) -> str:
    """One record's gain then and now, as a line of the table."""
    if "now" not in row:
        return f"{row['key']:<28} {row['then']:.3f}      - {row['reason']}"
    return f"{row['key']:<28} {row['then']:.3f}  {row['now']:.3f}  {row['now'] / row['then'] - 1:+.1%}  {row['config']}"


def outcome(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the recorded gains that stay within 2 %, and that do not fall by more."""
    moved = [r["now"] / r["then"] - 1 if "now" in r else -1.0 for r in rows]
    count = max(1, len(moved))
    return {
        "gains": len(moved),
        "within": sum(abs(x) <= NEAR for x in moved) / count,
        "not_lower": sum(x >= -NEAR for x in moved) / count,
        "median_move": median(moved) if moved else 0.0,
    }
