"""Where products are seen: functions that stand in the place of PyTorch's, and of `tritongemm.mm`.

They stand where programs look them up when they call: ``torch.nn.functional.linear``, ``torch.mm``, ``Tensor.mm``, the
operator @, and what the code calls that Inductor writes. A program that took one of them by ``from … import`` before
keeps PyTorch's own, and is not seen.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from tritongemm.operations.contract import every
from tritongemm.workloads.capturing.counting import make_counter
from tritongemm.workloads.capturing.recorder import Recorder

_FUNCTIONS = ("mm", "addmm", "matmul", "bmm", "baddbmm", "addbmm", "einsum", "tensordot", "inner", "chain_matmul",
              "mv", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm",
              "_scaled_grouped_mm_v2")  # fmt: skip
_METHODS = ("mm", "addmm", "addmm_", "matmul", "bmm", "baddbmm", "baddbmm_", "addbmm", "inner", "mv", "__matmul__")
_LINALG = ("matmul", "multi_dot")
_FUNCTIONAL = ("bilinear",)  # the others of its functions call one of `_FUNCTIONS`
_BY_INDUCTOR = ("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "_grouped_mm")
_LAYERS = {
    "linear": (("torch.nn.functional", "linear"),),
    "tritongemm.mm": (("tritongemm", "mm"), ("tritongemm.serving.api", "mm")),
}
# Where the calls of `tritongemm` are defined, whose own calls of PyTorch are none of the program's.
_SERVING = tuple(
    f"tritongemm.serving.{name}" for name in ("api", "products", "linear_fp8", "added_operations", "mixtures")
)
_OF_SERVERS = "tritongemm.serving.server_calls"
_COMPUTED = "tritongemm.serving.traced_operations"  # what computes operations in the code of torch.compile
_PLACES = {"input": 0, "x": 0, "weight": 1, "w": 1, "bias": 2, "out_dtype": 3}  # of a layer's arguments


def _product(operands: Any) -> tuple[str, Any]:
    """Return which call of ours a product of a server with scales is, and its arguments."""
    x, weight, weight_scale, x_scale, bias, out_dtype, _ = operands
    if x_scale is None:
        return "tritongemm.linear_fp8", (x, weight, weight_scale, bias, out_dtype)
    return "tritongemm.scaled_mm", (x, weight, x_scale, weight_scale, bias, out_dtype)


_SERVERS: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "product_or": _product,
    "four_bits_or": lambda operands: ("tritongemm.linear_w4", tuple(operands)),
    "activated_or": lambda operands: ("tritongemm.linear_act", tuple(operands)),
    "mixture_or": lambda operands: ("tritongemm.fused_moe", tuple(operands)),
}


class _Inside(threading.local):
    """How many calls of ours a thread is in."""

    own = 0


class Hooks:
    """The functions that stand in PyTorch's place, from `install` to `remove`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before: list[tuple[Any, str, Any, bool]] = []
        self._wrappers: dict[int, Any] = {}  # by the identity of what they stand for
        self._in_graphs: list[Any] = []
        self._active = False
        self._overriding = Overriding()
        self._inside = _Inside()
        self._operator, self._method = torch.Tensor.__matmul__, torch.Tensor.matmul

    def install(self) -> None:
        """Replace PyTorch's functions, and ours that count by themselves, by those that count."""
        self._active = True
        for module in (*_SERVING, _OF_SERVERS):  # which keep PyTorch's own functions for themselves
            importlib.import_module(module)
        for operation, places in _LAYERS.items():
            for module, name in places:
                self._replace(sys.modules[module], name, functools.partial(self._layer, operation))
        computed = importlib.import_module(_COMPUTED).computed
        for one in every():
            for name in (one.name, *one.calls):
                if f"tritongemm.{name}" not in _LAYERS:
                    self._replace_own(name)
            self._replace(computed, one.name, functools.partial(self._own_call, f"tritongemm.{one.name}"))
        for name, describe in _SERVERS.items():
            self._replace(sys.modules[_OF_SERVERS], name, functools.partial(self._server_call, describe))
        for owner, name in _calls():
            self._replace(owner, name, functools.partial(self._call, name.strip("_") if name[-2:] == "__" else name))
        self._replace(torch, "compile", self._compile)
        if "torch._dynamo" in sys.modules:
            self._let_compilers_pass()

    def remove(self) -> None:
        """Put everything back. What a graph of torch.compile holds counts no more."""
        self._active = False
        originals = {id(self._wrappers[id(original)]): original for _, _, original, _ in self._before}
        scripted = _scripted_functions()
        for wrapper in originals:
            scripted.pop(wrapper, None)
        for owner, name, original, was_own in reversed(self._before):
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        for kernels in _kernels_of_inductor():
            for name, value in list(vars(kernels).items()):
                if id(value) in originals:  # Inductor was imported while the hooks stood
                    setattr(kernels, name, originals[id(value)])
        self._before.clear()

    def _replace_own(self, name: str) -> None:
        """Put a hook in the place of a call of ours, where the package and the call's own module have it."""
        package = sys.modules["tritongemm"]
        original = getattr(package, name, None)
        if original is not None:
            for owner in (package, sys.modules[original.__module__]):
                self._replace(owner, name, functools.partial(self._own_call, f"tritongemm.{name}"))

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is None or any(original is wrapper for wrapper in self._wrappers.values()):
            return
        if id(original) not in self._wrappers:
            wrapper = self._wrappers[id(original)] = make(original)
            scripted = _scripted_functions()
            if id(original) in scripted:  # torch.jit.script knows functions by their identity
                scripted[id(wrapper)] = scripted[id(original)]
        self._before.append((owner, name, original, name in vars(owner)))
        setattr(owner, name, self._wrappers[id(original)])

    def _layer(self, operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts the calls of a linear layer, to stand in its place."""
        note = self._recorder.guarded(self._recorder.note_layer)

        def first(*args: Any, **named: Any) -> Any:
            operands = (*args, *named.values())
            asked = self._asked(operands, function, original)
            if asked is not None:
                return handle_torch_function(asked, operands, *args, **named)
            result = original(*args, **named)
            if self._active and not self._inside.own:
                given = dict(enumerate(args)) | {_PLACES[name]: value for name, value in named.items()}
                note(operation, counter, given[0], given[1], given.get(2), result)
            return result

        counter = make_counter(original, first)
        self._recorder.add_counter(counter)
        function = counter.function
        self._in_graphs.append(function)
        return function

    def _call(self, operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a function that multiplies."""
        note = self._recorder.guarded(self._recorder.note_call)

        @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
        def call(*args: Any, **kwargs: Any) -> Any:
            asked = self._asked(args, call, original)
            if asked is not None:
                return handle_torch_function(asked, args, *args, **kwargs)
            result = original(*args, **kwargs)
            if self._active and result is not NotImplemented and not self._inside.own:
                note(operation, original, args, kwargs)
            return result

        self._in_graphs.append(call)
        return call

    def _own_call(self, operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a call of ours: what it asks PyTorch for is not counted beside it."""
        note = self._recorder.guarded(self._recorder.note_call)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.own += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside.own -= 1
            if self._active and not self._inside.own:
                note(operation, original, args, kwargs)
            return result

        self._in_graphs.append(call)
        return call

    def _server_call(self, describe: Callable[[Any], tuple[str, Any]], original: Callable[..., Any]) -> Any:
        """Return what stands for a call that a server makes of its own functions, counted as the call of ours."""
        note = self._recorder.guarded(self._recorder.note_call)

        @functools.wraps(original)
        def call(operands: Any, otherwise: Callable[[], Any], *more: Any) -> Any:
            self._inside.own += 1
            try:
                result = original(operands, otherwise, *more)
            finally:
                self._inside.own -= 1
            if self._active and not self._inside.own:
                operation, given = describe(operands)
                note(operation, original, given, {})
            return result

        return call

    def _asked(self, args: Sequence[Any], hook: Any, original: Any) -> Any:
        """Return the function that a class of tensors is asked for which computes PyTorch's itself, or None."""
        if not (self._active and has_torch_function(args)):
            return None
        if original is self._operator:  # PyTorch asks for `matmul` where @ stands
            hook, original = torch.Tensor.matmul, self._method
        return self._overriding.choose(args, hook, original)

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that stands in the place of torch.compile."""

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._let_compilers_pass()
            return original(*args, **kwargs)

        return compile

    def _let_compilers_pass(self) -> None:
        """Have torch.compile take the hooks into its graphs, as it does PyTorch's functions, and not look inside."""
        for wrapper in self._in_graphs:
            torch.compiler.allow_in_graph(wrapper)


def _scripted_functions() -> dict[int, str]:
    """Return the table by which torch.jit.script knows PyTorch's functions."""
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()
    return table


def _calls() -> Iterator[tuple[Any, str]]:
    """Yield the places of all functions that multiply, but for linear layers."""
    for owner, names in ((torch, _FUNCTIONS), (torch.functional, _FUNCTIONS), (torch.linalg, _LINALG)):
        yield from ((owner, name) for name in names)
    yield from ((torch.Tensor, name) for name in _METHODS)
    yield from ((torch.nn.functional, name) for name in _FUNCTIONAL)
    yield from ((kernels, name) for kernels in _kernels_of_inductor() for name in _BY_INDUCTOR)


def _kernels_of_inductor() -> list[Any]:
    """Return where the code that Inductor writes finds PyTorch's products, once it is imported."""
    module = sys.modules.get("torch._inductor.select_algorithm")
    return [module.extern_kernels] if module else []


class Overriding:
    """Reports classes that were made while the hooks stood from older ones."""

    def __init__(self) -> None:
        self._before = WeakSet(_subclasses(Tensor))

    def choose(
        self, args: Sequence[Any], hook: Callable[..., Any], original: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        """Return the function of a class among the arguments; None where none computes functions itself."""
        kinds = [kind for kind in map(type, args) if issubclass(kind, Tensor) and _computes(kind)]
        if not kinds:
            return None
        return original if all(kind in self._before for kind in kinds) else hook


def _computes(kind: Any) -> bool:
    """Return whether a class has a function of its own; a parameter has switched it off."""
    method = kind.__torch_function__
    return isinstance(method, MethodType) and method.__func__ is not Tensor.__torch_function__.__func__


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)
