"""Strategy: every kept config, the promising first."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tritongemm.config import Config
from tritongemm.space import Space
from tritongemm.trial import Trial


def search(
    space: Space, order: Sequence[Config], budget: int, seeds: Sequence[Config] = ()
) -> Generator[list[Config], list[Trial], None]:
    """Yields batches to try and is sent their trials.

    Args:
        space: unused; other strategies move about in it.
        order: kept configs, the predicted best first.
        budget: most configs to try; 0 for all.
        seeds: winners of similar problems, tried first.
    """
    first = [c for c in dict.fromkeys(seeds) if c in set(order)]
    rest = [c for c in order if c not in set(first)]
    yield [*first, *rest][: budget or None]
