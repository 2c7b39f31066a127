"""Checks whether a config, wherever it comes from, can compute a problem here, and adds up as a result states."""

from tritongemm.core.config import Config
from tritongemm.core.errors import UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import NO_INPUTS, Backend, BuildInputs, Family, LibraryBackend


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


def check_order(record: Record, target: Target) -> Support:
    """Return whether a row's kernel adds up in the order that it states, if any.

    Of a library's algorithm only bits show it.
    """
    if not record.order:
        return SUPPORTED
    backend = registry.get(Backend, record.config.backend)
    order = backend.reduction_order(record.config, record.problem, target)
    if isinstance(order, Support):
        return order
    if isinstance(backend, LibraryBackend) or str(order) == record.order:
        return SUPPORTED
    return Support(f"it states the order {record.order}, and its kernel adds up in the order {order}")
