"""Triton's interpreter without work that changes no result, which is more than half of what it does."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

ROLE = "tests.support.quick_interpreter:make"


def make() -> Callable[[Any], Iterator[Any]]:
    """What the interpreter's process does, sooner, the sums of `tests.support.summing`, and programs in forks of it."""
    from tests.support import forked
    from tests.support.summing import SumJob, first_row
    from tritongemm.measure.interpreting import Interpreter

    hasten()
    interpreter = Interpreter()
    others: dict[type, Any] = {SumJob: first_row, forked.Program: forked.answer}
    return lambda job: others.get(type(job), interpreter)(job)


@functools.cache
def hasten() -> None:
    """Has this process's interpreter leave out what it computes for nothing."""
    from triton.runtime import interpreter

    # Every sum and product of integers is computed again in 64 bits, for an assertion made in debug mode only.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = functools.partial(_patch_builtin, interpreter)
    interpreter._patch_lang = _Patches(interpreter)
    # A function's lines are asked for three times, and tokenized each time.
    inspect.getsourcelines = functools.cache(inspect.getsourcelines)  # type: ignore[assignment]
    _share_types(interpreter)
    _match_sooner(interpreter)
    gc.freeze()  # a collection looks through what kernels make, and not through PyTorch


def _share_types(interpreter: Any) -> None:
    """What an operation makes of its result's type, its shape above all, is made once for each type."""
    core, numpy_type = interpreter.tl.core, functools.cache(interpreter._get_np_dtype)
    plain = interpreter._get_np_dtype
    interpreter._get_np_dtype = lambda of: plain(of.scalar) if of.scalar.is_ptr() else numpy_type(of.scalar)
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(extent, "value", extent) for extent in shape)
        if known := types.get(key):
            vars(self).update(known)
        else:
            make_type(self, element_ty, shape)
            types[key] = vars(self)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if known := vars(type).get("of_tensors"):
            vars(self).update(known, handle=handle, type=type)
        else:
            make_tensor(self, handle, type)
            type.of_tensors = vars(self) | {"handle": None}

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    unwrap, bare = core._unwrap_if_constexpr, {core.tensor, core.dtype, core.block_type, core.pointer_type, int, bool}
    core._unwrap_if_constexpr = lambda value: value if type(value) in bare else unwrap(value)


def _match_sooner(interpreter: Any) -> None:
    """Operands of one plain type are not converted, and a number beside a tensor is spread over its shape once."""
    semantic, tensor = type(interpreter.interpreter_semantic), interpreter.tl.core.tensor
    plain = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"int1", "fp32"}
    match, spread = semantic.binary_op_type_checking_impl, dict[Any, Any]()

    def match_sooner(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[Any, Any]:
        if type(lhs) is not tensor or lhs.dtype.name not in plain:
            return match(self, lhs, rhs, *flags, **named)  # type: ignore[no-any-return]
        if type(rhs) is tensor and lhs.dtype.name == rhs.dtype.name:
            return (lhs, rhs) if lhs.type.name == rhs.type.name else self.broadcast_impl_value(lhs, rhs)
        if type(rhs) not in (int, float, bool):
            return match(self, lhs, rhs, *flags, **named)  # type: ignore[no-any-return]
        key = lhs.type.name, repr(rhs), flags, *named.items()
        if key in spread:
            return lhs, spread[key]
        left, right = match(self, lhs, rhs, *flags, **named)
        if left is lhs:
            spread[key] = right
        return left, right

    semantic.binary_op_type_checking_impl = match_sooner


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


class _Patches:
    """What Triton's `_patch_lang` does, once a launch rather than at each call of a function in it."""

    def __init__(self, interpreter: Any) -> None:
        self._patch, self._modules = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
        self._done: set[str] = set()  # of the launch under way
        self._named: dict[Any, frozenset[str]] = {}
        self._nothing = interpreter._LangPatchScope()

    def __call__(self, function: Any) -> Any:
        """Patch the modules that a function names, and have the launch's end undo that."""
        if function not in self._named:
            values = function.__globals__.values()
            self._named[function] = frozenset(m.__name__ for m in self._modules if any(m is v for v in values))
        named = self._named[function]
        if named <= self._done:
            return self._nothing
        self._done |= named
        scope = self._patch(function)
        restore = scope.restore

        def undo() -> None:
            self._done.clear()
            restore()

        scope.restore = undo
        return scope
