"""The public functions `mm` and `load`, and the operator that torch.compile and torch.export trace."""

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.record import Record
from tritongemm.hip_ext.launching import native_calls
from tritongemm.operations.checks import PLAIN_TYPES, require_tensors, wants_gradient, wants_more
from tritongemm.operations.dense import DENSE, DenseOperands
from tritongemm.operations.torch_products import linear
from tritongemm.serving import dispatcher as engine
from tritongemm.serving.dispatcher import default_dispatcher, layer_key
from tritongemm.serving.loaded_tables import LoadReport
from tritongemm.serving.traced_operations import define

_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_compiling = torch.compiler.is_compiling
_autocast = torch.is_autocast_enabled
_forward = torch.autograd.forward_ad  # a dual number is a plain tensor to all else


def mm(x: Tensor, w: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Compute x @ w.T (+ bias) with the tuned winner for this size, or for its range of M, else with PyTorch.

    For inference: with gradients enabled, with an operand that requires one, and in forward mode PyTorch computes the
    product differentiably. Under autocast operands are cast as for a linear layer. PyTorch's settings (reduced
    precision, determinism) are read when a size is first called, except float32's precision, which is read at every
    call: kernels tuned in tf32 are used while PyTorch is set to tf32.

    Args:
        x: [..., K] activations; for tuned kernels contiguous, or the transposed view [M, K] of a [K, M] matrix.
        w: [N, K], a linear layer's weight, or the transposed view of a [K, N] matrix, as in x @ b. Each of these
            layouts has tuned rows of its own.
        bias: [N] or None.
        out_dtype: x's by default; float16 for fp8 and int32 for int8 operands.

    Returns:
        [..., N], contiguous, ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: at first use, if TRITONGEMM_CONFIG names a file that can't be read.
        DriverError: the driver refused a launch.

    Examples:
        >>> tritongemm.mm(torch.randn(4, 256), torch.randn(32, 256)).shape
        torch.Size([4, 32])
    """
    if _compiling():
        return _compiled(x, w, bias, out_dtype)
    served: Tensor | None = native_calls.serve(_find, engine.default.calls.compiled, x, w, bias, out_dtype)
    if served is not None:
        return served
    if wants_more(x, w, bias) or _autocast():
        return _unusual(x, w, bias, out_dtype)
    try:
        return engine.default.run(x, w, bias, out_dtype)
    except (AttributeError, RuntimeError, TypeError):
        require_tensors({"x": x, "w": w})  # None has no shape, and to look at each before would cost every call
        DENSE.check(DenseOperands(x, w, bias, out_dtype))  # a list has no hash
        if not (x.is_nested or w.is_nested or (bias is not None and bias.is_nested)):
            raise
        return _unusual(x, w, bias, out_dtype)  # nested tensors have no shape either


def _find(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Any:
    """Return what compiled code calls for operands that were served before."""
    with suppress(AttributeError, RuntimeError, TypeError):  # of no right kinds, which Python's checks name
        ready = engine.default.calls.table.get(layer_key(x, w, bias, out_dtype))
        return native_calls.compiled_form(ready, x, w, bias, out_dtype)
    return None


def load(source: str | os.PathLike[str] | Iterable[Record]) -> LoadReport:
    """Add tuned records to those that `mm` uses, replacing earlier ones, and load the current GPU's kernels.

    Kernels missing from the cache are compiled, all are loaded, and those compiled by another Triton version than the
    installed one are compared with float64. Nothing is compiled for a kernel library; each of its kernels is loaded at
    its first call. If called before the first `mm`, this function replaces TRITONGEMM_CONFIG. A server that forks must
    call it in its workers, as it initialises CUDA or HIP.

    Args:
        source: a results file of `tritongemm tune` or of another known format, a library of
            `tritongemm library`, ``"shipped"`` for the tables that come along in this package, or records. A record
            that can't be served affects its own size only: a warning gives the reason, and PyTorch computes that size.

    Returns:
        The number of records that calls can ask for, on any GPU. Printed, it says how many rows serve the current GPU,
        and why the others do not: ``405 of 405 rows serve cuda:0 (sm90, 132 compute units)``.

    Raises:
        InputError: the file can't be read, or holds no tuned result.
        TypeError: the source is neither a path nor records.

    Examples:
        >>> print(tritongemm.load([]))
        0 of 0 rows serve, as no GPU is here
    """
    return default_dispatcher().load(source)


def _compiled(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Return the call as torch.compile and torch.export trace it."""
    if wants_gradient(x, w, bias) or torch.is_autocast_enabled("cuda"):
        return linear(x, w, bias, out_dtype)
    result: Tensor = torch.ops.tritongemm.mm(x, w, bias, out_dtype)
    return result


def _unusual(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """Return a call in a mode: gradients, autocast, subclasses, tracers and transforms."""
    require_tensors({"x": x, "w": w} | ({} if bias is None else {"bias": bias}))
    DENSE.check(DenseOperands(x, w, bias, out_dtype))
    operands = (x, w) if bias is None else (x, w, bias)
    if wants_gradient(x, w, bias) or _tracing() is not None or _forward._current_level >= 0:
        return linear(x, w, bias, out_dtype)
    if _modes():  # make_fx, fake tensors and the like see one operation
        result: Tensor = torch.ops.tritongemm.mm(x, w, bias, out_dtype)
        return result
    if any(type(t) not in PLAIN_TYPES or t.is_nested for t in operands) or not x.is_cuda:
        return linear(x, w, bias, out_dtype)
    half = torch.get_autocast_dtype("cuda")
    x, w, *rest = (t.to(half) if t.is_floating_point() and t.dtype != torch.float64 else t for t in operands)
    return default_dispatcher().run(x, w, rest[0] if rest else None, out_dtype)


def _operation(x: Tensor, w: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    served: Tensor | None = native_calls.serve(_find, engine.default.calls.compiled, x, w, bias, out_dtype)
    return (engine.default.run(x, w, bias, out_dtype) if served is None else served).contiguous()


define(DENSE, _operation, has_gradients=False)
