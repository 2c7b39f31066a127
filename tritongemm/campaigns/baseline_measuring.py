"""Stage: problems → seconds of the baseline's own choice, on all devices at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from tritongemm.campaigns.baseline_times import BaselineTimes
from tritongemm.core.errors import TargetError
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Evaluator
from tritongemm.tuning.free_devices import work_when_free


def measure_baselines(
    evaluators: Sequence[Evaluator], problems: Sequence[Problem], known: BaselineTimes, say: Callable[[str], None]
) -> None:
    """Measure problems on whichever device is free; each time is stored when it is known.

    Args:
        evaluators: one for each device.
        problems: each once.
        known: where times go.
        say: prints what can't be measured.

    Raises:
        OutputError: a time can't be kept.
        TargetError: every measurement failed.
    """
    baseline = registry.baseline().name

    def measure(evaluator: Evaluator, problem: Problem) -> None:
        samples = evaluator.race(problem, [], baseline).samples.get(BASELINE_ENTRY)
        if samples:
            known.add(problem.key, median(samples))
        else:
            known.add(problem.key, None)
            say(f"{problem.key}: {baseline} does not compute it; the cost model says what it takes")

    outcomes = work_when_free(evaluators, problems, measure, say)
    failures = {problem: outcome for problem, outcome in outcomes if isinstance(outcome, Support)}
    if problems and len(failures) == len(problems):
        raise TargetError(f"no baseline could be measured; the first: {next(iter(failures.values()))}")
    for problem, reason in failures.items():
        say(f"{problem.key}: its baseline can't be measured, and the cost model says what it takes: {reason}")
