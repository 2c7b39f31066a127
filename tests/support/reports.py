"""Results, journals and workloads that a report shows, with text that means something to a browser."""

import dataclasses
from pathlib import Path
from typing import Any

from tests.support.nouns import Problem, Record, Trial, matrices, results_format
from tests.support.stores import CONFIG, TOOLS
from tritongemm.results.store import Store

HOSTILE = "</script><script>window.broken=1</script><img src=x onerror=window.broken=1><b>%{x}"
HOW = {"timer": "events", "iters": 200}
H200 = {**TOOLS, "device": "NVIDIA H200"}
_SPANS = ((1, 16), (17, 96), (97, 512), (513, 4096))  # of M


def problem(m: int, n: int = 4096, k: int = 4096) -> Problem:
    return Problem(m, n, k, *matrices("bf16", layout="TN"))


def result(size: Problem, seconds: float, **other: Any) -> Record:
    """A result on an H200 beside the library's time."""
    facts: dict[str, Any] = {"target": "sm90", "compute_units": 132, "toolchain": H200, "config": CONFIG}
    facts |= {"winner": "triton", "library": "torch", "library_seconds": seconds * 1.25}
    facts |= {"spread": 0.01, "timer": "graph-events"}
    return Record(size, seconds=seconds, **{**facts, **other})


def table(n: int, k: int) -> list[Record]:
    """A table over M of one product, with M held out; its last row is the library's."""
    configs = [dataclasses.replace(CONFIG, template=name) for name in ("gemv", "tile", "ws_tma", "ws_tma")]
    rows = []
    for (first, last), config in zip(_SPANS, configs, strict=True):
        rows.append(
            result(problem(last, n, k), 1e-5 * last**0.5, config=config, m_from=first,
                   held_out={str((first + last) // 2): (0.01, 1.1)}),
        )  # fmt: skip
    last_row = rows[-1]
    return [*rows[:-1], dataclasses.replace(last_row, winner="torch", library_seconds=last_row.seconds * 0.95)]


def write_results(path: Path, records: list[Record]) -> Path:
    path.write_text(results_format().write(records), encoding="utf-8")
    return path


def write_run(path: Path, records: list[Record], reason: str) -> Path:
    """The results and the journal of a run, in which some candidates failed for a reason."""
    with Store.open(path, "sm90", H200, HOW, compute_units=132) as store:
        for record in records:
            trials = [
                Trial(
                    dataclasses.replace(CONFIG, group_m=group), "ok", samples=(record.seconds * slower,), timer="events"
                )
                for group, slower in ((1, 1.5), (2, 1.1), (4, 1.0))
            ]
            failed = Trial(dataclasses.replace(CONFIG, group_m=8), "compile_failed", reason)
            store.add_trials(record.problem, [*trials, failed], record)
        store.merge()
    return path
