"""Makes compile jobs of configs, and launches of records, through the backends that they name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tritongemm.build.cache import ArtifactCache
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.core.trial import OUR_FAULT
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import NO_INPUTS, Backend, BuildInputs, KernelBackend
from tritongemm.plugins.validity import check_config

Made = TypeVar("Made")


def compile_job(
    problem: Problem, config: Config, target: Target, inputs: BuildInputs = NO_INPUTS
) -> CompileJob | Support:
    """Return the compile job of one config on a problem, or why it can't be compiled."""
    backend = registry.get(KernelBackend, config.backend)
    try:
        return backend.compile_job(config, problem, target, inputs)
    except (TritonGemmError, OSError) as error:
        return Support(str(error))
    except Exception as error:
        return Support(f"{OUR_FAULT}{type(error).__name__}: {error}")


def or_refusal(make: Callable[[], Made]) -> Made | Support:
    """Return a call's result, or the error of one config or record as a refusal, so that it costs no other."""
    try:
        return make()
    except (TritonGemmError, OSError) as error:
        return Support(str(error))
    except Exception as error:
        return Support(f"{type(error).__name__}: {error}")


def brings_kernels(config: Config) -> bool:
    """Return whether a config's backend compiles kernels; a library has its own."""
    return isinstance(registry.get(Backend, config.backend), KernelBackend)


@dataclass(frozen=True)
class PreparedKernel:
    """A record's kernel, compiled for the live device, whose compute units size persistent grids, and its launch."""

    record: Record
    artifact: Artifact
    target: Target
    launch: Launch | HostLaunch

    def serves(self, m: int) -> Support:
        """Return whether the kernel that was compiled for the record's M is also that of another M, and of all between.

        Of a column-major A the compiler knows what divides M, which the neighbours of an M do not share.
        """
        own = self.record.problem
        neighbour = m if own.a.row_major else m + (m < own.m) - (m > own.m)
        for other in {m, neighbour}:
            job = compile_job(self._problem(other), self.record.config, self.target)
            if isinstance(job, Support):
                return job
            if job.digest != self.artifact.digest:
                return Support(f"M {other} needs another binary than M {own.m}")
        return SUPPORTED

    def launch_at(self, m: int) -> Launch | HostLaunch | Support:
        """Return the launch on the record's problem with another M that its kernel serves, or why there is none."""
        problem, record = self._problem(m), self.record
        possible = check_config(record.config, problem, self.target, record.target)
        return _launch(record.config, problem, self.artifact, self.target) if possible else possible

    def _problem(self, m: int) -> Problem:
        return self.record.problem.at(m)


def prepare_launches(
    records: Sequence[Record], target: Target, cache: ArtifactCache
) -> dict[Problem, Launch | HostLaunch | str]:
    """Return the launch of each record's config, compiled as by `prepare_kernels`, or why it has none."""
    prepared = prepare_kernels(records, target, cache)
    return {p: str(one) if isinstance(one, Support) else one.launch for p, one in prepared.items()}


def prepare_kernels(
    records: Sequence[Record], target: Target, cache: ArtifactCache
) -> dict[Problem, PreparedKernel | Support]:
    """Return the kernel of each record's config, compiled in parallel where the cache lacks it, or why it has none."""
    from tritongemm.build import pool

    kernels: dict[Problem, PreparedKernel | Support] = {}
    jobs: list[tuple[Record, CompileJob]] = []
    for record in records:
        possible = check_config(record.config, record.problem, target, record.target)
        job = compile_job(record.problem, record.config, target) if possible else possible
        if isinstance(job, Support):
            kernels[record.problem] = job
        else:
            jobs.append((record, job))
    built = pool.build_missing((job for _, job in jobs), cache)
    return kernels | {record.problem: _prepared(record, built[job.digest], target) for record, job in jobs}


def _prepared(record: Record, artifact: Artifact, target: Target) -> PreparedKernel | Support:
    """Return a record's kernel, or why it can't be launched."""
    if artifact.status != "ok":
        return Support(f"{artifact.status}: {artifact.reason}")
    launch = _launch(record.config, record.problem, artifact, target)
    return launch if isinstance(launch, Support) else PreparedKernel(record, artifact, target, launch)


def _launch(config: Config, problem: Problem, artifact: Artifact, target: Target) -> Launch | HostLaunch | Support:
    """Return the launch of a compiled kernel, or why there is none."""
    own = replace(artifact, config=config)  # configs that differ in their arguments alone share a binary
    backend = registry.get(KernelBackend, config.backend)
    return or_refusal(lambda: backend.launch(own, problem, target))
