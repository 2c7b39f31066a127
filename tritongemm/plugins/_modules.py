"""Plug-ins that are modules still, until each is a class of `plugins.contracts`.

A plug-in module is imported on first use. It may define ``unavailable() -> str | None``: the reason it can't run on
this machine, or None. A file whose name starts with an underscore is shared code, not a plug-in.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

from tritongemm.core.errors import InputError, UnavailableError

KINDS = {  # the package that each kind of plug-in lies in
    "families": "tritongemm.numerics.families",
    "strategies": "tritongemm.search.strategies",
    "backends": "tritongemm.backends",
    "formats": "tritongemm.formats",
}


def names(kind: str) -> list[str]:
    """Names of all plug-ins of one kind, sorted; imports none of them."""
    package = importlib.import_module(KINDS[kind])
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load(kind: str, name: str) -> ModuleType:
    """Import one plug-in.

    Raises:
        InputError: no such plug-in; lists those there are.
        UnavailableError: the plug-in's own imports failed.
    """
    path = f"{KINDS[kind]}.{name}"
    for found in (f"{path}.backend", path):
        if found in sys.modules and not name.startswith("_") and not hasattr(sys.modules[found], "__path__"):
            return sys.modules[found]  # asked for every candidate, and reading the folder takes a millisecond
    known = names(kind)
    if name not in known:
        raise InputError(f"no {kind} plug-in is called {name!r}; there are: {', '.join(known)}")
    try:
        module = importlib.import_module(path)
        return importlib.import_module(f"{path}.backend") if hasattr(module, "__path__") else module
    except ImportError as error:
        raise UnavailableError(f"{kind}/{name}.py needs a package that is missing: {error}") from error


def unavailable(kind: str, name: str) -> str | None:
    """Why a plug-in can't be used on this machine, or None if it can."""
    try:
        module = load(kind, name)
    except UnavailableError as error:
        return str(error)
    probe = getattr(module, "unavailable", None)
    return probe() if probe else None
