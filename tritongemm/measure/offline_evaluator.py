"""The evaluator for a machine without a GPU.

Times are predicted from the binaries, and results are verified by an interpreter on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tritongemm.codegen import modules
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.temporary_folder import TemporaryFolder
from tritongemm.core.trial import PREDICTED, Trial
from tritongemm.measure.guarded_tensors import guarded
from tritongemm.numerics.error_metric import deviation
from tritongemm.numerics.grouped import written
from tritongemm.numerics.verify import poison
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Evaluator, Family, SearchedBackend
from tritongemm.search.cost_model import model as cost_model
from tritongemm.workers.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout


def reduced(problem: Problem, config: Config) -> Problem:
    """Return a smaller problem with the same remainders.

    It has two tiles plus the remainder along M and N, and a K loop that gives every split two blocks plus the
    remainder; a batch has three products. The number of groups stays, and rows are spread as in the original; captured
    spreads as skewed ones.
    """

    def shrink(size: int, block: int, blocks: int) -> int:
        return min(size, blocks * block + size % block)

    room = shrink(problem.room, config.block_m, 2) if problem.room else 0
    m = min(shrink(problem.m, config.block_m, 2), room or problem.m)
    spread = "skewed" if problem.counts else problem.spread
    return replace(
        problem,
        m=m,
        room=room,
        spread=spread,
        counts=(),
        n=shrink(problem.n, config.block_n, 2),
        k=shrink(problem.k, config.block_k, 2 * config.split_k),
        batch=min(problem.batch, 3),
    )


@dataclass(frozen=True)
class InterpreterJob:
    """A request to run a kernel in the interpreter.

    Attributes:
        problem: the problem to compute.
        config: the config whose kernel runs.
        text: of the generated module that contains the kernel.
    """

    problem: Problem
    config: Config
    text: str


class Interpreter:
    """The request handler of the interpreter's process."""

    def __init__(self) -> None:
        import torch  # Imported here, so that a slow import counts as starting.
        import triton

        self._torch, self._triton = torch, triton

    def __call__(self, job: InterpreterJob) -> Iterator[tuple[float, float]]:
        """Yield once: the error of the config's result, and the largest error that its family allows."""
        module = modules.run_text(job.text, "generated")
        module.teach_interpreter()
        problem = job.problem
        family = registry.get(Family, problem.family)
        operands = {name: guarded(t) for name, t in family.make_inputs(problem, "cpu").items()}
        # The interpreter truncates where hardware rounds to nearest: narrow floats stay float32.
        narrow = problem.c.is_fp8 or problem.dtype_c == "bf16"
        dtype = self._torch.float32 if narrow else getattr(self._torch, problem.c.torch)
        c = guarded(self._torch.empty(problem.operands["c"].extents, dtype=dtype))
        poison(c)
        module.launch(job.config.name, c=c, **operands)
        yield deviation(*written(problem, c, family.reference(problem, operands))), family.tolerance(problem)


def _interpreted(config: Config) -> Support:
    """Whether the interpreter can run a config's kernel."""
    backend = registry.get(Backend, config.backend)
    if isinstance(backend, SearchedBackend):
        return backend.interpreted(config)
    return Support(f"only a GPU can check a kernel of {config.backend}: the interpreter runs Triton's")


class OfflineEvaluator(Evaluator):
    """The evaluator that stands in for a GPU.

    Args:
        target: the architecture compiled for.
        timeout_s: seconds that one verification may take.
    """

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target, self.timeout_s = target, timeout_s
        # Beside the run's own modules these would replace them: they have the same names and fewer configs.
        self._folder = TemporaryFolder()
        self._process = WorkerProcess("tritongemm.measure.offline_evaluator:Interpreter", {"TRITON_INTERPRET": "1"})

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
        supports = {a.config: _interpreted(a.config) for a in artifacts}
        runs: dict[str, list[Config]] = {}
        for config, support in supports.items():
            if support:
                runs.setdefault(config.backend, []).append(config)
        texts = {backend: self._module_text(problem, backend, configs) for backend, configs in runs.items()}
        for config in (a.config for a in artifacts):
            if supports[config]:
                yield self._interpret(problem, config, texts[config.backend])
            else:
                yield Trial(config, "pruned", supports[config].reason, stage="final")

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Verify candidates in predicted order until one passes; nothing is timed, and there is no baseline."""
        trials: list[Trial] = []
        predicted = [(self._predict(problem, artifact), artifact) for artifact in artifacts]
        for seconds, artifact in sorted(predicted, key=lambda pair: pair[0]):
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
        return f"interpreter {small.m}x{small.n}x{small.k}"

    def close(self) -> None:
        """End the interpreter's process."""
        self._process.kill()
        self._folder.close()

    def _predict(self, problem: Problem, artifact: Artifact) -> float:
        """Predicted seconds of one launch, from the config and what its binary says."""
        return cost_model.predict(artifact.config, problem, self.target, artifact).seconds

    def _module_text(self, problem: Problem, backend: str, configs: list[Config]) -> str:
        """Text of a generated module that holds the kernels of a searched backend."""
        searched: SearchedBackend = registry.get(SearchedBackend, backend)
        path = searched.write_candidates(problem, configs, self.target, self._folder.path)
        return path.read_text(encoding="utf-8")

    def _interpret(self, problem: Problem, config: Config, text: str) -> Trial:
        """The trial of one config of a generated module, on a reduced problem."""
        job = InterpreterJob(reduced(problem, config), config, text)
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
        """What the interpreter answers; a process that is killed from outside gets a second chance.

        Raises:
            WorkerDied, WorkerError, WorkerTimeout: it gives no answer.
        """
        try:
            return list(self._process.ask(job, self.timeout_s))
        except WorkerDied as death:
            if not death.from_outside:
                raise
        return list(self._process.ask(job, self.timeout_s))
