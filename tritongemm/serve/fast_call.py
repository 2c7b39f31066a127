"""One tuned kernel, or algorithm of a library, ready to be called again and again from one thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritongemm.core.errors import ScratchError
from tritongemm.serve.torch_fallback import linear

if TYPE_CHECKING:
    from tritongemm.runtime.patched_launch import LoadedKernel, ServingDevice
    from tritongemm.runtime.workspaces import WorkspacePool

_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
_empty: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_ALIGN = 15  # addresses are known to the compiler as multiples of 16


class FastCall:
    """A launch whose addresses are patched; belongs to one thread.

    Args:
        kernel: the loaded kernel, or the library's algorithm.
        served: its device.
        shape: of the result.
        dtype: of the result.
    """

    __slots__ = (
        "_alone",
        "_counts",
        "_device",
        "_dtype",
        "_empty",
        "_index",
        "_last",
        "_launch",
        "_pair",
        "_put_a",
        "_put_b",
        "_put_bias",
        "_put_c",
        "_put_semaphore",
        "_put_workspace",
        "_scratch",
        "_shape",
        "_workspace",
    )

    def __init__(self, kernel: LoadedKernel, served: ServingDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype, self._index = shape, dtype, served.index
        self._device = served.place
        self._alone = torch.cuda.device_count() <= 1
        self._workspace = kernel.bytes("workspace")
        self._counts = kernel.bytes("semaphore") > 0
        self._scratch = served.scratch if self._workspace or self._counts else None
        self._pair: tuple[int, int] | None = None
        self._empty = self._allocator()
        with torch.cuda.device(self._index):
            served.device.make_current()
            bound = kernel.bind(served.device)
        self._launch = bound.launch
        self._last = [0, 0, 0, 0]
        self._put_a, self._put_b, self._put_c, self._put_bias = map(bound.put, ("a", "b", "c", "bias"))
        self._put_workspace, self._put_semaphore = bound.put("workspace"), bound.put("semaphore")

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """The result in new memory, in order of x's device's current stream; PyTorch's where an operand does not fit."""
        try:
            a, b = x.data_ptr(), w.data_ptr()
            d = 0 if bias is None else bias.data_ptr()
        except RuntimeError:  # sparse, or wrapped by a transform
            return linear(x, w, bias, out_dtype)
        if (
            (a | b | d) & _ALIGN
            or not (x.is_contiguous() and w.is_contiguous())
            or w.get_device() != self._index
            or (bias is not None and not (bias.is_contiguous() and bias.get_device() == self._index))
        ):
            return linear(x, w, bias, out_dtype)
        if not self._alone and _current() != self._index:
            with torch.cuda.device(self._index):
                return self(x, w, bias, out_dtype)
        c = self._empty()
        try:
            self.start(a, b, c.data_ptr(), d)
        except ScratchError:
            return linear(x, w, bias, out_dtype)
        return c

    def _allocator(self) -> Callable[[], Tensor]:
        """Makes new memory for a result."""
        if self._device.type == "cuda" and _empty is not None:
            # What torch.compile's own code calls: torch.empty without its argument parser and dispatcher.
            strides = torch.empty(self._shape, device="meta").stride()
            return partial(_empty, tuple(self._shape), strides, self._dtype)
        return partial(torch.empty, self._shape, dtype=self._dtype, device=self._device)

    def start(self, a: int, b: int, c: int, bias: int) -> None:
        """Launch on these addresses, on the current stream of the device, which must be the current one.

        Raises:
            DriverError: the driver refused it.
            ScratchError: there is no memory for what its programs share.
        """
        last = self._last
        if a != last[0]:
            self._put_a(a)
            last[0] = a
        if b != last[1]:
            self._put_b(b)
            last[1] = b
        if c != last[2]:
            self._put_c(c)
            last[2] = c
        if bias != last[3]:
            self._put_bias(bias)
            last[3] = bias
        stream = _stream(self._index)
        if self._scratch is None:
            self._launch(stream)
        else:
            self._shared(self._scratch, stream)

    def _shared(self, scratch: WorkspacePool, stream: int) -> None:
        """Launch programs that share tiles."""
        if not _capturing():
            pair = scratch.of_stream(stream)
            if pair is not self._pair:
                self._put_workspace(pair[0])
                self._put_semaphore(pair[1])
                self._pair = pair
            self._launch(stream)
            return
        self._pair = None
        # From PyTorch's allocator: it lies in the graph's own pool, and is free again in stream order.
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
        self._put_workspace(workspace.data_ptr())
        address = scratch.of_capture(stream) if self._counts else 0
        if address is None:  # given out to other captures: the graph itself zeroes some
            zeros = torch.zeros(scratch.each, dtype=torch.uint8, device=self._device)
            address = zeros.data_ptr()
        self._put_semaphore(address)
        self._launch(stream)
