"""Selects the configs of a problem that get launch plans: the one named, or those predicted fastest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tritongemm.build.pool import BuildPool
from tritongemm.build.prepare import compile_job
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, OutputError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.export.launch_plans import why_unplanned
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import BuildInputs, KernelBackend
from tritongemm.plugins.validity import check_config


def planned_backends() -> list[str]:
    """Return the backends whose launches can be written as plans."""
    return [backend.name for backend in registry.every(KernelBackend) if backend.has_plans]


@contextmanager
def emptied(folder: Path) -> Iterator[None]:
    """Make the folder, and remove an earlier run's plans, so that a reader of all plans does not run its kernels.

    Folders that were made for plans that are refused then are removed again.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("plan_[0-9]*.*"):
            old.unlink()
    except OSError as error:
        reason = "a file has that name" if isinstance(error, FileExistsError) else error.strerror
        raise OutputError(f"{folder} can't be a folder of plans: {reason}; choose another with -o") from error
    try:
        yield
    finally:
        with suppress(OSError):  # it holds plans
            for one in made:
                one.rmdir()


@dataclass(frozen=True)
class Selection:
    """Which configs to launch."""

    config: str | None = None  # name of the only one; None for the predicted best that can be built
    count: int = 0  # how many of the predicted best to take if no config is named, beside each template's best
    backend: str = ""  # with no name, whose kernels
    manifests: tuple[Path, ...] = ()  # of assembly kernels; none for those of the environment


def launches(
    problem: Problem, facts: Target, compiler: BuildPool, which: Selection, remark: Callable[[str], None]
) -> Iterator[Launch | HostLaunch]:
    """Yield the launches of one config, or of several that plans can hold.

    `remark` is called with what is passed over where no config is named, and with what a kernel's main loop has.
    """
    inputs = BuildInputs(manifests=which.manifests)
    if which.config is not None:
        candidates, wanted = [parse_config(which.config, problem, facts, inputs)], 1
    else:
        candidates, wanted = rank_candidates(problem, facts, which.backend, inputs), which.count or 1
    count, templates, unplanned, reasons = 0, set[str](), set[str](), list[str]()
    spilling: Launch | HostLaunch | None = None
    for config in candidates:
        if config.template in unplanned or (count >= wanted and (not which.count or config.template in templates)):
            continue
        backend = registry.get(KernelBackend, config.backend)
        possible = backend.check(config, problem, facts, inputs)
        artifact = _build(problem, config, facts, inputs, compiler) if possible else possible
        if isinstance(artifact, Support):
            reasons.append(f"{config.name}: {artifact}")
            continue
        launch = backend.launch(artifact, problem, facts)
        if which.config is None and (reason := why_unplanned(launch)):
            unplanned.add(config.template)
            reasons.append(f"{config.name} {reason}")
            remark(f"passed over: {reasons[-1]}")
            continue
        if which.config is None and artifact.loop is not None and artifact.loop.spilled:
            spilling = spilling or launch
            remark(f"passed over: {config.name} spills {artifact.loop.spilled} bytes of registers in its loop")
            continue
        if artifact.loop is not None:
            remark(f"{config.name}: its loop has {artifact.loop.describe()}")
        count += 1
        templates.add(config.template)
        yield launch
    if not count and spilling is not None:
        yield spilling
    elif not count:
        raise InputError(
            f"{problem.key}: no config can be built; the first: {reasons[0] if reasons else 'none is left'}"
        )


def _build(
    problem: Problem, config: Config, facts: Target, inputs: BuildInputs, compiler: BuildPool
) -> Artifact | Support:
    """Return a config compiled, or why it can't be."""
    job = compile_job(problem, config, facts, inputs)
    if isinstance(job, Support):
        raise InputError(str(job))
    artifact = compiler.build(job)
    return artifact if artifact.status == "ok" else Support(artifact.reason)


def rank_candidates(problem: Problem, facts: Target, name: str, inputs: BuildInputs) -> list[Config]:
    """Return all configs that a backend has for a problem and that plans can hold, the predicted fastest first."""
    backend = registry.get(KernelBackend, name)
    candidates = backend.candidates(problem, facts, inputs, everything=True)
    if not candidates:
        raise InputError(f"{problem.key}: no kernel of {name}: {backend.has_candidates(problem, facts, inputs)}")
    return candidates


def parse_config(name: str, problem: Problem, facts: Target, inputs: BuildInputs) -> Config:
    """Return the config of this name, where a plan can hold it and it computes the problem."""
    config = Config.parse(name)
    known = planned_backends()
    if config.backend not in known:
        raise InputError(f"{config.name}: only kernels of {', '.join(known)} have plans, not those of {config.backend}")
    possible = check_config(config, problem, facts, inputs=inputs)
    if not possible:
        raise InputError(f"{config.name} can't compute {problem.key} on {facts.name}: {possible}")
    return config
