import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.nouns import Config, Defaults, Problem, Record, Trial, sizes
from tritongemm.results import journal
from tritongemm.results.store import Store

TOOLS = {"triton": "3.5.1", "torch": "2.9.0"}


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


def merged(path: Path, *records: Record, order: Sequence[Problem] = (), **how: Any) -> None:
    """A run that adds records and writes them to its results."""
    with take(path, **how) as store:
        for one in records:
            store.add_record(one)
        store.merge(order)


def journal_of(path: Path) -> Path:
    return path.with_name(path.name + ".journal")


def append(path: Path, *entries: dict[str, Any]) -> None:
    """Write lines at the end of an output's journal, as a run does."""
    with journal_of(path).open("ab") as file:
        file.writelines(map(journal.encode, entries))


def journal_lines(path: Path) -> list[dict[str, Any]]:
    """What the lines of an output's journal hold, without their checksums."""
    lines = map(json.loads, journal_of(path).read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "crc32"} for line in lines]


def rewrite_header(path: Path, header: Any) -> None:
    """Replace the header of an output's journal, with the checksum that belongs to it."""
    _, *rest = journal_of(path).read_bytes().splitlines(keepends=True)
    journal_of(path).write_bytes(journal.encode({"header": header}) + b"".join(rest))


def known(store: Store) -> list[tuple[str, str]]:
    """Problem and config of every trial held."""
    return [(p.key, name) for p in (ONE, TWO, THREE) for name, _ in store.trials(p)]


def written(path: Path) -> bytes:
    with take(path) as store:
        for number, problem in enumerate((ONE, TWO, THREE)):
            store.add_trials(problem, [trial(number), trial(number + 10, status="timeout", samples=(), reason="né")])
            store.add_record(record(problem))
        data = store.journal.read_bytes()
        store.journal.unlink()
    return data


def rows(path: Path) -> list[Record | None]:
    return [r.record for r in sizes.from_file(path, Defaults())]
