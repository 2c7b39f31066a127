"""Races of previously tuned kernels against the baseline, which give a new result."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tritongemm.core.artifact import Artifact
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.plugins.contracts import Evaluator
from tritongemm.tuning import roster
from tritongemm.tuning.options import TuningOptions
from tritongemm.tuning.task import make_record


def race_again(
    evaluator: Evaluator, problem: Problem, artifacts: Sequence[Artifact], options: TuningOptions
) -> Record | Support:
    """Race these kernels and the baseline, and return the result, or why there is none.

    Args:
        evaluator: the device.
        problem: the problem that they compute.
        artifacts: the kernels; those that could not be compiled do not race.
        options: names the baseline, the margin and the toolchain.

    Raises:
        TritonGemmError: the device failed.
    """
    able = list({one.config: one for one in artifacts if one.status == "ok"}.values())
    if not able:
        return Support("; ".join(dict.fromkeys(f"{one.status}: {one.reason}" for one in artifacts)))
    race = evaluator.race(problem, able, options.library)
    entered = race.samples.keys() - {BASELINE_ENTRY}
    if not entered:
        reasons = dict.fromkeys(f"{trial.status}: {trial.reason}" for trial in race.trials if trial.reason)
        if race.library_wrong:
            reasons[f"{options.library} is wrong too: {race.library_wrong}"] = None
        return Support("; ".join(reasons) or "nothing raced")
    fastest = min(entered, key=lambda name: median(race.samples[name]))
    config = next(trial.config for trial in race.trials if trial.config.name == fastest)
    libraries = frozenset(filter(roster.is_library, {one.config.backend for one in able}))
    verified = evaluator.describe(problem, config)
    return make_record(problem, race, evaluator.target, options, libraries, verified, able)
