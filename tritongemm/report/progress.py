"""Describes the progress of a run in one line: sizes done of all, the gain so far and the time left."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, log
from time import monotonic

from tritongemm.core.record import Record
from tritongemm.core.trial import PREDICTED, Trial

SEARCH = "search"  # the stage that counts the configs tried, of those that searches may try at most
KEPT = "kept"  # the total of this stage is that of the configs that pruning kept
_COMPILE_SECONDS = 2.0  # of a core for a config of a size of 4096; some share a binary
_WORTH_SAYING_SECONDS = 60.0
_COUNTED = {  # what the steps of a stage are, of those that a person counts
    "final": ("size", ""),
    "table": ("table", " over M"),
    "layers": ("layer", ""),
    "verify": ("result", " verified"),
    "time": ("result", " timed"),
}
_BENEATH = {"plan": "planned", "compile": "compiled", "screen": "screened"}
# This share of the time of sizes goes into their searches, the rest into their races.
_SEARCH_SHARE = 0.8
# The time left is not estimated before this share is done: what comes first is not as fast as the rest.
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class RunProgress:
    """How far a run is."""

    done: int  # sizes that have a result, or failed
    total: int  # sizes that the run tunes
    gain: float | None  # geometric mean of the results' gains over the library; None before the first
    seconds_left: float | None  # estimate of the time left in seconds; None if too little is done to say


@dataclass
class _Stage:
    total: int = 0
    done: int = 0
    began: float = field(default_factory=lambda: monotonic())

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0


class Progress:
    """Counts of a run's stages, and what is known of its results."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._stages: dict[str, _Stage] = {}
        self._logs: list[float] = []  # of the results' gains
        self._library = ""
        self._best: Trial | None = None

    def stage(self, name: str, total: int) -> None:
        """Begin a stage, or make it longer; planning begins another run."""
        if name == "plan":
            self._stages.clear()
            self._logs.clear()
            self._best = None
        self._stages.setdefault(name, _Stage()).total += total

    def step(self, name: str, count: int) -> None:
        """Count steps of a stage; no step may be one of a stage that never began."""
        if count:
            self._stages[name].done += count

    def trial(self, trial: Trial) -> None:
        """Count a candidate's time."""
        if trial.status == "ok" and trial.samples and (self._best is None or trial.seconds < self._best.seconds):
            self._best = trial

    def finished(self, record: Record | None) -> None:
        """Count a size that has its result, or none."""
        self.step("final", 1)
        if record is not None and record.speedup:
            self._logs.append(log(record.speedup))
            self._library = record.library

    def is_done(self, name: str) -> bool:
        """Return whether all steps of a stage are done."""
        return self._stages[name].done >= self._stages[name].total

    def state(self) -> RunProgress:
        """Return the state of the run as numbers."""
        sizes = self._stages.get("final", _Stage())
        return RunProgress(sizes.done, sizes.total, self._mean_gain(), self._seconds_left("final"))

    def line(self, columns: int = 1000) -> str:
        """Return the state of the run, shortened to a number of columns."""
        counted = [name for name, stage in self._stages.items() if name in _COUNTED and stage.total]
        beneath = [name for name in self._stages if name in _BENEATH and not self.is_done(name)]
        first = counted[-1:] or beneath[-1:]
        parts = [self._count(name) for name in first]
        parts += [*self._gain(), *self._left(first[0])] if first else []
        details = ", ".join(self._count(name) for name in beneath if name not in first)
        text = ", ".join(parts)
        full = f"{text} ({details})" if details else text
        return (full if len(full) <= columns else text)[:columns]

    def estimate(self, compilers: int) -> Iterator[str]:
        """Yield how many configs are compiled of those that pruning kept, and the expected time, if it is long."""
        kept, tried = self._stages.get(KEPT, _Stage()).total, self._stages.get(SEARCH, _Stage()).total
        each, cores = _COMPILE_SECONDS / compilers, f"{compilers} core{'s' if compilers > 1 else ''}"
        if 0 < self._seconds < tried * each:
            text = f"{tried:,} configs would take {about(tried * each)} to compile on {cores}"
            yield f"{text}; --budget ends that earlier"
        elif tried < kept:
            sizes = " of each size" if self._stages["plan"].total > 1 else ""
            text = f"{tried:,} of {kept:,} configs are compiled, the best predicted{sizes}: {about(tried * each)}"
            yield f"{text} on {cores}; --budget 0 compiles all: {about(kept * each)}"
        elif tried * each > _WORTH_SAYING_SECONDS:
            text = f"{kept:,} configs are compiled: {about(kept * each)} on {cores}"
            yield f"{text}; --budget N compiles only the N best predicted of each size"

    def _count(self, name: str) -> str:
        stage = self._stages[name]
        count = f"{stage.done:,} of {stage.total:,}"
        if name in _BENEATH:
            return f"{_BENEATH[name]} {count}"
        noun, rest = _COUNTED[name]
        return f"{count} {noun}{'s' if stage.total > 1 else ''}{rest}"

    def _mean_gain(self) -> float | None:
        return exp(sum(self._logs) / len(self._logs)) if self._logs else None

    def _gain(self) -> Iterator[str]:
        gain = self._mean_gain()
        if gain is not None:
            yield f"{gain:.2f}x {self._library} so far"
        elif self._best is not None and self._stages.get("final", _Stage()).total == 1:
            how = "predicted" if self._best.timer == PREDICTED else "so far"
            yield f"best {self._best.seconds * 1e6:.2f} us {how}"

    def _left(self, name: str) -> Iterator[str]:
        left = self._seconds_left(name)
        if left is not None:
            yield f"{about(left)} left"

    def _seconds_left(self, name: str) -> float | None:
        """Return the time left in seconds; None if too little is done to say, or all."""
        stage = self._stages.get(name, _Stage())
        share = stage.share
        if name == "final":
            search = self._stages.get(SEARCH, stage)
            stage, share = search, _SEARCH_SHARE * search.share + (1 - _SEARCH_SHARE) * share
        gone = monotonic() - stage.began
        if not _LEAST_SHARE <= share < 1:
            return None
        left = gone * (1 - share) / share
        return min(left, self._seconds - gone) if gone < self._seconds else left


def about(seconds: float) -> str:
    """Return an uncertain time, rounded."""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"about {seconds / 86400:.0f} days"
