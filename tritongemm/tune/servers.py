"""Chooses whose kernels race for the tables of servers, and what may be tried of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tritongemm.core.config import DEFAULT_BACKEND
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import FormatRow
from tritongemm.core.space import SearchLimits
from tritongemm.core.support import Support
from tritongemm.hip_ext.machine import Machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, LibraryBackend, SearchedBackend, ServerFormat
from tritongemm.tune.request import TuneRequest


def server_format(server: str, groups: int = 1) -> ServerFormat:
    """Return the format that sets a server's kernels."""
    kind = "grouped" if groups > 1 else "one"
    found = {f.server.lower(): f for f in registry.every(ServerFormat) if f.computes == kind}
    if server.lower() not in found:
        raise InputError(f"no format writes tables for server {server!r}; known servers: {', '.join(sorted(found))}")
    return found[server.lower()]


def format_of(request: TuneRequest) -> ServerFormat:
    """Return the format that sets the kernels of the server that a request names."""
    return server_format(request.search.server or "", request.sizes.defaults.group_count)


def limits(request: TuneRequest, machine: Machine, backends: Sequence[str]) -> SearchLimits:
    """Return what may be tried within the limits of the user and of the server's kernel."""
    if request.search.server is None:
        return SearchLimits(request.search.max_split)
    server = format_of(request)
    found = server.limits(request.sizes.defaults.family, machine.target)
    if server.backend not in backends:
        return found
    return replace(found, first=tuple(replace(config, backend=server.backend) for config in found.first))


def may_race(backend: str, server: str) -> bool:
    """Return whether a backend's kernels fit a server's tables: the server's own, or generated ones."""
    if backend not in registry.names(Backend):
        return False
    return backend == server or isinstance(registry.get(Backend, backend), SearchedBackend)


def choose_kernels(
    request: TuneRequest, rows: Sequence[FormatRow], machine: Machine, say: Callable[[str], None]
) -> str:
    """Return, and report, the backend that races for a server's tables: the server's own kernels, or generated ones."""
    server = format_of(request)
    if request.search.libtype is not None:
        return request.search.libtype
    own = _can_race(server.backend, rows, machine)
    if own:
        version = registry.get(LibraryBackend, server.backend).version()
        say(f"{server.server} {version}: its own kernels race, set as its tables can set them")
        return server.backend
    say(f"generated kernels with the same tiles race in the places of {server.server}'s kernels, for {own}")
    return DEFAULT_BACKEND


def _can_race(backend: str, rows: Sequence[FormatRow], machine: Machine) -> Support:
    """Return whether a server's own kernels can be raced with all that is to be tuned."""
    if backend not in registry.names(LibraryBackend):
        return Support("its kernels are not known here")
    if not machine.devices:
        return Support("there is no GPU to run its kernels on")
    own = registry.get(LibraryBackend, backend)
    refusals = (own.supports(row.problem, machine.target) for row in rows)
    return own.available() and next((refused for refused in refusals if not refused), own.available())
