"""Stage: screened Trials of one problem → its Record: the best are verified and raced, the winner is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.protocol import RaceResult
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.measure import choose
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import SearchedBackend, Watcher
from tritongemm.results.store import Store
from tritongemm.tuning import finalists, roster
from tritongemm.tuning.task import Task


def finish(task: Task, plan: TuningOptions, store: Store, watcher: Watcher) -> None:
    """Race the best of one problem and record the winner, or say of the task why there is none.

    Raises:
        OutputError: the result can't be written.
    """
    problem, judge = task.problem, task.judge
    final, raced = _raced(task, plan, store, watcher)
    if final is None or not raced:
        lost = [*task.trials.values(), *(final.trials if final else ())]
        counts = Counter(t.status for t in lost)
        within = f" within {plan.seconds:g} s" if plan.seconds else ""
        said = [f"{n} {s}" for s, n in counts.items()] or [f"{', '.join(plan.backends)} brought none{within}"]
        said += [f"{t.config.name}: {t.reason}" for t in lost if t.reason][:1]
        said += explain_refusals(task, plan)
        task.failure = task.failure or f"no candidate passed: {', '.join(said)}"
        watcher.failed(problem, task.failure)
        return
    record = task.record(final, plan)
    ours = [t for t in final.trials if t.samples and roster.is_searched(t.config.backend)]
    if ours:  # whoever won, the best kernel of ours can be taken away
        best = min(ours, key=lambda t: t.seconds)
        backend = registry.get(SearchedBackend, best.config.backend)
        backend.write_winner(replace(record, config=best.config, seconds=best.seconds), judge.target, plan.folder)
    # Last and at once: what has a record is done for good, and a race without one would be run again.
    store.add_trials(problem, final.trials, record)


def explain_refusals(task: Task, plan: TuningOptions) -> list[str]:
    """Why backends brought no candidate; where none did, also who else could compute the problem."""
    reasons = [f"{name}: {reason}" for name, reason in task.refused.items()]
    if task.trials or task.built:
        return reasons
    return reasons + roster.suggest_backends(task.problem, task.judge.target, plan.backends)


def _raced(task: Task, plan: TuningOptions, store: Store, watcher: Watcher) -> tuple[RaceResult | None, set[str]]:
    """The race, and who took part; wrong finalists make room for the next in line, until somebody passes."""
    # A resumed run knows trials of what it has not built: the cache is gone, or the time was up.
    at_hand = {name for name, built in task.built.items() if built.status == "ok"}
    known = [t for t in task.trials.values() if t.config.name in at_hand]
    batch, waiting = finalists.finalists(known, plan.finalists)
    final: RaceResult | None = None
    raced: set[str] = set()
    while batch and not raced:
        try:
            final = task.judge.race(task.problem, [task.built[t.config.name] for t in batch], plan.library)
        except TritonGemmError as error:
            task.failure = str(error)
            break
        raced = final.samples.keys() - {choose.BASELINE_ENTRY}
        if not raced:
            store.add_trials(task.problem, final.trials)
        for trial in final.trials:
            watcher.trial(task.problem, trial)
        batch, waiting = waiting[: plan.finalists], waiting[plan.finalists :]
    return final, raced
