from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.codegen import modules
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.system.child_process import WorkerProcess


@dataclass(frozen=True)
class Interpreted:
    child: WorkerProcess
    folder: Path

    def errors(self, problem: Problem, configs: Iterable[Config], target: Target) -> dict[str, float]:
        """Each config's share of the error that its family allows; the error itself where none is allowed.

        A program of gemv has few rows and takes as long as one of a tile: its M has a block and the remainder, or two
        rows.
        """
        configs = list(configs)
        text = modules.write_candidates(problem, configs, target, self.folder).read_text()
        found = {}
        for config in configs:
            gemv = config.template == "gemv"
            rows = min(problem.m, max(2, config.block_m + problem.m % config.block_m)) if gemv else problem.m
            ((error, tolerance),) = self.child.ask(InterpreterJob(replace(problem, m=rows), config, text), 60)
            found[config.name] = error / tolerance if tolerance else error
        return found

    def check(self, problem: Problem, configs: Iterable[Config], target: Target, most: float = 1) -> None:
        """Require that no config's error is more than a share of what its family allows."""
        found = self.errors(problem, configs, target)
        assert all(e <= most for e in found.values()), found
