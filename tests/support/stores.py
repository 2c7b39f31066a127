"""A store of three problems, and what the tests of it write and read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.formats import Defaults
from tritongemm.results.store import Store
from tritongemm.workloads import sizes

TOOLS = {"triton": "3.6.0", "torch": "2.9.0"}


HOW = {"timer": "events", "iters": 200}


ONE, TWO, THREE = Problem(16, 16, 16), Problem(32, 16, 16), Problem(64, 16, 16)


CONFIG = Config("tile", 16, 16, 16)


def take(path: Path, **other: Any) -> Store:
    """Open a store as the same command would."""
    return Store.open(path, **{"target": "gfx942", "toolchain": TOOLS, "protocol": HOW, **other})


def trial(number: int, **other: Any) -> Trial:
    config = dataclasses.replace(CONFIG, group_m=number + 1)
    return Trial(config, **{"status": "ok", "samples": (1e-6 + number,), "timer": "graph-events", **other})


def record(problem: Problem, seconds: float = 1e-5, **other: Any) -> Record:
    facts = {
        "spread": 0.01,
        "timer": "graph-events",
        "target": "gfx942",
        "toolchain": TOOLS,
        "winner": "triton",
        **other,
    }
    return Record(problem, config=CONFIG, seconds=seconds, **facts)


def known(store: Store) -> list[tuple[str, str]]:
    """Problem and config of every trial held."""
    return [(p.key, name) for p in (ONE, TWO, THREE) for name, _ in store.trials(p)]


def written(path: Path) -> bytes:
    """A journal of every kind of line."""
    with take(path) as store:
        for number, problem in enumerate((ONE, TWO, THREE)):
            store.add_trials(problem, [trial(number), trial(number + 10, status="timeout", samples=(), reason="né")])
            store.add_record(record(problem))
        data = store.journal.read_bytes()
        store.journal.unlink()
    return data


def rows(path: Path) -> list[Record | None]:
    return [r.record for r in sizes.from_file(path, Defaults())]
