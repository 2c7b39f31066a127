"""One loaded kernel, prepared to be called again and again from one thread: in general, and for `mm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from tritongemm.core.errors import WorkspaceError
from tritongemm.operations.torch_products import linear

if TYPE_CHECKING:
    from tritongemm.core.serving import LoadedKernel
    from tritongemm.runtime.workspaces import WorkspacePool
    from tritongemm.serving.serving_device import ServingDevice

_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
_empty: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
ReadyCall: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None, torch.dtype | None], Tensor]"
MISALIGNED_BITS = 15  # The compiler takes addresses to be multiples of 16 bytes, so none of these bits may be set.


class PatchedCall:
    """A launch whose addresses are patched; belongs to one thread.

    Args:
        kernel: the loaded kernel.
        device: the GPU that it is loaded on.
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
        "_set_a",
        "_set_b",
        "_set_bias",
        "_set_c",
        "_set_semaphore",
        "_set_workspace",
        "_shape",
        "_workspace_bytes",
        "_workspaces",
        "set_address",
    )

    def __init__(self, kernel: LoadedKernel, device: ServingDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype, self._index = shape, dtype, device.index
        self._device = device.torch_device
        self._alone = torch.cuda.device_count() <= 1
        self._workspace_bytes = kernel.bytes("workspace")
        self._counts = kernel.bytes("semaphore") > 0
        self._workspaces = device.workspaces if self._workspace_bytes or self._counts else None
        self._pair: tuple[int, int] | None = None
        self._empty = self._make_allocator()
        with torch.cuda.device(self._index):
            device.driver_device.make_current()
            prepared = kernel.prepare(device.driver_device)
        self._launch = prepared.launch
        self._last = [0, 0, 0, 0]
        self.set_address = prepared.set_address
        self._set_a, self._set_b, self._set_c, self._set_bias = map(self.set_address, ("a", "b", "c", "bias"))
        self._set_workspace, self._set_semaphore = map(self.set_address, ("workspace", "semaphore"))

    def _make_allocator(self) -> Callable[[], Tensor]:
        """A function that makes new memory for a result."""
        if self._device.type == "cuda" and _empty is not None:
            # What torch.compile's own code calls: torch.empty without its argument parser and dispatcher.
            strides = torch.empty(self._shape, device="meta").stride()
            return partial(_empty, tuple(self._shape), strides, self._dtype)
        return partial(torch.empty, self._shape, dtype=self._dtype, device=self._device)

    def start_on(self, addresses: Mapping[str, int]) -> None:
        """Launch on these addresses, by the names of a problem's operands; as `start`, for a call now and then."""
        for name in addresses.keys() - {"a", "b", "c", "bias"}:
            self.set_address(name)(addresses[name])
        self.start(*(addresses.get(name, 0) for name in ("a", "b", "c", "bias")))

    def start(self, a: int, b: int, c: int, bias: int) -> None:
        """Launch on these addresses, on the current stream of the device, which must be the current one.

        Raises:
            DriverError: the driver refused it.
            WorkspaceError: there is no memory for what its programs share.
        """
        last = self._last
        if a != last[0]:
            self._set_a(a)
            last[0] = a
        if b != last[1]:
            self._set_b(b)
            last[1] = b
        if c != last[2]:
            self._set_c(c)
            last[2] = c
        if bias != last[3]:
            self._set_bias(bias)
            last[3] = bias
        stream = _stream(self._index)
        if self._workspaces is None:
            self._launch(stream)
        else:
            self._launch_with_workspace(self._workspaces, stream)

    def _launch_with_workspace(self, workspaces: WorkspacePool, stream: int) -> None:
        """Launch a kernel whose programs share memory."""
        if not _capturing():
            pair = workspaces.for_stream(stream)
            if pair is not self._pair:
                self._set_workspace(pair[0])
                self._set_semaphore(pair[1])
                self._pair = pair
            self._launch(stream)
            return
        self._pair = None
        # From PyTorch's allocator: it lies in the graph's own pool, and is free again in stream order.
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        self._set_workspace(workspace.data_ptr())
        address = workspaces.for_capture(stream) if self._counts else 0
        if address is None:  # All are given out to other captures, so the graph itself zeroes some.
            zeros = torch.zeros(workspaces.counter_bytes, dtype=torch.uint8, device=self._device)
            address = zeros.data_ptr()
        self._set_semaphore(address)
        self._launch(stream)


class FastCall(PatchedCall):
    """A launch for the operands of `tritongemm.mm`; belongs to one thread.

    Args:
        kernel: the loaded kernel.
        device: the GPU that it is loaded on.
        shape: of the result.
        dtype: of the result.
        otherwise: computes the calls whose operands the kernel can't take.
    """

    __slots__ = ("_otherwise",)

    def __init__(
        self,
        kernel: LoadedKernel,
        device: ServingDevice,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        otherwise: ReadyCall = linear,
    ) -> None:
        super().__init__(kernel, device, shape, dtype)
        self._otherwise = otherwise

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """The result in new memory, in order of the current stream; PyTorch computes where an operand does not fit."""
        try:
            a, b = x.data_ptr(), w.data_ptr()
            d = 0 if bias is None else bias.data_ptr()
        except RuntimeError:  # sparse, or wrapped by a transform
            return self._otherwise(x, w, bias, out_dtype)
        if (
            (a | b | d) & MISALIGNED_BITS
            or not (x.is_contiguous() and w.is_contiguous())
            or w.get_device() != self._index
            or (bias is not None and not (bias.is_contiguous() and bias.get_device() == self._index))
        ):
            return self._otherwise(x, w, bias, out_dtype)
        if not self._alone and _current() != self._index:
            with torch.cuda.device(self._index):
                return self(x, w, bias, out_dtype)
        c = self._empty()
        try:
            self.start(a, b, c.data_ptr(), d)
        except WorkspaceError:
            return self._otherwise(x, w, bias, out_dtype)
        return c


class TransposedCall:
    """A launch for operands of `tritongemm.mm` of which one or both are transposed views of row-major matrices.

    Args:
        prepare: prepares the launch for these matrices, given what computes the calls that it can't take.
        transposed: whether x and w are such views.
        otherwise: computes these calls with x and w as they were given.
    """

    __slots__ = ("_call", "_w", "_x")

    def __init__(
        self, prepare: Callable[[ReadyCall], ReadyCall], transposed: tuple[bool, bool], otherwise: ReadyCall
    ) -> None:
        self._x, self._w = transposed

        def compute(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
            return otherwise(*self._transpose(x, w), bias, out_dtype)

        self._call = prepare(compute)

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """The result, as of `FastCall`."""
        return self._call(*self._transpose(x, w), bias, out_dtype)

    def _transpose(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.t() if self._x else x, w.t() if self._w else w


def prepare_call(
    prepare: Callable[[ReadyCall], ReadyCall], transposed: tuple[bool, bool], otherwise: ReadyCall = linear
) -> ReadyCall:
    """A `FastCall`, or the same for transposed views; arguments are those of `TransposedCall`."""
    return TransposedCall(prepare, transposed, otherwise) if any(transposed) else prepare(otherwise)
