"""Copies operands to device memory that ends where nothing is mapped.

A kernel that reads or writes beyond an operand faults there. Elsewhere it would find another tensor, its result may be
right all the same, and it faults by chance once it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.core.launch import Buffer
from tritongemm.core.operands import Operands
from tritongemm.hip_ext.driver import driver
from tritongemm.measure.guarded_tensors import copy_to

if TYPE_CHECKING:
    from torch import Tensor

MOST_OF_FREE = 0.25  # of the device's free memory, which references and libraries need too


class GuardedOperands:
    """The operands of one product, and the buffers of the launch that was prepared last.

    Args:
        operands: copied.
        device: the driver's device that holds them.

    Attributes:
        tensors: the copies by name.

    Raises:
        DriverError: there is too little memory, or the device maps none by pages.
        UnavailableError: the driver has no such calls.
    """

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
