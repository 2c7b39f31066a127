"""The line: Problems → Records. Prune, rank, generate, compile, time, verify, choose and write, in rounds.

In a round every problem asks its strategy for a batch; what they ask for is compiled once for all of them and timed as
the binaries arrive. When no strategy asks for more, each problem's finalists are verified and raced.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any, Protocol

from tritongemm import choose, generate, planning, prune, registry
from tritongemm.compile import Compiler, Job
from tritongemm.config import Config
from tritongemm.errors import OutputError, TritonGemmError
from tritongemm.planning import Planned
from tritongemm.problem import Problem
from tritongemm.record import Record
from tritongemm.store import Store
from tritongemm.target import Target
from tritongemm.timing import Final
from tritongemm.trial import Built, Trial


class Judge(Protocol):
    """What times and verifies candidates: a GPU, or the stand-in for one."""

    target: Target

    def screen(self, problem: Problem, built: Sequence[Built], best: float) -> Iterator[Trial]: ...
    def check(self, problem: Problem, built: Sequence[Built]) -> Iterator[Trial]: ...
    def final(self, problem: Problem, built: Sequence[Built], library: str) -> Final: ...
    def describe(self, problem: Problem, config: Config) -> str: ...
    def close(self) -> None: ...


class Watcher(Protocol):
    """What is told of the progress."""

    def planned(self, problem: Problem, total: int, pruned: prune.Pruned) -> None: ...
    def stage(self, name: str, total: int) -> None: ...
    def step(self, name: str, count: int = 1) -> None: ...
    def trial(self, problem: Problem, trial: Trial) -> None: ...
    def failed(self, problem: Problem, reason: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What to do, beside the problems.

    Attributes:
        folder: where generated modules go.
        strategy: plug-in of strategies/.
        budget: most configs tried for one problem; 0 for no limit.
        finalists: candidates verified and raced.
        library: plug-in of backends/ that is raced; "" for none.
        margin: relative gain below which the library is kept.
        stop: "" to tune, or the stage after which to stop: ``generate`` or ``compile``.
        toolchain: versions, for the records.
    """

    folder: Path
    strategy: str = "exhaustive"
    budget: int = 0
    finalists: int = 12
    library: str = "torch"
    margin: float = choose.MARGIN
    stop: str = ""
    toolchain: dict[str, str] = field(default_factory=dict, hash=False)


@dataclass
class Task:
    """One problem on its way down the line."""

    problem: Problem
    judge: Judge
    module: Path
    search: Generator[list[Config], list[Trial], None]
    batch: list[Config]
    trials: dict[str, Trial] = field(default_factory=dict)
    built: dict[str, Built] = field(default_factory=dict)
    failure: str = ""

    @property
    def best(self) -> float:
        return min((t.seconds for t in self.trials.values() if t.status == "ok"), default=float("inf"))


def nearest(problem: Problem, records: Iterable[Record], count: int = 3) -> list[Config]:
    """Winners of the solved problems that differ least in size, among those of equal dtypes and layouts."""

    def distance(other: Problem) -> float:
        pairs = ((problem.m, other.m), (problem.n, other.n), (problem.k, other.k))
        return sum(abs(log2(a / b)) for a, b in pairs)

    alike = [r for r in records if (r.problem.dtypes, r.problem.layout) == (problem.dtypes, problem.layout)]
    return [r.config for r in sorted(alike, key=lambda r: distance(r.problem))[:count] if r.config.backend == "triton"]


class Pipeline:
    """The stages and what they share during one run.

    Args:
        judges: one for each device; problems are dealt out among them.
        compiler: builds for all of them.
        store: where trials and records go.
        plan: what to do.
        watcher: told of the progress.
    """

    def __init__(self, judges: Sequence[Judge], compiler: Compiler, store: Store, plan: Plan, watcher: Watcher) -> None:
        self.judges, self.compiler, self.store, self.plan, self.watcher = judges, compiler, store, plan, watcher

    def tune(self, problems: Sequence[Problem]) -> dict[Problem, str]:
        """Tune the problems that have no record yet; records go to the store as they are made.

        Returns:
            The problems that failed, with the reason.
        """
        todo = [p for p in problems if self.store.record(p) is None]
        self.watcher.stage("plan", len(todo))
        planned = planning.plans(todo, self.judges[0].target, self.plan.folder, self.compiler.jobs)
        tasks = [self._start(p, self.judges[i % len(self.judges)]) for i, p in enumerate(planned)]
        if self.plan.stop == "generate":
            return {}
        running = tasks
        while running:
            self._round(running)
            running = [t for t in running if self._next(t)]
        if self.plan.stop == "compile":
            return {t.problem: t.failure for t in tasks if t.failure}
        self._on_judges(tasks, "final", self._finish)
        return {t.problem: t.failure for t in tasks if t.failure}

    def _start(self, planned: Planned, judge: Judge) -> Task:
        problem = planned.problem
        strategy = registry.load("strategies", self.plan.strategy)
        seeds = nearest(problem, self.store.records())
        search = strategy.search(planned.space, planned.order, self.plan.budget, seeds)
        self.watcher.planned(problem, len(planned.space), planned.pruned)
        self.watcher.step("plan")
        return Task(problem, judge, planned.module, search, next(search))

    def _next(self, task: Task) -> bool:
        """Send a task's trials to its strategy; whether it asks for more."""
        if task.failure or self.plan.stop:
            return False
        try:
            task.batch = task.search.send([task.trials[c.name] for c in task.batch])
            return True
        except StopIteration:
            return False

    def _round(self, tasks: Sequence[Task]) -> None:
        wanted: dict[str, list[tuple[Task, Config]]] = {}
        jobs: list[Job] = []
        for task in tasks:
            known = {
                name: trial for (name, stage), trial in self.store.trials(task.problem).items() if stage == "screen"
            }
            for config in task.batch:
                if config.name in known and known[config.name].status != "ok" and not self.plan.stop:
                    task.trials[config.name] = known[config.name]
                    continue
                job = registry.load("backends", config.backend).job(
                    config, task.problem, task.judge.target, str(task.module)
                )
                if job.digest not in wanted:
                    wanted[job.digest] = []
                    jobs.append(job)
                wanted[job.digest].append((task, config))
                if config.name in known:
                    task.trials[config.name] = known[config.name]
        self.watcher.stage("compile", len(jobs))
        self.watcher.stage("screen", sum(map(len, wanted.values())))
        lanes = {id(t.judge): SimpleQueue[Any]() for t in tasks}
        faults: list[BaseException] = []
        threads = [threading.Thread(target=self._lane, args=(q, faults), daemon=True) for q in lanes.values()]
        for thread in threads:
            thread.start()
        try:
            for built in self.compiler.stream(jobs):
                self.watcher.step("compile")
                for task, config in wanted[built.digest]:
                    lanes[id(task.judge)].put((task, config, built))
        finally:
            for lane in lanes.values():
                lane.put(None)
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]

    def _lane(self, queue: SimpleQueue[Any], faults: list[BaseException]) -> None:
        """Screen what arrives for one judge until None does."""
        try:
            open_ = True
            while open_:
                items = [queue.get()]
                while not queue.empty() and len(items) < 256:
                    items.append(queue.get())
                open_ = None not in items
                by_task: dict[int, tuple[Task, list[Built]]] = {}
                for task, config, built in (i for i in items if i is not None):
                    task.built[config.name] = built
                    if config.name in task.trials or task.failure:
                        self.watcher.step("screen")
                    else:
                        by_task.setdefault(id(task), (task, []))[1].append(built)
                for task, builds in by_task.values():
                    self._screen(task, builds)
        except BaseException as error:
            faults.append(error)

    def _screen(self, task: Task, builds: list[Built]) -> None:
        fresh = [Trial(b.config, b.status, b.reason) for b in builds if b.status != "ok"]
        ready = [b for b in builds if b.status == "ok"]
        try:
            if self.plan.stop != "compile":
                for trial in task.judge.screen(task.problem, ready, task.best):
                    fresh.append(trial)
                    self.watcher.step("screen")
        except OutputError:
            raise
        except TritonGemmError as error:
            task.failure = str(error)
            self.watcher.failed(task.problem, task.failure)
        self.watcher.step("screen", sum(b.status != "ok" for b in builds))
        self.store.add_trials(task.problem, fresh)
        for trial in fresh:
            task.trials[trial.config.name] = trial
            self.watcher.trial(task.problem, trial)

    def _on_judges(self, tasks: Sequence[Task], stage: str, work: Any) -> None:
        """Run `work` on every task, one thread for each judge."""
        self.watcher.stage(stage, len(tasks))
        faults: list[BaseException] = []

        def run(mine: Iterable[Task]) -> None:
            try:
                for task in mine:
                    work(task)
                    self.watcher.step(stage)
            except BaseException as error:
                faults.append(error)

        lanes: dict[int, list[Task]] = {}
        for task in tasks:
            lanes.setdefault(id(task.judge), []).append(task)
        threads = [threading.Thread(target=run, args=(lane,), daemon=True) for lane in lanes.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]

    def _finish(self, task: Task) -> None:
        """Race the best of one problem and record the winner."""
        if task.failure:
            return
        problem, judge, plan = task.problem, task.judge, self.plan
        ranked = sorted((t for t in task.trials.values() if t.status == "ok"), key=lambda t: (t.seconds, t.config))
        final: Final | None = None
        # Wrong finalists make room for the next in line, until somebody passes.
        while ranked and (final is None or not final.samples.keys() - {choose.LIBRARY}):
            finalists, ranked = ranked[: plan.finalists], ranked[plan.finalists :]
            try:
                final = judge.final(problem, [task.built[t.config.name] for t in finalists], plan.library)
            except TritonGemmError as error:
                task.failure = str(error)
                break
            self.store.add_trials(problem, final.trials)
            for trial in final.trials:
                self.watcher.trial(problem, trial)
        if final is None or not final.samples.keys() - {choose.LIBRARY}:
            counts: dict[str, int] = {}
            for trial in (*task.trials.values(), *(final.trials if final else ())):
                counts[trial.status] = counts.get(trial.status, 0) + 1
            task.failure = task.failure or "no candidate passed: " + ", ".join(f"{n} {s}" for s, n in counts.items())
            self.watcher.failed(problem, task.failure)
            return
        record = self._record(task, final)
        self.store.add_record(record)
        generate.winner(record, judge.target, plan.folder)

    def _record(self, task: Task, final: Final) -> Record:
        choice = choose.choose(final.samples, self.plan.margin)
        best = next(t for t in final.trials if t.config.name == choice.name)
        library = final.samples.get(choose.LIBRARY)
        return Record(
            problem=task.problem,
            target=task.judge.target.name,
            config=best.config,
            winner=self.plan.library if choice.library_won else best.config.backend,
            seconds=best.seconds,
            spread=best.spread,
            timer=best.timer,
            error=best.error,
            tolerance=best.tolerance,
            library_seconds=median(library) if library else None,
            library=self.plan.library if library else "",
            tie=choice.tie,
            verified=task.judge.describe(task.problem, best.config),
            toolchain=self.plan.toolchain,
            cold=final.cold,
        )
