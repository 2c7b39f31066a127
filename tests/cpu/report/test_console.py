"""Tables as people read them."""

from __future__ import annotations

import io

from rich.console import Console

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.report.console import Reporter

SIZE, OTHER = Problem(16, 4096, 4096), Problem(64, 4096, 4096)
OURS = Config("tile", 16, 64, 64)
ALGORITHM = Config("heuristic", 16, 64, 64, backend="blaslt")
INSTANCE = Config("single", 16, 64, 128, backend="cutlass")


def final(config: Config, us: float) -> Trial:
    return Trial(config, "ok", samples=(us * 1e-6,) * 3, stage="final")


def record(problem: Problem, config: Config, us: float, library_us: float | None = None) -> Record:
    library = None if library_us is None else library_us * 1e-6
    return Record(
        problem,
        "sm90",
        config,
        config.backend,
        us * 1e-6,
        0.002,
        "graph-events",
        library_seconds=library,
        library="torch",
    )


def table(records: list[Record], trials: dict[Problem, list[Trial]]) -> list[list[str]]:
    out = io.StringIO()
    Reporter(console=Console(file=out, width=120)).backends(records, trials.__getitem__)
    return [line.split() for line in out.getvalue().splitlines()]


def test_the_best_of_each_backend_side_by_side() -> None:
    """The winner's lead is over the next backend, be it the library; what did not race has no time."""
    trials = {
        SIZE: [final(OURS, 10.0), final(OURS, 9.0), final(ALGORITHM, 9.9), Trial(INSTANCE, "ok", samples=(1e-6,))],
        OTHER: [final(OURS, 12.0), final(INSTANCE, 15.0), Trial(ALGORITHM, "wrong", "error", stage="final")],
    }
    found = table([record(SIZE, OURS, 9.0, 12.0), record(OTHER, OURS, 12.0, 12.6)], trials)
    assert found == [
        ["Best", "of", "each", "backend,", "us"],
        ["size", "torch", "blaslt", "cutlass", "triton", "lead", "noise"],
        [SIZE.key, "12.00", "9.90", "-", "9.00", "10.0%", "0.2%"],
        [OTHER.key, "12.60", "-", "15.00", "12.00", "5.0%", "0.2%"],
    ]


def test_one_backend_alone_needs_no_table_of_its_own() -> None:
    assert table([record(SIZE, OURS, 9.0, 12.0)], {SIZE: [final(OURS, 9.0)]}) == []
