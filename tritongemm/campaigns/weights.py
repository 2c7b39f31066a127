"""Stage: products with counts → what each takes of a job's time, measured where there is a GPU."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic

from tritongemm.campaigns.campaign import Campaign
from tritongemm.campaigns.column_major import least_bytes, operand_dtype
from tritongemm.campaigns.workload import LoggedProduct
from tritongemm.core.config import Config
from tritongemm.core.errors import TargetError
from tritongemm.core.problem import Problem
from tritongemm.core.record import SCHEMA
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Evaluator
from tritongemm.plugins.contracts.call_logs import LoggedCall
from tritongemm.results import journal
from tritongemm.search.cost_model import model as cost_model
from tritongemm.tune.free_devices import work_when_free


class BaselineTimes:
    """Seconds of one call by the key of a problem; threads may share it."""

    def __init__(self, path: Path, measured_with: Mapping[str, str]) -> None:
        header = {"target": "", "toolchain": dict(measured_with), "protocol": {}, "schema": SCHEMA}
        self._journal, lines = journal.resume(path, header)
        self._times: dict[str, float | None] = dict(line.value for line in lines if line.kind == "baseline")
        self._guard = threading.Lock()

    def __contains__(self, key: object) -> bool:
        """Return whether a problem was measured, or is known not to be computed by the baseline."""
        return key in self._times

    def get(self, key: str) -> float | None:
        """Return the seconds of one call; None where they are not known."""
        return self._times.get(key)

    def add(self, key: str, seconds: float | None) -> None:
        """Store a time, or None where the baseline does not compute the problem."""
        with self._guard:
            self._journal.append([{"baseline": {"problem": key, "seconds": seconds}}])
            self._times[key] = seconds

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def measure_baselines(
    evaluators: Sequence[Evaluator], problems: Sequence[Problem], known: BaselineTimes, say: Callable[[str], None]
) -> None:
    """Measure problems on whichever device is free; each time is stored when it is known."""
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


BASELINE = "baseline.journal"  # measured times, in the campaign's folder
# Times are measured by the baseline, predicted by the cost model, or guessed: what can't be computed here is taken to
# be as far from the data sheet's rates as the middle one of the others.
MEASURED, PREDICTED, GUESSED = "measured", "model", "roofline"
PROGRESS_SECONDS = 2.0  # between two lines of progress of predictions
# Tiles whose best predicted time stands for a product's where nothing can be measured.
_TILES = tuple(
    Config("tile", m, n, 64, split_k=split, num_warps=8 if m * n >= 128 * 128 else 4, num_stages=2)
    for m in (16, 64, 128, 256)
    for n in (32, 64, 128, 256)
    for split in (1, 4)
)


def weigh(campaign: Campaign, products: Sequence[LoggedProduct]) -> list[LoggedProduct]:
    """Return the products with their shares of the job's time, the largest first."""
    problems = [one.problem for one in products if one.problem is not None]
    measured = _measure(campaign, problems)
    times = {p: (seconds, MEASURED) for p, seconds in measured.items()}
    predicted = _predict(campaign, [p for p in problems if p not in measured])
    times |= {p: (seconds, PREDICTED) for p, seconds in predicted.items()}
    slowness = _slowness(products, times, campaign.target)
    found = []
    for one in products:
        guess = slowness * _roofline_seconds(one.call, campaign.target), GUESSED
        seconds, how = guess if one.problem is None else times[one.problem]
        found.append(replace(one, seconds=seconds, how=how))
    total = sum(one.total_seconds for one in found)
    return sorted((replace(one, share=100 * one.total_seconds / total) for one in found), key=lambda one: -one.share)


def _predict(campaign: Campaign, problems: Sequence[Problem]) -> dict[Problem, float]:
    """Return the predicted seconds of one launch of the best of a few usual tiles, for each problem."""
    said = monotonic()

    def report(count: int) -> None:
        nonlocal said
        if monotonic() - said >= PROGRESS_SECONDS:
            said = monotonic()
            campaign.say(f"predicted: {count} of {len(problems)} GEMMs")

    seconds = cost_model.best_seconds(_TILES, problems, campaign.target, report)
    return dict(zip(problems, seconds.tolist(), strict=True))


def _roofline_seconds(call: LoggedCall, target: Target) -> float:
    return target.roofline_seconds(call.flops, least_bytes(call), operand_dtype(call))


def _slowness(products: Sequence[LoggedProduct], times: Mapping[Problem, tuple[float, str]], target: Target) -> float:
    """Return the middle product's time relative to the data sheet's; 1 where none is known."""
    ratios = [times[p.problem][0] / _roofline_seconds(p.call, target) for p in products if p.problem is not None]
    return median(ratios) if ratios else 1.0


def _measure(campaign: Campaign, problems: Sequence[Problem]) -> dict[Problem, float]:
    """Return the seconds of the baseline's own choice for each problem that it computes; none without a GPU.

    Each time is on disk when it is known, so that a run that is killed goes on from there.
    """
    if not campaign.devices:
        return {}
    path = campaign.folder / BASELINE
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(BaselineTimes(path, campaign.measured_with)) as known:
        wanted = [p for p in dict.fromkeys(problems) if p.key not in known]
        if wanted:
            campaign.say(f"measuring the baseline of {len(wanted)} GEMMs on {len(campaign.devices)} devices")
            with campaign.open_evaluators() as evaluators:
                measure_baselines(evaluators, wanted, known, campaign.say)
        return {p: seconds for p in problems if (seconds := known.get(p.key)) is not None}
