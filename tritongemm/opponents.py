"""Stage: --libtype → the backends that race; their screened Trials → finalists.

A backend brings its candidates in one of three ways. Triton's come from the search space. One with
``configs(problem, target)`` carries code, which is compiled beside Triton's (assembly, CK, CUTLASS). One with
``enumerate(problem, operands)`` is a library and is asked on the GPU. PyTorch is what all are measured against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tritongemm import registry
from tritongemm.config import Config
from tritongemm.errors import InputError, TritonGemmError, UnavailableError
from tritongemm.problem import Problem
from tritongemm.target import Target
from tritongemm.trial import Trial

SEARCHED = "triton"
BASELINE = "torch"
LIBRARY_PLACES = 20
NEAR = 1.06  # of 736 races on H200s no winner had been screened more than 1.047 times the best


@dataclass(frozen=True)
class Roster:
    """Who races.

    Attributes:
        backends: plug-ins of backends/ whose candidates are tried.
        left_out: why the others are not, by name.
    """

    backends: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)


def brings_code(backend: str) -> bool:
    """Whether a backend has kernels of its own to compile."""
    return hasattr(registry.load("backends", backend), "configs")


def is_library(backend: str) -> bool:
    """Whether a backend is asked on the GPU for its candidates."""
    return hasattr(registry.load("backends", backend), "enumerate")


def compile_seconds(backend: str) -> float:
    """Seconds that one compile may take where the backend asks for more than ``--timeout``, else 0."""
    return float(getattr(registry.load("backends", backend), "COMPILE_SECONDS", 0.0))


def chosen(libtype: str | None, runs: bool, builds_only: bool = False) -> Roster:
    """The backends that a command line names.

    Args:
        libtype: ``all``, a comma list, or None for all that compile quickly.
        runs: there is a GPU to run them on.
        builds_only: the run ends when they are compiled.

    Raises:
        InputError: a backend is unknown, or named and not usable here; says why.
    """
    if libtype in (None, "all"):
        reasons = {n: _hindrance(n, runs, builds_only) for n in registry.names("backends") if n != BASELINE}
        for name in reasons if libtype is None else ():
            if reasons[name] is None and compile_seconds(name):
                reasons[name] = "compiling its instances takes minutes; --libtype all or its name asks for it"
        return Roster(tuple(n for n, r in reasons.items() if r is None), {n: r for n, r in reasons.items() if r})
    names = list(dict.fromkeys(_plain(n.strip()) for n in str(libtype).split(",")))
    for name in names:
        reason = _hindrance(name, runs, builds_only)
        if reason:
            raise InputError(f"--libtype {name}: {reason}")
    # PyTorch races anyway; by itself it is measured as the candidate.
    return Roster(tuple(n for n in names if n != BASELINE) or (BASELINE,))


def _plain(name: str) -> str:
    """The plug-in that a name stands for.

    Raises:
        InputError: there is none.
    """
    known = registry.names("backends")
    if name in known:
        return name
    others = {alias: n for n in known for alias in _aliases(n)}
    if name not in others:
        raise InputError(f"--libtype: no backend is called {name!r}; there are: {', '.join(['all', *known, *others])}")
    return others[name]


def _aliases(backend: str) -> tuple[str, ...]:
    try:
        return tuple(getattr(registry.load("backends", backend), "ALIASES", ()))
    except UnavailableError:
        return ()


def _hindrance(name: str, runs: bool, builds_only: bool) -> str | None:
    """Why a backend can't take part in this run, or None."""
    reason = registry.unavailable("backends", name)
    if reason or runs or name == SEARCHED:
        return reason
    if not brings_code(name):
        return "a library can be asked on its GPU only, and there is none"
    return None if builds_only else "without its GPU its kernels can only be compiled (--compile_only)"


def brought(backend: str, problem: Problem, target: Target) -> tuple[list[Config], str]:
    """The candidates of a backend that carries code, and why there are none, where it says so.

    Raises:
        TritonGemmError: it fails, e.g. at a damaged manifest.
    """
    plugin = registry.load("backends", backend)
    try:
        found: list[Config] = plugin.configs(problem, target)
        why = getattr(plugin, "refusal", None)
        return found, "" if found or why is None else why(problem, target) or ""
    except TritonGemmError:
        raise
    except Exception as error:  # whatever its files and tools are like, the others race
        raise UnavailableError(f"{type(error).__name__}: {error}") from error


def finalists(trials: Iterable[Trial], count: int) -> tuple[list[Trial], list[Trial]]:
    """Who races first, and who is next in line should all of those be wrong.

    `count` places go to Triton's and to those who bring code: every backend's best has one, no backend but Triton more
    than a quarter, and all of them together half. Libraries come on top, each with its first choice and its best, up to
    `LIBRARY_PLACES`. Beyond a quarter of the places only those race that are `NEAR` to the best of all: others are shown,
    and would cost their verification for nothing.

    Args:
        trials: screened; of one library in its own order of preference.
        count: places.
    """
    passed = [t for t in trials if t.status == "ok"]
    ranked = sorted(passed, key=lambda t: (t.seconds, t.config))
    by_backend: dict[str, list[Trial]] = {}
    for trial in ranked:
        by_backend.setdefault(trial.config.backend, []).append(trial)
    ours = by_backend.pop(SEARCHED, [])
    libraries = {n: by_backend.pop(n) for n in list(by_backend) if is_library(n)}
    share = max(1, count // 4)

    def hopeful(found: list[Trial], places: int) -> list[Trial]:
        near = sum(t.seconds <= NEAR * ranked[0].seconds for t in found)
        return found[: min(places, max(share, near))]

    invited = sorted(((place, t) for found in by_backend.values() for place, t in enumerate(found[:share])), key=_place)
    first = [t for _, t in invited[: max(len(by_backend), count // 2)]]
    reserved = share if libraries else 0
    first += hopeful(ours, max(1, count - len(first) - reserved))
    for name, found in libraries.items():
        first += hopeful(found, LIBRARY_PLACES)
        favourite = next(t for t in passed if t.config.backend == name)
        first += [] if favourite in first else [favourite]
    first.sort(key=lambda t: (t.seconds, t.config))
    rest = [t for t in ranked if t not in first]
    return first, sorted(rest, key=lambda t: t.config.backend != SEARCHED)


def _place(invited: tuple[int, Trial]) -> tuple[int, float]:
    return invited[0], invited[1].seconds
