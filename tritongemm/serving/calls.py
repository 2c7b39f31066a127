"""What is ready for the calls of a thread, and what serves those of `mm` until a kernel is chosen for them."""

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tritongemm.hip_ext.launching.native_calls import compiled_form
from tritongemm.operations.contract import ReadyCall
from tritongemm.operations.dense import DenseOperands
from tritongemm.operations.torch_products import linear, torch_linear

FREQUENT_CALLS = 64  # A size is frequent from this call of one thread on; a model of 32 layers has come by twice then.
MOST_ROWS_AT_ONCE = 512  # More rows, as of prompts, seldom return: only frequent sizes are worth milliseconds.
NOT_TUNED = ("fallback", "library")  # kinds of resolutions that no kernel of a record is of
_MOST_CALLS = 8192  # Calls kept in a table; sequences of any length must not fill the memory.

# What decides which kernel serves a call: shapes, dtypes, devices, and whatever else an operation depends on.
CallKey: TypeAlias = tuple[Any, ...]


def keep(table: dict[Any, Any], key: Any, ready: Any) -> None:
    """Keep what serves calls of a key in a table, which is emptied before it grows too large."""
    if len(table) >= _MOST_CALLS:
        table.clear()
    table[key] = ready


def plain_linear(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Compute PyTorch's linear layer; `mm` knows this function and skips its frame."""
    return torch_linear(x, w, bias)


class ResolveAfterCalls:
    """PyTorch's linear layer until a size is frequent, and what it is resolved to from then on.

    To find the kernel that PyTorch launches costs about 1 ms, which 250 calls save, and sequences of all lengths come
    by that do not return.
    """

    __slots__ = ("_calls_left", "_resolve")

    def __init__(self, resolve: Callable[[DenseOperands], ReadyCall]) -> None:
        self._calls_left, self._resolve = FREQUENT_CALLS, resolve

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Return the result of PyTorch's linear layer, or of what the size is resolved to."""
        self._calls_left -= 1
        if self._calls_left > 0:
            return torch_linear(x, w, bias)
        return self._resolve(DenseOperands(x, w, bias, out_dtype))(x, w, bias, out_dtype)

    def compiled(self, *_: Any) -> None:
        """Return None: compiled code keeps nothing that changes."""


class CallsByLayout:
    """The ready calls of one size by the memory layout of its operands; belongs to one thread.

    A size has this in the table where rows are of other layouts than a linear layer's, or where its first operands
    were. Every other size is spared the question. `prepare` gives the ready call of operands, and whether equal
    operands will have the same.
    """

    __slots__ = ("_calls", "_prepare")

    def __init__(self, prepare: Callable[[DenseOperands], tuple[ReadyCall, bool]]) -> None:
        self._prepare, self._calls = prepare, dict[tuple[Any, Any], ReadyCall]()

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Return the result of the call that is ready for this layout, which is made ready where it is the first."""
        if not x.layout == w.layout == torch.strided:
            return linear(x, w, bias, out_dtype)
        layout = x.stride(), w.stride()
        call = self._calls.get(layout)
        if call is None:
            call, lasting = self._prepare(DenseOperands(x, w, bias, out_dtype))
            if lasting:
                self._calls[layout] = call
        return call(x, w, bias, out_dtype)

    def compiled(self, x: Tensor, w: Tensor, *rest: Any) -> Any:
        """Return what compiled code calls for operands of this layout."""
        return compiled_form(self._calls.get((x.stride(), w.stride())), x, w, *rest)


class CallTable(threading.local):
    """Ready calls of one thread, by shapes, dtypes, device and, for float32, PyTorch's precision.

    Keys of `scaled_mm` are longer than those of `mm`, and its calls take other operands.
    """

    def __init__(self) -> None:
        self.table: dict[CallKey, ReadyCall] = {}
        self.compiled: dict[bytes, Any] = {}  # by what compiled code compares
        # Addresses of a server's layers and the activations for which it was found that the server computes itself.
        self.declined: dict[Any, None] = {}
