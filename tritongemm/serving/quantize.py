"""The public function `quantize`, which quantises activations in one kernel for products with scales."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.helper_kernel import PARTS
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.hip_ext.launching.patched_launch import call_all
from tritongemm.numerics.scale_factors import scale_places
from tritongemm.operations import microscaling
from tritongemm.operations.checks import check_kind, check_tensors, check_unmapped, is_wrapped
from tritongemm.operations.factors import powers
from tritongemm.operations.quantisation import FACTOR_LAYOUTS, Quantised, by_torch, empty_factors, empty_pair
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving.calls import keep
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.traced_operations import define_operation

GRANULARITIES = ("tensor", "row", "block", "mx")
_TYPES = tuple(t for t, name in DTYPE_NAMES.items() if DTYPES[name].is_fp8 or name == "int8")
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def quantize(x: Tensor, granularity: str = "row", dtype: torch.dtype | None = None, layout: str = "rows") -> Quantised:
    """Quantise activations to 8 or 4 bits with scale factors, such that x is approximately q * scale.

    A factor is the largest absolute value that it covers divided by the type's largest number, and 1 if all are zero.
    For ``mx`` it is rounded up to a power of two and stored as its exponent plus 127 (e8m0); others are float32. One
    kernel computes it on a GPU (two for ``tensor``), without synchronising, so it can be captured in a graph. A factor
    that covers a NaN or an infinite value is NaN, which makes that row of the product NaN. There is no gradient.

    Args:
        x: [..., K] of bfloat16, float16 or float32.
        granularity: ``tensor`` (one factor), ``row`` (one per row), ``block`` (one per 128 elements along K of a row)
            or ``mx`` (one per 32).
        dtype: an fp8 type or int8; by default the e4m3 that x's GPU multiplies. For ``mx`` OCP's fp8, by default e4m3,
            or fp4 (e2m1, two numbers per byte, K even): ``torch.float4_e2m1fn_x2`` or the same as ``torch.uint8``.
        layout: memory layout of the factors of ``block``: ``rows`` [M, K / 128], ``groups`` M-major, or ``tma`` M-major
            with M padded to a multiple of 4, as DeepGEMM expects; the shape is always [M, K / 128], the strides differ.
            For ``mx``: ``rows`` [M, K / 32], or a plug-in of numerics/scale_layouts, e.g. ``e8m0_32x8``, padded.

    Returns:
        q [..., K], contiguous, and the factors: [1, 1], [M, 1] or [M, K / 128], or bytes [M, K / 32]. Of no rows both
            are empty, but for the one factor of ``tensor``, which is 1.

    Raises:
        TypeError: x is no tensor.
        InputError: an argument has none of these values.

    Examples:
        >>> q, scale = tritongemm.quantize(torch.randn(4, 256), "block")
        >>> q.dtype, scale.shape
        (torch.float8_e4m3fn, torch.Size([4, 2]))
        >>> tritongemm.quantize(torch.randn(4, 256), "column")
        Traceback (most recent call last):
        tritongemm.core.errors.InputError: granularity is 'column'; there are: tensor, row, block, mx
    """
    if torch.compiler.is_compiling() and granularity == "mx":  # a tracer does not follow a look-up of layouts
        traced: Quantised = torch.ops.tritongemm.quantize(x.detach(), granularity, dtype or torch.float8_e4m3fn, layout)
        return traced
    dtype = _check(x, granularity, dtype, layout)
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        pair: Quantised = torch.ops.tritongemm.quantize(x.detach(), granularity, dtype, layout)
        return pair
    return _quantize(x, granularity, dtype, layout)


@cache
def own_fp8(device: torch.device) -> torch.dtype:
    """Return the e4m3 type that a device multiplies: fnuz on gfx942, else OCP's."""
    name: str = torch.cuda.get_device_properties(device).gcnArchName if torch.version.hip and device.index != -1 else ""
    return torch.float8_e4m3fnuz if name.startswith("gfx94") else torch.float8_e4m3fn


def _check(x: Tensor, granularity: str, dtype: torch.dtype | None, layout: str) -> torch.dtype:
    """Return the type to quantise to."""
    check_tensors({"x": x})
    check_kind("dtype", dtype, torch.dtype)
    if granularity not in GRANULARITIES:
        raise InputError(f"granularity is {granularity!r}; there are: {', '.join(GRANULARITIES)}")
    if granularity == "mx":
        return _check_powers(x, dtype or torch.float8_e4m3fn, layout)
    if layout not in FACTOR_LAYOUTS or (layout != "rows" and granularity != "block"):
        raise InputError(f"layout is {layout!r}; blocks can be in {', '.join(FACTOR_LAYOUTS)}, others in rows")
    if x.dtype not in _INPUTS or not x.dim() or _has_no_k(x):
        known = ", ".join(map(str, _INPUTS))
        raise InputError(f"x is {x.dtype} {tuple(x.shape)}; activations [..., K], K not 0, of {known}")
    wanted = dtype or (own_fp8(x.device) if x.is_cuda else torch.float8_e4m3fn)
    if wanted not in _TYPES:
        raise InputError(f"dtype is {wanted}; there are: {', '.join(map(str, _TYPES))}")
    return wanted


def _check_powers(x: Tensor, dtype: torch.dtype, layout: str) -> torch.dtype:
    """Return the type to quantise to with powers of two."""
    if layout not in microscaling.layouts():
        raise InputError(f"layout is {layout!r}; powers of two can be in {', '.join(microscaling.layouts())}")
    if dtype not in microscaling.FORMATS:
        known = ", ".join(map(str, microscaling.FORMATS))
        raise InputError(f"dtype is {dtype}; with powers of two along K there are: {known}")
    packed = DTYPES[microscaling.FORMATS[dtype]].packed
    if x.dtype not in _INPUTS or not x.dim() or _has_no_k(x) or x.shape[-1] % packed:
        wanted = f"activations [..., K], K not 0, of {', '.join(map(str, _INPUTS))}{', K even' if packed > 1 else ''}"
        raise InputError(f"x is {x.dtype} {tuple(x.shape)}; {wanted}")
    return dtype


def _has_no_k(x: Tensor) -> bool:
    """Return whether rows hold nothing to quantise; a tracer may not know how long they are."""
    size = x.shape[-1]
    return isinstance(size, int) and size == 0


def _quantize(x: Tensor, granularity: str, dtype: torch.dtype, layout: str) -> Quantised:
    x = x.contiguous()
    if is_wrapped(x):
        check_unmapped("quantize", {"x": x})
    if not x.numel():
        return _of_no_rows(x, granularity, dtype, layout)
    if not x.is_cuda or is_wrapped(x):
        return by_torch(x, granularity, dtype, layout)
    key = ("quantize", x.shape, x.dtype, x.get_device(), granularity, dtype, layout)
    table: dict[Any, Any] = default_dispatcher().calls.table
    launch: Callable[[Tensor], Quantised] | None = table.get(key)
    if launch is None:
        launch = _make_ready(key, x, granularity, dtype, layout)
    return launch(x)


def _of_no_rows(x: Tensor, granularity: str, dtype: torch.dtype, layout: str) -> Quantised:
    """Return what no rows are quantised to; a factor that all numbers share is there all the same, and is 1."""
    if not x.shape[-1]:
        raise InputError(f"x is {tuple(x.shape)}: there is nothing to quantise")
    q, factors = empty_pair(x, granularity, dtype, layout)
    return q, factors.fill_(1.0) if granularity == "tensor" else factors


class _Launch:
    """The kernels that quantise activations of one shape; belongs to one thread."""

    def __init__(
        self, prepared: Sequence[PatchedLaunch], index: int, granularity: str, dtype: torch.dtype, layout: str
    ) -> None:
        self._launch, self._index = call_all([one.launch for one in prepared]), index
        self._set_x, self._set_q, self._set_scale, self._set_part = (
            call_all([one.set_address(name) for one in prepared if name in one.setters])
            for name in ("x", "q", "scale", "part")
        )
        self._parts = len(prepared) > 1
        self._empty_pair = partial(empty_pair, granularity=granularity, dtype=dtype, layout=layout)
        self._otherwise = partial(by_torch, granularity=granularity, dtype=dtype, layout=layout)

    def __call__(self, x: Tensor) -> Quantised:
        """Return the quantised activations and their factors, in order of the current stream."""
        if x.data_ptr() % 16:
            return self._otherwise(x)
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(x)
        q, factors = self._empty_pair(x)
        self._set_x(x.data_ptr())
        self._set_q(q.data_ptr())
        self._set_scale(factors.data_ptr())
        part = x.new_empty(PARTS, dtype=torch.float32) if self._parts else None
        if part is not None:
            self._set_part(part.data_ptr())
        self._launch(_stream(self._index))
        return q, factors  # what takes over the memory of parts is behind the kernels in the stream


def _make_ready(
    key: tuple[Any, ...], x: Tensor, granularity: str, dtype: torch.dtype, layout: str
) -> Callable[[Tensor], Quantised]:
    """Return the kernel of a key, loaded and kept in the thread's table; PyTorch's operations where there is none.

    While a graph is captured nothing is compiled or loaded, and what PyTorch computes then is not kept.
    """
    launch: Callable[[Tensor], Quantised] = partial(by_torch, granularity=granularity, dtype=dtype, layout=layout)
    dispatcher = default_dispatcher()
    if dispatcher.device(x.get_device()) is None:
        return launch
    try:
        launch = _load(x, granularity, dtype, layout)
    except (TritonGemmError, OSError) as error:
        if torch.cuda.is_current_stream_capturing():
            return launch
        warnings.warn(f"PyTorch's operations quantise activations, as no kernel does: {error}", stacklevel=3)
    keep(dispatcher.calls.table, key, launch)
    return launch


def _extents(x: Tensor, granularity: str, layout: str) -> tuple[int, int]:
    """Return where a kernel stores factors: their strides, or the extents in memory of powers of two."""
    if granularity == "mx":
        return powers(layout).shape(x.numel() // x.shape[-1], x.shape[-1])
    strides = empty_factors(x, granularity, layout).stride()
    return strides[0], strides[1]


def _load(x: Tensor, granularity: str, dtype: torch.dtype, layout: str) -> _Launch:
    """Return the kernel for activations like x, of a library, or compiled where the cache lacks it."""
    from tritongemm.build.quantization_kernels import Quantization, choose_kernels

    device = default_dispatcher().device(x.get_device())
    assert device is not None
    target, k, microscaled = device.target, x.shape[-1], granularity == "mx"
    name = microscaling.FORMATS[dtype] if microscaled else DTYPE_NAMES[dtype]
    if DTYPES[name].is_fp8 and not target.supports(DTYPES[name]):
        raise InputError(f"{target.name} has no {name}: its fp8 encoding is {target.fp8}")
    m = x.numel() // k
    asked = Quantization(m, k, DTYPE_NAMES[x.dtype], name, granularity, _extents(x, granularity, layout))
    if microscaled:
        asked = replace(asked, places=scale_places(layout))
        if not all(asked.places):
            raise InputError(f"no kernel writes powers of two in the order {layout}")
    prepared = [device.helpers.prepare(helper, arguments) for helper, arguments in choose_kernels(asked)]
    return _Launch(prepared, device.device.index, granularity, dtype, layout)


def _fake(x: Tensor, granularity: str, dtype: torch.dtype, layout: str) -> Quantised:
    return empty_pair(x, granularity, _check(x, granularity, dtype, layout), layout)


define_operation(
    "quantize(Tensor x, str granularity, ScalarType dtype, str layout) -> (Tensor, Tensor)", _quantize, _fake
)
