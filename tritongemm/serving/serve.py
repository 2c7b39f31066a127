"""A region of a program in which PyTorch's own functions are served by tuned kernels: `with tritongemm.serve(file):`.

PyTorch's functions are replaced in their modules and classes. That costs a call which is not served about 0.1 us, and
other functions nothing. A mode of torch.overrides costs every function of PyTorch 1.5 us, and kernels registered in
PyTorch's dispatcher for aten::mm and aten::addmm cost each linear layer 3 to 5 us (measured on a CPU, torch 2.13).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from tritongemm.core.record import Record
from tritongemm.serving.api import default_dispatcher, load
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.torch_fallback import torch_linear
from tritongemm.serving.tuned_calls import TunedCalls

Function: TypeAlias = Callable[..., Tensor]

_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
_compiling = torch.compiler.is_compiling


class ServedRegion:
    """A region in which tuned kernels serve ``linear``, ``matmul``, ``mm`` and ``addmm`` of plain tensors on a GPU.

    The functions are replaced for the whole process: calls of all threads are served while any thread is inside.
    Regions may be nested, and one may be entered again. Modules that hold a function of their own since before
    (``from torch.nn.functional import linear``) and callers in C++ are not served. Under torch.compile a linear layer
    is the opaque operation ``torch.ops.tritongemm.mm``; what is compiled outside of the region is not served.

    Args:
        source: tuned records, see `serve`.
        dispatcher: has the records and the loaded kernels.
    """

    def __init__(self, source: str | os.PathLike[str] | Iterable[Record] | None, dispatcher: Dispatcher) -> None:
        self._source, self._dispatcher = source, dispatcher
        self._read = False
        self._replaced: list[list[_Replacement]] = []

    def __enter__(self) -> ServedRegion:
        """Read the records at the first time, and replace the functions.

        Raises:
            InputError: the file can't be read, or holds no tuned result.
            TypeError: the source is neither a path nor records.
        """
        if not self._read:
            if self._source is None:
                self._dispatcher.add_configured()
            else:
                load(self._source)
            self._read = True
        calls = TunedCalls(self._dispatcher, torch_linear)
        self._replaced.append([_replace(*place, self._dispatcher, calls) for place in _PLACES])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Put the functions back. The records stay loaded, for `tritongemm.mm`."""
        for replacement in reversed(self._replaced.pop()):
            replacement.restore()


def serve(source: str | os.PathLike[str] | Iterable[Record] | None = None) -> ServedRegion:
    """A region in which tuned kernels serve PyTorch's own functions: ``with tritongemm.serve("tuned.yaml"): …``.

    Where no row holds for a call, the function of PyTorch that was called computes it, with the operands it was given.
    So it does under autocast, in other modes, and where a gradient is wanted.

    Args:
        source: tuned records as `tritongemm.load` takes them, which are read when the region is entered; by default
            those loaded before, or else those that TRITONGEMM_CONFIG names.
    """
    return ServedRegion(source, default_dispatcher())


@dataclass(frozen=True)
class _Replacement:
    """A function of PyTorch, and what stands in its place.

    Attributes:
        owner: the module or class that has it.
        name: its name there.
        original: the function.
        inherited: whether the class has it from another.
        switch: a list that is not empty while the function is replaced.
        function: what stands in its place.
    """

    owner: Any
    name: str
    original: Function
    inherited: bool
    switch: list[bool]
    function: Function

    def restore(self) -> None:
        """Put the function back; where somebody replaced it meanwhile, only have ours pass calls on."""
        self.switch.clear()
        if vars(self.owner).get(self.name) is not self.function:
            return
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


def _replace(
    owner: Any, name: str, make: Callable[..., Function], dispatcher: Dispatcher, calls: TunedCalls
) -> _Replacement:
    original, inherited, switch = getattr(owner, name), name not in vars(owner), [True]
    function = functools.wraps(original)(make(original, switch, dispatcher, calls))
    setattr(owner, name, function)
    return _Replacement(owner, name, original, inherited, switch, function)


def _make_linear(original: Function, switch: list[bool], dispatcher: Dispatcher, calls: TunedCalls) -> Function:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        plain = type(input) in _PLAIN and type(weight) in _PLAIN and (bias is None or type(bias) in _PLAIN)
        if not plain or not switch:
            return original(input, weight, bias)
        if _compiling():
            if not _has_row(weight, dispatcher) or _wants_pytorch(input, weight, bias):
                return original(input, weight, bias)
            result: Tensor = torch.ops.tritongemm.mm(input, weight, bias)
            return result
        call = calls.find(input, weight, bias)
        return original(input, weight, bias) if call is None else call(input, weight, bias, None)

    return linear


def _has_row(weight: Tensor, dispatcher: Dispatcher) -> bool:
    """Whether any record has a weight's N and K, while torch.compile traces a call."""
    return weight.dim() == 2 and (weight.shape[0], weight.shape[1]) in dispatcher.weights


def _wants_pytorch(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether a gradient or autocast sends a call that is traced to PyTorch."""
    wanted = x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)
    return (torch.is_grad_enabled() and wanted) or torch.is_autocast_enabled("cuda")


def _make_matmul(original: Function, switch: list[bool], dispatcher: Dispatcher, calls: TunedCalls) -> Function:
    def matmul(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 1 and not kwargs and switch:
            w = _linear_weight(args[0], dispatcher)
            if w is not None and type(input) in _PLAIN and input.dim() > 1:
                call = calls.find(input, w)
                if call is not None:
                    return call(input, w, None, None)
        return original(input, *args, **kwargs)

    return matmul


def _make_mm(original: Function, switch: list[bool], dispatcher: Dispatcher, calls: TunedCalls) -> Function:
    served = _make_matmul(original, switch, dispatcher, calls)

    def mm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if type(input) in _PLAIN and input.dim() == 2:
            return served(input, *args, **kwargs)
        return original(input, *args, **kwargs)

    return mm


def _make_addmm(original: Function, switch: list[bool], dispatcher: Dispatcher, calls: TunedCalls) -> Function:
    def addmm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 2 and not kwargs and switch:
            x, w = args[0], _linear_weight(args[1], dispatcher)
            plain = w is not None and type(x) in _PLAIN and type(input) in _PLAIN
            if plain and x.dim() == 2 and input.dim() == 1:
                call = calls.find(x, w, input)
                if call is not None:
                    return call(x, w, input, None)
        return original(input, *args, **kwargs)

    return addmm


def _linear_weight(right: Any, dispatcher: Dispatcher) -> Tensor | None:
    """The weight [N, K] of a linear layer whose transpose is the right operand of a product, if a record has it."""
    if type(right) not in _PLAIN or right.dim() != 2 or right.shape[::-1] not in dispatcher.weights or _compiling():
        return None
    w: Tensor = right.t()
    return w if w.is_contiguous() else None


_PLACES: Final[tuple[tuple[Any, str, Callable[..., Function]], ...]] = (
    (torch.nn.functional, "linear", _make_linear),
    (torch, "matmul", _make_matmul),
    (torch, "mm", _make_mm),
    (torch, "addmm", _make_addmm),
    (Tensor, "matmul", _make_matmul),
    (Tensor, "__matmul__", _make_matmul),
    (Tensor, "mm", _make_mm),
    (Tensor, "addmm", _make_addmm),
)
