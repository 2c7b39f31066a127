"""The process that measures on one GPU, which screens, verifies and races candidates on request.

A candidate may kill it: an illegal access or a hang ends it, and the parent starts another that continues with the next
candidate.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.core.integers import cdiv
from tritongemm.core.operands import Call
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.support import Support
from tritongemm.core.trial import Trial
from tritongemm.hip_ext.driver import driver
from tritongemm.measure import jobs
from tritongemm.measure.guarded_operands import GuardedOperands, copy_guarded
from tritongemm.measure.operand_sets import LibraryRefusal, OperandSets, PreparedCandidate
from tritongemm.measure.quantization import time_quantization
from tritongemm.measure.race import EntryFailed, RaceEntry, graph_launches, run_race
from tritongemm.numerics import shared_rows, verify
from tritongemm.numerics.verify import VerifyResult
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import LibraryBackend, Timer

# Words in the driver's names of errors after which the context is lost; any other error is the candidate's own refusal.
FATAL_ERROR_WORDS = (
    "ILLEGAL", "MISALIGNED", "LAUNCH_FAILED", "LAUNCH_FAILURE", "EXECUTION_FAILED", "INVALID_PC", "HARDWARE", "ASSERT",
    "UNKNOWN",
)  # fmt: skip


class DeviceWorker:
    """The request handler of the process."""

    SCREEN_GRAPH_SECONDS = 1e-4  # One replay of a screened graph takes at least this, or passes through the copies.
    SCREEN_REPEATS_SECONDS = 1e-3  # The replays of a promising candidate take at most this.
    SCREEN_LAUNCHES = 32  # launches of a screened graph at most
    FIRST_LOOK_ELEMENTS = 1 << 22  # elements of C that decide whether a library's fast algorithm is kept
    HELD_MEMORY_SHARE = 0.3  # share of the device's memory that operands of earlier problems may take

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._operand_sets: OrderedDict[tuple[Problem, MeasureProtocol], OperandSets] = OrderedDict()
        self._device: driver.Device | None = None
        self._stream: Any = None

    def __call__(self, job: jobs.MeasureJob) -> Iterator[jobs.MeasureAnswer]:
        """Yield the answers to a job, as `measure.jobs` defines them; SystemExit where the device is lost."""
        device = self._open(job.setup)
        with self._torch.cuda.stream(self._stream):
            operands = self._operands(job.setup, device)
            if isinstance(job, jobs.AlgorithmsJob):
                yield jobs.OperandsReady(operands.copies, operands.cold)
                library = registry.get(LibraryBackend, job.backend)
                yield jobs.Algorithms(tuple(library.list_algorithms(operands.problem, operands.sets[0], job.limit)))
                return
            if isinstance(job, jobs.QuantizeJob):
                yield jobs.OperandsReady(operands.copies, operands.cold)
                yield jobs.RaceSamples({jobs.QUANTIZATION: time_quantization(operands, job.launches)})
                return
            operands.reserve_buffers(candidate.launch for candidate in job.candidates)
            yield jobs.OperandsReady(operands.copies, operands.cold)
            yield from self._screen(operands, job) if isinstance(job, jobs.ScreenJob) else self._final(operands, job)

    def _open(self, setup: jobs.MeasureSetup) -> driver.Device:
        """Return the device; opened by the first job, as profilers register before the process first uses its GPU."""
        torch = self._torch
        if self._device is None:
            registry.get(Timer, setup.protocol.timer).prepare()
            torch.cuda.set_device(setup.device)
            torch.zeros(1, device=f"cuda:{setup.device}")
            torch.backends.cuda.matmul.allow_tf32 = True
            self._stream = torch.cuda.Stream(setup.device)
            self._device = driver.open_driver(setup.vendor).device(setup.device)
        return self._device

    def _operands(self, setup: jobs.MeasureSetup, device: driver.Device) -> OperandSets:
        """Return the operands of a problem; those of the problem that waits longest make room for new ones.

        Those of a smaller M are the first rows of a larger one's, if these are there: B and the reference are not made
        again. Groups of another M have the same B.
        """
        key = (setup.problem, setup.protocol)
        held = self._operand_sets
        if key not in held:
            while held and self._held_bytes() > device.memory()[1] * self.HELD_MEMORY_SHARE:
                held.popitem(last=False)
                self._torch.cuda.empty_cache()
            taller = next((one for one in held.values() if one.can_narrow(setup)), None)
            alike = next((one for one in held.values() if one.has_weights_of(setup)), None)
            held[key] = OperandSets(setup, device, self._stream.cuda_stream, taller, alike)
            self._torch.cuda.synchronize()
        held.move_to_end(key)
        return held[key]

    def _held_bytes(self) -> int:
        """Return the bytes of all operands that are held; weights that several problems share count once."""
        sets = self._operand_sets.values()
        weights = {id(tensor): tensor for one in sets for tensor in one.weights.values()}
        return sum(one.bytes for one in sets) + sum(int(t.numel() * t.element_size()) for t in weights.values())

    def _attempt(self, config: Config, stage: str, work: Callable[[], Trial]) -> Trial:
        """Return the trial of `work`, or its refusal or crash as a trial; after a crash the process must end."""
        try:
            return work()
        except DriverError as error:
            # Not every fatal error is known by name, but a lost device would refuse everything that follows.
            fatal = any(word in error.name.upper() for word in FATAL_ERROR_WORDS) or self._device_lost()
            return Trial(config, "crashed" if fatal else "out_of_resources", str(error), stage=stage)
        except (self._torch.cuda.OutOfMemoryError, LibraryRefusal, UnavailableError) as error:
            return Trial(config, "out_of_resources", str(error).partition("\n")[0], stage=stage)
        except RuntimeError as error:  # PyTorch may be the first to see a fault.
            if not self._device_lost():
                raise
            return Trial(config, "crashed", str(error).partition("\n")[0], stage=stage)

    def _device_lost(self) -> bool:
        """Return whether the device has faulted, so that nothing runs in this process any more."""
        assert self._device is not None
        try:
            self._device.synchronize()
        except DriverError:
            return True
        return False

    def _screen(self, operands: OperandSets, job: jobs.ScreenJob) -> Iterator[Trial]:
        best_s = job.best_s
        for candidate in job.candidates:
            trial = self._attempt(candidate.config, "screen", partial(self._time_once, operands, candidate, best_s))
            yield trial
            if trial.status == "crashed":
                raise SystemExit(f"{candidate.config.name}: {trial.reason}")
            if trial.status == "ok":
                best_s = min(best_s, trial.seconds)

    def _time_once(self, operands: OperandSets, candidate: jobs.LaunchCandidate, best_s: float) -> Trial:
        """Return the screened time of one candidate."""
        clock, label = operands.screen_clock
        launches = operands.launches_for(self.SCREEN_GRAPH_SECONDS, self.SCREEN_LAUNCHES, spared=1)
        prepared = operands.prepare(candidate, min(operands.copies, launches))
        try:
            prepared.calls[0]()
            graph = operands.capture(prepared.in_turn(launches))
            try:
                samples = [clock.time(graph, launches, prepared.symbol)]
                if samples[0] < 2 * best_s:
                    wrong = None if candidate.launch else self._first_look(operands, candidate.config, prepared)
                    if wrong:
                        return wrong
                    repeats = min(3, int(self.SCREEN_REPEATS_SECONDS / (samples[0] * launches)))
                    samples = [clock.time(graph, launches, prepared.symbol) for _ in range(repeats)] or samples
            finally:
                graph.destroy()
        finally:
            prepared.unload()
        return Trial(candidate.config, "ok", samples=tuple(samples), timer=label)

    def _first_look(self, operands: OperandSets, config: Config, prepared: PreparedCandidate) -> Trial | None:
        """Return why a library's algorithm, which is fast enough for the final, is wrong; None if it is right.

        A library may list hundreds of them, and wrong ones must not fill the final, which looks at all of C.
        """
        ratio, family = operands.protocol.err_ratio, operands.family
        step = cdiv(operands.reference.numel(), self.FIRST_LOOK_ELEMENTS)
        c, reference = operands.sets[0]["c"][::step], operands.reference[::step]
        result = verify.verify_once(operands.problem, family, prepared.calls[0], c, reference, ratio)
        if result.ok:
            return None
        return Trial(
            config, "wrong", result.reason, error=result.error, tolerance=result.tolerance, outside=result.outside
        )

    def _final(self, operands: OperandSets, job: jobs.VerifyJob | jobs.RaceJob) -> Iterator[jobs.MeasureAnswer]:
        """Yield a trial of each candidate with its error, then the answers of the race, if there is one."""
        entries: list[RaceEntry] = []
        guarded = copy_guarded(operands.sets[0], operands.device)
        try:
            for candidate in job.candidates:
                work = partial(self._verify, operands, candidate, guarded, entries)
                trial = self._attempt(candidate.config, "final", work)
                yield trial
                if trial.status == "crashed":
                    raise SystemExit(f"{candidate.config.name}: {trial.reason}")
            if job.baseline:
                entry, wrong = self._baseline_entry(operands, job)
                entries += [entry] if entry else []
                if wrong:
                    yield jobs.WrongBaseline(wrong)
            if isinstance(job, jobs.RaceJob):
                yield from run_race(operands, entries, job.names_runners, job.brief)
        except EntryFailed as fault:
            if fault.config is None and not self._device_lost():
                raise fault.error from None
            if fault.config:  # It costs only itself: the others race again, in a new process.
                yield Trial(fault.config, "crashed", f"in the race: {fault}", stage="final")
            raise SystemExit(f"{operands.problem.key}: {fault}") from fault
        finally:
            self._release(operands, entries)

    def _verify(
        self,
        operands: OperandSets,
        candidate: jobs.LaunchCandidate,
        guarded: GuardedOperands | None,
        entries: list[RaceEntry],
    ) -> Trial:
        """Return the trial of one candidate with its error; one that passes is added to the entries of the race."""
        launches = graph_launches(operands)
        prepared = operands.prepare(candidate, min(operands.copies, launches))
        entered = False
        try:
            result = self._compared(operands, candidate, prepared, guarded)
            trial = Trial(
                candidate.config,
                "ok",
                stage="final",
                error=result.error,
                tolerance=result.tolerance,
                outside=result.outside,
            )
            if not result.ok:
                return replace(trial, status="wrong", reason=result.reason)
            if operands.protocol.compares_rows:
                bits = self._row_bits(operands, candidate)
                if isinstance(bits, Support):
                    return replace(trial, status="wrong", reason=bits.reason)
                trial = replace(trial, row_bits=bits)
            graph = operands.capture(prepared.in_turn(launches))
            entries.append(RaceEntry(candidate.config, graph, launches, prepared))
            entered = True
            return trial
        finally:
            if not entered:
                prepared.unload()

    def _row_bits(self, operands: OperandSets, candidate: jobs.LaunchCandidate) -> str | Support:
        """Return a hash of a row of C that does not depend on M, or which equal rows have other bits."""
        prepared = operands.prepare_shared_rows(candidate)
        try:
            c = operands.shared_rows["c"]
            verify.poison(c)
            prepared.calls[0]()
            self._torch.cuda.current_stream().synchronize()
            return shared_rows.hash_rows(operands.problem, c)
        finally:
            prepared.unload()

    def _compared(
        self,
        operands: OperandSets,
        candidate: jobs.LaunchCandidate,
        prepared: PreparedCandidate,
        guarded: GuardedOperands | None,
    ) -> VerifyResult:
        """Return the candidate's error, on guarded operands if possible, where reaching beyond them crashes."""
        alone = operands.prepare_guarded(candidate, guarded) if guarded else None
        start, c = prepared.calls[0], operands.sets[0]["c"]
        if guarded and alone:
            start, c = alone.calls[0], guarded.tensors["c"]

        def run() -> None:
            start()
            self._torch.cuda.current_stream().synchronize()

        ratio = operands.protocol.err_ratio
        try:
            return verify.verify(operands.problem, operands.family, run, c, operands.reference, ratio)
        finally:
            if alone:
                alone.unload()

    def _baseline_entry(
        self, operands: OperandSets, job: jobs.VerifyJob | jobs.RaceJob
    ) -> tuple[RaceEntry | None, str]:
        """Return the baseline's entry, and why its result is wrong; no entry then, or if it can't compute it."""
        launches = graph_launches(operands)
        calls = operands.library_calls(job.baseline, launches)
        if not calls:
            return None, ""
        prepared = PreparedCandidate(calls)
        try:
            # The library makes its workspace and handles outside the capture.
            wrong = self._baseline_fault(operands, calls[0], compared=bool(job.candidates))
            if wrong:
                return None, wrong
            graph = operands.capture(prepared.in_turn(launches))
        except (RuntimeError, DriverError) as error:
            if self._device_lost():
                raise SystemExit(f"{job.baseline}, {operands.problem.key}: {error}") from error
            return None, ""
        return RaceEntry(None, graph, launches, prepared), ""

    def _baseline_fault(self, operands: OperandSets, run: Call, compared: bool) -> str:
        """Launch the baseline and say why its result is wrong; "" if it is right, or is not compared.

        It is compared beside candidates, for which the reference is computed anyway.
        """
        c = operands.sets[0]["c"]
        verify.poison(c)
        made = run()
        self._torch.cuda.current_stream().synchronize()
        if not compared:
            return ""
        if isinstance(made, self._torch.Tensor):  # Some of PyTorch's functions allocate the result.
            c = made.view_as(c)
        ratio = operands.protocol.err_ratio
        result = verify.compare(operands.problem, operands.family, c, operands.reference, ratio)
        return verify.library_fault(operands.problem, result)

    def _release(self, operands: OperandSets, entries: Sequence[RaceEntry]) -> None:
        operands.__dict__.pop("shared_rows", None)
        for entry in entries:
            with suppress(DriverError):  # A device that was lost takes nothing back.
                entry.graph.destroy()
                entry.prepared.unload()
