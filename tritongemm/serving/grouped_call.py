"""One loaded kernel, prepared to be called again and again from one thread with the operands of `grouped_mm`."""

from __future__ import annotations

import torch
from torch import Tensor

from tritongemm.core.errors import WorkspaceError
from tritongemm.operations.checks import wants_gradient
from tritongemm.operations.grouped import GroupedOperands, as_kernels_read, grouped
from tritongemm.serving.fast_call import MISALIGNED_BITS, PatchedCall


class GroupedCall(PatchedCall):
    """A launch for the operands of `tritongemm.grouped_mm`; belongs to one thread."""

    __slots__ = ()

    def __call__(self, operands: GroupedOperands) -> Tensor:
        """The result in new memory, in order of the current stream; PyTorch computes where an operand does not fit."""
        if not self._alone and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(operands)
        tensors = as_kernels_read(operands)  # some may be copies, which are kept until the launch is queued
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        if any(at & MISALIGNED_BITS for at in addresses.values()) or wants_gradient(*operands.tensors.values()):
            return grouped(operands)
        c = self._empty()
        addresses["c"] = c.data_ptr()
        try:
            self.start_on(addresses)
        except WorkspaceError:
            return grouped(operands)
        return c
