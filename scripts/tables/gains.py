"""Prints what made tables gain over the library in the products of each model, by the times of their own rows."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scripts.tables.making import read_made
from scripts.tables.products import MOST_SEQUENCES, list_models
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record

TOKENS = (1, 16, 64, 256, 2048)  # M that every table has a row of its own for


def describe(made: Path) -> Iterator[str]:
    """Yield a row of a table for each model, type and number of GPUs all of whose products have tables."""
    measured = {record.problem: record for record in read_made(made)}
    tables = {problem.at(1) for problem in measured}
    yield f"| model | {' | '.join(f'M {m}' for m in TOKENS)} |"
    yield f"| --- {'| --- ' * len(TOKENS)}|"
    for name, layers in list_models():
        if layers.keys() <= tables:
            gains = [gain(layers, m, measured) for m in TOKENS]
            yield f"| {name} | {' | '.join('–' if one is None else f'{one:.3f}' for one in gains)} |"


def gain(layers: Mapping[Problem, float], m: int, measured: Mapping[Problem, Record]) -> float | None:
    """Return the library's time of a model's products at an M over that of the served kernels; None if unknown.

    The output layer, of one token for each sequence, counts up to the largest M of its table.
    """
    found = [(measured.get(p.at(m)), n) for p, n in layers.items() if m <= MOST_SEQUENCES or p.at(m) in measured]
    known: Sequence[tuple[Record, float]] = [(r, n) for r, n in found if r is not None and r.library_seconds]
    served = sum(n * r.served_seconds for r, n in known)
    return sum(n * (r.library_seconds or 0.0) for r, n in known) / served if len(known) == len(found) else None
