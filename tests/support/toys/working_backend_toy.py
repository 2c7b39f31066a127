"""A backend of one's own whose kernel computes: one tile of the backend that is searched, under another name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import BuildInputs, Capabilities, KernelBackend, SearchedBackend


def _source() -> SearchedBackend:
    return registry.every(SearchedBackend)[0]


def _theirs(config: Config) -> Config:
    return replace(config, backend=_source().name)


class WorkingToyBackend(KernelBackend):
    """Races, is served, exported and launch-planned as any backend whose kernels are code objects."""

    summary = "one tile of the searched backend"
    capabilities = Capabilities()
    has_manifest_rows = True

    def _candidates(self, problem: Problem, target: Target, inputs: BuildInputs, everything: bool) -> Iterable[Config]:
        configs = [Config("tile", 16, 16, 32, 1, 1, 1, 2, backend=self.name)]
        return [config for config in configs if self._check(config, problem, target, inputs)]

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        return _source().check(_theirs(config), problem, target, inputs)

    def _compile_job(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> CompileJob:
        job = _source().compile_job(_theirs(config), problem, target)
        return CompileJob(config, job.identity | {"backend": self.name}, job.payload)

    def _compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        artifact, code, name = _source().compile(replace(job, config=_theirs(job.config)))
        return replace(artifact, config=job.config), code, name

    def _launch(self, artifact: Artifact, problem: Problem, target: Target) -> Launch | HostLaunch:
        return _source().launch(replace(artifact, config=_theirs(artifact.config)), problem, target)

    def manifest_row(self, record: Record, launch: Launch, target: Target) -> dict[str, Any] | Support:
        """The kernel as an assembly backend starts it."""
        return _source().manifest_row(replace(record, config=_theirs(record.config)), launch, target)
