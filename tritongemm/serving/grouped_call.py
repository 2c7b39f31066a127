"""The launch of a grouped product's tuned kernel on any addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritongemm.core.serving import LoadedKernel

if TYPE_CHECKING:
    from tritongemm.serving.serving_device import ServingDevice

MISALIGNED_BITS = 15  # The compiler takes addresses to be multiples of 16 bytes.


class GroupedCall:
    """A launch of a grouped product; belongs to one thread.

    Args:
        kernel: the loaded kernel; its programs share no memory.
        device: the GPU that it is loaded on.
        shape: of the result.
        dtype: of the result.
    """

    def __init__(self, kernel: LoadedKernel, device: ServingDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device.torch_device
        with torch.cuda.device(device.index):
            device.driver_device.make_current()
            self._prepared = kernel.prepare(device.driver_device)

    def __call__(self, operands: Mapping[str, Tensor]) -> Tensor:
        """The result in new memory, in order of the current stream.

        Args:
            operands: by the names of the problem's, on the device, at multiples of 16 bytes.
        """
        with torch.cuda.device(self._device):
            c = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self.start({name: tensor.data_ptr() for name, tensor in operands.items()} | {"c": c.data_ptr()})
        return c

    def start(self, addresses: Mapping[str, int]) -> None:
        """Launch on these addresses, on the current stream of the device, which must be the current one."""
        for name, address in addresses.items():
            self._prepared.set_address(name)(address)
        self._prepared.launch(torch.cuda.current_stream(self._device).cuda_stream)
