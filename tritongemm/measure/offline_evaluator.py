"""The evaluator for a machine without a GPU.

Times are predicted from the binaries, and results are verified by an interpreter on the CPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.trial import PREDICTED, Trial
from tritongemm.measure.interpreting import InterpreterJob, count_launches, reduced, with_fewer_programs
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Evaluator, SearchedBackend
from tritongemm.search.cost_model import model as cost_model
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout
from tritongemm.system.temporary_folder import TemporaryFolder


def _interpreted(config: Config) -> Support:
    """Return whether the interpreter can run a config's kernel."""
    backend = registry.get(Backend, config.backend)
    if isinstance(backend, SearchedBackend):
        return backend.interpreted(config)
    return Support(f"only a GPU can check a kernel of {config.backend}: the interpreter runs Triton's")


class OfflineEvaluator(Evaluator):
    """The evaluator that stands in for a GPU."""

    verification = (
        "in Triton's interpreter at the smaller sizes shown, against float64 as closely as float32 allows; races "
        "between programs, what a compiler makes of a kernel, the full sizes and time need a GPU"
    )

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target, self.timeout_s = target, timeout_s
        self._process = WorkerProcess("tritongemm.measure.interpreting:Interpreter", {"TRITON_INTERPRET": "1"})

    def start(self) -> None:
        """Start nothing yet: the interpreter is needed last, and compilers need the cores until then."""

    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """Yield a predicted time for each candidate, except those of a searched backend that can't be verified here."""
        for artifact in artifacts:
            config = artifact.config
            searched = isinstance(registry.get(Backend, config.backend), SearchedBackend)
            if searched and not (support := _interpreted(config)):
                yield Trial(config, "pruned", support.reason)
                continue
            yield Trial(config, "ok", samples=(self._predict(problem, artifact),), timer=PREDICTED)

    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """Yield the error of each candidate, from the interpreter on a reduced problem."""
        for config in (a.config for a in artifacts):
            if support := _interpreted(config):
                yield self._interpret(problem, config)
            else:
                yield Trial(config, "pruned", support.reason, stage="final")

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Verify candidates in predicted order until one passes; nothing is timed, and there is no baseline."""
        trials: list[Trial] = []
        # The model predicts no algorithm of a library, which does not say what a program of it does.
        predictable = [a for a in artifacts if a.config.block_m and a.config.num_warps]
        trials += self.verify(problem, [a for a in artifacts if a not in predictable])
        predicted = [(bool(a.loop and a.loop.spilled), self._predict(problem, a), a) for a in predictable]
        # Waits for spilled registers empty a loop's pipeline: only where all loops spill is one that does the fastest.
        for _, seconds, artifact in sorted(predicted, key=lambda one: one[:2]):
            (trial,) = self.verify(problem, [artifact])
            trials.append(replace(trial, samples=(seconds,), timer=PREDICTED))
            if trial.status == "ok":
                return RaceResult(tuple(trials), {artifact.config.name: (seconds,)}, cold=True)
        return RaceResult(tuple(trials), {}, cold=True)

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """Return no configs, as a library can be queried on a GPU only."""
        return []

    def describe(self, problem: Problem, config: Config) -> str:
        """Describe in a few words how a result is verified."""
        small = reduced(problem, config)
        launches = "2 launches" if count_launches(config, small) == 2 else "1 launch"
        return f"{launches} in the interpreter at {small.m}x{small.n}x{small.k}"

    def close(self) -> None:
        """End the interpreter's process."""
        self._process.kill()

    def _predict(self, problem: Problem, artifact: Artifact) -> float:
        """Return the predicted seconds of one launch, from the config and the facts of its binary."""
        return cost_model.predict(artifact.config, problem, self.target, artifact).seconds

    def _interpret(self, problem: Problem, config: Config) -> Trial:
        """Return the trial of one config on a reduced problem."""
        small = reduced(problem, config)
        few, target = with_fewer_programs(config, problem, small, self.target)
        searched: SearchedBackend = registry.get(SearchedBackend, config.backend)
        # Beside the run's own modules it would replace one, which has the same name and more configs.
        with TemporaryFolder() as folder:
            text = searched.write_candidates(small, [few], target, folder).read_text(encoding="utf-8")
        job = InterpreterJob(small, few, text)
        try:
            ((error, tolerance),) = self._answers(job)
        except WorkerTimeout as late:
            return Trial(config, "timeout", f"interpreter: {late}", stage="final")
        except WorkerDied as death:
            reason = f"interpreter: {death}"
            return Trial(config, "crashed", reason, stage="final", try_again=death.from_outside)
        except WorkerError as fault:
            return Trial(config, "crashed", f"interpreter: {fault}", stage="final")
        trial = Trial(config, "ok", stage="final", error=error, tolerance=tolerance)
        if not error <= tolerance:
            return replace(trial, status="wrong", reason=f"error {error:.3g} > {tolerance:.3g}")
        return trial

    def _answers(self, job: InterpreterJob) -> list[Any]:
        """Return the interpreter's answers; a process that is killed from outside gets a second chance."""
        try:
            return list(self._process.ask(job, self.timeout_s))
        except WorkerDied as death:
            if not death.from_outside:
                raise
        return list(self._process.ask(job, self.timeout_s))
