"""Strategy: every kept config, the promising first."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tritongemm.config import Config
from tritongemm.rank import Predictions
from tritongemm.space import Space
from tritongemm.trial import Trial


def search(
    space: Space,
    order: Sequence[Config],
    budget: int,
    seeds: Sequence[Config] = (),
    expected: Predictions | None = None,
) -> Generator[list[Config], list[Trial], None]:
    """Yields batches to try and is sent their trials.

    Args:
        space: unused; other strategies move about in it.
        order: kept configs, the predicted best first.
        budget: most configs to try; 0 for all.
        seeds: winners of similar problems, tried first.
        expected: unused; predictions for `order`, for strategies that learn where the model errs.
    """
    kept = set(order)
    first = dict.fromkeys(c for c in seeds if c in kept)
    yield list(dict.fromkeys([*first, *order]))[: budget or None]
