import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.support.nouns import Artifact, Config, Problem, RaceResult, TritonGemmError, load_target, registry
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.plugins.contracts import Backend, Evaluator, KernelBackend


def tile_rows_seconds(config: Config) -> float:
    """As many microseconds as the tile has rows, and one more for a kernel of Triton's."""
    return (config.block_m + (config.backend == "triton")) * 1e-6


class FakeEvaluator(Evaluator):
    """Times candidates by a function of their configs and finds every result right.

    Args:
        arch: target.
        seconds: of one launch of a config.
        timer: label of its clock.
        baseline_seconds: of the baseline in a race; None where it does not take part.
        fits: whether a problem's operands fit the device; a race of one that does not fit is refused.
        on_trial: is given each trial of a screen after it was taken.
        rounds: of a race.
        library_wrong: why the baseline is wrong; "" where it is right.

    Attributes:
        screened, raced: configs, in the order they were given; `raced` is of the last race.
    """

    verification = "by eye"

    def __init__(
        self,
        arch: str = "gfx942",
        seconds: Callable[[Config], float] = tile_rows_seconds,
        timer: str = "sundial",
        baseline_seconds: float | None = None,
        fits: Callable[[Problem], bool] = lambda problem: True,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        rounds: int = 1,
        library_wrong: str = "",
    ) -> None:
        self.target = load_target(arch)
        self.seconds, self.timer, self.baseline_seconds = seconds, timer, baseline_seconds
        self.fits, self.on_trial, self.rounds, self.library_wrong = fits, on_trial, rounds, library_wrong
        self.screened: list[Config] = []
        self.raced: list[Config] = []

    def start(self) -> None:
        """Nothing has to start."""

    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        for artifact in artifacts:
            require_launch(self, problem, artifact)
            self.screened.append(artifact.config)
            trial = Trial(artifact.config, "ok", samples=(self.seconds(artifact.config),), timer=self.timer)
            yield trial
            self.on_trial(trial)

    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        yield from self.race(problem, artifacts, "").trials

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        if not self.fits(problem):
            raise TritonGemmError("out of memory")
        self.raced = [a.config for a in artifacts]
        rounds = self.rounds
        trials = [Trial(c, "ok", "", (self.seconds(c),) * rounds, self.timer, "final", 0.0, 0.1) for c in self.raced]
        samples = {t.config.name: t.samples for t in trials}
        if baseline and self.baseline_seconds is not None and not self.library_wrong:
            samples[BASELINE_ENTRY] = (self.baseline_seconds,) * rounds
        return RaceResult(tuple(trials), samples, True, library_wrong=self.library_wrong)

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        raise TritonGemmError(f"{backend} lacks a symbol")

    def describe(self, problem: Problem, config: Config) -> str:
        return "by eye"

    def close(self) -> None:
        """Nothing was started."""


def require_launch(evaluator: FakeEvaluator, problem: Problem, artifact: Artifact) -> None:
    """Have the backend make the launch, as a device would; what it raises is the candidate's fault."""
    backend = registry.get(Backend, artifact.config.backend)
    if isinstance(backend, KernelBackend):
        backend.launch(artifact, problem, evaluator.target)


def passed(self: OfflineEvaluator, problem: Problem, config: Config) -> Trial:
    """Stands in for `OfflineEvaluator._interpret`: the interpreter is not run and finds every result right."""
    return Trial(config, "ok", stage="final", error=0.0, tolerance=1e-3)


class Waiting(FakeEvaluator):
    """A device of which each race waits for one of another device."""

    both: threading.Barrier

    def race(self, *args: Any, **more: Any) -> RaceResult:
        self.both.wait()
        return super().race(*args, **more)
