"""The line: Problems → Records. Prune, rank, generate, compile, time, verify, choose and write, in rounds.

In a round every problem asks its strategy for a batch; what they ask for is compiled once for all of them and timed as
the binaries arrive. A problem's next batch is thought out while the GPU times the others'. The first round takes in what
other backends bring: their kernels are compiled with the rest, and libraries are asked while the first compiles run. When
a problem's strategy asks for no more, its finalists are verified and raced as soon as there is nothing to screen. What takes
minutes to compile does so beside the line: only the final waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypeAlias

from tritongemm.build.background import BackgroundBuilds
from tritongemm.build.pool import BuildPool
from tritongemm.build.prepare import CompileJobs
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import OutputError, TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.trial import Trial
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.plugins.contracts import BuildInputs, Evaluator, Watcher
from tritongemm.results.store import Store
from tritongemm.search.warm_start import WarmStart
from tritongemm.tuning import final_race, planning, roster
from tritongemm.tuning.task import Task, dealt, longest_first
from tritongemm.workers.work_queue import WorkQueue

# A judge is given binaries to screen, and other work on a task.
Item: TypeAlias = "tuple[Task, Artifact | Callable[[Task], None]]"


class TuningRun:
    """The stages and what they share during one run.

    Args:
        judges: one for each device; problems are dealt out among them.
        compiler: builds for all of them.
        store: where trials and records go.
        plan: what to do.
        watcher: told of the progress.

    Attributes:
        unstored: trials that the store does not keep, so that a resumed run tries them again.
    """

    def __init__(
        self, judges: Sequence[Evaluator], compiler: BuildPool, store: Store, plan: TuningOptions, watcher: Watcher
    ) -> None:
        self.judges, self.compiler, self.store, self.plan, self.watcher = judges, compiler, store, plan, watcher
        self.unstored: dict[Problem, list[Trial]] = {}
        self._deadline = inf  # when the search ends, by time.monotonic
        self._others = WarmStart((), store)
        self._lanes: dict[int, WorkQueue[Item]] = {}  # by the identity of their judge

    def tune(self, problems: Sequence[Problem]) -> dict[Problem, str]:
        """Tune the problems that have no record yet; records go to the store as they are made.

        Returns:
            The problems that failed, with the reason.
        """
        self._deadline = time.monotonic() + (self.plan.seconds or inf)
        turns = longest_first(problems, self.judges[0].target)
        todo = [p for p in turns if self.store.record(p) is None]
        self._others = WarmStart(turns, self.store)
        self.watcher.stage("plan", len(todo))
        if todo and not self.plan.stop:
            self.compiler.start()
            for judge in self.judges:
                judge.start()
        tasks = dealt(todo, self.judges, self.plan.folder)
        if self.plan.stop == "generate":
            return {t.problem: t.failure for t in self._planned(tasks) if t.failure}
        self.watcher.stage("final", 0 if self.plan.stop else len(tasks))
        running, ended = tasks, list[Task]()
        with closing(BackgroundBuilds(self.compiler)) as sideline, ThreadPoolExecutor(1) as thinker:
            self._lanes = {id(judge): WorkQueue[Item](partial(self._work, thinker)) for judge in self.judges}
            while running or ended:
                if not running:
                    sideline.wait([[f for _, f in task.slow] for task in ended], self._deadline)
                running, ended = self._round(running, ended, sideline, thinker)
            for lane in self._lanes.values():
                lane.close()
        if self.plan.stop == "compile":
            for task in (t for t in tasks if not any(b.status == "ok" for b in t.built.values())):
                reasons = final_race.explain_refusals(task, self.plan)
                task.failure = task.failure or ", ".join(["no config could be compiled", *reasons])
                self.watcher.failed(task.problem, task.failure)
            self.watcher.compiled({t.problem: t.built.values() for t in tasks})
        return {t.problem: t.failure for t in tasks if t.failure}

    def _planned(self, tasks: Sequence[Task]) -> Iterator[Task]:
        """The tasks, each as soon as it has been planned."""
        return planning.planned(tasks, self.plan, self.compiler.jobs, self._others, self.watcher)

    def _next(self, task: Task) -> bool:
        """Send a task's trials to its strategy; whether it asks for more. If not, it races, unless it waits still."""
        more = self._asks(task)
        if not more and not task.slow:
            self._race(task)
        return more

    def _race(self, task: Task) -> None:
        if not self.plan.stop:
            self._put(task, self._finish, later=True)

    def _put(self, task: Task, thing: Artifact | Callable[[Task], None], later: bool = False) -> None:
        self._lanes[id(task.judge)].put((task, thing), later)

    def _asks(self, task: Task) -> bool:
        if task.failure or self.plan.stop or time.monotonic() > self._deadline:
            return False
        try:
            assert task.search is not None
            task.batch = task.search.send([task.trials[c.name] for c in task.batch])
            return True
        except StopIteration:
            return False

    def _round(
        self, tasks: list[Task], ended: list[Task], sideline: BackgroundBuilds, thinker: ThreadPoolExecutor
    ) -> tuple[list[Task], list[Task]]:
        """Compile and screen what the strategies of `tasks` ask for, and race those of the `ended` that wait no more.

        Returns:
            The tasks whose strategies ask for more, and those whose do not but that wait for slow compiles.
        """
        wanted: dict[str, list[tuple[Task, Config]]] = {}
        for task in (*tasks, *ended):
            self._take_late(task)
        for task in ended:
            if not task.slow:
                self._race(task)
        for task in tasks:
            if not task.asked and not self.plan.stop:
                self._put(task, self._ask_libraries)
        for built in self.compiler.stream(self._wanted(tasks, wanted, sideline, thinker), self._deadline):
            for task, config in wanted.pop(built.digest, ()):
                self.watcher.step("compile")
                self._put(task, replace(built, config=config))
        for lane in self._lanes.values():
            lane.wait()
        going = [task for task in tasks if task.more is not None and task.more.result()]
        for task in tasks:
            if task.more is None and not task.slow:  # its time was up before its kernels were compiled
                self._race(task)
        return going, [t for t in (*ended, *tasks) if t.slow and t not in going]

    def _wanted(
        self,
        tasks: Sequence[Task],
        wanted: dict[str, list[tuple[Task, Config]]],
        sideline: BackgroundBuilds,
        thinker: ThreadPoolExecutor,
    ) -> Iterator[CompileJob]:
        """The jobs of the tasks' batches, task by task; those before are screened while later ones are planned and made.

        Args:
            wanted: filled with who wants each, by digest.
            sideline: is given those whose compiles take minutes.
            thinker: is told of tasks that want none.
        """
        for task in self._planned(tasks):
            task.more = None
            every = list(self._jobs(task))
            task.asked = True
            self.watcher.stage("compile", len(every))
            self.watcher.stage("screen", len(every))
            jobs = [pair for pair in every if not roster.compile_limit_s(pair[0].backend)]
            task.slow += [(c, sideline.begin(job)) for c, job in every if roster.compile_limit_s(c.backend)]
            task.waiting = len(jobs)
            if not jobs:
                task.more = thinker.submit(self._next, task)
            for config, job in jobs:
                wanted.setdefault(job.digest, []).append((task, config))
                yield job

    def _take_late(self, task: Task) -> None:
        """Screen what has been compiled beside the line meanwhile; once the time is spent, go on without the rest."""
        slow, task.slow, builds = task.slow, [], list[Artifact]()
        for config, future in slow:
            if future.done():  # asked once: what ends meanwhile must not be neither
                builds.append(replace(future.result(), config=config))
            elif not task.failure:
                task.slow.append((config, future))
        if builds:
            self.watcher.step("compile", len(builds))
            self._put(task, partial(self._look, builds=builds))
        if task.slow and time.monotonic() > self._deadline:
            for backend in dict.fromkeys(c.backend for c, _ in task.slow):
                count = sum(c.backend == backend for c, _ in task.slow)
                self._refused(task, backend, f"the budget was spent before {count} of its kernels were compiled")
            task.slow = []

    def _jobs(self, task: Task) -> Iterator[tuple[Config, CompileJob]]:
        """What to compile of a task's batch, and of what other backends bring; what is known to fail is not compiled again."""
        trials = self.store.trials(task.problem)
        configs = [*task.batch, *(() if task.asked else self._brought(task))]
        wanted, inputs = [(task.problem, config) for config in configs], BuildInputs(module=task.module)
        jobs = CompileJobs(wanted, task.judge.target, self.plan.folder, inputs)
        for config in configs:
            known = trials.get((config.name, "screen"))
            if known is not None:
                task.trials[config.name] = known
                if known.status != "ok" and not self.plan.stop:
                    continue
            job = jobs.job(task.problem, config)
            if isinstance(job, CompileJob):
                yield config, job
            else:
                self._done(task, [Trial(config, "compile_failed", job.reason)])

    def _brought(self, task: Task) -> list[Config]:
        """The candidates of the backends that carry code; one that fails costs itself alone."""
        found: list[Config] = []
        for name in filter(roster.lists_kernels, self.plan.backends):
            try:
                configs, why = roster.list_candidates(name, task.problem, task.judge.target)
            except TritonGemmError as error:
                self._refused(task, name, str(error))
                continue
            self.watcher.offered(task.problem, name, len(configs), why)
            task.refused |= {name: why} if why else {}
            found += configs
        return found

    def _refused(self, task: Task, backend: str, reason: str) -> None:
        task.refused[backend] = reason
        self.watcher.refused(task.problem, backend, reason)

    def _work(self, thinker: ThreadPoolExecutor, items: list[Item]) -> None:
        """What a judge's thread does: screen binaries, or what else an item says."""
        by_task: dict[int, tuple[Task, list[Artifact]]] = {}
        for task, item in items:
            if isinstance(item, Artifact):
                by_task.setdefault(id(task), (task, []))[1].append(item)
            else:
                item(task)
        for task, builds in by_task.values():
            self._look(task, builds)
            task.waiting -= len(builds)
            if not task.waiting:
                task.more = thinker.submit(self._next, task)

    def _look(self, task: Task, builds: list[Artifact]) -> None:
        """Screen what has not been."""
        task.built |= {b.config.name: b for b in builds}
        fresh = [b for b in builds if b.config.name not in task.trials and not task.failure]
        self.watcher.step("screen", len(builds) - len(fresh))
        self._screen(task, fresh)

    def _ask_libraries(self, task: Task) -> None:
        """Screen the libraries' own candidates of one problem; they need no compiling."""
        known = self.store.trials(task.problem)
        for backend in filter(roster.is_library, self.plan.backends):
            builds = []
            try:
                configs = task.judge.list_algorithms(task.problem, backend, self.plan.algorithms)
            except TritonGemmError as error:
                self._refused(task, backend, str(error))
                continue
            self.watcher.offered(task.problem, backend, len(configs), "")
            for config in configs:
                task.built[config.name] = Artifact(config, "")
                if (config.name, "screen") in known:
                    task.trials[config.name] = known[config.name, "screen"]
                else:
                    builds.append(task.built[config.name])
            self.watcher.stage("screen", len(builds))
            self._screen(task, builds)

    def _screen(self, task: Task, builds: list[Artifact]) -> None:
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
        # A compile that took too long may do so because the machine was busy: a resumed run tries it again.
        late = {b.config.name for b in builds if b.status == "timeout"}
        self.unstored.setdefault(task.problem, []).extend(t for t in fresh if t.config.name in late)
        self._done(task, fresh, late)

    def _done(self, task: Task, trials: Sequence[Trial], unstored: Collection[str] = ()) -> None:
        self.store.add_trials(task.problem, [t for t in trials if t.config.name not in unstored])
        for trial in trials:
            task.trials[trial.config.name] = trial
            self.watcher.trial(task.problem, trial)

    def _finish(self, task: Task) -> None:
        self.watcher.step("final")
        if not task.failure:
            final_race.finish(task, self.plan, self.store, self.watcher)
