"""Configs → compile jobs, and records → launches: what a config or a record names is compiled as its backend says."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from tritongemm.plugins.contracts import NO_INPUTS, Backend, BuildInputs, KernelBackend
from tritongemm.plugins.validity import check_config

Made = TypeVar("Made")


def compile_job(
    problem: Problem, config: Config, target: Target, inputs: BuildInputs = NO_INPUTS
) -> CompileJob | Support:
    """What to compile for one config on a problem, or why it can't be compiled."""
    backend = registry.get(KernelBackend, config.backend)
    return or_refusal(partial(backend.compile_job, config, problem, target, inputs))


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
    for record in records:
        possible = check_config(record.config, record.problem, target, record.target)
        job = compile_job(record.problem, record.config, target) if possible else possible
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
