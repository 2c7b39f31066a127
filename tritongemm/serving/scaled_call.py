"""One loaded kernel, prepared to be called again and again from one thread with the operands of `scaled_mm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritongemm.core.errors import WorkspaceError
from tritongemm.serving.fast_call import MISALIGNED_BITS, PatchedCall

if TYPE_CHECKING:
    from tritongemm.core.serving import LoadedKernel
    from tritongemm.serving.serving_device import ServingDevice


class ScaledCall(PatchedCall):
    """A launch for the operands of `tritongemm.scaled_mm`; belongs to one thread.

    Strides of b and of the scale factors are those of the call that it was made for.

    Args:
        kernel: the loaded kernel.
        device: the GPU that it is loaded on.
        shape: of the result.
        dtype: of the result.
        otherwise: computes the calls whose operands the kernel can't take.
    """

    __slots__ = ("_last_scales", "_otherwise", "_set_scale_a", "_set_scale_b")

    def __init__(
        self,
        kernel: LoadedKernel,
        device: ServingDevice,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        otherwise: Callable[..., Tensor],
    ) -> None:
        super().__init__(kernel, device, shape, dtype)
        self._otherwise = otherwise
        self._set_scale_a, self._set_scale_b = map(self.set_address, ("scale_a", "scale_b"))
        self._last_scales = [0, 0]

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """The result in new memory, in order of the current stream; PyTorch computes where an operand does not fit."""
        try:
            of_a, of_b, of_scale_a, of_scale_b = a.data_ptr(), b.data_ptr(), scale_a.data_ptr(), scale_b.data_ptr()
            of_bias = 0 if bias is None else bias.data_ptr()
        except RuntimeError:  # wrapped by a transform
            return self._otherwise(a, b, scale_a, scale_b, bias, out_dtype)
        index = self._index
        if (
            (of_a | of_b | of_scale_a | of_scale_b | of_bias) & MISALIGNED_BITS
            or not a.is_contiguous()
            or not b.get_device() == scale_a.get_device() == scale_b.get_device() == index
            or (bias is not None and not (bias.is_contiguous() and bias.get_device() == index))
        ):
            return self._otherwise(a, b, scale_a, scale_b, bias, out_dtype)
        if not self._alone and torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self(a, b, scale_a, scale_b, bias, out_dtype)
        c = self._empty()
        last = self._last_scales
        if of_scale_a != last[0]:
            self._set_scale_a(of_scale_a)
            last[0] = of_scale_a
        if of_scale_b != last[1]:
            self._set_scale_b(of_scale_b)
            last[1] = of_scale_b
        try:
            self.start(of_a, of_b, c.data_ptr(), of_bias)
        except WorkspaceError:
            return self._otherwise(a, b, scale_a, scale_b, bias, out_dtype)
        return c
