from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """The outcome of one try; any other is a `TortureFailure`."""

    REFUSED = "refused with a message"
    RECOVERED = "recovered equal"
    HARMLESS = "made no difference"


class TortureFailure(AssertionError):
    """A try ended as it must not; the text says how, and how to see it again."""


@dataclass
class Tally:
    outcomes: Counter[Outcome] = field(default_factory=Counter)  # tries that came to each
    failures: list[str] = field(default_factory=list)  # what each failed try says

    @property
    def tried(self) -> int:
        return sum(self.outcomes.values()) + len(self.failures)
