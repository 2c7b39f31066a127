"""The command line of `python -m tritongemm.launch_plan`: a config's code object, and everything its launch needs, as files.

No GPU is needed: an emulator, a debugger or another runtime can start the kernel from them. For each launch, in the
order they run, the folder gets ``plan_<i>.json`` and ``plan_<i>.<hsaco or cubin>``. A library whose host code starts the
kernels (CK) is there as well, ``plan_<i>.so``; what it sets to zero first has ``init`` zero. A plan has these keys:

arch, object, kernel    architecture, file name of the code object, symbol
grid, block             workgroups and threads along x, y, z
dynamic_lds             bytes of LDS beside what the code object declares
kernarg                 the parameter block in hex, hidden arguments included, every pointer zero
buffers                 memory to allocate: name; offset of its pointer in the parameter block; bytes; role (a, b, c, bias,
                        workspace, semaphore …); init (random, zero or poison); dtype; shape; strides in elements; for a
                        B that is shuffled beforehand, order (`tritongemm.families._shuffled`)
problem, launches       M, N, K; how often to launch
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tritongemm import generate, options, plans, prune, rank, registry, settings, sizes, target
from tritongemm.backends import asm, ck
from tritongemm.codegen import kernels
from tritongemm.compile import Cache, Compiler
from tritongemm.config import Config
from tritongemm.errors import InputError, OutputError, TritonGemmError
from tritongemm.launch import HostCall, Launch
from tritongemm.problem import Problem
from tritongemm.space import AXES, space
from tritongemm.target import Target
from tritongemm.trial import Built

BACKENDS = ("triton", "asm", "ck")
MOST_WORKGROUPS = 2**31 - 1  # along x, where all kernels have their tiles


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 for bad input."""
    args = parser().parse_args(options.normalised(sys.argv[1:] if argv is None else argv))
    try:
        for path in _run(args):
            print(path)
    except (TritonGemmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(
        prog="python -m tritongemm.launch_plan",
        description="Write a config's code object and the plan of its launch, without a GPU.",
    )
    g = p.add_argument_group("what to run")
    options.problem_options(g)
    g.add_argument(
        "--target", default="gfx942", metavar="ARCH", help=f"{', '.join(target.names())}; default: %(default)s"
    )
    g.add_argument("--config", metavar="NAME", help="the config; default: the one predicted fastest")
    g.add_argument("--backend", default="triton", choices=BACKENDS,
                   help="whose kernels, where --config names none (default %(default)s)")  # fmt: skip
    g.add_argument("--manifest", action="append", default=[], metavar="FILE",
                   help="manifest of assembly kernels (may be repeated; default: TRITONGEMM_ASM_MANIFESTS)")  # fmt: skip
    g.add_argument("--all", type=_count, default=0, metavar="N",
                   help="the N configs predicted fastest, and each template's best")  # fmt: skip
    g = p.add_argument_group("result")
    g.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="folder for the files; made where it is missing"
    )
    g.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="seconds one compile may take (default 60)"
    )
    g.add_argument("--num-threads", type=_count, default=0, metavar="N", help="compiler processes (default: all cores)")
    return p


def _run(args: argparse.Namespace) -> Iterator[Path]:
    facts = target.load(args.target)
    if None in (args.m, args.n, args.k):
        raise InputError("name a size with -m, -n and -k")
    (row,) = sizes.from_options(args.m, args.n, args.k, options.defaults(args, facts.fp8))
    problem, folder = row.problem, Path(args.output)
    refusal = registry.load("families", problem.family).unsupported(problem, facts)
    if refusal:
        raise InputError(f"{problem.key}: {refusal}")
    emptied(folder)
    which = Which(args.config, args.all, args.backend, tuple(map(Path, args.manifest)))
    with closing(Compiler(Cache(settings.cache_folder()), args.num_threads, args.timeout)) as compiler:
        index = 0
        for launch in launches(problem, facts, compiler, folder, which):
            if isinstance(launch, HostCall):
                shutil.copyfile(launch.path, folder / f"plan_{index}{Path(launch.path).suffix}")
            for code, suffix, plan in plans.of(launch, problem, facts):
                path = folder / f"plan_{index}.json"
                (folder / f"plan_{index}{suffix}").write_bytes(code)
                plan = {"arch": plan.pop("arch"), "object": f"plan_{index}{suffix}", **plan}
                generate.write_text(path, json.dumps(plan, indent=1) + "\n")
                index += 1
                yield path


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
class Which:
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
    problem: Problem, facts: Target, compiler: Compiler, folder: Path, which: Which
) -> Iterator[Launch | HostCall]:
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


def ranked(problem: Problem, facts: Target, which: Which) -> list[Config]:
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
    return [p.config for p in rank.rank(kept, problem, facts)]


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
    kernels.kernel_template(config.template)
    here = space(problem, facts).axes
    usable = [axes.template for axes in here]
    if config.template not in usable:
        known = ", ".join(usable)
        raise InputError(
            f"{config.name}: {facts.name} does not run template {config.template} on {problem.key}; only {known}"
        )
    options = {name for axes in here for name, _ in axes.values[len(AXES) :]}
    wrong = kernels.fault(config, options)
    if wrong:
        raise InputError(f"{config.name}: {wrong}")


def too_large(config: Config, problem: Problem, facts: Target) -> str | None:
    """Why no launch can have the workgroups that a generated kernel wants, or None."""
    if config.backend != "triton":
        return None
    most = max(kernels.geometry(config, problem, facts.compute_units).grid)
    return f"{most} workgroups, of which a launch has at most {MOST_WORKGROUPS}" if most > MOST_WORKGROUPS else None


@contextmanager
def builder(
    candidates: Sequence[Config],
    problem: Problem,
    facts: Target,
    compiler: Compiler,
    folder: Path,
    manifests: Sequence[Path] = (),
) -> Iterator[Callable[[Config], Built]]:
    """What compiles the candidates; their generated module lies in `folder` meanwhile."""
    generated = [c for c in candidates if c.backend == "triton"]
    # A compiler process reads a module once: all candidates must be in it.
    module = generate.module(problem, generated, facts, folder) if generated else None

    def build(config: Config) -> Built:
        source = str(module) if config.backend == "triton" else os.pathsep.join(map(str, manifests))
        return compiler.build(registry.load("backends", config.backend).job(config, problem, facts, source))

    try:
        yield build
    finally:
        if module is not None:
            module.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
