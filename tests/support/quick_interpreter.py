"""Triton's interpreter without work that changes no result, which is more than half of what it does."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritongemm.measure.offline_evaluator import Interpreter

ROLE = "tests.support.quick_interpreter:make"


def make() -> Interpreter:
    """What the interpreter's process does, sooner."""
    from tritongemm.measure.offline_evaluator import Interpreter

    hasten()
    return Interpreter()


def hasten() -> None:
    """Has this process's interpreter leave out what it computes for nothing."""
    from triton.runtime import interpreter

    # Every sum and product of integers is computed again in 64 bits, for an assertion made in debug mode only.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = functools.partial(_patch_builtin, interpreter)


def _patch_builtin(interpreter: Any, package: Any, builder: Any, scope: Any) -> None:
    """What Triton's function of this name does, without listing hundreds of names at each call of a function."""
    for name, member in _builtins(package):
        if getattr(package, name) is member:  # else a caller has patched it already
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def _builtins(package: Any) -> tuple[tuple[str, Any], ...]:
    """The names that are patched, and what they stand for unpatched."""
    from triton.language import core

    return tuple((name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member))
