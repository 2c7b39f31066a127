"""The evaluator that measures on one GPU, in a process that a candidate may kill.

A crash or a hang affects only the candidate that was running; the rest continue in a new process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median
from typing import TypeAlias

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError, UnavailableError
from tritongemm.core.launch import Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol, RaceResult
from tritongemm.core.target import Target
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.measure import jobs
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Evaluator, ExternalRaceJob, ExternalTimer, KernelBackend, Timer
from tritongemm.system.child_process import ServingProcess, WorkerDied, WorkerError, WorkerProcess, WorkerTimeout

# Screening takes microseconds where others of its size were launched. One that hangs is given up after this
# part of the limit, but not before these seconds and this multiple of the best's time.
SCREEN_SHARE = 0.1
SCREEN_LEAST_SECONDS = 5.0
SCREEN_MOST_OF_BEST = 100

MOST_UNEXPLAINED_DEATHS = 2  # deaths of the process without a culprit after which a job is given up

# The job of one attempt at a final: of these candidates, naming the runners or not.
_FinalJob: TypeAlias = "Callable[[tuple[jobs.LaunchCandidate, ...], bool], jobs.VerifyJob | jobs.RaceJob]"


DEVICE_ROLE = "tritongemm.measure.device_worker:DeviceWorker"


class _ProcessGone(Exception):
    """The process that measures ended before it had answered a job completely."""

    def __init__(self, status: str, reason: str, from_outside: bool = False) -> None:
        super().__init__(reason)
        self.status, self.reason, self.from_outside = status, reason, from_outside

    def trial(self, config: Config, stage: str, where: str = "") -> Trial:
        """Return the trial of the candidate that ran; `where` goes before the reason."""
        return Trial(config, self.status, where + self.reason, stage=stage, try_again=self.from_outside)


def _explained(fault: Exception, last: jobs.MeasureAnswer, timeout_s: float) -> _ProcessGone:
    """Return the death of the process, with the candidate that ran by the answer `last`."""
    # The process ends itself after an answer that reports a fault of the device.
    if isinstance(last, Trial) and last.status == "crashed" and not isinstance(fault, WorkerError):
        return _ProcessGone("", str(fault))
    if isinstance(fault, WorkerTimeout):
        return _ProcessGone("timeout", f"no answer within {timeout_s:g} s; killed")
    return _ProcessGone("crashed", str(fault), isinstance(fault, WorkerDied) and fault.from_outside)


@dataclass
class _Attempt:
    """The answers so far of one attempt at a final."""

    trials: list[Trial] = field(default_factory=list)  # one for each candidate that was verified
    samples: dict[str, Sequence[float]] = field(default_factory=dict)  # of the race, once it has ended
    rested: dict[str, Sequence[float]] = field(default_factory=dict)  # see `core.protocol.RaceResult`
    cold: bool = True  # the operands are not in the last-level cache
    running: str = ""  # name of the candidate that runs in the race; "" where that isn't known
    library_wrong: str = ""  # why the baseline's result is wrong; "" where it is not

    def take(self, answer: jobs.MeasureAnswer) -> None:
        """Note one answer."""
        if isinstance(answer, Trial):
            self.trials.append(answer)
        elif isinstance(answer, jobs.OperandsReady):
            self.cold = answer.cold
        elif isinstance(answer, jobs.NowRacing):
            self.running = "" if answer.name == BASELINE_ENTRY else answer.name
        elif isinstance(answer, jobs.RaceSamples):
            self.samples, self.rested = dict(answer.samples), dict(answer.rested)
        elif isinstance(answer, jobs.WrongBaseline):
            self.library_wrong = answer.reason

    def blame(self, fault: _ProcessGone, candidates: Sequence[jobs.LaunchCandidate]) -> Trial | None:
        """Return the trial of the candidate that ended the process; None where there is no culprit."""
        if not fault.status:
            return self.trials[-1]
        if len(self.trials) < len(candidates):
            return fault.trial(candidates[len(self.trials)].config, "final")
        if self.running:
            config = next(c.config for c in candidates if c.config.name == self.running)
            return fault.trial(config, "final", "in the race: ")
        return None


class _SecondChances:
    """Allows one more try of a candidate whose process another program killed."""

    def __init__(self) -> None:
        self._given: set[Config] = set()

    def give(self, fault: _ProcessGone, config: Config) -> bool:
        """Return whether a candidate is tried again after this end of the process, at most once."""
        if not fault.from_outside or config in self._given:
            return False
        self._given.add(config)
        return True


class GpuEvaluator(Evaluator):
    """One device and the process that works on it.

    `device` is the GPU's ordinal; one candidate may take `timeout_s` seconds; without a process it starts one on this
    host.
    """

    verification = "on the GPU, two launches of each, all of C against float64"

    def __init__(
        self,
        target: Target,
        vendor: str,
        device: int,
        protocol: MeasureProtocol,
        timeout_s: float,
        process: ServingProcess | None = None,
    ) -> None:
        self.target, self.vendor, self.device = target, vendor, device
        self.protocol, self.timeout_s = protocol, timeout_s
        self._process = process or WorkerProcess(DEVICE_ROLE)
        self._launched: set[Problem] = set()  # problems whose candidates have run in the live process
        self._quantization: dict[tuple[object, ...], float | None] = {}  # by what determines the kernel and its memory
        self.times_quantization = not isinstance(registry.get(Timer, protocol.timer), ExternalTimer)

    def start(self) -> None:
        """Begin to start the process; it takes seconds, in which problems can be planned."""
        self._process.start()

    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """Yield a quick time of each candidate, as they come; a TritonGemmError where the problem can't be run."""
        left, refused = self._candidates(problem, artifacts, "screen")
        yield from refused
        second_chances = _SecondChances()
        while left:
            try:
                for answer in self._answers(jobs.ScreenJob(self._setup(problem), tuple(left), best_s)):
                    if isinstance(answer, Trial):
                        left.pop(0)
                        yield answer
            except _ProcessGone as fault:
                if fault.status and left and not second_chances.give(fault, left[0].config):
                    yield fault.trial(left.pop(0).config, "screen")

    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """Yield the error of each candidate at full size; a TritonGemmError where the problem itself can't be run."""
        setup, label = self._setup(problem), registry.get(Timer, self.protocol.timer).label
        for artifact in artifacts:
            candidates, lost = self._candidates(problem, [artifact], "final")
            attempt = self._final(problem, candidates, lost, lambda left, _: jobs.VerifyJob(setup, left))
            yield from (replace(t, timer=label) for t in attempt.trials)
            yield from lost

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Verify candidates, and race those that pass and a baseline backend; a TritonGemmError if that can't end."""
        setup, timer = self._setup(problem), registry.get(Timer, self.protocol.timer)
        candidates, lost = self._candidates(problem, artifacts, "final")
        if isinstance(timer, ExternalTimer):
            attempt = self._final(problem, candidates, lost, lambda left, _: jobs.VerifyJob(setup, left, baseline))
            right = tuple(t.config for t in attempt.trials if t.status == "ok")
            samples: dict[str, Sequence[float]] = {}
            if right:
                samples |= timer.race(self._external_job(problem, right, "" if attempt.library_wrong else baseline))
        else:
            job: _FinalJob = lambda left, names_runners: jobs.RaceJob(setup, left, baseline, names_runners, brief)
            attempt = self._final(problem, candidates, lost, job)
            samples = attempt.samples
        label = timer.label
        raced = [replace(t, samples=tuple(samples.get(t.config.name, ())), timer=label) for t in attempt.trials]
        wrong, rested = attempt.library_wrong, attempt.rested
        return RaceResult((*raced, *lost), samples, attempt.cold, library_wrong=wrong, rested=rested)

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """Return a library's configs for a problem, at most `limit` unless 0; a TritonGemmError says why not."""
        plugin = registry.get(Backend, backend)
        if not (support := registry.available(Backend, backend) and plugin.supports(problem, self.target)):
            raise UnavailableError(support.reason)
        configs: list[Config] = []
        try:
            for answer in self._answers(jobs.AlgorithmsJob(self._setup(problem), backend, limit)):
                if isinstance(answer, jobs.Algorithms):
                    configs += answer.configs
        except _ProcessGone as fault:
            raise TritonGemmError(fault.reason) from None
        return configs

    def time_quantization(self, problem: Problem, launches: tuple[Launch, ...]) -> float | None:
        """Return seconds of the kernels that quantise A, by the races' timer; None if that timer can't measure them.

        The launches are of the kernels in order, on addresses named x, part, q and scale.
        """
        key = problem.m, problem.k, problem.a.dtype, problem.a.scaling
        if key not in self._quantization:
            self._quantization[key] = None
            with suppress(_ProcessGone, TritonGemmError):  # The next job starts the process again.
                for answer in self._answers(jobs.QuantizeJob(self._setup(problem), launches)):
                    if isinstance(answer, jobs.RaceSamples):
                        self._quantization[key] = median(answer.samples[jobs.QUANTIZATION])
        return self._quantization[key]

    def describe(self, problem: Problem, config: Config) -> str:
        """Describe in a few words how a result is verified."""
        return f"float64 {problem.m}x{problem.n}x{problem.k}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()

    def _setup(self, problem: Problem) -> jobs.MeasureSetup:
        return jobs.MeasureSetup(problem, self.target, self.protocol, self.vendor, self.device)

    def _candidates(
        self, problem: Problem, artifacts: Sequence[Artifact], stage: str
    ) -> tuple[list[jobs.LaunchCandidate], list[Trial]]:
        """Return what to launch, and a trial for each config that has no launch for the problem."""
        candidates: list[jobs.LaunchCandidate] = []
        refused: list[Trial] = []
        for artifact in artifacts:
            try:
                backend = registry.get(Backend, artifact.config.backend)
                launch = backend.launch(artifact, problem, self.target) if isinstance(backend, KernelBackend) else None
                candidates.append(jobs.LaunchCandidate(artifact.config, launch))
            except TritonGemmError as error:
                refused.append(Trial(artifact.config, "out_of_resources", str(error), stage=stage))
        return candidates, refused

    def _limit(self, job: jobs.MeasureJob) -> float:
        """Return the seconds to wait for each answer of a job: few where all slow steps were done before."""
        if not isinstance(job, jobs.ScreenJob) or job.setup.problem not in self._launched:
            return self.timeout_s
        if not all(isinstance(candidate.launch, Launch) for candidate in job.candidates):
            return self.timeout_s
        enough = max(SCREEN_LEAST_SECONDS, SCREEN_SHARE * self.timeout_s, SCREEN_MOST_OF_BEST * job.best_s)
        return min(self.timeout_s, enough)

    def _answers(self, job: jobs.MeasureJob) -> Iterator[jobs.MeasureAnswer]:
        """Yield the answers to one job, as they come."""
        last: jobs.MeasureAnswer | None = None
        limit = self._limit(job)
        for deaths in count(1):
            try:
                for last in self._process.ask(job, limit):
                    yield last
                if isinstance(job, jobs.ScreenJob):
                    self._launched.add(job.setup.problem)
                return
            except (WorkerTimeout, WorkerDied, WorkerError) as fault:
                self._launched.clear()
                if last is not None:
                    raise _explained(fault, last, limit) from None
                limit = self.timeout_s
                # No candidate has run yet. An earlier job may have left the process or its device in a bad state.
                self._process.kill()
                from_outside = isinstance(fault, WorkerDied) and fault.from_outside
                if deaths > (MOST_UNEXPLAINED_DEATHS if from_outside else 1):
                    raise TritonGemmError(f"{job.setup.problem.key}: {fault}") from fault

    def _final(self, problem: Problem, left: list[jobs.LaunchCandidate], lost: list[Trial], job: _FinalJob) -> _Attempt:
        """Return the attempt at a final that the process survived."""
        deaths = 0
        second_chances = _SecondChances()
        while True:
            attempt = _Attempt()
            try:
                # Naming the runners costs time, so it begins after a death without a culprit.
                for answer in self._answers(job(tuple(left), deaths > 0)):
                    attempt.take(answer)
                return attempt
            except _ProcessGone as fault:
                blamed = attempt.blame(fault, left)
                if blamed is not None:
                    if not second_chances.give(fault, blamed.config):
                        lost.append(blamed)
                        left[:] = [c for c in left if c.config != blamed.config]
                    continue
                deaths += 1
                if deaths > MOST_UNEXPLAINED_DEATHS:
                    raise TritonGemmError(
                        f"{problem.key}: the final race ended {deaths} times: {fault.reason}"
                    ) from None

    def _external_job(self, problem: Problem, configs: tuple[Config, ...], baseline: str) -> ExternalRaceJob:
        protocol = self.protocol
        return ExternalRaceJob(
            problem,
            self.target,
            configs,
            baseline,
            self.device,
            rotating_mb=protocol.rotation_bytes(self.target) >> 20,
            warmup=protocol.warmup,
            iters=protocol.iters,
            timeout_s=self.timeout_s * (len(configs) + 1),
        )
