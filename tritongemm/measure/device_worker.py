"""The GPU's own process: screening, verification and the final race of one device.

It may die: an illegal access or a hang ends it, the parent starts another and goes on with the next candidate.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.trial import Trial
from tritongemm.hip_ext.driver import driver
from tritongemm.measure import choose
from tritongemm.measure.jobs import Request
from tritongemm.measure.operand_sets import LeadInKernel, LibraryRefusal, OperandSets, PreparedCandidate
from tritongemm.numerics import verify
from tritongemm.plugins import _modules as registry
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import LibraryBackend

# After these the context is lost; everything else is the candidate's own refusal.
FATAL = (
    "ILLEGAL", "MISALIGNED", "LAUNCH_FAILED", "LAUNCH_FAILURE", "EXECUTION_FAILED", "INVALID_PC", "HARDWARE", "ASSERT",
    "UNKNOWN",
)  # fmt: skip


@dataclass
class RaceEntry:
    """A candidate made ready to race; without a config it is the library."""

    config: Config | None
    graph: driver.Graph
    launches: int
    calls: PreparedCandidate
    samples: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.config.name if self.config else choose.BASELINE_ENTRY

    def sample(self, timer: Any) -> float:
        """Seconds of one launch.

        Raises:
            Stumbled: it can't be launched any more.
        """
        try:
            seconds: float = timer.time(self.graph, self.launches, self.calls.symbol)
            return seconds
        except (RuntimeError, DriverError) as error:
            raise EntryFailed(self.config, error) from error


class EntryFailed(Exception):
    """A contender failed in the middle of the race."""

    def __init__(self, config: Config | None, error: Exception) -> None:
        super().__init__(str(error))
        self.config, self.error = config, error


class DeviceWorker:
    """What the GPU's process does with a request."""

    SCREEN_SECONDS = 1e-4  # of one graph's replay, or what it takes to pass through the copies
    SCREEN_LIMIT = 1e-3  # of the repeats of a promising one
    RACE_SECONDS = 4e-4  # of one graph's replay
    RACE_LIMIT = 0.4  # seconds a race may take once everybody has run
    FEWEST_ROUNDS = 10
    LOOKS = 5  # rounds between two looks at who still races, and whether it is decided
    SEEN = 1 << 22  # elements of C that a first look is at

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._benches: OrderedDict[tuple[Problem, MeasureProtocol], OperandSets] = OrderedDict()
        self._device: driver.Device | None = None
        self._stream: Any = None

    def __call__(self, request: Request) -> Iterator[Any]:
        torch = self._torch
        if self._device is None:
            # profilers register before the process first uses its GPU
            prepare = getattr(registry.load("timers", request.protocol.timer), "prepare", None)
            if prepare:
                prepare()
            torch.cuda.set_device(request.device)
            torch.zeros(1, device=f"cuda:{request.device}")
            torch.backends.cuda.matmul.allow_tf32 = True
            self._stream = torch.cuda.Stream(request.device)
            self._device = driver.open(request.vendor).device(request.device)
        with torch.cuda.stream(self._stream):
            bench = self._bench(request)
            bench.provide(launch for _, launch in request.candidates)
            yield {"copies": bench.copies, "cold": bench.cold}
            if request.kind == "enumerate":
                backend = plugins.get(LibraryBackend, request.library)
                yield backend.list_algorithms(bench.problem, bench.sets[0], request.most)
                return
            yield from self._screen(bench, request) if request.kind == "screen" else self._final(bench, request)

    def _bench(self, request: Request) -> OperandSets:
        key = (request.problem, request.protocol)
        if key not in self._benches:
            assert self._device is not None
            while self._benches and sum(b.bytes for b in self._benches.values()) > self._device.memory()[1] * 0.3:
                self._benches.popitem(last=False)
                self._torch.cuda.empty_cache()
            self._benches[key] = OperandSets(request, self._device, self._stream.cuda_stream)
            self._torch.cuda.synchronize()
        self._benches.move_to_end(key)
        return self._benches[key]

    def _guard(self, config: Config, stage: str, work: Callable[[], Trial]) -> Trial:
        """A refusal as a trial; a fatal fault as a crashed one, after which the process must end."""
        try:
            return work()
        except DriverError as error:
            # The names are those that are known; whatever lost the device would refuse all that come after.
            fatal = any(word in error.name.upper() for word in FATAL) or self._lost()
            return Trial(config, "crashed" if fatal else "out_of_resources", str(error), stage=stage)
        except (self._torch.cuda.OutOfMemoryError, LibraryRefusal, UnavailableError) as error:
            return Trial(config, "out_of_resources", str(error).splitlines()[0], stage=stage)
        except RuntimeError as error:  # PyTorch may be the first to meet a fault
            if not self._lost():
                raise
            return Trial(config, "crashed", str(error).splitlines()[0], stage=stage)

    def _lost(self) -> bool:
        """Whether the device has faulted, so that nothing runs in this process any more."""
        assert self._device is not None
        try:
            self._device.synchronize()
        except DriverError:
            return True
        return False

    def _screen(self, bench: OperandSets, request: Request) -> Iterator[Trial]:
        best = request.best
        for config, launch in request.candidates:
            trial = self._guard(config, "screen", partial(self._screened, bench, config, launch, best))
            yield trial
            if trial.status == "crashed":
                raise SystemExit(f"{config.name}: {trial.reason}")
            if trial.status == "ok":
                best = min(best, trial.seconds)

    def _screened(self, bench: OperandSets, config: Config, launch: Launch | HostLaunch | None, best: float) -> Trial:
        clock, label = bench.screener
        launches = bench.launches_for(self.SCREEN_SECONDS, 32, spared=1)
        calls = bench.calls(config, launch, min(bench.copies, launches))
        try:
            if launch is None:
                wrong = self._first_look(bench, config, calls)
                if wrong:
                    return wrong
            else:
                calls.operations[0]()
            graph = bench.capture(calls.repeated(launches))
            try:
                samples = [clock.time(graph, launches, calls.symbol)]
                if samples[0] < 2 * best:
                    repeats = min(3, int(self.SCREEN_LIMIT / (samples[0] * launches)))
                    samples = [clock.time(graph, launches, calls.symbol) for _ in range(repeats)] or samples
            finally:
                graph.destroy()
        finally:
            bench.release(calls)
        return Trial(config, "ok", samples=tuple(samples), timer=label)

    def _first_look(self, bench: OperandSets, config: Config, calls: PreparedCandidate) -> Trial | None:
        """Why a library's kernel is wrong, or None; with hundreds of them, wrong ones must not fill the final, which
        looks at the whole of C.
        """
        ratio, family = bench.protocol.err_ratio, bench.family
        step = -(-bench.exact.numel() // self.SEEN)
        c, exact = bench.sets[0]["c"][::step], bench.exact[::step]
        found = verify.verify_once(bench.problem, family, calls.operations[0], c, exact, ratio)
        if found.ok:
            return None
        return Trial(config, "wrong", found.reason, error=found.error, tolerance=found.tolerance, outside=found.outside)

    def _final(self, bench: OperandSets, request: Request) -> Iterator[Any]:
        """Answers: a Trial each with its error, then those of `_race`."""
        contenders: list[RaceEntry] = []
        library: list[RaceEntry] = []
        try:
            for config, launch in request.candidates:
                trial = self._guard(config, "final", partial(self._verified, bench, config, launch, contenders))
                yield trial
                if trial.status == "crashed":
                    raise SystemExit(f"{config.name}: {trial.reason}")
            if request.kind == "final":
                library = self._library(bench, request)
                yield from self._race(bench, contenders, library, request.watched)
        except EntryFailed as fault:
            if fault.config is None and not self._lost():
                raise fault.error from None
            if fault.config:  # it costs itself: the others race again, in a fresh process
                yield Trial(fault.config, "crashed", f"in the race: {fault}", stage="final")
            raise SystemExit(f"{request.problem.key}: {fault}") from fault
        finally:
            self._release(bench, contenders + library)

    def _verified(
        self, bench: OperandSets, config: Config, launch: Launch | HostLaunch | None, contenders: list[RaceEntry]
    ) -> Trial:
        launches = bench.launches_for(self.RACE_SECONDS, OperandSets.MOST_COPIES)
        calls = bench.calls(config, launch, min(bench.copies, launches))

        def run() -> None:
            calls.operations[0]()
            self._torch.cuda.current_stream().synchronize()

        c, ratio = bench.sets[0]["c"], bench.protocol.err_ratio
        kept = False
        try:
            found = verify.verify(bench.problem, bench.family, run, c, bench.exact, ratio)
            trial = Trial(
                config, "ok", stage="final", error=found.error, tolerance=found.tolerance, outside=found.outside
            )
            if not found.ok:
                return replace(trial, status="wrong", reason=found.reason)
            contenders.append(RaceEntry(config, bench.capture(calls.repeated(launches)), launches, calls))
            kept = True
            return trial
        finally:
            if not kept:
                bench.release(calls)

    def _library(self, bench: OperandSets, request: Request) -> list[RaceEntry]:
        if not request.library:
            return []
        backend = plugins.get(LibraryBackend, request.library)
        launches = bench.launches_for(self.RACE_SECONDS, OperandSets.MOST_COPIES)
        found = [backend.operation(bench.problem, operands) for operands in bench.sets[:launches]]
        operations = [operation for operation in found if operation is not None]
        if len(operations) < len(found):
            return []
        calls = PreparedCandidate(operations)
        try:
            operations[0]()  # workspace and handles are made outside the capture
            self._torch.cuda.current_stream().synchronize()
            graph = bench.capture(calls.repeated(launches))
        except (RuntimeError, DriverError) as error:  # the library has no kernel for it
            if self._lost():
                raise SystemExit(f"{request.library}, {request.problem.key}: {error}") from error
            return []
        return [RaceEntry(None, graph, launches, calls)]

    def _race(
        self, bench: OperandSets, ours: list[RaceEntry], library: list[RaceEntry], watched: bool
    ) -> Iterator[Any]:
        """Answers: {"racing": name} of who warms up, so that one that hangs is known, and of nobody when all have, or of
        whoever runs where the race is `watched`; then samples by name, the library's under "", taken in rounds of a new
        order each, so that drift meets all alike.
        """
        entries = ours + library
        order = random.Random(bench.protocol.seed)
        headed = getattr(registry.load("timers", bench.protocol.timer), "HEADED", False)
        head = LeadInKernel(bench.sets[0]["a"].device) if headed else None
        for entry in entries:
            yield {"racing": entry.name}
            for _ in range(max(1, math.ceil(bench.protocol.warmup / entry.launches))):
                entry.sample(bench.timer)
        yield {"racing": choose.BASELINE_ENTRY}
        rounds = max(
            self.FEWEST_ROUNDS, math.ceil(bench.protocol.iters / max((e.launches for e in entries), default=1))
        )
        running, deadline = list(entries), time.perf_counter() + self.RACE_LIMIT
        for done in range(1, 4 * rounds + 1):
            for entry in order.sample(running, len(running)):
                if watched:
                    yield {"racing": entry.name}
                if head:
                    head()
                entry.samples.append(entry.sample(bench.timer))
                bench.rest(entry.samples[-1] * entry.launches)
            if done == 2 or done % self.LOOKS == 0:  # to test takes as long as a round
                kept = choose.still_racing({e.name: e.samples for e in running})
                running = [e for e in running if e.name in kept]
                if done >= rounds and (len(running) < 2 or choose.decided({e.name: e.samples for e in running})):
                    break
            if done >= self.FEWEST_ROUNDS and time.perf_counter() > deadline:
                break
        yield {e.name: e.samples for e in entries}

    def _release(self, bench: OperandSets, contenders: list[RaceEntry]) -> None:
        for contender in contenders:
            with suppress(DriverError):  # a device that was lost takes nothing back
                contender.graph.destroy()
                bench.release(contender.calls)
