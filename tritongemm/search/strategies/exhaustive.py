"""Strategy: every kept config, the promising first."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence

from tritongemm.core.config import Config
from tritongemm.core.search_results import Predictions
from tritongemm.core.space import Space
from tritongemm.core.trial import Trial

OWN = 0.25  # of a budget goes to the best predicted; the rest prefers kernels that other problems have compiled,
POOL = 2  # among the best predicted, so many times the budget


def search(
    space: Space,
    order: Sequence[Config],
    budget: int,
    seeds: Sequence[Config] = (),
    expected: Predictions | None = None,
    compiled: Collection[str] = frozenset(),
) -> Generator[list[Config], list[Trial], None]:
    """Yields batches to try and is sent their trials.

    Args:
        space: unused; other strategies move about in it.
        order: kept configs, the predicted best first.
        budget: most configs to try; 0 for all.
        seeds: winners of similar problems, tried first.
        expected: unused; predictions for `order`, for strategies that learn where the model errs.
        compiled: names of kernels that other problems of the run ask for, which cost no compile.
    """
    kept = set(order)
    ranked = list(dict.fromkeys([*(c for c in seeds if c in kept), *order]))
    if 0 < budget < len(ranked):
        own = ranked[: round(OWN * budget)]
        shared = (c for c in ranked[: POOL * budget] if c.kernel_name in compiled)
        ranked = list(dict.fromkeys([*own, *shared, *ranked]))[:budget]
    yield ranked
