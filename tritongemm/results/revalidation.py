"""The nouns `VerifiedResult` and `RetimedResult`: what a stored result gave when it was run again."""

from dataclasses import dataclass

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial

LEAST_KEPT_SHARE_OF_GAIN = 0.98  # A recorded gain holds if it is no more than 2 % smaller when it is timed again.


@dataclass(frozen=True)
class VerifiedResult:
    """A stored result, checked again."""

    problem: Problem  # what it computes
    trial: Trial  # its error, or why it has none
    how: str = ""  # how it was checked, in a few words; "" where it was not

    @property
    def wrong(self) -> bool:
        """Whether it is wrong or failed when it was run."""
        return self.trial.status not in ("ok", "pruned", "refused")

    @property
    def refused(self) -> bool:
        """Whether it was not run, as it can't be: its numbers fit no launch, or it is of another target."""
        return self.trial.status == "refused"

    @property
    def unchecked(self) -> bool:
        """Whether it was not run, as nothing here can check it."""
        return self.trial.status == "pruned"


@dataclass(frozen=True)
class RetimedResult:
    """A stored result, timed again beside the baseline."""

    problem: Problem  # what it computes
    trial: Trial  # its time, or why it has none
    baseline_seconds: float | None  # the baseline's time in the same race; None where it did not take part
    record: Record | None  # the result as stored; None where the row had no time
    library_wrong: str = ""  # why the baseline's result is wrong; "" where it is right or was not compared

    @property
    def ratio(self) -> float | None:
        """The baseline's time over the config's."""
        timed = self.baseline_seconds is not None and self.trial.status == "ok"
        return self.baseline_seconds / self.trial.seconds if timed and self.baseline_seconds else None

    @property
    def gain_holds(self) -> bool | None:
        """Whether the gain that was recorded was found again; None where none was recorded or it was not timed."""
        record = self.record
        if record is None or not record.speedup or record.winner != self.trial.config.backend or self.ratio is None:
            return None
        return self.ratio >= LEAST_KEPT_SHARE_OF_GAIN * record.speedup
