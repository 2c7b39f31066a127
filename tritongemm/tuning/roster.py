"""Stage: --libtype → the backends that race; their screened Trials → finalists.

A backend brings its candidates in one of three ways. Triton's come from the search space. One with
``configs(problem, target)`` carries code, which is compiled beside Triton's (assembly, CK, CUTLASS). One with
``enumerate(problem, operands)`` is a library and is asked on the GPU. PyTorch is what all are measured against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, TritonGemmError, UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.plugins import _modules as registry

SEARCHED = "triton"
BASELINE = "torch"


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


def choose_roster(libtype: str | None, runs: bool, builds_only: bool = False) -> Roster:
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


def candidates_of(backend: str, problem: Problem, target: Target) -> tuple[list[Config], str]:
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
