"""A campaign whose tuning is a stand-in: every problem takes a microsecond."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import Config, Problem, Record, load_target
from tests.support.stores import TOOLS, record, take
from tritongemm.campaigns import driver
from tritongemm.campaigns.campaign import Campaign
from tritongemm.campaigns.device_load import CountedEvaluator
from tritongemm.results.store import Store

TARGET = load_target("gfx942")


class Run:
    """Stands in for a tuning run: every problem takes a microsecond."""

    def __init__(self, store: Store, rig: "Rig") -> None:
        self.store, self.rig = store, rig
        self.evaluators = [CountedEvaluator(FakeEvaluator()), CountedEvaluator(FakeEvaluator())]

    def tune(self, problems: Sequence[Problem]) -> dict[Problem, str]:
        """Tune all that is not known; the rig says who fails, and after how many it is killed."""
        failures = {}
        for problem in problems:
            if self.store.record(problem) is not None:
                continue
            if self.rig.killed_after == len(self.rig.tuned):
                raise KeyboardInterrupt
            if problem.m in self.rig.fails:
                failures[problem] = "nothing compiles"
                continue
            self.rig.tuned.append(problem.m)
            self.store.add_record(result(problem))
        return failures


def result(problem: Problem) -> Record:
    return record(problem, toolchain=TOOLS)


def algorithm(index: int) -> Config:
    return Config(f"Cijk_{index}", 0, 0, 0, 1, 1, 0, 0, (("index", index), ("version", 7)), "blaslt")


def stored(problem: Problem, index: int, us: float = 5.0, **other: Any) -> Record:
    """A result that such an algorithm won on an MI300X."""
    facts = {"winner": "blaslt", "library": "torch", "library_seconds": 1e-5, "compute_units": 304, "spread": 0.0}
    return replace(record(problem, us * 1e-6), config=algorithm(index), **{**facts, **other})


@dataclass
class Rig:
    place: Path
    tuned: list[int] = field(default_factory=list)
    fails: tuple[int, ...] = ()
    killed_after: int = -1
    said: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.place / "tunings"

    def campaign(self, text: str | None = None, threshold: float = 0.1) -> Campaign:
        """Of the log that is there, or of none where there is none."""
        log = self.place / "job.log"
        if text is not None:
            log.write_text(text)

        @contextmanager
        def open_run(problems: Sequence[Problem], output: Path) -> Iterator[Run]:
            with take(output, problems=problems) as store:
                yield Run(store, self)

        return Campaign(
            self.folder, log if log.exists() else None, threshold, TARGET, (), self.said.append,
            lambda: nullcontext(()), open_run, nullcontext,  # type: ignore[arg-type]
        )  # fmt: skip

    def done(self) -> list[str]:
        return list(json.loads((self.folder / driver.NAME).read_text())["done"])
