"""Loads tuned kernels on a device: those that the driver launches, and those that a library's host code launches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tritongemm.core.launch import HostLaunch, Launch, StridePlaces
from tritongemm.core.served_call import LaunchSteps, PatchedLaunch
from tritongemm.hip_ext.driver import driver, tensor_map
from tritongemm.hip_ext.driver.module import PreparedLaunch
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.hip_ext.launching import patched_launch


@dataclass(frozen=True)
class TunedKernel:
    """A tuned kernel on a device."""

    launch: Launch  # its launch on this device
    function: driver.Function  # the loaded code
    # Where the launch has the strides of operands, of a library's kernel that reads others than dense ones.
    strides: StridePlaces | None = None

    def bytes(self, buffer: str) -> int:
        """Return the bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return sum(b.bytes for b in self.launch.buffers if b.name == buffer)

    def prepare(self, device: driver.Device) -> PatchedLaunch:
        """Return a launch for one thread."""
        launch, offsets = self.launch, self.launch.offsets()
        makers = patched_launch.tensor_map_makers(device, launch)
        prepared = patched_launch.prepare_launch(self.function, launch, makers)
        slots: dict[str, list[tuple[int, int, int]]] = {}
        setters: dict[str, list[Callable[[int], None]]] = {}
        for index, param in enumerate(launch.params):
            name, inside = str(param.value), 0
            if param.kind == "tma":
                address_offset = tensor_map.find_address_offset(makers[index])
                if address_offset is None:
                    moving = tensor_map.MovingMap(device.api, makers[index](patched_launch.PLACEHOLDER_ADDRESS))
                    setters.setdefault(name, []).append(_map_mover(moving, prepared, offsets[index]))
                    continue
                inside = address_offset
            elif param.kind != "pointer" or not name or (name in slots and _is_missing_bias(launch, index)):
                continue
            slots.setdefault(name, []).append((0, offsets[index] + inside, 0))
        steps = LaunchSteps([prepared], slots)
        of_python = bool(setters or launch.zeroed)
        for name, write in patched_launch.address_writers(steps).items():
            setters.setdefault(name, []).append(write)
        start: Callable[[int], None] = prepared.launch
        if launch.zeroed:
            start = zeroed = patched_launch.ZeroedLaunch(device, launch.zeroed, prepared.launch)
            for buffer in launch.zeroed:
                setters.setdefault(buffer.name, []).append(partial(zeroed.set_address, buffer.name))
        writers = {name: patched_launch.call_all(each) for name, each in setters.items()}
        return PatchedLaunch(writers, start, None if of_python else steps)


def _is_missing_bias(launch: Launch, index: int) -> bool:
    """Return whether a parameter is the pointer to C before the workspace, which replaces a bias that is never read."""
    following = launch.params[index + 1 : index + 2]
    return launch.params[index].value == "c" and any(p.value == "workspace" for p in following)


def _map_mover(moving: tensor_map.MovingMap, prepared: PreparedLaunch, offset: int) -> Callable[[int], None]:
    """Return a function that lets the driver write an address into a tensor map."""
    return lambda address: prepared.set_bytes(offset, moving.move(address))


@dataclass(frozen=True)
class HostLaunchedKernel:
    """A tuned kernel that the host code of its own library launches."""

    launch: HostLaunch

    def bytes(self, buffer: str) -> int:
        """Return the bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return sum(b.bytes for b in self.launch.buffers if b.name == buffer)

    def prepare(self, device: driver.Device) -> PatchedLaunch:
        """Return a launch for one thread."""
        prepared = PreparedCall(self.launch, {})
        names = [str(p.value) for p in self.launch.params if p.kind == "pointer" and p.value != "stream"]
        return PatchedLaunch({name: prepared.setter(name) for name in names}, prepared.launch)
