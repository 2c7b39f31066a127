"""Stage: launches → Trials, on one GPU, in a process that may die.

A crash or a hang costs the candidate that was running; the rest go on in a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError, UnavailableError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol, RaceResult
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.measure.jobs import Request
from tritongemm.plugins import _modules as registry
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import Backend, Evaluator, KernelBackend
from tritongemm.workers.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout

Candidate = tuple[Config, Launch | HostLaunch | None]


class _Fault(Exception):
    """The process is gone; `status` is what that makes of the candidate that ran, "" if it has been answered."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def _blamed(fault: Exception, last: Any, timeout: float) -> _Fault:
    """What a fault behind the answer `last` makes of the candidate that ran."""
    # The process ends itself after an answer that says the device faulted.
    if isinstance(last, Trial) and last.status == "crashed" and not isinstance(fault, WorkerError):
        return _Fault("", str(fault))
    if isinstance(fault, WorkerTimeout):
        return _Fault("timeout", f"no answer within {timeout:g} s; killed")
    return _Fault("crashed", str(fault))


class GpuEvaluator(Evaluator):
    """One device and the process that works on it.

    Args:
        target: its facts.
        vendor: whose driver.
        device: ordinal.
        protocol: how to measure.
        timeout: seconds one candidate may take.
    """

    def __init__(self, target: Target, vendor: str, device: int, protocol: MeasureProtocol, timeout: float) -> None:
        self.target, self.vendor, self.device = target, vendor, device
        self.protocol, self.timeout = protocol, timeout
        self._child = WorkerProcess("tritongemm.measure.device_worker:DeviceWorker")

    def start(self) -> None:
        """Begin to start the process; it takes seconds, in which problems can be planned."""
        self._child.start()

    def _request(self, kind: str, problem: Problem, candidates: Sequence[Candidate], **more: Any) -> Request:
        common = (kind, problem, self.target, self.protocol, self.vendor, self.device)
        return Request(*common, tuple(candidates), **more)

    def _answers(self, request: Request) -> Iterator[Any]:
        """Answers to one request.

        Raises:
            _Fault: the process is gone.
            TritonGemmError: the problem itself can't be run, e.g. its operands do not fit.
        """
        last: Any = None
        for again in (True, False):
            try:
                for last in self._child.ask(request, self.timeout):
                    yield last
                return
            except (WorkerTimeout, WorkerDied, WorkerError) as fault:
                if last is not None:
                    raise _blamed(fault, last, self.timeout) from None
                # No candidate has been touched yet. What went before may have left the process or its device unwell.
                self._child.kill()
                if not again:
                    raise TritonGemmError(f"{request.problem.key}: {fault}") from fault

    def _launches(self, problem: Problem, built: Sequence[Artifact], stage: str) -> tuple[list[Candidate], list[Trial]]:
        """What to launch, and a trial for each config that has no launch for the problem."""
        launches: list[Candidate] = []
        refused: list[Trial] = []
        for one in built:
            try:
                backend = plugins.get(Backend, one.config.backend)
                launch = backend.launch(one, problem, self.target) if isinstance(backend, KernelBackend) else None
                launches.append((one.config, launch))
            except TritonGemmError as error:
                refused.append(Trial(one.config, "out_of_resources", str(error), stage=stage))
        return launches, refused

    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """A cheap time for each candidate, as they come.

        Args:
            problem: what they compute.
            artifacts: compiled candidates.
            best_s: seconds of the best so far.

        Raises:
            TritonGemmError: the problem itself can't be run, e.g. its operands do not fit.
        """
        left, refused = self._launches(problem, artifacts, "screen")
        yield from refused
        while left:
            try:
                for answer in self._answers(self._request("screen", problem, left, best=best_s)):
                    if isinstance(answer, Trial):
                        left.pop(0)
                        yield answer
            except _Fault as fault:
                if fault.status and left:
                    yield Trial(left.pop(0)[0], fault.status, fault.reason, stage="screen")

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """The configs a library has for a problem, `limit` of them unless that is 0.

        Raises:
            TritonGemmError: it can't be asked; says why.
        """
        available = plugins.available(Backend, backend)
        if not available:
            raise UnavailableError(str(available))
        try:
            answers = list(self._answers(self._request("enumerate", problem, (), library=backend, most=limit)))
        except _Fault as fault:
            raise TritonGemmError(fault.reason) from None
        found: list[Config] = answers[-1]
        return found

    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """The error of each candidate at full size."""
        for one in artifacts:
            yield from self.race(problem, [one], "", race=False).trials

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, race: bool = True) -> RaceResult:
        """Verify candidates and race those that pass with the library.

        Raises:
            TritonGemmError: the race itself can't be finished.
        """
        timer = registry.load("timers", self.protocol.timer)
        outside = getattr(timer, "race", None) if race else None  # a clock that runs the race in a process of its own
        left, lost = self._launches(problem, artifacts, "final")
        deaths = 0  # that are nobody's fault
        kind = "final" if race and outside is None else "check"
        while True:
            trials: list[Trial] = []
            samples: dict[str, list[float]] = {}
            cold, racing = True, ""
            try:
                # After a death in the race that nobody can be blamed for, whoever runs is named.
                request = self._request(kind, problem, left, library=baseline, watched=deaths > 0)
                for answer in self._answers(request):
                    if isinstance(answer, Trial):
                        trials.append(answer)
                    elif "cold" in answer:
                        cold = answer["cold"]
                    elif "racing" in answer:
                        racing = answer["racing"]
                    else:
                        samples = answer
            except _Fault as fault:
                if not fault.status:
                    lost.append(trials[-1])
                    left = [c for c in left if c[0] != trials[-1].config]
                elif len(trials) < len(left):
                    lost.append(Trial(left.pop(len(trials))[0], fault.status, fault.reason, stage="final"))
                elif racing:
                    gone = next(c for c, _ in left if c.name == racing)
                    lost.append(Trial(gone, fault.status, f"in the race: {fault.reason}", stage="final"))
                    left = [c for c in left if c[0] != gone]
                else:
                    deaths += 1
                    if deaths > 2:
                        raise TritonGemmError(
                            f"{problem.key}: the final race ended {deaths} times: {fault.reason}"
                        ) from None
                continue
            if outside and (configs := [t.config for t in trials if t.status == "ok"]):
                samples = self._outside(outside, problem, configs, baseline)
            raced = [replace(t, samples=tuple(samples.get(t.config.name, ())), timer=timer.LABEL) for t in trials]
            return RaceResult((*raced, *lost), samples, cold)

    def _outside(
        self, race: Callable[..., Any], problem: Problem, configs: list[Config], library: str
    ) -> dict[str, list[float]]:
        protocol, entries = self.protocol, len(configs) + 1
        megabytes, rounds = protocol.rotation_bytes(self.target) >> 20, (protocol.warmup, protocol.iters)
        limit = self.timeout * entries
        found: dict[str, list[float]] = race(
            problem, self.target, configs, library, self.device, megabytes, rounds, limit
        )
        return found

    def describe(self, problem: Problem, config: Config) -> str:
        """How a result was verified."""
        return f"float64 {problem.m}x{problem.n}x{problem.k}"

    def close(self) -> None:
        """End the process."""
        self._child.kill()
