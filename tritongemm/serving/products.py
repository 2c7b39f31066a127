"""The public functions `scaled_mm`, `bmm`, `scaled_bmm` and `grouped_mm`, and the operators that are traced for them.

Each looks at its operands, makes a key of them and looks up what serves it; all else is the dispatcher's.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.problem import PLAIN
from tritongemm.hip_ext.launching import native_calls
from tritongemm.operations.batched import BATCHED, BatchOperands, check_out
from tritongemm.operations.checks import wants_more
from tritongemm.operations.contract import ProductOperation, check_factors_are_numbers
from tritongemm.operations.grouped import GROUPED
from tritongemm.operations.grouped_operands import GroupedOperands
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands
from tritongemm.operations.torch_products import float32_precision
from tritongemm.serving import dispatcher as engine
from tritongemm.serving.calls import CallKey
from tritongemm.serving.traced_operations import define

_FLOAT32: Final = torch.float32
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_compiling = torch.compiler.is_compiling
_autocast = torch.is_autocast_enabled


def serve_calls(
    operation: ProductOperation, make_key: Callable[..., CallKey]
) -> tuple[Callable[..., Any], Callable[..., Tensor], Callable[..., Tensor]]:
    """Return an operation's look-up for compiled code, its call in Python, and its call by either."""

    def find(*given: Any) -> Any:
        with suppress(AttributeError, RuntimeError, TypeError):  # of no right kinds, which Python's checks name
            return native_calls.compiled_form(engine.default.calls.table.get(make_key(*given)), *given)

    def run(*given: Any) -> Tensor:
        try:
            key = make_key(*given)
            call = engine.default.calls.table.get(key)
        # Sparse tensors have no strides, nested ones no shape, lists no hash, and None has none of these.
        except (AttributeError, RuntimeError, TypeError):
            operation.check(operation.operands(*given))  # To look at each before would cost every call.
            raise
        if call is None:
            call = engine.default.resolve(operation, key, operation.operands(*given))
        return call(*given)

    def serve(*given: Any) -> Tensor:
        served: Tensor | None = native_calls.serve(find, engine.default.calls.compiled, *given)
        return run(*given) if served is None else served

    return find, run, serve


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    order_b: str = PLAIN,
    scale_layout: str = "",
) -> Tensor:
    """Compute (a * scale_a) @ (b * scale_b).T (+ bias) with the tuned kernel for this size, else with PyTorch.

    For inference. Factors are float32, or powers of two (e8m0) per 32 elements along K. Their shapes give the
    granularity: one factor; one per row, [M] or [M, 1] and [N], [N, 1] or [1, N]; [M, K / 128] per 128 elements along K
    of a row, row-major or M-major by their strides; [N / 128, K / 128] or [N, K / 128] for the weight. The call does
    not synchronise with the GPU, so NaN and infinite factors are detected on the CPU only.

    Args:
        a: [..., K] of fp8, int8 or fp4 (two numbers per byte); tuned kernels need contiguous rows on a GPU.
        b: [N, K], a linear layer's weight, or its transposed view [K, N] as ``torch._scaled_mm`` takes it; scale_b is
            transposed with it.
        scale_a: scale factors of a.
        scale_b: scale factors of b.
        bias: [N] or None.
        out_dtype: bfloat16, float16 or float32.
        order_b: memory layout of b: ``plain``, or a plug-in of numerics/weight_layouts, e.g. ``shuffled_16x16``.
        scale_layout: "" if the factors' strides give their layout, or a plug-in of numerics/scale_layouts.

    Returns:
        [..., N], contiguous, ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes, strides, dtypes or devices that do not fit together, or an fp8 encoding that this GPU does
            not compute.
        DriverError: the driver refused a launch.

    Examples:
        >>> a, of_a = tritongemm.quantize(torch.randn(4, 256))
        >>> b, of_b = tritongemm.quantize(torch.randn(32, 256))
        >>> tritongemm.scaled_mm(a, b, of_a, of_b).shape
        torch.Size([4, 32])
    """
    if _compiling():
        result: Tensor = _trace_scaled(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout)
        return result
    served: Tensor | None = native_calls.serve(
        _find_scaled, engine.default.calls.compiled, a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout
    )
    if served is not None:
        return served
    if wants_more(a, b, scale_a, scale_b, bias):
        given = ScaledOperands(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout)
        return _unusual(SCALED, lambda *call: _trace_scaled(*call[:-1]), given)  # an operation gives new memory
    return _run_scaled(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout)


def _scaled_key(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, *how: Any
) -> CallKey:
    key: CallKey = (
        a.shape, a.stride(), a.dtype, a.get_device(), b.shape, b.stride(), b.dtype, b.get_device(), scale_a.shape,
        scale_a.stride(), scale_a.dtype, scale_a.get_device(), scale_b.shape, scale_b.stride(), scale_b.dtype,
        scale_b.get_device(), *how,
    )  # fmt: skip
    return key if bias is None else (*key, bias.shape, bias.stride(), bias.dtype, bias.get_device())


_find_scaled, _run_scaled, _serve_scaled = serve_calls(SCALED, _scaled_key)
_trace_scaled = define(SCALED, lambda *given: _serve_scaled(*ScaledOperands(*given)[:-1]))  # PyTorch omits defaults


def multiply_quantized(given: ScaledOperands) -> Tensor:
    """Compute `scaled_mm` of activations quantised here: NaN and infinity in them propagate, as in PyTorch's layers."""
    return scaled_mm(*given[:6]) if given.a.is_cuda else SCALED.fallback(SCALED.check(given))


def bmm(
    a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Compute a @ b (+ bias) for each product of a batch, with the tuned kernel for this size, else with PyTorch.

    For inference, as `mm`. A tuned kernel needs contiguous rows or columns in each matrix; the stride between products
    is arbitrary: views such as ``x.view(M, B, K).transpose(0, 1)`` are read in place. An operand that is expanded over
    the batch (a stride of 0) is shared by all products.

    Args:
        a: [B, M, K].
        b: [B, K, N], e.g. the transposed view of weights [B, N, K].
        bias: [N], [B, N] or [B, 1, N], or None.
        out_dtype: a's by default; float16 for fp8 and int32 for int8 operands.
        out: where the result is written; new memory by default.

    Returns:
        [B, M, N], ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes that do not fit together; at first use, if TRITONGEMM_CONFIG names a file that can't be read.
        DriverError: the driver refused a launch.

    Examples:
        >>> tritongemm.bmm(torch.ones(2, 4, 8), torch.ones(2, 8, 3)).shape
        torch.Size([2, 4, 3])
        >>> tritongemm.bmm(torch.ones(2, 4, 8), torch.ones(3, 8, 3))
        Traceback (most recent call last):
        tritongemm.core.errors.InputError: a (2, 4, 8) and b (3, 8, 3) must be [B, M, K] and [B, K, N]
    """
    if _compiling():
        return _traced_bmm(*BatchOperands(a, b, bias, out_dtype, out=out))
    served: Tensor | None = native_calls.serve(
        _find_batch, engine.default.calls.compiled, a, b, bias, out_dtype, None, None, "", out
    )
    if served is not None:
        return served
    if wants_more(a, b, bias, out) or _autocast():
        return _unusual(BATCHED, _traced_bmm, BatchOperands(a, b, bias, out_dtype, out=out))
    return _run_bmm(a, b, bias, out_dtype, None, None, "", out)


def scaled_bmm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    scale_layout: str = "",
) -> Tensor:
    """Compute (a * scale_a) @ (b * scale_b) (+ bias) for each product of a batch of fp8, int8 or fp4, as `bmm`.

    Factors along K are read in place: those of each product must be contiguous, row-major or with K as the slower
    dimension, as their strides say; the stride between products is arbitrary, and 0 if they share factors.

    Args:
        a: [B, M, K]; for fp4 bytes [B, M, K / 2], two numbers each.
        b: [B, K, N], e.g. the transposed view of weights [B, N, K]; scale_b is transposed with it.
        scale_a: a float32 factor per row of a, [B, M] or [B, M, 1], or per 128 elements along K of a row, [B, M, K /
            128]; or a power of two (e8m0) per 32, [B, M, K / 32].
        scale_b: a float32 factor per column of b, [B, N] or [B, 1, N], or per 128 elements along K, for 128 columns [B,
            K / 128, N / 128] or for each [B, K / 128, N]; or a power of two per 32, [B, K / 32, N].
        bias: as for `bmm`.
        out_dtype: bfloat16, float16 or float32.
        out: as for `bmm`.
        scale_layout: "" if the strides of a product's factors give their layout, or a plug-in of numerics/scale_layouts
            that gives it, b's transposed as b is.

    Raises:
        TypeError, InputError, DriverError: as `bmm`.

    Examples:
        >>> a, of_a = tritongemm.quantize(torch.randn(4, 256))
        >>> b, of_b = tritongemm.quantize(torch.randn(32, 256))
        >>> tritongemm.scaled_bmm(a[None], b.mT[None], of_a[None], of_b.mT[None]).shape
        torch.Size([1, 4, 32])
    """
    if scale_a is None or scale_b is None:
        raise TypeError("scale_a and scale_b must be tensors, and go together")
    if _compiling():
        return _traced_bmm(a, b, bias, out_dtype, scale_a, scale_b, scale_layout, out)
    served: Tensor | None = native_calls.serve(
        _find_batch, engine.default.calls.compiled, a, b, bias, out_dtype, scale_a, scale_b, scale_layout, out
    )
    if served is not None:
        return served
    if wants_more(a, b, scale_a, scale_b, bias, out):
        given = BatchOperands(a, b, bias, out_dtype, scale_a, scale_b, scale_layout, out)
        return _unusual(BATCHED, _traced_bmm, given)
    return _run_bmm(a, b, bias, out_dtype, scale_a, scale_b, scale_layout, out)


def _batch_key(
    a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None, scale_b: Tensor | None = None, scale_layout: str = "", out: Tensor | None = None,
) -> CallKey:  # fmt: skip
    key: CallKey = (
        a.shape, a.stride(), b.shape, b.stride(), a.dtype, b.dtype, a.get_device(), b.get_device(), out_dtype,
        scale_layout, float32_precision() if a.dtype is _FLOAT32 else None,
    )  # fmt: skip
    for name, one in (("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b), ("out", out)):
        if one is not None:
            key += (name, one.shape, one.stride(), one.dtype, one.get_device())
    return key


_find_batch, _run_bmm, _serve_bmm = serve_calls(BATCHED, _batch_key)
_trace_bmm = define(BATCHED, lambda *given: _serve_bmm(*BatchOperands(*given)))


def _traced_bmm(*given: Any) -> Tensor:
    """Trace the call for torch.compile and torch.export; its operation's new memory is copied to `out`."""
    operands = BatchOperands(*given)
    wanted = torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in given)
    if operands.scale_a is None and (wanted or torch.is_autocast_enabled("cuda")):
        return BATCHED.fallback(BATCHED.check(operands))
    result: Tensor = _trace_bmm(*given[:-1])
    if operands.out is None:
        return result
    check_out(operands)
    return operands.out.copy_(result)


def grouped_mm(  # noqa: PLR0913 (what a product of groups has)
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scale_layout: str = "",
    order_b: str = PLAIN,
    act: str = "",
) -> Tensor:
    """Multiply each group's rows of a by the group's own matrix of b, with a tuned kernel, else with PyTorch.

    For inference. Each group's number of rows is read on the GPU without synchronising, so the call can be captured.
    Group ends that do not add up are detected on the CPU only; on a GPU no row beyond a's is accessed.

    Args:
        a: [M, K], the rows of the groups one after another; or [groups, rows, K]. For fp4 bytes with two numbers each,
            along K of a and b.
        b: [groups, K, N], e.g. the ``mT`` of weights [groups, N, K], or of bytes of four bits [groups, N, K / 2].
        offs: int32 [groups]: the end row of each group; for a [groups, rows, K] the number of rows of each group.
        scale_a: None; float32 [M] (one factor per row), or [M, K / 128] (per 128 elements along K of a row); for a
            [groups, rows, K] with the groups first. Or a power of two (e8m0) per 32, [M, K / 32].
        scale_b: None; float32 [groups, N], or [groups, N / 128, K / 128]; or e8m0 [groups, N, K / 32]; of four
            bits those of `linear_w4` for each group, beside an `a` of 16 bits, or with scale_a of fp8 or int8.
        out_dtype: by default bfloat16 with factors of a, else that of `mm`.
        scale_layout: "" for powers of two in rows, or a plug-in of numerics/scale_layouts that gives their layout: a's
            factors of all rows together, padded, and b's of each group.
        order_b: memory layout of weights of four bits, as of `linear_w4`.
        act: "", or as of `linear_act`, of rows one after another. Of gate and up b has all columns of gate, then those
            of up, and the result is [M, N / 2]. With an act that ends in ``_block`` the result is of a's type, with
            rows behind it that hold its factors.

    Returns:
        [M, N] or [groups, rows, N], contiguous, ordered on the current stream. Rows that belong to no group are
            undefined.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes, types or devices that do not fit together.
        DriverError: the driver refused a launch.

    Examples:
        >>> a, b, ends = torch.randn(4, 64), torch.randn(2, 64, 8), torch.tensor([1, 4], dtype=torch.int32)
        >>> tritongemm.grouped_mm(a, b, ends).shape
        torch.Size([4, 8])
    """
    given = a, b, offs, scale_a, scale_b, out_dtype, scale_layout, order_b, act
    if _compiling():
        return _trace_grouped(*given)
    served: Tensor | None = native_calls.serve(_find_grouped, engine.default.calls.compiled, *given)
    if served is not None:
        return served
    if wants_more(a, b, offs, scale_a, scale_b):
        return _unusual(GROUPED, _trace_grouped, GroupedOperands(*given))
    return _run_grouped(*given)


def _grouped_key(  # noqa: PLR0913
    a: Tensor, b: Tensor, offs: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None, scale_layout: str = "", order_b: str = PLAIN, act: str = "",
) -> CallKey:  # fmt: skip
    key: CallKey = (
        "grouped", a.shape, a.stride(), b.shape, b.stride(), offs.shape, offs.stride(), a.dtype, b.dtype,
        offs.dtype, a.get_device(), b.get_device(), offs.get_device(), out_dtype, scale_layout, order_b, act,
    )  # fmt: skip
    for name, one in (("scale_a", scale_a), ("scale_b", scale_b)):
        if one is not None:
            key += (name, one.shape, one.stride(), one.dtype, one.get_device())
    return key


_find_grouped, _run_grouped, run_grouped = serve_calls(GROUPED, _grouped_key)
_trace_grouped = define(GROUPED, lambda *given: run_grouped(*GroupedOperands(*given)))


def _unusual(operation: ProductOperation, trace: Callable[..., Tensor], given: Any) -> Tensor:
    """Return a call in a mode: subclasses, tracers, transforms, and operands that want a gradient."""
    if _compiling() or (_modes() and _tracing() is None):  # make_fx, fake tensors and the like see one operation
        return trace(*given)
    checked = operation.check(given)
    check_factors_are_numbers(given)
    return operation.fallback(checked)
