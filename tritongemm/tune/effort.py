"""The levels of effort of a run, by name: what `--effort` and `tritongemm.autotune` offer beside a budget."""

from dataclasses import dataclass

from tritongemm.core.errors import InputError


@dataclass(frozen=True)
class Effort:
    """How much is tried of each size.

    Attributes:
        budget: most configs tried where candidates are timed; 0 for as many as the strategy likes.
        untimed: most configs compiled, the best predicted, where nothing is timed; 0 for all that pruning keeps.
        summary: for help texts.
        strategy: plug-in of strategies/; None for guided search on a GPU, and all of the best predicted without one.
    """

    budget: int
    untimed: int
    summary: str
    strategy: str | None = None


EFFORTS = {
    "quick": Effort(32, 16, "at most 32 configs per size, half the time of normal; 16 if nothing is timed"),
    "normal": Effort(0, 64, "guided search with its own budget, 48 to 128 configs per size; 64 if nothing is timed"),
    "full": Effort(0, 0, "all configs that pruning keeps, thousands of a large size", "exhaustive"),
}


def effort(name: str) -> Effort:
    """Return the level of a name."""
    if name not in EFFORTS:
        raise InputError(f"there is no effort {name!r}; there are: {', '.join(EFFORTS)}")
    return EFFORTS[name]
