"""Spares Triton's front end the work that it repeats for every node of a source and for every call in it.

It parses a function again for each set of argument types it is called with, derives the signature of a builtin for
each call, sets the filters of warnings for each node, makes a location of each node for line numbers that the binary
leaves out, and in version 3.6 writes out the type of each tuple as text. Without that a warp-specialised kernel takes
a quarter less time to compile, and its binary is the same. A version of Triton without these names is left as it is.
"""

import ast
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, cached_property, lru_cache
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

MOST_SOURCES = 1024  # of functions whose parsed form is kept
_WITHOUT_LOCATIONS = ContextVar("_WITHOUT_LOCATIONS", default=False)


@contextmanager
def quick_front_end() -> Iterator[None]:
    """Let Triton compile without repeated work, and ignore throughout the warnings that it ignores for each node.

    What is compiled so has no locations; what others compile in this process has its own.
    """
    _replace_repeated_work()
    without = _WITHOUT_LOCATIONS.set(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", PendingDeprecationWarning)
            yield
    finally:
        _WITHOUT_LOCATIONS.reset(without)


@cache
def _replace_repeated_work() -> None:
    """Make functions of Triton's modules keep their answers, for the rest of the process."""
    from triton.compiler import code_generator
    from triton.language import core
    from triton.runtime import jit

    _leave_out_locations(code_generator)
    _name_tuples_when_asked(core)
    _replace(jit, "ast", parse=lru_cache(MOST_SOURCES))
    _replace(code_generator, "inspect", signature=_remember_signatures)
    _replace(code_generator, "warnings", catch_warnings=lambda _: nullcontext, simplefilter=lambda _: _do_nothing)


def _replace(module: ModuleType, imported: str, **wrappers: Callable[[Any], object]) -> None:
    """Give a module its own view of a module that it imported, in which functions are wrapped."""
    seen = getattr(module, imported, None)
    if isinstance(seen, ModuleType):
        wrapped = {name: wrap(getattr(seen, name)) for name, wrap in wrappers.items()}
        setattr(module, imported, SimpleNamespace(**vars(seen) | wrapped))


def _leave_out_locations(code_generator: ModuleType) -> None:
    """Make the front end visit nodes without a location for each, which took a third of its time."""
    generator, error = (vars(code_generator).get(name) for name in ("CodeGenerator", "CompilationError"))
    if generator is None or error is None:
        return
    plain = generator.visit

    def visit(self: Any, node: ast.AST | None) -> Any:
        if node is None or not _WITHOUT_LOCATIONS.get():
            return plain(self, node)
        outer, self.cur_node = self.cur_node, node
        try:
            found = ast.NodeVisitor.visit(self, node)
        except (error, MemoryError):
            raise
        except Exception as fault:
            raise error(self.jit_fn.src, self.cur_node, repr(fault)) from None
        self.cur_node = outer
        return found

    generator.visit = visit


def _name_tuples_when_asked(core: ModuleType) -> None:
    """Make the type of a tuple compute its name on first use, as later versions of Triton do; few are used."""
    made: Any = vars(core).get("tuple_type")
    if made is None or "name" in vars(made):
        return

    def __init__(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def name(self: Any) -> str:
        return "[" + ",".join([f"{key}:{kind}" for key, kind in zip(self.fields, self.types, strict=False)]) + "]"

    made.__init__, made.name = __init__, cached_property(name)
    made.name.__set_name__(made, "name")


def _remember_signatures(signature: Callable[[Any], inspect.Signature]) -> Callable[[Any], inspect.Signature]:
    """Return a function that derives a function's signature once, and again where it is a method of an object."""
    known: dict[tuple[Any, bool], inspect.Signature] = {}

    def signature_of(function: Any) -> inspect.Signature:
        plain = function.__func__ if isinstance(function, MethodType) else function
        key = plain, plain is function
        if key not in known:
            known[key] = signature(function)
        return known[key]

    return signature_of


def _do_nothing(*_: object, **__: object) -> None:
    """Replace a function that is called for its effect alone."""
