"""A race without a GPU: backends made of text, a judge that reads times off the tiles, and a run with both."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core import settings
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.trial import Trial
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.plugins import _modules as registry
from tritongemm.report.console import Reporter
from tritongemm.results.store import Store
from tritongemm.search_spaces import loader as target_files
from tritongemm.tuning.run import TuningRun

SIZE = Problem(16, 16, 32)
Drop = Callable[[str, str], None]  # puts a backend of a name and a text beside those that are there

CODE = """
from tritongemm.core.artifact import CompileJob as Job
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.artifact import Artifact as Built
COMPILE_SECONDS = 100.0
def configs(problem, target):
    return [Config("toy", n, n, n, backend="toycode") for n in (1, 2, 3)]
def job(config, problem, target, module):
    if config.block_m == 2:
        raise InputError("two is no number for a tile")
    return Job(config, {"toy": config.name})
def build(job):
    if job.config.block_m == 3:
        raise InputError("three is truncated")
    return Built(job.config, job.digest, symbol="toy"), b"code", "kernel.toy"
def launch(built, problem, target):
    return None
"""


def seconds(config: Config) -> float:
    return (config.block_m + (config.backend == "triton")) * 1e-6


class Judge:
    """Stands in for a GPU: a candidate takes as many microseconds as its tile has rows, one of Triton's a little more."""

    def __init__(self, arch: str = "gfx942") -> None:
        self.target = target_files.load_target(arch)
        self.raced: list[Config] = []

    def start(self) -> None:
        pass

    def screen(self, problem: Problem, built: list[Artifact], best: float) -> Iterator[Trial]:
        for one in built:
            registry.load("backends", one.config.backend).launch(one, problem, self.target)
            yield Trial(one.config, "ok", samples=(seconds(one.config),), timer="sundial")

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        raise TritonGemmError(f"{backend} lacks a symbol")

    def race(self, problem: Problem, built: list[Artifact], baseline: str) -> RaceResult:
        self.raced = [b.config for b in built]
        trials = [Trial(c, "ok", "", (seconds(c),), "sundial", "final", 0.0, 0.1) for c in self.raced]
        return RaceResult(tuple(trials), {t.config.name: t.samples for t in trials}, True)

    def describe(self, problem: Problem, config: Config) -> str:
        return "by eye"

    def close(self) -> None:
        pass


def race(
    folder: Path,
    backends: tuple[str, ...],
    judge: Judge | None = None,
    build: Callable[[CompileJob], None] = lambda job: None,
    **plan: Any,
) -> tuple[Any, Store, str]:
    """A run's failures, its store and what it said; `build` is called before a toy is built, `plan` goes to the Plan."""
    compiler, judge = BuildPool(ArtifactCache(settings.cache_folder()), jobs=1), judge or Judge()
    builds = compiler.build

    def built(job: CompileJob) -> Artifact:
        """Toys are built here: no other process finds them."""
        if not job.config.backend.startswith("toy"):
            return builds(job)
        build(job)
        try:
            one: Artifact = registry.load("backends", job.config.backend).build(job)[0]
            return one
        except TritonGemmError as error:
            return Artifact(job.config, job.digest, status="compile_failed", reason=str(error))

    compiler.build = built  # type: ignore[method-assign]
    opened = Store.open(folder / "out.yaml", judge.target.name, {}, {})
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out), opened as store, closing(compiler):
        what = TuningOptions(
            folder, **{"strategy": "exhaustive", "budget": 1, "library": "", "backends": backends, **plan}
        )
        failures = TuningRun([judge], compiler, store, what, Reporter(verbose=True)).tune([SIZE])
        store.merge()
    return failures, store, out.getvalue()


def passed(self: Any, problem: Any, config: Config, path: Path) -> Trial:
    """In place of `Offline._checked`: the interpreter's verdict, without asking it."""
    return Trial(config, "ok", stage="final", error=0.0, tolerance=1e-3)
