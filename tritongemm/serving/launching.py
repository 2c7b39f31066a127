"""One loaded kernel, prepared to be called again and again from one thread with the operands of an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritongemm.core.errors import WorkspaceError
from tritongemm.hip_ext.launching import native_calls
from tritongemm.operations.contract import ProductOperation, Reading, ReadyCall
from tritongemm.operations.dense import DENSE, DenseOperands, are_transposed
from tritongemm.operations.torch_products import linear

if TYPE_CHECKING:
    from tritongemm.core.served_call import LoadedKernel
    from tritongemm.hip_ext.launching.workspaces import WorkspacePool
    from tritongemm.serving.serving_device import ServingDevice

_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
_empty: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
MISALIGNED_BITS = 15  # The compiler takes addresses to be multiples of 16 bytes, so none of these bits may be set.


class PatchedCall:
    """A launch whose addresses are patched; belongs to one thread."""

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
        "_prepared",
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
        self._prepared, self._launch = prepared, prepared.launch
        self._last = [0, 0, 0, 0]
        self.set_address = prepared.set_address
        self._set_a, self._set_b, self._set_c, self._set_bias = map(self.set_address, ("a", "b", "c", "bias"))
        self._set_workspace, self._set_semaphore = map(self.set_address, ("workspace", "semaphore"))

    def _make_allocator(self) -> partial[Tensor]:
        """Return a function that makes new memory for a result."""
        if self._device.type == "cuda" and _empty is not None:
            # What torch.compile's own code calls: torch.empty without its argument parser and dispatcher.
            strides = torch.empty(self._shape, device="meta").stride()
            return partial(_empty, tuple(self._shape), strides, self._dtype)
        return partial(torch.empty, self._shape, dtype=self._dtype, device=self._device)

    def _compile(self, names: Sequence[str], places: Sequence[int], given: Sequence[Any], out: int = -1) -> Any:
        """Return the call for compiled code, or this one where there is none.

        `places` has the argument that each operand of `names` is, -1 for a missing one; `out` that of the result.
        """
        launch = native_calls.prepare(self._prepared, ("c", *names, "workspace", "semaphore"))
        if launch is None:
            return self
        empty = self._empty
        new = (empty, ()) if empty.keywords else (empty.func, empty.args)
        streams = self._workspaces.of_streams if self._workspaces else None
        return native_calls.load().Call(launch, *new, streams, given[0], self._alone, out, tuple(places))

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
        # From PyTorch's allocator: it is in the graph's own pool, and is free again in stream order.
        workspace = torch.empty(self._workspace_bytes or 1, dtype=torch.uint8, device=self._device)
        self._set_workspace(workspace.data_ptr())
        address = workspaces.for_capture(stream, partial(_pool_of, workspace)) if self._counts else 0
        if address is None:  # All are given out to other captures, so the graph itself zeroes some.
            zeros = torch.zeros(workspaces.counter_bytes, dtype=torch.uint8, device=self._device)
            address = zeros.data_ptr()
        self._set_semaphore(address)
        self._launch(stream)


def _pool_of(memory: Tensor) -> tuple[int, int] | None:
    """Return which pool of graphs some memory is from; None where PyTorch does not say it."""
    at = memory.data_ptr()
    pools = (
        one["segment_pool_id"] for one in torch.cuda.memory_snapshot() if 0 <= at - one["address"] < one["total_size"]
    )
    return next(filter(any, pools), None)


class FastCall(PatchedCall):
    """A launch for the operands of `tritongemm.mm`; belongs to one thread."""

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

    def __call__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None = None
    ) -> Tensor:
        """Return the result in `out` or in new memory, in stream order; PyTorch computes where an operand does not fit.

        PyTorch's result is always in new memory. `out` is dense.
        """
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
                return self(x, w, bias, out_dtype, out)
        c = self._empty() if out is None else out
        of_c = c.data_ptr()
        if of_c & MISALIGNED_BITS:
            return self._otherwise(x, w, bias, out_dtype)
        try:
            self.start(a, b, of_c, d)
        except WorkspaceError:
            return self._otherwise(x, w, bias, out_dtype)
        return c

    def compiled(self, x: Tensor, w: Tensor, bias: Tensor | None, _: Any, out: Tensor | None = None) -> Any:
        """Return the call for compiled code; itself where operands are not dense."""
        places = (0, 1, -1 if bias is None else 2)
        dense = all(one is None or one.is_contiguous() for one in (x, w, bias))
        return self._compile(("a", "b", "bias"), places, (x,), -1 if out is None else 4) if dense else self


class OperandCall(PatchedCall):
    """A launch for the operands of any operation, whose strides are those of the call that it was made for.

    It belongs to one thread.
    """

    __slots__ = ("_addresses", "_names", "_operation", "_otherwise", "_out", "_places", "_setters")

    def __init__(
        self,
        operation: ProductOperation,
        given: Any,
        reading: Reading,
        otherwise: ReadyCall,
        kernel: LoadedKernel,
        device: ServingDevice,
    ) -> None:
        super().__init__(kernel, device, *reading.result)
        self._otherwise, self._names = otherwise, (names := list(reading.tensors))
        of_call = {name: place for place, name in enumerate(given._fields)}
        out = of_call.get("out", -1)
        self._out = -1 if out < 0 or given[out] is None else out
        places = [of_call.get(operation.sources.get(name, name), -1) for name in names]
        # Operands that kernels read where the caller has them are looked at there, others are read at each call.
        in_place = all(
            place >= 0 and _is_same_memory(given[place], tensor)
            for place, tensor in zip(places, reading.tensors.values(), strict=True)
        )
        self._operation = None if in_place else operation
        self._places = places if in_place else list(range(len(names)))
        self._setters = [self.set_address(name) for name in names]
        self._addresses = [0] * len(names)

    def __call__(self, *given: Any) -> Tensor:
        """Return the result, in stream order; PyTorch computes where an operand's address does not fit."""
        if not self._alone and _current() != self._index:
            with torch.cuda.device(self._index):
                return self(*given)
        operation, read, addresses = self._operation, given, self._addresses
        if operation is not None:  # copies are kept until the launch is queued
            read = tuple(operation.tensors(operation.check(operation.operands(*given))).values())
        try:
            c = self._empty() if self._out < 0 else given[self._out]
            of_c = c.data_ptr()
            for i, place in enumerate(self._places):
                at = read[place].data_ptr()
                if at != addresses[i]:
                    if at & MISALIGNED_BITS:
                        return self._otherwise(*given)
                    self._setters[i](at)
                    addresses[i] = at
        except RuntimeError:  # wrapped by a transform
            return self._otherwise(*given)
        if of_c & MISALIGNED_BITS:
            return self._otherwise(*given)
        self._set_c(of_c)
        stream = _stream(self._index)
        try:
            if self._workspaces is None:
                self._launch(stream)
            else:
                self._launch_with_workspace(self._workspaces, stream)
        except WorkspaceError:
            return self._otherwise(*given)
        return c

    def compiled(self, *given: Any) -> Any:
        """Return the call for compiled code; itself where operands are not read where the caller has them."""
        return self if self._operation else self._compile(self._names, self._places, given, self._out)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return bool(torch._C._is_alias_of(one, other)) and one.storage_offset() == other.storage_offset()


def prepare_layer(
    operands: DenseOperands, reading: Reading, otherwise: ReadyCall, kernel: LoadedKernel, device: ServingDevice
) -> ReadyCall:
    """Return a launch for the operands of `tritongemm.mm`, of which transposed views have the strides of these."""
    if any(are_transposed(operands.x, operands.w)):
        return OperandCall(DENSE, operands, reading, otherwise, kernel, device)
    return FastCall(kernel, device, *reading.result, otherwise)
