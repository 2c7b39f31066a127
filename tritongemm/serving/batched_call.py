"""One loaded kernel, prepared to be called again and again from one thread with the operands of `bmm`."""

from __future__ import annotations

import torch
from torch import Tensor

from tritongemm.core.errors import WorkspaceError
from tritongemm.operations.batched import BatchOperands, check_shapes, torch_bmm
from tritongemm.serving.fast_call import MISALIGNED_BITS, PatchedCall


class BatchedCall(PatchedCall):
    """A launch for the operands of `tritongemm.bmm`, whose strides are those of the call that it was made for.

    It belongs to one thread.
    """

    __slots__ = ()

    def __call__(self, operands: BatchOperands) -> Tensor:
        """The result, in order of the current stream; PyTorch computes where an operand's address does not fit.

        Args:
            operands: as `check_shapes` leaves them, or as they came where that copies none.
        """
        a, b, bias, _, scale_a, scale_b, _, out = operands
        c = self._empty() if out is None else out
        of_a, of_b, of_c = a.data_ptr(), b.data_ptr(), c.data_ptr()
        of_bias = 0 if bias is None else bias.data_ptr()
        if (of_a | of_b | of_c | of_bias) & MISALIGNED_BITS:
            return torch_bmm(check_shapes(operands))
        if not self._alone and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self(operands)
        try:
            if scale_a is None or scale_b is None:
                self.start(of_a, of_b, of_c, of_bias)
            else:
                scales = {"scale_a": scale_a.data_ptr(), "scale_b": scale_b.data_ptr()}
                if (scales["scale_a"] | scales["scale_b"]) & MISALIGNED_BITS:
                    return torch_bmm(check_shapes(operands))
                self.start_on({"a": of_a, "b": of_b, "c": of_c, "bias": of_bias} | scales)
        except WorkspaceError:
            return torch_bmm(check_shapes(operands))
        return c
