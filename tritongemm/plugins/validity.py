"""Checks whether a config, wherever it comes from, can compute a problem here."""

from tritongemm.core.config import Config
from tritongemm.core.errors import UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import NO_INPUTS, Backend, BuildInputs, Family


def check_config(
    config: Config, problem: Problem, target: Target, tuned_for: str = "", inputs: BuildInputs = NO_INPUTS
) -> Support:
    """Return whether a config can compute a problem on a target, as its family and its backend say; else the reason.

    `tuned_for` is the name of the target that the config is a result for; "" where that is not said.
    """
    if tuned_for not in ("", target.name):
        return Support(f"it is a result for {tuned_for}, not for {target.name}")
    try:
        family, backend = registry.get(Family, problem.family), registry.get(Backend, config.backend)
    except UnavailableError as error:
        return Support(str(error))
    return family.supports(problem, target) and backend.check(config, problem, target, inputs)
