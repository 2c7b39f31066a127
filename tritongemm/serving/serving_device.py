"""The GPU that calls are computed on, as PyTorch and its driver know it, and the memory that its kernels share."""

from dataclasses import dataclass

import torch

from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.launching.workspaces import WorkspacePool


@dataclass
class ServingDevice:
    """One GPU, whose index is as PyTorch counts; it has `workspaces` once a kernel needs a workspace or counters.

    The bandwidth of its memory is 0 where the driver does not say.
    """

    index: int
    torch_device: torch.device
    driver_device: driver.Device
    arch: str
    compute_units: int
    memory_gbps: int = 0
    workspaces: WorkspacePool | None = None

    def reserve_workspaces(self, workspace_bytes: int, counter_bytes: int) -> None:
        """Provide a pool that holds these bytes of each, and what it held before. Calls prepared before keep theirs.

        Raises:
            WorkspaceError: there is no memory for it.
        """
        held = self.workspaces
        if held is None or not held.holds(workspace_bytes, counter_bytes):
            if held is not None:  # kernels that are not called yet rely on it
                workspace_bytes = max(workspace_bytes, held.workspace_bytes)
                counter_bytes = max(counter_bytes, held.counter_bytes)
            self.workspaces = WorkspacePool(self.driver_device, workspace_bytes, counter_bytes)


def open_device(index: int, workspaces: WorkspacePool | None = None) -> ServingDevice:
    """Return a GPU of this machine, which becomes the driver's current one."""
    torch_device = torch.device("cuda", index)
    vendor = driver.find_vendor()
    assert vendor is not None, "PyTorch sees a GPU, its driver does not"
    torch.zeros(1, device=torch_device)  # starts PyTorch's context before the driver's is made current
    device = driver.open_driver(vendor).device(index)
    units, gbps = device.properties["compute_units"], device.properties["memory_gbps"]
    return ServingDevice(index, torch_device, device, device.arch, units, gbps, workspaces)
