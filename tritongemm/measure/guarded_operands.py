"""Copies operands to memory that ends where nothing is mapped, of a device or of this process.

A kernel that reads or writes beyond an operand faults there. Elsewhere it would find another tensor, its result may be
right all the same, and it faults by chance once it serves.
"""

import ctypes
import mmap
from collections.abc import Callable, Sequence

from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.core.integers import round_up
from tritongemm.core.launch import Buffer
from tritongemm.core.operands import Operands, Tensor
from tritongemm.hip_ext.driver import driver

_NO_ACCESS = 0  # PROT_NONE of mprotect(2), which the module mmap has no name for


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU tensor, of the same strides, whose last byte is the last one that can be read or written.

    A kernel that reaches beyond it ends its process with SIGSEGV instead of finding whatever else is there.
    """
    return copy_to(tensor, _guarded_bytes)


def copy_to(tensor: Tensor, allocate: Callable[[int], Tensor]) -> Tensor:
    """Return a copy of a tensor, of the same strides, in just as many bytes as these take.

    One without elements is returned as it is; `allocate` returns that many bytes of memory, as uint8.
    """
    if not tensor.numel():
        return tensor
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    room = allocate(elements * tensor.element_size()).view(tensor.dtype)
    # One after the other, as elements may share a place.
    return room.copy_(tensor.as_strided((elements,), (1,))).as_strided(tensor.shape, tensor.stride())


def _guarded_bytes(count: int) -> Tensor:
    import torch

    inside = round_up(count, mmap.PAGESIZE)
    pages = mmap.mmap(-1, inside + mmap.PAGESIZE)  # lives as long as the tensor, which references it
    every = torch.frombuffer(pages, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(every.data_ptr() + inside), ctypes.c_size_t(mmap.PAGESIZE), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    return every[inside - count : inside]


MOST_OF_FREE = 0.25  # of the device's free memory, which references and libraries need too


class GuardedOperands:
    """Copies of the operands of one product, and the buffers of the launch that was prepared last."""

    def __init__(self, operands: Operands, device: driver.Device) -> None:
        self._device = device
        self._buffers: Operands = {}
        self.tensors = {name: copy_to(tensor, self._bytes) for name, tensor in operands.items()}

    def addresses(self, buffers: Sequence[Buffer]) -> dict[str, int]:
        """Return the addresses of the operands and of new buffers for a launch; none if there is too little memory.

        Buffers of the launch before are given back, which must be done by now.
        """
        self._buffers.clear()
        try:
            for buffer in buffers:
                self._buffers[buffer.name] = self._bytes(buffer.bytes).fill_(buffer.fill)
        except DriverError:
            return {}
        return {name: tensor.data_ptr() for name, tensor in (self.tensors | self._buffers).items()}

    def _bytes(self, count: int) -> Tensor:
        """Return memory whose last byte is the last one that is mapped there."""
        import torch

        return torch.as_tensor(self._device.guarded_memory(max(1, count)), device=f"cuda:{self._device.index}")


def copy_guarded(operands: Operands, device: driver.Device) -> GuardedOperands | None:
    """Return copies of operands in guarded memory; None where that is unavailable, or needs much memory."""
    if sum(t.numel() * t.element_size() for t in operands.values()) > MOST_OF_FREE * device.memory()[0]:
        return None
    try:
        return GuardedOperands(operands, device)
    except (DriverError, UnavailableError, RuntimeError):  # the last of a PyTorch that accepts no foreign memory
        return None
