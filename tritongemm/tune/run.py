"""A tuning run, which takes problems through all stages: prune, rank, generate, compile, time, verify, race and write.

One thread owns all tasks and the store: the one that calls `TuningRun.tune`. Builders, devices and strategies work in
threads and processes of their own and send it events (`tune.threads`).

Sizes are independent. A size's strategy requests a batch, whose kernels are compiled (once, if several sizes need the
same) and screened as they arrive, on whichever device is free; given the times, it requests the next batch. So
compilers and devices work on some sizes while others are planned. Candidates of other backends join a size's first
batch: their kernels are compiled with the rest, and libraries are queried while the first kernels compile. When a
strategy wants no more, the finalists are verified and raced as soon as a device has nothing to screen. Slow compiles
run in the background: only the race waits for them.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from queue import Empty, SimpleQueue

from tritongemm.build.pool import BackgroundBuilds, BuildPool
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Evaluator, Watcher
from tritongemm.results.store import Store
from tritongemm.search.warm_start import WarmStart
from tritongemm.tune import roster, threads
from tritongemm.tune.device_queue import CompileQueue, DeviceQueue
from tritongemm.tune.final_race import RaceOutcome, best_kernel, decide, prepare_race
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.planning import PlannedTasks, begin_search, plan_tasks, take_job
from tritongemm.tune.quantization import compile_jobs
from tritongemm.tune.search_processes import Planner
from tritongemm.tune.task import (
    Task,
    TaskState,
    list_without_kernels,
    longest_first,
    trials_of,
    why_nothing_was_compiled,
)

# how many of each size's first batch, the best predicted, are compiled before all else; the rest in the sizes' order
URGENT_CONFIGS, FIRST_TURN = 8, 0
# how many of a library's best guesses are screened with generated kernels, the others when a device is idle
FIRST_ALGORITHMS = 8


class TuningRun:
    """The stages of one run, and the state that they share."""

    def __init__(
        self, evaluators: Sequence[Evaluator], pool: BuildPool, store: Store, options: TuningOptions, watcher: Watcher
    ) -> None:
        self.evaluators, self.pool, self.store, self.options, self.watcher = evaluators, pool, store, options, watcher
        self.unstored: dict[Problem, list[Trial]] = {}  # that a resumed run tries again
        self.ends = time.monotonic() + (options.seconds or inf)
        self._deadline = self.ends  # from then on the search tries nothing new
        self._events: SimpleQueue[threads.Event] = SimpleQueue()
        self._devices: DeviceQueue[Task, threads.Work] = DeviceQueue(len(evaluators))
        self._thinker = ThreadPoolExecutor(1)  # its threads wait for strategies, or run them
        self._to_compile, self._background, self._planner = CompileQueue(), BackgroundBuilds(pool), Planner(0)
        self._tasks: list[Task] = []
        self._warm_start = WarmStart((), store)

    def tune(self, problems: Sequence[Problem], share: float = 1.0) -> dict[Problem, str]:
        """Tune the problems that have no record yet, and return those that failed, with the reason.

        Records go to the store as they are made. The search has a `share` of the run's seconds; tables have the rest.
        """
        self._deadline = time.monotonic() + (self.options.seconds * share or inf)
        ordered = longest_first(problems, self._target)
        left = [p for p in ordered if self.store.record(p) is None]
        self._tasks = tasks = [Task(problem, turn=turn) for turn, problem in enumerate(left, start=1)]
        self._warm_start = WarmStart(ordered, self.store)
        self.watcher.stage("plan", len(tasks))
        with ExitStack() as stack:
            self._planner = planner = Planner.for_problems(len(tasks), self.pool.jobs)
            self._thinker = stack.enter_context(ThreadPoolExecutor(planner.width))
            stack.callback(planner.close)
            cores = self.pool.jobs / len(self.evaluators)  # the effort for a size is that of a run on one of its GPUs
            planned = plan_tasks(tasks, self._target, self.options, planner, self._warm_start, cores)
            if self.options.stop == "generate":
                for task, plan in planned:
                    begin_search(task, plan, self._warm_start, self.watcher)
                return {}
            stack.callback(self._background.close)
            self.watcher.stage("final", len(tasks))
            if tasks and not self.options.stop:
                self._start_devices(stack)
                for task, library in product(tasks, filter(roster.is_library, self.options.backends)):
                    self._send(task, threads.AlgorithmsWork(library))
            over = threading.Event()
            stack.callback(self._to_compile.end)
            stack.callback(over.set)
            self._start_planners_and_builders(planned, over)
            while not all(task.finished for task in tasks):
                self._handle_next()
            planner.finish_modules()
        if self._time_is_spent:
            self.watcher.say_alike(list_without_kernels(tasks, self.options))
        if self.options.stop:
            places = {problem: place for place, problem in enumerate(problems)}
            self._report_compiled(sorted(tasks, key=lambda task: places[task.problem]))
        return {t.problem: t.failure for t in tasks if t.failure}

    @property
    def _target(self) -> Target:
        return self.evaluators[0].target

    def _start_devices(self, stack: ExitStack) -> None:
        """Start the compilers, the devices and a thread for each device."""
        # Of a search without a budget it isn't known how many kernels it takes.
        most = len(self._tasks) * self.options.budget or self.pool.jobs
        self.pool.start(self.options.backends, self._target, most)
        stack.callback(self._devices.close, abandon=True)
        for number, evaluator in enumerate(self.evaluators):
            evaluator.start()
            screened = partial(self.watcher.step, "screen")
            worker = threads.DeviceThread(number, evaluator, self._devices, self.options, self._events.put, screened)
            threading.Thread(target=worker.run, name=f"device {number}", daemon=True).start()

    def _start_planners_and_builders(self, planned: PlannedTasks, over: threading.Event) -> None:
        """Start the thread that plans the sizes and the one that has their kernels compiled, until the run is over."""
        post = self._events.put
        built = self.pool.stream(self._to_compile.draw(), self._deadline, self._to_compile.turn)
        threading.Thread(target=threads.send_plans, args=(post, planned, over), name="plans", daemon=True).start()
        threading.Thread(target=threads.send_builds, args=(post, built, over), name="builds", daemon=True).start()

    @property
    def _time_is_spent(self) -> bool:
        return time.monotonic() > self._deadline

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _begin_batch(self, task: Task) -> None:
        """Compile and screen a strategy's batch, and with its first one the candidates of other backends."""
        task.move_to(TaskState.BUILDING)
        jobs = [] if self._time_is_spent else list(self._compile_jobs(task))
        first, task.asked_others = not task.asked_others, True
        if first and not self.options.stop:
            self._to_compile.put_ahead(compile_jobs(task.problem, self.evaluators[0]), self._turn_of(task))
        self.watcher.stage("compile", len(jobs))
        self.watcher.stage("screen", len(jobs))
        for number, (config, job) in enumerate(jobs):
            if roster.compile_limit_s(config.backend):
                task.slow[config.name] = config
                future = self._background.begin(job)
                future.add_done_callback(partial(threads.send_slow_build, self._events.put, task, config))
            else:
                task.unscreened += 1
                urgent = first and number < URGENT_CONFIGS
                self._to_compile.put(task, config, job, FIRST_TURN if urgent else self._turn_of(task))
        self._go_on(task)

    def _turn_of(self, task: Task) -> int:
        """Return the priority of a task's compiles: one size after the other, or all alike in a run of limited time."""
        return FIRST_TURN + (1 if self.options.seconds else task.turn)

    def _compile_jobs(self, task: Task) -> Iterator[tuple[Config, CompileJob]]:
        """Yield the compile jobs of a batch; configs that are known to fail are not compiled again."""
        known = self.store.trials(task.problem)
        for config in [*task.batch, *(() if task.asked_others else self._candidates(task))]:
            trial = known.get((config.name, "screen"))
            if trial is not None:
                task.add_trial(trial)
                if trial.status != "ok" and not self.options.stop:
                    continue
            job = take_job(task, config, self._target)
            if isinstance(job, Support):
                self._keep(task, [Trial(config, "compile_failed", job.reason)])
            else:
                yield config, job

    def _candidates(self, task: Task) -> list[Config]:
        """Return the candidates of the backends that bring code; a backend that fails costs itself alone."""
        found, limits = list[Config](), self.options.limits_of(task.problem)
        for name in filter(roster.lists_kernels, self.options.backends):
            try:
                configs, why = roster.list_candidates(name, task.problem, self._target, limits)
            except TritonGemmError as error:
                self._refuse(task, name, str(error))
                continue
            self.watcher.offered(task.problem, name, len(configs), why)
            task.refused |= {name: why} if why else {}
            found += configs
        return found

    # --- events -------------------------------------------------------------------------------------------------------

    def _handle_next(self) -> None:
        """Wait for the next event and handle it; once the time is spent, go on without what is not compiled."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self._to_compile.end()
            if self._give_up_slow():
                return
        try:
            event = self._events.get(timeout=left if 0 < left < inf else None)
        except Empty:
            return
        self._handle(event)

    def _handle(self, event: threads.Event) -> None:
        match event:
            case threads.SizePlanned(task, plan):
                begin_search(task, plan, self._warm_start, self.watcher)
                self._begin_batch(task)
            case threads.ArtifactBuilt(artifact):
                self._take_built(artifact)
            case threads.SlowArtifactBuilt(task, artifact):
                self._take_slow(task, artifact)
            case threads.BuildsEnded():
                self._end_builds()
            case threads.Screened():
                self._take_screened(event)
            case threads.AlgorithmsListed():
                self._take_algorithms(event)
            case threads.BatchChosen(task, batch):
                self._take_choice(task, batch)
            case threads.Raced(task, outcome):
                self._take_race(task, outcome)
            case threads.ThreadFailed(error):
                raise error

    def _take_built(self, artifact: Artifact) -> None:
        """Pass an artifact to all configs that wait for it; configs that differ only in arguments share a binary."""
        for task, config in self._to_compile.take(artifact.digest):
            self.watcher.step("compile")
            self._take_artifact(task, replace(artifact, config=config), in_batch=True)
            self._go_on(task)

    def _take_slow(self, task: Task, artifact: Artifact) -> None:
        """Take a slow compile, unless it was given up meanwhile."""
        if task.slow.pop(artifact.config.name, None) is not None:
            self.watcher.step("compile")
            self._take_artifact(task, artifact, in_batch=False)
            self._go_on(task)

    def _end_builds(self) -> None:
        """Go on without what was not compiled before the time was spent."""
        for task, _ in self._to_compile.give_up():
            self.watcher.step("search", task.count_tried(1))
            self._go_on(task)

    def _take_choice(self, task: Task, batch: list[Config] | None) -> None:
        """Begin a strategy's next batch; None: it wants no more."""
        task.batch = batch or []
        if batch is None:
            task.move_to(TaskState.WAITING)
            self._go_on(task)
        else:
            self._begin_batch(task)

    def _take_screened(self, event: threads.Screened) -> None:
        task = event.task
        self.watcher.step("search", task.count_tried(event.batch_pieces))
        task.in_flight -= event.batch_pieces + event.other_pieces
        if event.failure and not task.failure:
            task.fail(event.failure)
            self.watcher.failed(task.problem, event.failure)
        self._keep(task, event.trials)
        self._go_on(task)

    def _go_on(self, task: Task) -> None:
        """Move a task to its next state, where nothing that it waits for is under way."""
        if task.state is TaskState.BUILDING and not task.unscreened:
            task.move_to(TaskState.SEARCHING)
            if task.failure or self.options.stop or self._time_is_spent:
                task.move_to(TaskState.WAITING)
            else:
                assert task.search is not None, "a task that is built has been planned"
                self._thinker.submit(
                    threads.choose_batch, self._events.put, task, task.search, trials_of(task, task.batch)
                )
        if task.state is TaskState.WAITING and not task.slow and not task.in_flight:
            self._begin_race(task)

    def _send(self, task: Task, work: threads.Work, later: bool = False) -> None:
        """Queue work of a task for a device."""
        task.in_flight += 1
        self._devices.put(task, work, later)

    def _take_artifact(self, task: Task, artifact: Artifact, in_batch: bool) -> None:
        """Screen an artifact that was not screened yet; one that was not built gets its trial without a device."""
        task.artifacts[artifact.config.name] = artifact
        self._warm_start.note_built(task.problem, artifact)
        known = artifact.config.name in task.trials or bool(task.failure)
        if not known and artifact.status == "ok" and not self.options.stop:
            self._send(task, threads.ScreenWork(artifact, in_batch))
            return
        self.watcher.step("screen")
        self.watcher.step("search", task.count_tried(int(in_batch)))
        if not known and artifact.status != "ok":
            self._keep(task, [artifact.failed_trial()])

    def _take_algorithms(self, event: threads.AlgorithmsListed) -> None:
        """Screen a library's algorithms that were not screened yet; they need no compiling."""
        task = event.task
        task.in_flight -= 1
        if event.refusal:
            self._refuse(task, event.backend, event.refusal)
        else:
            self.watcher.offered(task.problem, event.backend, len(event.configs), "")
        known = self.store.trials(task.problem)
        for number, config in enumerate(event.configs):
            trial = known.get((config.name, "screen"))
            task.artifacts[config.name] = Artifact(config, "")
            if trial is not None:
                task.add_trial(trial)
            elif not task.failure:
                self.watcher.stage("screen", 1)
                self._send(
                    task, threads.ScreenWork(task.artifacts[config.name], in_batch=False), number >= FIRST_ALGORITHMS
                )
        self._go_on(task)

    def _give_up_slow(self) -> bool:
        """Go on without unfinished compiles, where time is up; return whether there were any."""
        waiting = [task for task in self._tasks if task.slow]
        for task in waiting:
            for backend in dict.fromkeys(c.backend for c in task.slow.values()):
                count = sum(c.backend == backend for c in task.slow.values())
                self._refuse(task, backend, f"the budget was spent before {count} of its kernels were compiled")
            task.slow.clear()
            if task.state is TaskState.WAITING and not task.in_flight:
                self._begin_race(task)
        return bool(waiting)

    # --- the end of a size --------------------------------------------------------------------------------------------

    def _begin_race(self, task: Task) -> None:
        self.watcher.step("search", task.untried)
        if self.options.stop or task.failure:
            self._end(task, TaskState.DONE if self.options.stop else TaskState.FAILED)
            return
        task.move_to(TaskState.RACING)
        per_core = len(self._tasks) * len(self.evaluators) / self.pool.jobs
        self._send(task, prepare_race(task, self.options, self._target, per_core), later=True)

    def _take_race(self, task: Task, outcome: RaceOutcome) -> None:
        """Store the trials and the record of a race."""
        trials = outcome.result.trials if outcome.result else ()
        for trial in (*outcome.lost, *trials):
            self.watcher.trial(task.problem, trial)
        self._store(task.problem, outcome.lost)
        record = decide(task, outcome, self._target, self.options)
        if record is None:
            self.watcher.failed(task.problem, task.failure)
            self._end(task, TaskState.FAILED)
            return
        self._planner.write(best_kernel(record, trials, self._target, self.options))
        # Last and at once: what has a record is done for good, and a race without one would be run again.
        self._store(task.problem, trials, record)
        self._end(task, TaskState.DONE, record)

    def _end(self, task: Task, state: TaskState, record: Record | None = None) -> None:
        task.move_to(state)
        self.watcher.finished(record)

    def _report_compiled(self, tasks: Sequence[Task]) -> None:
        late = f"its kernels were not compiled within the {self.options.seconds:g} s of --budget"
        for task in (t for t in tasks if not any(a.status == "ok" for a in t.artifacts.values())):
            hints = [] if task.artifacts else roster.suggest_backends(task.problem, self._target, self.options.backends)
            spent = self._time_is_spent and not task.artifacts and not task.trials and not task.refused
            task.fail(late if spent else "; ".join([*why_nothing_was_compiled(task), *hints]))
            self.watcher.failed(task.problem, task.failure)
        self.watcher.compiled({t.problem: t.artifacts.values() for t in tasks})

    def _refuse(self, task: Task, backend: str, reason: str) -> None:
        task.refused[backend] = reason
        self.watcher.refused(task.problem, backend, reason)

    def _keep(self, task: Task, trials: Sequence[Trial]) -> None:
        """Store trials, on disk as well."""
        self._store(task.problem, trials)
        for trial in trials:
            task.add_trial(trial)
            self.watcher.trial(task.problem, trial)

    def _store(self, problem: Problem, trials: Sequence[Trial], record: Record | None = None) -> None:
        """Store trials on disk, but for those that a resumed run shall try again, and the record of their race."""
        self.unstored.setdefault(problem, []).extend(trial for trial in trials if trial.try_again)
        self.store.add_trials(problem, [trial for trial in trials if not trial.try_again], record)
