"""The tuned kernel of a grouped product: which record serves a call, and its launch on any addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.serving import LoadedKernel
from tritongemm.core.support import Support

if TYPE_CHECKING:
    from tritongemm.serving.device_kernels import DeviceKernels
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


def find_kernel(device: DeviceKernels, problem: Problem) -> tuple[LoadedKernel, Record] | Support:
    """The kernel that serves a problem, whatever its groups' rows are, or why there is none.

    Of the records of the same product the one of the next larger M counts, else that of the largest.
    Kernels are right for every M and every spread.
    """
    rows = device.records.list_rows(device.device.arch, device.device.compute_units)
    record = find_record((row.record for row in rows), problem)
    if record is None:
        return Support(f"{problem.key} was never tuned for {device.device.arch}, at any M")
    binder = device.binders.get((record.problem, record.m_from))
    if binder is None:
        found = device.loaded_for(record)
        return (
            found if isinstance(found, Support) else Support(f"{record.problem.key}: PyTorch's own product won there")
        )
    kernel = binder(_size(problem))
    return kernel if isinstance(kernel, Support) else (kernel, record)


def find_record(records: Iterable[Record], problem: Problem) -> Record | None:
    """The record that serves a grouped problem: of the same product that of the next larger M, else of the largest."""
    same = [record for record in records if _product(record.problem) == _product(problem)]
    size = _size(problem)
    above = [record for record in same if _size(record.problem) >= size]
    return min(above or same, key=lambda record: abs(_size(record.problem) - size), default=None)


def _size(problem: Problem) -> int:
    """Rows by which kernels differ: of all groups, or those that each has room for."""
    return problem.room or problem.m


def _product(problem: Problem) -> Problem:
    """What records of one product agree in."""
    if problem.groups == 1:
        return problem
    return replace(problem, m=1, spread="uniform", counts=(), room=1 if problem.room else 0)
