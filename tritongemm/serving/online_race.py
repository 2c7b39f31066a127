"""Checks a library's algorithms and the baseline against float64 and times them, on a GPU that serves calls."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

import torch
from torch import Tensor

from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics.verify import VerifyResult, compare, library_fault, poison
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, LibraryBackend

MOST_ALGORITHMS = 32  # The library's best guesses; the others win rarely, and each costs time of the user's program.
MARGIN = 0.02  # An algorithm must be faster than the baseline by this share; noise of a busy process is less.
_FIRST_LAUNCHES, _MORE_LAUNCHES, _HOPELESS = 3, 7, 1.25  # One this much slower than the best is timed no further.
_FINALISTS, _ROUNDS, _LAUNCHES_OF_ROUND = 4, 5, 5
_SHARE_OF_TRIALS = 0.7  # of the time; the rest is for the last rounds
_FLUSHED_BYTES = 256 << 20  # As much is written before each launch, so that operands come from memory as in a model.
_COMPARED_ELEMENTS = 1 << 24  # of an operand or a result at a time, as the comparison is made in float64

Run = Callable[[], object]
LaunchClock = Callable[[Run, int], list[float]]  # gives the seconds of each of some launches


class StreamClock:
    """Times launches on PyTorch's current stream by events, each after the cache was overwritten."""

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int32, device=device)

    def __call__(self, run: Run, launches: int) -> list[float]:
        """Return the seconds of each launch; the GPU overwrites the cache while the host queues the launch."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(launches)]
        for start, end in events:
            self._flushed.zero_()
            start.record()
            run()
            end.record()
        events[-1][1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


@dataclass
class TimedAlgorithm:
    """The baseline, whose config is None, or an algorithm whose result is right, and the seconds of its launches."""

    config: Config | None
    run: Run
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median time of a launch."""
        return median(self.samples)


@dataclass(frozen=True)
class OnlineOutcome:
    """What a race found."""

    # The fastest algorithm; the baseline where none is faster by `MARGIN`; None where nothing is right.
    winner: TimedAlgorithm | None
    baseline: TimedAlgorithm  # what serves calls otherwise; it has no samples where it is wrong
    baseline_wrong: str  # the error and the tolerance of a baseline whose result is wrong; "" where it is right
    listed: list[Config]  # what the library offers, its best guess first
    tried: int  # how many of them were run


class AlgorithmRace:
    """A library's algorithms for one problem, on random operands of their own and the thread's current stream.

    Where the baseline has no function for the problem, the library's own first choice stands for it. The device is
    PyTorch's current one; without a clock a `StreamClock` times launches.

    Raises:
        LookupError: neither has anything for the problem.
        TritonGemmError: the baseline can't be run.
    """

    def __init__(
        self,
        problem: Problem,
        library: LibraryBackend,
        baseline: LibraryBackend,
        device: torch.device,
        clock: LaunchClock | None = None,
    ) -> None:
        self.problem, self._library, self._device, self._clock = problem, library, device, clock
        self._family = registry.get(Family, problem.family)
        self.operands = dict(self._family.make_inputs(problem, str(device)))
        c = torch.empty((problem.m, problem.n), dtype=getattr(torch, problem.c.type.torch), device=device)
        self.operands["c"] = c
        writing = baseline.list_algorithms(problem, self.operands, 1)
        run = baseline.operation(problem, self.operands, writing[0]) if writing else None
        run = run or library.operation(problem, self.operands)
        if run is None:
            raise LookupError(f"{library.label} has nothing for {problem.key}")
        self._baseline, self._reference = TimedAlgorithm(None, run), self._exact()
        self._baseline_wrong = library_fault(problem, self._result(run))

    def _exact(self) -> Tensor:
        """Return C from float64, rounded to its type, some columns at a time: all of B in float64 takes much memory."""
        problem, exact = self.problem, torch.empty_like(self.operands["c"])
        step = max(1, _COMPARED_ELEMENTS // max(problem.k, problem.m))
        for first in range(0, problem.n, step):
            columns = slice(first, min(first + step, problem.n))
            part = {name: t[..., columns] if name in ("b", "bias") else t for name, t in self.operands.items()}
            exact[:, columns] = self._family.reference(replace(problem, n=columns.stop - first), part)
        return exact

    def check(self, run: Run) -> Support:
        """Return whether a launch writes the right result, up to rounding, or how far it is off."""
        fault = self._result(run).reason
        return Support(f"its result is wrong: {fault}") if fault else SUPPORTED

    def _result(self, run: Run) -> VerifyResult:
        """Return what a launch writes beside what is right, where they differ most."""
        c = self.operands["c"]
        poison(c)
        run()
        pairs = zip(_parts(c), _parts(self._reference), strict=True)
        results = [compare(self.problem, self._family, ours, right.double()) for ours, right in pairs]
        return max(results, key=lambda result: result.error)

    def hold(self, seconds: float) -> OnlineOutcome:
        """Try algorithms, the library's best guesses first, until time is up, and race the best of them.

        The seconds count once the library has listed them, by the wall clock; launches under way at the end are waited
        for.

        Raises:
            TritonGemmError: the library can't be asked, or the baseline can't be run.
        """
        baseline, best = self._baseline, list[TimedAlgorithm]()
        clock = self._clock or StreamClock(self._device)
        right = [] if self._baseline_wrong else [baseline]
        for each in right:
            each.samples = clock(each.run, _FIRST_LAUNCHES + _MORE_LAUNCHES)
        listed, tried = self._library.list_algorithms(self.problem, self.operands, MOST_ALGORITHMS), 0
        started = time.monotonic()  # The library is slow to answer at first: it begins its work then.
        for config in listed[:MOST_ALGORITHMS]:
            if time.monotonic() - started > _SHARE_OF_TRIALS * seconds:
                break
            tried += 1
            timed = self._try(config, clock, min((each.seconds for each in (*right, *best)), default=inf))
            best = sorted([*best, *([timed] if timed else [])], key=lambda each: each.seconds)[:_FINALISTS]
        winner = _race(right, best, clock, started + seconds)
        return OnlineOutcome(winner, baseline, self._baseline_wrong, listed, tried)

    def _try(self, config: Config, clock: LaunchClock, best_seconds: float) -> TimedAlgorithm | None:
        """Return the algorithm with its times; None where it is refused, wrong or hopeless."""
        try:
            run = self._library.operation(self.problem, self.operands, config)
            if run is None or not self.check(run):
                return None
            samples = clock(run, _FIRST_LAUNCHES)
            if min(samples) > _HOPELESS * best_seconds:
                return None
            return TimedAlgorithm(config, run, samples + clock(run, _MORE_LAUNCHES))
        except TritonGemmError:  # a status of the library: this algorithm is none for this product
            return None


def _race(
    baselines: list[TimedAlgorithm], best: list[TimedAlgorithm], clock: LaunchClock, deadline: float
) -> TimedAlgorithm | None:
    """Return the winner of rounds in which all take turns; one round is held at least.

    The baseline, where it is right, must be beaten by `MARGIN`.
    """
    racing = [*baselines, *best]
    if not best:
        return next(iter(baselines), None)
    for each in racing:
        each.samples = []
    for round_ in range(_ROUNDS):
        if round_ and time.monotonic() > deadline:
            break
        for each in racing:
            each.samples += clock(each.run, _LAUNCHES_OF_ROUND)
    fastest = min(best, key=lambda each: each.seconds)
    return next((b for b in baselines if fastest.seconds >= (1 - MARGIN) * b.seconds), fastest)


def _parts(c: Tensor) -> tuple[Tensor, ...]:
    """Yield rows of a result, as many at a time as are compared at once."""
    parts: tuple[Tensor, ...] = c.split(max(1, _COMPARED_ELEMENTS // c.shape[1]))
    return parts
