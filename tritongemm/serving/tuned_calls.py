"""Calls of a function of PyTorch or a server that tuned kernels take over; without a row, the function itself runs."""

import warnings
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from tritongemm.core.errors import TritonGemmError
from tritongemm.hip_ext.launching import native_calls
from tritongemm.operations.checks import is_watched, wants_gradient
from tritongemm.operations.contract import ReadyCall
from tritongemm.operations.dense import DenseOperands, are_transposed
from tritongemm.operations.torch_products import float32_precision
from tritongemm.serving.calls import MOST_ROWS_AT_ONCE, NOT_TUNED, CallKey, keep
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.launching import prepare_layer

LinearFunction: TypeAlias = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

_UNKNOWN: Final = object()
_HALVES: Final = (torch.bfloat16, torch.float16)  # float32 has a precision that may change
_autocast = torch.is_autocast_enabled


class TunedCalls:
    """The calls of one linear function, served by tuned kernels where a row of a table holds for them.

    `otherwise` is the function itself, given x [..., K], w [N, K] and a bias [N] or None. It computes every call that
    no row holds for, and is given the very operands that the caller gave. `returns` says of an M whether its calls will
    come often, so that what takes milliseconds to load pays: by default of few rows.
    """

    def __init__(
        self, dispatcher: Dispatcher, otherwise: LinearFunction, returns: Callable[[int], bool] | None = None
    ) -> None:
        self._dispatcher, self._otherwise = dispatcher, otherwise
        self._returns = returns or MOST_ROWS_AT_ONCE.__ge__
        self._find_compiled = self._compiled  # One object, whose address is part of a key of compiled code.

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """X @ w.T (+ bias) by a tuned kernel, or by the function itself."""
        call = self.find(x, w, bias)
        return self._otherwise(x, w, bias) if call is None else call(x, w, bias, None)

    def launch(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
        """Return the result, by compiled code; False where no row holds for a call, None where `find` has to look."""
        return native_calls.serve(self._find_compiled, self._dispatcher.calls.compiled, x, w, bias, None)

    def find(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> ReadyCall | None:
        """Return the tuned kernel of a call; None where there is no row for it, or where PyTorch has to see the call.

        PyTorch sees calls that want a gradient, and those under autocast, a tracer or a mode.
        """
        if w.shape not in self._dispatcher.weights or not x.is_cuda:
            return None
        if wants_gradient(x, w, bias) or _autocast() or is_watched():
            return None
        if not x.layout == w.layout == torch.strided:
            return None
        key = self._key(x, w, bias)
        call = self._dispatcher.calls.table.get(key, _UNKNOWN)
        return self._resolve(key, DenseOperands(x, w, bias)) if call is _UNKNOWN else call  # type: ignore[return-value]

    def _key(self, x: Tensor, w: Tensor, bias: Tensor | None) -> CallKey:
        precision = float32_precision() if x.dtype is torch.float32 else None
        key: CallKey = (self, x.shape, w.shape, x.dtype, w.dtype, x.get_device(), precision)
        if bias is not None:
            key = (*key, bias.shape, bias.dtype)
        by_layout = self._dispatcher.weights_by_layout
        return (*key, x.stride(), w.stride()) if by_layout and w.shape in by_layout else key

    def _compiled(self, x: Tensor, w: Tensor, bias: Tensor | None, *more: Any) -> Any:
        """Return what compiled code calls for such operands, or None while that may change."""
        return self._form(self.find(x, w, bias), x, w, bias, w, *more)

    def _form(
        self, call: ReadyCall | None, x: Tensor, w: Tensor, bias: Tensor | None, weight: Tensor, *more: Any
    ) -> Any:
        if call is None:
            return _decline if self._key(x, w, bias) in self._dispatcher.calls.table else None
        found = native_calls.compiled_form(call, x, weight, bias, *more)
        return None if found is call else found

    def _resolve(self, key: tuple[Any, ...], operands: DenseOperands) -> ReadyCall | None:
        """Ask the sources of kernels, and keep the answer where an equal call will have the same."""
        table: dict[Any, Any] = self._dispatcher.calls.table
        x, w = operands.x, operands.w
        if any(are_transposed(x, w)) and w.shape not in self._dispatcher.weights_by_layout:
            return None  # The key is also that of dense operands, which a row may be for.
        rows, spans = x.numel() // max(x.shape[-1], 1), table.setdefault(("library's", *key[:1], *key[2:]), [])
        returns = self._returns(rows)
        if not returns and any(rows in span for span in spans):
            keep(table, key, None)
            return None
        answers = self._dispatcher.explain(*operands, frequent=returns)
        resolution, call = answers.resolution, None
        kernel = None if resolution.kind in NOT_TUNED else resolution.kernel
        if kernel is not None and answers.device is not None and answers.reading is not None:
            try:
                call = prepare_layer(operands, answers.reading, self._compute_otherwise, kernel, answers.device.device)
            except (TritonGemmError, LookupError) as error:
                warnings.warn(f"the tuned kernel of {resolution.text} can't be launched: {error}", stacklevel=2)
        if resolution.lasting:
            keep(table, key, call)
            problems = () if answers.reading is None else answers.reading.problems
            if call is None and answers.device is not None and len(problems) == 1:  # one row of x is of two layouts
                spans += filter(None, [answers.device.library_span(problems[0])])
        return call

    def _compute_otherwise(self, x: Tensor, w: Tensor, bias: Tensor | None, _: torch.dtype | None) -> Tensor:
        return self._otherwise(x, w, bias)


class WrittenCalls(TunedCalls):
    """The calls of one linear function whose caller gives it the memory of the result, as Inductor's code does."""

    def write(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> bool:
        """Return whether a tuned kernel holds for x [M, K] @ w [K, N] (+ bias), and then has written it to `out`.

        A call that no row holds for costs the host less than a microsecond. Nothing is served where PyTorch might
        do more than compute the product, as in a graph of autograd.
        """
        if w.shape not in self._dispatcher.transposed_weights:
            return False
        written = native_calls.serve(self._find_compiled, self._dispatcher.calls.compiled, x, w, bias, None, out)
        if written is not None:
            return written is not False
        call = self._find(x, w, bias, out)
        if call is None or is_watched():
            return False
        result = call(x, w.t(), bias, None, out)
        if result is not out:
            out.copy_(result)
        return True

    def _find(self, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> ReadyCall | None:
        """Return the tuned kernel of a call; None where there is no row for it, or its operands are of another kind."""
        dense = w.stride() == (1, w.shape[0]) and x.is_contiguous() and out.is_contiguous()
        if not dense or out.dtype != x.dtype or x.dtype not in _HALVES:
            return None
        key = self._key(x, w, bias)
        call: Any = self._dispatcher.calls.table.get(key, _UNKNOWN)
        if call is _UNKNOWN:
            call = self._resolve(key, DenseOperands(x, w.t(), bias)) if x.is_cuda else None
        return call  # type: ignore[no-any-return]

    def _key(self, x: Tensor, w: Tensor, bias: Tensor | None) -> CallKey:
        return (self, x.shape, w.shape, x.dtype, None if bias is None else bias.dtype)

    def _compiled(self, x: Tensor, w: Tensor, bias: Tensor | None, *more: Any) -> Any:
        return self._form(self._find(x, w, bias, more[-1]), x, w, bias, w.t(), *more)


def _decline(*operands: Any) -> bool:
    """Return False: no tuned kernel holds for the call."""
    return False
