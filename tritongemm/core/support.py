"""The class `Support`, which is an answer that is true, or false with its reason."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Support:
    """Whether something can be done here: true without a reason, false with one and the numbers that decide."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return self.reason or "supported"


class LateRefusal(Support):
    """A refusal whose reason is put into words when it is read, as few are."""

    def __init__(self, describe: Callable[[], str]) -> None:
        vars(self)["_describe"] = describe

    @cached_property
    def reason(self) -> str:
        """What stands in the way."""
        reason: str = vars(self)["_describe"]()
        return reason

    def __bool__(self) -> bool:
        return False


SUPPORTED = Support()
