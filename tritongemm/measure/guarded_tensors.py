"""Copies tensors to memory that ends where nothing may be read, so that a kernel which reaches beyond one faults."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

from tritongemm.core.integers import round_up

if TYPE_CHECKING:
    from torch import Tensor

_NO_ACCESS = 0  # PROT_NONE of mprotect(2), which the module mmap has no name for


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU tensor, of the same strides, whose last byte is the last one that can be read or written.

    A kernel that reaches beyond it ends its process with SIGSEGV instead of finding whatever else is there, as it
    would by chance on a GPU.

    Raises:
        OSError: the system refuses to protect a page.
    """
    return copy_to(tensor, _guarded_bytes)


def copy_to(tensor: Tensor, allocate: Callable[[int], Tensor]) -> Tensor:
    """Return a copy of a tensor, of the same strides, in just as many bytes as these take.

    Args:
        tensor: what is copied; one without elements is returned as it is.
        allocate: returns that many bytes of memory, as uint8.
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
