"""The roster of a run: the backends that --libtype selects, and the candidates of those that list their own kernels.

A backend provides candidates in one of three ways. Those of a `SearchedBackend` come from a search space, from which a
strategy picks. Another `KernelBackend` lists its kernels, which are compiled with those. A `LibraryBackend` is queried
on the GPU. All race against the baseline.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, TritonGemmError, UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.space import SearchLimits
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, KernelBackend, LibraryBackend, SearchedBackend


@dataclass(frozen=True)
class Roster:
    """The backends that race in a run."""

    backends: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)


def is_searched(backend: str) -> bool:
    """Say whether a strategy picks a backend's candidates from a search space."""
    return isinstance(registry.get(Backend, backend), SearchedBackend)


def lists_kernels(backend: str) -> bool:
    """Say whether a backend lists kernels that are compiled here, rather than being searched by a strategy."""
    return isinstance(registry.get(Backend, backend), KernelBackend) and not is_searched(backend)


def is_library(backend: str) -> bool:
    """Say whether a backend is queried on the GPU for its candidates."""
    return isinstance(registry.get(Backend, backend), LibraryBackend)


def compile_limit_s(backend: str) -> float:
    """Return the seconds that one compile may take if the backend needs more than ``--timeout``, else 0."""
    return registry.get(Backend, backend).compile_limit_s


def choose_roster(libtype: str | None, runs: bool, builds_only: bool = False) -> Roster:
    """Return the backends that a command line names."""
    baseline = registry.baseline().name
    if libtype in (None, "all"):
        states = {n: _can_race(n, runs, builds_only) for n in registry.names(Backend) if n != baseline}
        for name in states:
            if states[name] and registry.get(Backend, name).named_only:
                states[name] = Support("it races where it is asked for by its name alone")
        for name in states if libtype is None else ():
            if states[name] and compile_limit_s(name):
                states[name] = Support("its kernels take long to compile; --libtype all or its name asks for it")
        return Roster(tuple(n for n, s in states.items() if s), {n: s.reason for n, s in states.items() if not s})
    names = list(dict.fromkeys(_resolve(n.strip()) for n in str(libtype).split(",")))
    for name in names:
        state = _can_race(name, runs, builds_only)
        if not state:
            raise InputError(f"--libtype {name}: {state}")
    # The baseline races anyway; alone it is measured as the candidate.
    return Roster(tuple(n for n in names if n != baseline) or (baseline,))


def _resolve(text: str) -> str:
    """Return the backend that a name or an alias stands for."""
    try:
        return registry.resolve(Backend, text)
    except InputError as error:
        known = [*registry.names(Backend), *(alias for b in registry.every(Backend) for alias in b.aliases)]
        raise InputError(
            f"--libtype: no backend is called {text!r}; there are: {', '.join(['all', *known])}"
        ) from error


def _can_race(name: str, runs: bool, builds_only: bool) -> Support:
    """Return whether a backend can take part in this run."""
    available = registry.available(Backend, name)
    if not available or runs or is_searched(name):
        return available
    if is_library(name):
        return Support("a library can be asked on its GPU only, and there is none")
    return Support("" if builds_only else "without its GPU its kernels can only be compiled (--compile_only)")


def list_candidates(backend: str, problem: Problem, target: Target, limits: SearchLimits) -> tuple[list[Config], str]:
    """Return the candidates of a backend that lists kernels, and why there are none."""
    plugin = registry.get(KernelBackend, backend)
    try:
        configs = list(filter(limits.allow, plugin.candidates(problem, target)))
        orders = [plugin.reduction_order(config, problem, target) for config in configs] if limits.order else []
        if orders and limits.order not in orders:
            return [], f"invariant rows add up in the order {limits.order}, and its kernels: {orders[0]}"
        configs = [c for c, order in zip(configs, orders, strict=True) if order == limits.order] if orders else configs
        return configs, "" if configs else plugin.has_candidates(problem, target).reason
    except TritonGemmError:
        raise
    except Exception as error:  # whatever its files and tools are like, the others race
        raise UnavailableError(f"{type(error).__name__}: {error}") from error


def _has_kernels(backend: Backend, problem: Problem, target: Target) -> bool:
    if isinstance(backend, KernelBackend):
        return bool(backend.has_candidates(problem, target))
    return bool(backend.supports(problem, target))


def suggest_backends(problem: Problem, target: Target, tried: Collection[str]) -> list[str]:
    """Return hints for a problem that no backend of a run can compute: why the searched backend has no kernel for it.

    Then, for each other backend that could, how to select it and what it lacks on this machine.
    """
    hints: list[str] = []
    if any(_has_kernels(registry.get(Backend, name), problem, target) for name in tried):
        return hints
    searched = ((name, registry.get(Backend, name).supports(problem, target)) for name in filter(is_searched, tried))
    hints += [f"{name}: {supported}" for name, supported in searched if not supported]
    for plugin in registry.every(Backend):
        if plugin.name in tried or plugin.baseline or not plugin.supports(problem, target):
            continue
        available = plugin.available()
        hints.append(
            f"{plugin.name} could compute it: --libtype {plugin.name}" + ("" if available else f" ({available})")
        )
    return hints
