"""Which configs of a problem get launch plans: the one named, or those predicted fastest, built and made launches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tritongemm.backends.asm import backend as asm
from tritongemm.backends.ck import backend as ck
from tritongemm.build.pool import BuildPool
from tritongemm.codegen import geometry, modules, template_facts
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import AXES, Config
from tritongemm.core.errors import InputError, OutputError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.plugins import _modules as registry
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune
from tritongemm.search.space import space

BACKENDS = ("triton", "asm", "ck")
MOST_WORKGROUPS = 2**31 - 1  # along x, where all kernels have their tiles


def emptied(folder: Path) -> None:
    """Make the folder, and remove the plans of an earlier run: who takes all that are there must not run its kernels.

    Raises:
        OutputError: no such folder can be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("plan_[0-9]*.*"):
            old.unlink()
    except OSError as error:
        reason = "a file has that name" if isinstance(error, FileExistsError) else error.strerror
        raise OutputError(f"{folder} can't be a folder of plans: {reason}; choose another with -o") from error


@dataclass(frozen=True)
class Selection:
    """Which configs to launch.

    Attributes:
        config: name of the only one; None for the predicted best that can be built.
        count: with no name, so many of the predicted best, and each template's best.
        backend: with no name, whose kernels: ``triton``, ``asm`` or ``ck``.
        manifests: of assembly kernels; none for those of the environment.
    """

    config: str | None = None
    count: int = 0
    backend: str = "triton"
    manifests: tuple[Path, ...] = ()


def launches(
    problem: Problem, facts: Target, compiler: BuildPool, folder: Path, which: Selection
) -> Iterator[Launch | HostLaunch]:
    """The launches of one config, or of several.

    Args:
        problem: what to compute.
        facts: where.
        compiler: builds them.
        folder: where the generated module goes, for the time of compiling.
        which: the configs.

    Raises:
        InputError: the config named can't run on the target, or nothing can be built.
    """
    if which.config is not None:
        config = Config.parse(which.config)
        check(config, problem, facts, which.manifests)
        candidates, wanted = [config], 1
    else:
        candidates, wanted = ranked(problem, facts, which), which.count or 1
    found, templates, reasons = 0, set[str](), []
    with builder(candidates, problem, facts, compiler, folder, which.manifests) as build:
        for config in candidates:
            if found >= wanted and (not which.count or config.template in templates):
                continue
            reason = too_large(config, problem, facts)
            if reason is None:
                built = build(config)
                reason = None if built.status == "ok" else built.reason
            if reason is not None:
                reasons.append(f"{config.name}: {reason}")
                continue
            found += 1
            templates.add(config.template)
            yield registry.load("backends", config.backend).launch(built, problem, facts)
    if not found:
        raise InputError(
            f"{problem.key}: no config can be built; the first: {reasons[0] if reasons else 'none is left'}"
        )


def ranked(problem: Problem, facts: Target, which: Selection) -> list[Config]:
    """Kept configs, the predicted fastest first.

    Raises:
        InputError: no kernel of the backend fits; says why.
    """
    if which.backend == "ck":
        kept = [c for c in ck.configs(problem, facts, everything=True) if c.split_k == 1]
        reason = ck.refusal(problem, facts) or ck.unavailable()
        if not kept or reason:
            raise InputError(f"{problem.key}: no kernel of CK: {reason or 'none of its tiles fits'}")
        return kept
    if which.backend == "triton":
        kept = list(prune.prune(space(problem, facts), problem, facts).kept)
    else:
        kept, refused = asm.survey(problem, facts, which.manifests)
        if not kept:
            reasons = "".join(f"\n  {symbol}: {reason}" for symbol, reason in refused.items())
            raise InputError(f"{problem.key}: no assembly kernel fits{reasons or ': ' + (asm.unavailable() or 'none')}")
    return [p.config for p in cost_model.rank(kept, problem, facts)]


def check(config: Config, problem: Problem, facts: Target, manifests: Sequence[Path] = ()) -> None:
    """Refuse a config that the target or the problem rules out.

    Raises:
        InputError: says why.
    """
    if config.backend == "asm":
        found, refused = asm.survey(problem, facts, manifests)
        reason = refused.get(config.template)
        splits = [c.split_k for c in found if c.template == config.template]
        if splits and config.split_k not in splits:
            reason = f"its splits along K can be {', '.join(map(str, splits))}, not {config.split_k}"
        if reason:
            raise InputError(f"{config.name} can't compute {problem.key} on {facts.name}: {reason}")
    if config.backend == "ck":
        reason = ck.check(config, problem, facts)
        if reason:
            raise InputError(f"{config.name} can't compute {problem.key} on {facts.name}: {reason}")
    if config.backend not in BACKENDS:
        raise InputError(
            f"{config.name}: only kernels of {', '.join(BACKENDS)} have plans, not those of {config.backend}"
        )
    if config.backend != "triton":
        return
    template_facts.kernel_template(config.template)
    here = space(problem, facts).axes
    usable = [axes.template for axes in here]
    if config.template not in usable:
        known = ", ".join(usable)
        raise InputError(
            f"{config.name}: {facts.name} does not run template {config.template} on {problem.key}; only {known}"
        )
    options = {name for axes in here for name, _ in axes.values[len(AXES) :]}
    wrong = template_facts.fault(config, options)
    if wrong:
        raise InputError(f"{config.name}: {wrong}")


def too_large(config: Config, problem: Problem, facts: Target) -> str | None:
    """Why no launch can have the workgroups that a generated kernel wants, or None."""
    if config.backend != "triton":
        return None
    most = max(geometry.geometry(config, problem, facts.compute_units).grid)
    return f"{most} workgroups, of which a launch has at most {MOST_WORKGROUPS}" if most > MOST_WORKGROUPS else None


@contextmanager
def builder(
    candidates: Sequence[Config],
    problem: Problem,
    facts: Target,
    compiler: BuildPool,
    folder: Path,
    manifests: Sequence[Path] = (),
) -> Iterator[Callable[[Config], Artifact]]:
    """What compiles the candidates; their generated module lies in `folder` meanwhile."""
    generated = [c for c in candidates if c.backend == "triton"]
    # A compiler process reads a module once: all candidates must be in it.
    module = modules.write_candidates(problem, generated, facts, folder) if generated else None

    def build(config: Config) -> Artifact:
        source = str(module) if config.backend == "triton" else os.pathsep.join(map(str, manifests))
        return compiler.build(registry.load("backends", config.backend).job(config, problem, facts, source))

    try:
        yield build
    finally:
        if module is not None:
            module.unlink(missing_ok=True)
