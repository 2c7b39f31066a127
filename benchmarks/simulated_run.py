"""How long a tuning run of many sizes takes, without a GPU: ``python benchmarks/simulated_run.py SIZES --devices 4``.

The run and its journal are the real ones. Planning processes, compilers and devices are replaced by waits as long as
they take on some machine; what devices measure is the model's prediction, off by up to 30 %. What searches ask for is
worked out before, with these times, by the real planner and strategy. So this shows what the order of work and the
run's own process cost, and for how many devices that process is quick enough; it says nothing of how fast kernels are.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import _common  # noqa: F401  (puts the checkout on Python's path)

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Evaluator
from tritongemm.report.console import Reporter
from tritongemm.report.page.time_to_quality import GOAL, quality_over_time
from tritongemm.results import history
from tritongemm.results.run_files import RunFiles
from tritongemm.results.store import Store
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search_spaces import loader as target_files
from tritongemm.system.child_process import WorkerError
from tritongemm.tune import search_processes
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.run import TuningRun
from tritongemm.tune.search_processes import BegunSearch, SearchJob, SearchWorker, TriedBatch, WinnerModule
from tritongemm.workloads import sizes

LIBRARY, STRATEGY = "blaslt", "guided"
MOST_ERROR = 0.3  # of a prediction, which what is measured exceeds by up to this share
LIBRARY_FACTOR = 1.15  # time of a library's best guess over that predicted for the model's first pick


class Waits:
    """Seconds that parts of a run take, and how busy they were.

    Args:
        args: the command line.

    Attributes:
        busy: seconds by part.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.busy: dict[str, float] = {"compilers": 0.0, "devices": 0.0}
        self._adding = threading.Lock()

    def wait(self, part: str, seconds: float) -> None:
        """Wait, and count it."""
        with self._adding:
            self.busy[part] += seconds
        time.sleep(seconds)


class SimulatedPool(BuildPool):
    """Compilers that wait; what they have compiled once comes from the cache.

    Args:
        waits: how long.
        folder: of the cache, in which nothing is written.
    """

    def __init__(self, waits: Waits, folder: Path) -> None:
        super().__init__(ArtifactCache(folder), waits.args.cores * waits.args.devices)
        self.waits, self.built = waits, dict[str, Artifact]()
        self.cache.get = self.built.get  # type: ignore[method-assign, assignment]

    def start(self, backends: Sequence[str], target: Target, most: int) -> None:
        """There is nothing to start."""

    def build(self, job: CompileJob) -> Artifact:
        """The artifact, after a wait."""
        self.waits.wait("compilers", self.waits.args.compile * (0.5 + random.random()))
        self.built[job.digest] = Artifact(job.config, job.digest)
        return self.built[job.digest]


class SimulatedDevice(Evaluator):
    """A device that waits, and measures what the model predicts with an error that is a config's own. A library's
    algorithms are the slower, the less it thinks of them.

    Args:
        target: its facts.
        waits: how long.
        searches: what it measures.
        start: seconds until it is ready.
    """

    def __init__(self, target: Target, waits: Waits, searches: Mapping[Problem, RecordedSearch], start: float) -> None:
        self.target, self.waits, self.searches = target, waits, searches
        self._ready = time.monotonic() + start

    def start(self) -> None:
        """It starts by itself."""

    def _wait(self, seconds: float) -> None:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        self.waits.wait("devices", seconds)

    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """A trial for each, after a wait."""
        found = self.searches[problem]
        for config in (artifact.config for artifact in artifacts):
            if config.backend != LIBRARY:
                self._wait(self.waits.args.screen)
                yield generated_trial(config, found.samples)
                continue
            self._wait(self.waits.args.algorithm)
            late = config.option("index") / self.waits.args.algorithms
            seconds = LIBRARY_FACTOR * found.pick_s * (1 + MOST_ERROR * (late + config_error(problem, config.name)))
            yield Trial(config, "ok", samples=(seconds,), timer="simulated")

    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """Every candidate is right."""
        yield from self.race(problem, artifacts, "").trials

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Every candidate is right and as fast as the others, after a wait."""
        self._wait(self.waits.args.race)
        trials = tuple(Trial(a.config, "ok", "", (1e-5,) * 20, "simulated", "final", 0.0, 0.1) for a in artifacts)
        return RaceResult(trials, {t.config.name: t.samples for t in trials}, cold=True)

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """As many as are asked for, after a wait."""
        self._wait(self.waits.args.listing)
        return [Config("heuristic", 128, 128, 128, options=(("index", i),), backend=LIBRARY) for i in range(limit)]

    def describe(self, problem: Problem, config: Config) -> str:
        """No one computed anything."""
        return "simulated"

    def close(self) -> None:
        """Nothing was started."""


@dataclass(frozen=True)
class RecordedSearch:
    """A search as it went with the times that the simulated devices measure.

    Attributes:
        answers: those of a planning process, pickled, and the seconds of a core that each of them took here.
        samples: seconds that a device measures of each config that is asked for, by its name.
        pick_s: predicted seconds of the model's first pick.
    """

    answers: list[tuple[bytes, float]]
    samples: dict[str, float]
    pick_s: float


def record(job: SearchJob) -> RecordedSearch:
    """Run a search to its end."""
    worker, samples, answers, request = SearchWorker(), dict[str, float](), list[tuple[bytes, float]](), job
    batch: list[Config] | None = []
    while batch is not None:
        began = time.process_time()
        (answer,) = worker(request)
        answers.append((pickle.dumps(answer), time.process_time() - began))
        prepared = answer.first if isinstance(answer, BegunSearch) else answer
        batch = prepared and prepared.configs
        expected = {c.name: cost_model.predict(c, job.problem, job.target).seconds for c in batch or ()}
        samples |= {n: s * (1 + MOST_ERROR * config_error(job.problem, n)) for n, s in expected.items()}
        request = TriedBatch(job.problem, [generated_trial(c, samples) for c in batch or ()])
    first = pickle.loads(answers[0][0]).first.configs[0]
    return RecordedSearch(answers, samples, cost_model.predict(first, job.problem, job.target).seconds)


def config_error(problem: Problem, name: str) -> float:
    """A config's own share of the largest error, from 0 to 1."""
    return random.Random(f"{problem.key} {name}").random()


def generated_trial(config: Config, samples: Mapping[str, float]) -> Trial:
    """What a device makes of a kernel that was asked for."""
    return Trial(config, "ok", samples=(samples[config.name],), timer="simulated")


class SimulatedProcess:
    """A planning process that answers as one did before, as late as one would.

    Args:
        waits: how long planning takes.
        searches: what was recorded.
    """

    def __init__(self, waits: Waits, searches: Mapping[Problem, RecordedSearch]) -> None:
        self._waits, self._searches, self._batches = waits, searches, dict[Problem, int]()

    def ask(self, request: SearchJob | TriedBatch | WinnerModule, timeout: float) -> Iterator[Any]:
        """One answer; a process's first takes twice as long, as it loads what planning needs."""
        if isinstance(request, WinnerModule):
            yield None  # no module is written
            return
        answers = self._searches[request.problem].answers
        number = self._batches[request.problem] = self._batches.get(request.problem, -1) + 1
        if isinstance(request, TriedBatch):
            before = pickle.loads(answers[number - 1][0])
            wanted = before.first if isinstance(before, BegunSearch) else before
            if [t.config for t in request.trials] != wanted.configs:
                raise WorkerError("the run has tried other configs than the search asked for")
            time.sleep(answers[number][1])
        else:
            time.sleep(self._waits.args.plan * (1 if len(self._batches) > 1 else 2))
        yield pickle.loads(answers[number][0])

    def kill(self) -> None:
        """Nothing was started."""


def main() -> None:
    """Simulate one run and print what took how long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("sizes", type=Path, help="a file of sizes")
    parser.add_argument("--target", default="sm90")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--cores", type=int, default=16, help="of each device")
    parser.add_argument("--algorithms", type=int, default=48, help="that a library lists for a size")
    for name, seconds, what in (
        ("start", 6.0, "a device's process takes to start"),
        ("apart", 0.0, "the next device takes longer to start"),
        ("plan", 0.7, "one size takes to be planned"),
        ("compile", 0.29, "one kernel takes to compile"),
        ("listing", 0.03, "a library takes to list its algorithms"),
        ("algorithm", 0.0029, "one of them takes to be screened"),
        ("screen", 0.003, "one kernel takes to be screened"),
        ("race", 0.45, "the final race of a size takes"),
    ):
        parser.add_argument(f"--{name}", type=float, default=seconds, help=f"seconds that {what}")
    args = parser.parse_args()
    target, waits = target_files.load_target(args.target), Waits(args)
    defaults = Defaults.of("bf16", "bf16", "bf16", layout="TN")
    problems = list(dict.fromkeys(row.problem for row in sizes.from_file(args.sizes, defaults)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        each = len(problems) / args.cores
        jobs = [SearchJob(p, target, None, "triton", strategy=STRATEGY, problems_per_core=each) for p in problems]
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as recorders:
            searches = dict(zip(problems, recorders.map(record, jobs), strict=True))
        simulate(problems, target, waits, searches, folder)


def simulate(
    problems: Sequence[Problem], target: Target, waits: Waits, searches: Mapping[Problem, RecordedSearch], folder: Path
) -> None:
    """Run with stand-ins in a folder, and print what took how long."""
    args = waits.args
    options = TuningOptions(folder, STRATEGY, backends=("triton", LIBRARY), library="", algorithms=args.algorithms)
    starts = [args.start + number * args.apart for number in range(args.devices)]
    devices = [SimulatedDevice(target, waits, searches, start) for start in starts]
    results = folder / "results.yaml"
    with (
        mock.patch.object(search_processes, "FEW_PROBLEMS", 0),
        mock.patch.object(search_processes, "WorkerProcess", lambda role: SimulatedProcess(waits, searches)),
        closing(SimulatedPool(waits, folder / "cache")) as pool,
        Store.open(results, target.name, {}, {}) as store,
    ):
        began, used = time.monotonic(), time.process_time()
        failures = TuningRun(devices, pool, store, options, Reporter()).tune(problems)
        wall, used = time.monotonic() - began, time.process_time() - used
        tried = history.read(RunFiles(results).journal)
    if failures:
        raise SystemExit(f"{len(failures)} sizes failed, the first: {next(iter(failures.values()))}")
    own = [t.seconds for t in tried.tried if t.trial.config.backend != LIBRARY and t.seconds is not None]
    reached = quality_over_time(tried).reached(GOAL)
    print(f"{len(problems)} sizes on {args.devices} devices: {wall:.1f} s")
    print(
        f"first generated kernel screened after {min(own):.1f} s; {GOAL:.0%} of the final speed after {reached:.1f} s"
    )
    print(
        f"compilers busy {waits.busy['compilers'] / (args.cores * args.devices):.1f} s each, {len(pool.built)} kernels"
    )
    print(f"devices busy {waits.busy['devices'] / args.devices:.1f} s each; this process {used:.1f} s of one core")


if __name__ == "__main__":
    main()
