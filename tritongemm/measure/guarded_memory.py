"""Memory that ends where nothing may be read, so that a kernel which reaches beyond an operand faults."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_NO_ACCESS = 0  # PROT_NONE of mprotect(2), which the module mmap has no name for


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU tensor, of the same strides, whose last byte is the last one that can be read or written.

    A kernel that reaches beyond it ends its process with SIGSEGV instead of finding whatever else lies there, as it
    would by chance on a GPU.

    Raises:
        OSError: the system refuses to protect a page.
    """
    import torch

    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = elements * tensor.element_size() if tensor.numel() else 0
    inside = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, inside + mmap.PAGESIZE)  # lives as long as the tensor, which keeps hold of it
    every = torch.frombuffer(pages, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(every.data_ptr() + inside), ctypes.c_size_t(mmap.PAGESIZE), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = every[inside - size : inside].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor)
