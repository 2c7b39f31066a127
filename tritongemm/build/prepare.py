"""Configs → compile jobs, and records → launches: what a config or a record names is compiled as its backend says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tritongemm.build.cache import ArtifactCache
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import NO_INPUTS, Backend, BuildInputs, KernelBackend, SearchedBackend
from tritongemm.plugins.validity import check_config

Made = TypeVar("Made")


class CompileJobs:
    """The compile jobs of configs; generated modules are written when the first job needs them.

    Args:
        wanted: every config there may be a job for: a generated module holds all of its problem's, as a compiler
            process reads a module once.
        target: where they run.
        folder: for generated modules.
        inputs: files that there are already.
        cache: compiled kernels; a config in it needs no module. None to write modules in any case.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[Problem, Config]],
        target: Target,
        folder: Path,
        inputs: BuildInputs = NO_INPUTS,
        cache: ArtifactCache | None = None,
    ) -> None:
        self._wanted, self._target, self._folder = wanted, target, folder
        self._inputs, self._cache = inputs, cache
        self._modules: dict[tuple[Problem, str], Path] = {}

    def job(self, problem: Problem, config: Config) -> CompileJob | Support:
        """What to compile for one config on a problem, or why it can't be compiled."""
        return or_refusal(lambda: self._make_job(problem, config))

    def _make_job(self, problem: Problem, config: Config) -> CompileJob:
        backend = registry.get(KernelBackend, config.backend)
        job = backend.compile_job(config, problem, self._target, self._inputs)
        if not isinstance(backend, SearchedBackend) or self._inputs.module is not None:
            return job
        if self._cache is not None and self._cache.get(job.digest) is not None:
            return job
        inputs = replace(self._inputs, module=self._module(backend, problem))
        return backend.compile_job(config, problem, self._target, inputs)

    def _module(self, backend: SearchedBackend, problem: Problem) -> Path:
        key = problem, backend.name
        if key not in self._modules:
            own = dict.fromkeys(c for p, c in self._wanted if p == problem and c.backend == backend.name)
            configs = [c for c in own if backend.check(c, problem, self._target, self._inputs)]
            self._modules[key] = backend.write_candidates(problem, configs, self._target, self._folder)
        return self._modules[key]


def or_refusal(make: Callable[[], Made]) -> Made | Support:
    """What a call gives, or why it gives nothing: whatever is wrong with one config or record costs no other."""
    try:
        return make()
    except (TritonGemmError, OSError) as error:
        return Support(str(error))
    except Exception as error:
        return Support(f"{type(error).__name__}: {error}")


def brings_kernels(config: Config) -> bool:
    """Whether a config's backend compiles kernels; a library brings its own."""
    return isinstance(registry.get(Backend, config.backend), KernelBackend)


def prepare_launches(
    records: Sequence[Record], target: Target, cache: ArtifactCache
) -> dict[Problem, Launch | HostLaunch | str]:
    """The launch of each record's config, compiled in parallel where the cache lacks it; or why there is none.

    Args:
        records: one for each problem, tuned for the target.
        target: facts of the live device; its compute units size persistent grids.
        cache: compiled kernels.
    """
    from tritongemm.build.pool import BuildPool

    launches: dict[Problem, Launch | HostLaunch | str] = {}
    waiting: list[tuple[Record, CompileJob]] = []
    with tempfile.TemporaryDirectory(prefix="tritongemm-") as folder:
        wanted = [(record.problem, record.config) for record in records]
        jobs = CompileJobs(wanted, target, Path(folder), cache=cache)
        for record in records:
            possible = check_config(record.config, record.problem, target, record.target)
            job = jobs.job(record.problem, record.config) if possible else possible
            if isinstance(job, Support):
                launches[record.problem] = job.reason
            elif (artifact := cache.get(job.digest)) is not None:
                launches[record.problem] = _launch(record, artifact, target)
            else:
                waiting.append((record, job))
        if waiting:
            pool = BuildPool(cache, min(len(os.sched_getaffinity(0)), len(waiting)))
            try:
                by_digest = {artifact.digest: artifact for artifact in pool.stream(job for _, job in waiting)}
            finally:
                pool.close()
            for record, job in waiting:
                launches[record.problem] = _launch(record, by_digest[job.digest], target)
    return launches


def _launch(record: Record, artifact: Artifact, target: Target) -> Launch | HostLaunch | str:
    """The launch of a record's kernel, or why there is none."""
    if artifact.status != "ok":
        return f"{artifact.status}: {artifact.reason}"
    own = replace(artifact, config=record.config)  # configs that differ in their arguments alone share a binary
    backend = registry.get(KernelBackend, record.config.backend)
    launch = or_refusal(lambda: backend.launch(own, record.problem, target))
    return str(launch) if isinstance(launch, Support) else launch
