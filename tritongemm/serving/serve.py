"""A region of a program in which PyTorch's own functions are served by tuned kernels: `with tritongemm.serve(file):`.

PyTorch's functions are replaced in their modules and classes. That costs a call which no row holds for about 0.5 us,
and other functions nothing. A mode of torch.overrides costs a linear layer 2 us and every other function of PyTorch
1.5 to 4 us; kernels registered in PyTorch's dispatcher for aten::mm and aten::addmm cost each linear layer 3 to 5 us
(measured on a CPU with torch 2.13).
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
from tritongemm.operations.torch_products import torch_linear
from tritongemm.serving.api import load
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.tuned_calls import TunedCalls

Function: TypeAlias = Callable[..., Tensor]

_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
_compiling = torch.compiler.is_compiling


class ServedRegion:
    """A region in which tuned kernels serve ``linear``, ``matmul``, ``mm`` and ``addmm`` of plain tensors on a GPU.

    The functions are replaced for the entire process: calls of all threads are served while any thread is inside.
    Regions may be nested, and one may be entered again. Modules that hold a function of their own since before
    (``from torch.nn.functional import linear``) and callers in C++ are not served. Under torch.compile a linear layer
    is the opaque operation ``torch.ops.tritongemm.mm``; what is compiled outside of the region is not served.
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
    """Return a region in which tuned kernels serve PyTorch's own functions: ``with tritongemm.serve("tuned.yaml"): …``.

    Where no row holds for a call, the function of PyTorch that was called computes it, with the operands it was given.
    So it does under autocast, in other modes, and where a gradient is wanted.

    Args:
        source: tuned records as `tritongemm.load` takes them, which are read when the region is entered; by default
            those loaded before, or else those that TRITONGEMM_CONFIG names.

    Examples:
        >>> with tritongemm.serve([]):
        ...     torch.nn.functional.linear(torch.ones(4, 256), torch.ones(32, 256)).shape
        torch.Size([4, 32])
    """
    return ServedRegion(source, default_dispatcher())


@dataclass(frozen=True)
class _Replacement:
    """A function of PyTorch, and what stands in its place."""

    owner: Any
    name: str
    original: Function
    inherited: bool  # the class has it from another
    switch: list[bool]  # not empty while the function is replaced
    function: Function

    def restore(self) -> None:
        """Put the function back; where another program replaced it meanwhile, only let ours pass calls on."""
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
        # The first check decides most calls that no row holds for.
        if (
            type(weight) in _PLAIN
            and weight.shape in dispatcher.weights
            and switch
            and type(input) in _PLAIN
            and (bias is None or type(bias) in _PLAIN)
        ):
            if _compiling():
                if not _wants_pytorch(input, weight, bias):
                    result: Tensor = torch.ops.tritongemm.mm(input, weight, bias)
                    return result
            else:
                call = calls.find(input, weight, bias)
                if call is not None:
                    return call(input, weight, bias, None)
        return original(input, weight, bias)

    return linear


def _wants_pytorch(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Return whether a gradient or autocast sends a call that is traced to PyTorch."""
    wanted = x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)
    return bool(torch.is_grad_enabled() and wanted) or torch.is_autocast_enabled("cuda") is True


def _make_matmul(original: Function, switch: list[bool], dispatcher: Dispatcher, calls: TunedCalls) -> Function:
    def matmul(input: Tensor, other: Tensor, **kwargs: Any) -> Tensor:
        if type(other) in _PLAIN and other.shape in dispatcher.transposed_weights and switch and not kwargs:
            w = _linear_weight(other, dispatcher)
            if w is not None and type(input) in _PLAIN and input.dim() > 1:
                call = calls.find(input, w)
                if call is not None:
                    return call(input, w, None, None)
        return original(input, other, **kwargs)

    return matmul


def _make_mm(original: Function, switch: list[bool], dispatcher: Dispatcher, calls: TunedCalls) -> Function:
    served = _make_matmul(original, switch, dispatcher, calls)

    def mm(input: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or type(input) not in _PLAIN or input.dim() != 2:
            return original(input, mat2, *args, **kwargs)
        return served(input, mat2)

    return mm


def _make_addmm(original: Function, switch: list[bool], dispatcher: Dispatcher, calls: TunedCalls) -> Function:
    def addmm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 2 and type(args[1]) in _PLAIN and args[1].shape in dispatcher.transposed_weights and switch:
            x, w = args[0], _linear_weight(args[1], dispatcher)
            plain = w is not None and not kwargs and type(x) in _PLAIN and type(input) in _PLAIN
            if plain and x.dim() == 2 and input.dim() == 1:
                call = calls.find(x, w, input)
                if call is not None:
                    return call(x, w, input, None)
        return original(input, *args, **kwargs)

    return addmm


def _linear_weight(right: Tensor, dispatcher: Dispatcher) -> Tensor | None:
    """Return the weight [N, K] whose transpose is the right operand of a product; None where no row is for its layout.

    While torch.compile traces there is none, as it knows matrix products itself.
    """
    if _compiling():
        return None
    w = right.t()
    return w if w.is_contiguous() or (right.is_contiguous() and w.shape in dispatcher.weights_by_layout) else None


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
