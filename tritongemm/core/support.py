"""The class `Support`, which is an answer that is true, or false with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """Whether something can be done here: true without a reason, false with one and the numbers that decide."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return self.reason or "supported"


SUPPORTED = Support()
