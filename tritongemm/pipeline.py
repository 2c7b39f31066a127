"""The line: Problems → Records. Prune, rank, generate, compile, time, verify, choose and write, in rounds.

In a round every problem asks its strategy for a batch; what they ask for is compiled once for all of them and timed as
the binaries arrive. Libraries are asked for their candidates in the first round, while the first compiles run. When no
strategy asks for more, each problem's finalists are verified and raced.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from statistics import median
from typing import Any

from tritongemm import choose, generate, planning, registry
from tritongemm.compile import Compiler, Job
from tritongemm.config import Config
from tritongemm.errors import OutputError, TritonGemmError
from tritongemm.planning import Planned
from tritongemm.problem import Problem
from tritongemm.record import Record
from tritongemm.store import Store
from tritongemm.task import Judge, Plan, Task, Watcher, nearest
from tritongemm.timing import Final
from tritongemm.trial import Built, Trial


def finalists(trials: Iterable[Trial], count: int) -> list[Trial]:
    """Screened candidates in the order they get to the final: of the first `count`, a quarter are each backend's best,
    so that near-copies of one library's kernel don't fill it."""
    ranked = sorted((t for t in trials if t.status == "ok"), key=lambda t: (t.seconds, t.config))
    share = max(1, count // 4)
    first: list[Trial] = []
    for backend in sorted({t.config.backend for t in ranked}):
        first += [t for t in ranked if t.config.backend == backend][:share]
    libraries = Counter(t.config.backend for t in first)
    rest = [t for t in ranked if t not in first]
    ours = [t for t in rest if libraries[t.config.backend] < share or t.config.backend == "triton"]
    return [*first, *ours, *(t for t in rest if t not in ours)]


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
        self.solved: list[Record] = []

    def tune(self, problems: Sequence[Problem]) -> dict[Problem, str]:
        """Tune the problems that have no record yet; records go to the store as they are made.

        Returns:
            The problems that failed, with the reason.
        """
        todo = [p for p in problems if self.store.record(p) is None]
        self.watcher.stage("plan", len(todo))
        # Not this run's own sizes: a resumed run has some of them already, and must try what the first would have.
        self.solved = [r for r in self.store.records() if r.problem not in set(problems)]
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
        seeds = nearest(problem, self.solved)
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
        """Compile and screen what the tasks' strategies ask for; in the first round, what libraries have as well."""
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
        for task in tasks:
            if not task.asked and not self.plan.stop:
                lanes[id(task.judge)].put((task, None, None))
        try:
            for built in self.compiler.stream(jobs):
                self.watcher.step("compile")
                for task, config in wanted[built.digest]:
                    lanes[id(task.judge)].put((task, config, replace(built, config=config)))
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
                    if config is None:
                        self._ask_libraries(task)
                        continue
                    task.built[config.name] = built
                    if config.name in task.trials or task.failure:
                        self.watcher.step("screen")
                    else:
                        by_task.setdefault(id(task), (task, []))[1].append(built)
                for task, builds in by_task.values():
                    self._screen(task, builds)
        except BaseException as error:
            faults.append(error)

    def _ask_libraries(self, task: Task) -> None:
        """Screen the libraries' own candidates of one problem; they need no compiling."""
        task.asked = True
        known = self.store.trials(task.problem)
        for backend in self.plan.libraries:
            builds = []
            for config in task.judge.enumerate(task.problem, backend)[: self.plan.algorithms]:
                task.built[config.name] = Built(config, "")
                if (config.name, "screen") in known:
                    task.trials[config.name] = known[config.name, "screen"]
                else:
                    builds.append(task.built[config.name])
            self.watcher.stage("screen", len(builds))
            self._screen(task, builds)

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

    def _on_judges(self, tasks: Sequence[Task], stage: str, work: Callable[[Task], None]) -> None:
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
        waiting = finalists(task.trials.values(), plan.finalists)
        final: Final | None = None
        raced: set[str] = set()
        # Wrong finalists make room for the next in line, until somebody passes.
        while waiting and not raced:
            batch, waiting = waiting[: plan.finalists], waiting[plan.finalists :]
            try:
                final = judge.final(problem, [task.built[t.config.name] for t in batch], plan.library)
            except TritonGemmError as error:
                task.failure = str(error)
                break
            raced = final.samples.keys() - {choose.LIBRARY}
            self.store.add_trials(problem, final.trials)
            for trial in final.trials:
                self.watcher.trial(problem, trial)
        if final is None or not raced:
            counts = Counter(t.status for t in (*task.trials.values(), *(final.trials if final else ())))
            task.failure = task.failure or "no candidate passed: " + ", ".join(f"{n} {s}" for s, n in counts.items())
            self.watcher.failed(problem, task.failure)
            return
        record = self._record(task, final)
        self.store.add_record(record)
        ours = [t for t in final.trials if t.samples and t.config.backend == "triton"]
        if ours:  # whoever won, the best kernel of ours can be taken away
            best = min(ours, key=lambda t: t.seconds)
            generate.winner(replace(record, config=best.config, seconds=best.seconds), judge.target, plan.folder)

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
