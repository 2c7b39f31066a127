"""Stage: launches → Trials, on a machine without a GPU: times predicted from the binaries, results checked by
Triton's interpreter on the CPU.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.codegen import modules, template_facts
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.measure.timers import model as model_timer
from tritongemm.numerics.error_metric import deviation
from tritongemm.numerics.verify import poison
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import Evaluator, Family
from tritongemm.tuning import roster
from tritongemm.workers.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout


def reduced(problem: Problem, config: Config) -> Problem:
    """A smaller problem with the same remainders: two tiles and what is left over along M and N, and a K loop that
    gives every split two blocks and the remainder.
    """

    def shrink(size: int, block: int, blocks: int) -> int:
        return min(size, blocks * block + size % block)

    return replace(
        problem,
        m=shrink(problem.m, config.block_m, 2),
        n=shrink(problem.n, config.block_n, 2),
        k=shrink(problem.k, config.block_k, 2 * config.split_k),
    )


@dataclass(frozen=True)
class InterpreterJob:
    """Work for the interpreter: run `config` of the generated module at `path` on `problem`."""

    problem: Problem
    config: Config
    path: str


class Interpreter:
    """What the interpreter's process does."""

    def __init__(self) -> None:
        import torch  # here, so that a slow import counts as starting
        import triton

        self._torch, self._triton = torch, triton

    def __call__(self, check: InterpreterJob) -> Iterator[tuple[float, float]]:
        spec = importlib.util.spec_from_file_location("generated", check.path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        vars(module)["torch"] = self._torch  # the module imports it only when it is run
        module.teach_interpreter()
        problem = check.problem
        family = plugins.get(Family, problem.family)
        operands = family.make_inputs(problem, "cpu")
        # The interpreter truncates where hardware rounds to nearest: narrow floats stay float32.
        narrow = problem.c.is_fp8 or problem.dtype_c == "bf16"
        dtype = self._torch.float32 if narrow else getattr(self._torch, problem.c.torch)
        c = self._torch.empty((problem.m, problem.n), dtype=dtype)
        poison(c)
        module.launch(check.config.name, c=c, **operands)
        yield deviation(c, family.reference(problem, operands)), family.tolerance(problem)


def _unchecked(config: Config) -> str | None:
    """Why the interpreter can't run a config's kernel, or None."""
    if not roster.is_searched(config.backend):
        return f"only a GPU can check a kernel of {config.backend}: the interpreter runs Triton's"
    if not template_facts.kernel_template(config.template).interpreted:
        return f"only a GPU can check a kernel of {config.template}: Triton's interpreter does not run it"
    return None


class OfflineEvaluator(Evaluator):
    """The stand-in for a GPU.

    Args:
        target: the architecture compiled for.
        timeout: seconds one check may take.
    """

    def __init__(self, target: Target, timeout: float) -> None:
        self.target, self.timeout = target, timeout
        # Beside the run's own modules these would replace them: they have the same names and fewer configs.
        self._folder = tempfile.TemporaryDirectory(prefix="tritongemm-")
        self._child = WorkerProcess("tritongemm.measure.offline_evaluator:Interpreter", {"TRITON_INTERPRET": "1"})

    def start(self) -> None:
        """Nothing: the interpreter is wanted last, and compilers need the cores till then."""

    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """A predicted time for each candidate that could be checked here."""
        for one in artifacts:
            ours = roster.is_searched(one.config.backend)
            if ours and (reason := _unchecked(one.config)):
                yield Trial(one.config, "pruned", reason)
                continue
            yield Trial(
                one.config, "ok", samples=(model_timer.predict(problem, self.target, one),), timer=model_timer.LABEL
            )

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """None: a library can be asked on a GPU only."""
        return []

    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """The error of each candidate, from Triton's interpreter on a reduced problem."""
        reasons = {b.config: _unchecked(b.config) for b in artifacts}
        runs = [config for config, reason in reasons.items() if reason is None]
        path = modules.write_candidates(problem, runs, self.target, Path(self._folder.name)) if runs else None
        for one in artifacts:
            if path and one.config in runs:
                yield self._checked(problem, one.config, path)
            else:
                yield Trial(one.config, "pruned", reasons[one.config] or "", stage="final")

    def _checked(self, problem: Problem, config: Config, path: Path) -> Trial:
        small = reduced(problem, config)
        try:
            ((error, tolerance),) = self._child.ask(InterpreterJob(small, config, str(path)), self.timeout)
        except WorkerTimeout as late:
            return Trial(config, "timeout", f"interpreter: {late}", stage="final")
        except (WorkerDied, WorkerError) as fault:
            return Trial(config, "crashed", f"interpreter: {fault}", stage="final")
        trial = Trial(config, "ok", stage="final", error=error, tolerance=tolerance)
        if not error <= tolerance:
            return replace(trial, status="wrong", reason=f"error {error:.3g} > {tolerance:.3g}")
        return trial

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str) -> RaceResult:
        """Check candidates in predicted order until one passes; there is no race to run and no library to race."""
        trials: list[Trial] = []
        for one in sorted(artifacts, key=lambda b: model_timer.predict(problem, self.target, b)):
            (trial,) = self.verify(problem, [one])
            seconds = model_timer.predict(problem, self.target, one)
            trials.append(replace(trial, samples=(seconds,), timer=model_timer.LABEL))
            if trial.status == "ok":
                return RaceResult(tuple(trials), {one.config.name: (seconds,)}, cold=True)
        return RaceResult(tuple(trials), {}, cold=True)

    def describe(self, problem: Problem, config: Config) -> str:
        """How a result was verified."""
        small = reduced(problem, config)
        return f"interpreter {small.m}x{small.n}x{small.k}"

    def close(self) -> None:
        """End the interpreter's process."""
        self._child.kill()
        self._folder.cleanup()
