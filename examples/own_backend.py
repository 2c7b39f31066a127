"""A backend of one's own: three tiles that I trust, which race with everything else under their own name.

Copy it to where backends are found, and name it:

    cp examples/own_backend.py tritongemm/backends/
    tritongemm tune -m 16 -n 4096 -k 4096 -col_b --libtype triton,own_backend

docs/plugins/backend.md has the contract. Its kernels are the package's templates, so that this file is short; a
backend with kernels of its own compiles them in `_compile`.
"""

from collections.abc import Iterable
from dataclasses import replace

from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import BuildInputs, Capabilities, KernelBackend, SearchedBackend

TILES = ((16, 16, 64), (16, 64, 64), (64, 64, 64))  # rows and columns of C, and depth, of one program


def _triton() -> SearchedBackend:
    return registry.get(SearchedBackend, "triton")


def _theirs(config: Config) -> Config:
    return replace(config, backend="triton")


class OwnBackend(KernelBackend):
    """Offers the tiles of `TILES`."""

    summary = "three tiles that I trust"
    capabilities = Capabilities()

    def _candidates(self, problem: Problem, target: Target, inputs: BuildInputs, everything: bool) -> Iterable[Config]:
        configs = [Config("tile", *tile, 1, 1, 4, 2, backend=self.name) for tile in TILES]
        return [config for config in configs if self._check(config, problem, target, inputs)]

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        return _triton().check(_theirs(config), problem, target, inputs)

    def _compile_job(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> CompileJob:
        job = _triton().compile_job(_theirs(config), problem, target)
        return CompileJob(config, job.identity | {"backend": self.name}, job.payload)

    def _compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        artifact, code, name = _triton().compile(replace(job, config=_theirs(job.config)))
        return replace(artifact, config=job.config), code, name

    def _launch(self, artifact: Artifact, problem: Problem, target: Target) -> Launch | HostLaunch:
        return _triton().launch(replace(artifact, config=_theirs(artifact.config)), problem, target)
