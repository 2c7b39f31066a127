"""Finds plug-ins by file name: one file (or one folder with backend.py) in a kind's package is one plug-in.

A plug-in is imported on first use, by one thread at a time. No module asks for a plug-in while it is imported itself:
two threads could then wait for each other. A file whose name starts with an underscore is shared code, not a plug-in.
"""

import importlib
import pkgutil
import threading
import traceback
import warnings
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Final, TypeVar

from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.format_row import Defaults
from tritongemm.core.support import Support
from tritongemm.plugins.contracts import Family, LibraryBackend, Plugin

P = TypeVar("P", bound=Plugin)
_LOADING: Final = threading.RLock()  # re-entrant, as plug-ins ask for others when they are made


def names(kind: type[Plugin]) -> list[str]:
    """Return the names of all plug-ins of one kind, sorted; imports none of them."""
    return list(_names_in(tuple(importlib.import_module(kind.package).__path__)))


@cache
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the plug-ins in folders, cached: listing takes 0.1 ms, and each row of a file asks."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(folders) if not m.name.startswith("_")))


def get(kind: type[P], name: str) -> P:
    """Return the plug-in called `name`, that of its file, of a class of `plugins.contracts`, imported on first use.

    Raises:
        InputError: no such plug-in; lists those there are. Or its file holds none, or raises an error.
        UnavailableError: the plug-in's own imports failed.
    """
    plugin = _loaded(kind, name)
    if not isinstance(plugin, kind):
        raise InputError(f"{kind.kind} {name} is no {kind.__name__}")
    return plugin


def _loaded(kind: type[Plugin], name: str) -> Plugin:
    """Return the plug-in called `name` of the kind that a class belongs to, of that class or not."""
    root = next(c for c in reversed(kind.__mro__) if issubclass(c, Plugin) and c.package == kind.package)
    with _LOADING:
        return _load(root, name)


@cache
def _load(kind: type[Plugin], name: str) -> Plugin:
    """Return the one object of a plug-in, by the base contract of its kind, whichever class `get` was asked for."""
    known = names(kind)
    if name not in known:
        raise _absent(kind.kind, name, known)
    path = f"{kind.package}.{name}"
    try:
        module = importlib.import_module(path)
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{path}.backend")
        plugin = _plugin_class(kind, module)()
    except ImportError as error:
        raise UnavailableError(f"{kind.kind} {name} needs a package that is missing: {error}") from error
    except SystemExit as error:  # as of packages that do so where their device is not there
        raise UnavailableError(f"{kind.kind} {name} imports what ends the program ({error})") from error
    except InputError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        at = next((frame for frame in frames if frame.name == "<module>"), frames[0])
        place = "" if isinstance(error, SyntaxError) else f" ({at.filename}, line {at.lineno})"
        raise InputError(f"{kind.kind} {name} raises {type(error).__name__}: {error}{place}") from error
    plugin.name = name
    return plugin


def _plugin_class(kind: type[Plugin], module: ModuleType) -> type[Plugin]:
    """Return the one class of a module that derives from a kind's contract and is not shared by others."""
    found: list[type[Plugin]] = [
        c
        for c in vars(module).values()
        if issubclass(type(c), type)  # a name of list[int] says that it is a class until Python 3.11, and is none
        and issubclass(c, kind)
        and c.__module__ == module.__name__
        and not c.__name__.startswith("_")
    ]
    if len(found) != 1:
        held = ", ".join(c.__name__ for c in found) or "none"
        raise InputError(f"{module.__name__} must hold one class that derives from {kind.__name__}; it holds {held}")
    return found[0]


def baseline() -> LibraryBackend:
    """Return the backend that every race is measured against."""
    return next(backend for backend in every(LibraryBackend) if backend.baseline)


def forget() -> None:
    """Forget what was found and loaded, so that a file dropped beside the plug-ins is seen."""
    _names_in.cache_clear()
    _load.cache_clear()


def every(kind: type[P]) -> list[P]:
    """Return all plug-ins of a class of contracts that can be loaded, in the order of their names.

    One whose package is missing is passed over; so is, with a warning, one whose file is broken.
    """
    found = []
    for name in names(kind):
        try:
            if isinstance(plugin := _loaded(kind, name), kind):
                found.append(plugin)
        except UnavailableError:
            continue
        except InputError as error:
            warnings.warn(f"{error}; it is passed over", stacklevel=2)
    return found


def available(kind: type[Plugin], name: str) -> Support:
    """Return whether a plug-in can be used on this machine. Raises InputError: no such plug-in."""
    try:
        answer: Support = get(kind, name).available()
        return answer
    except UnavailableError as error:
        return Support(str(error))


def resolve(kind: type[Plugin], text: str) -> str:
    """Return the name of the plug-in that a name or an alias stands for; an InputError lists both."""
    known = names(kind)
    if text in known:
        return text
    aliases = {alias: plugin.name for plugin in every(kind) for alias in plugin.aliases}
    if text not in aliases:
        raise _absent(kind.kind, text, [*known, *aliases])
    return aliases[text]


def family_of(text: str) -> tuple[Family, Defaults]:
    """Return the family of its or a variant's name, and its defaults; an InputError lists families and variants."""
    known = names(Family)
    if text in known:
        family = get(Family, text)
        return family, family.defaults
    variants = {name: (family, found) for family in every(Family) for name, found in family.variants.items()}
    if text not in variants:
        raise _absent("family", text, [*known, *variants])
    return variants[text]


def _absent(kind: str, text: object, known: Iterable[str]) -> InputError:
    """Return the error of a name that nothing has: all names, and those that begin so."""
    if not isinstance(text, str):
        return InputError(f"a {kind} is named by a text, not a {type(text).__name__}; there are: {', '.join(known)}")
    meant = [name for name in known if text and name.startswith(text)]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return InputError(f"no {kind} is called {text!r}; there are: {', '.join(known)}{hint}")
