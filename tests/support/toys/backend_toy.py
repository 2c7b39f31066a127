"""A backend of one's own: one kernel, `toy`, which is text. As tritongemm/backends/toy.py it races with the others."""

from __future__ import annotations

from collections.abc import Iterable

from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.launch import Launch, Param
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins.contracts import BuildInputs, Capabilities, KernelBackend


class ToyBackend(KernelBackend):
    """Computes single GEMMs without scales, of a B in rows or columns, on every target."""

    summary = "one kernel that is text"
    capabilities = Capabilities()

    def _candidates(self, problem: Problem, target: Target, inputs: BuildInputs, everything: bool) -> Iterable[Config]:
        return [Config("toy", 16, 16, 32, backend=self.name)]

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        return SUPPORTED if config.template == "toy" else Support(f"there is no kernel {config.template}, only toy")

    def _compile_job(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> CompileJob:
        return CompileJob(config, {"backend": self.name, "arch": target.name, "config": config.name})

    def _compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        return Artifact(job.config, job.digest, symbol="toy", threads=64), b"code", "kernel.toy"

    def _launch(self, artifact: Artifact, problem: Problem, target: Target) -> Launch:
        grid = -(-problem.m // artifact.config.block_m), -(-problem.n // artifact.config.block_n), 1
        sizes = [Param("i32", size) for size in (problem.m, problem.n, problem.k)]
        params = [Param("pointer", name) for name in ("a", "b", "c")] + sizes
        return Launch(artifact.path, artifact.symbol, grid, (artifact.threads, 1, 1), 0, tuple(params), ())
