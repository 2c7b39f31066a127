"""A winner loaded on a device: a kernel of ours, a library's algorithm, or what a library's own host code starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.record import Record
from tritongemm.hip_ext.driver import driver, tensor_map
from tritongemm.hip_ext.driver.module import PreparedLaunch
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.runtime.launch_preparation import PLACEHOLDER_ADDRESS, prepare_launch, tensor_map_makers
from tritongemm.runtime.patched_launch import PatchedLaunch, in_order, patching, words

if TYPE_CHECKING:
    from tritongemm.backends.blaslt.served_algorithm import ServedAlgorithm


@dataclass(frozen=True)
class TunedKernel:
    """A tuned kernel on a device.

    Attributes:
        record: the result that chose it.
        launch: its launch on this device.
        function: the loaded code.
    """

    record: Record
    launch: Launch
    function: driver.Function

    def bytes(self, buffer: str) -> int:
        """Bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return sum(b.bytes for b in self.launch.buffers if b.name == buffer)

    def bind(self, device: driver.Device) -> PatchedLaunch:
        """A launch for one thread."""
        launch, offsets = self.launch, self.launch.offsets()
        makers = tensor_map_makers(device, launch)
        prepared = prepare_launch(self.function, launch, makers)
        block = words(prepared.params)
        places: dict[str, list[tuple[memoryview, int, int]]] = {}
        puts: dict[str, list[Callable[[int], None]]] = {}
        for index, p in enumerate(launch.params):
            name, inside = str(p.value), 0
            if p.kind == "tma":
                found = tensor_map.place(makers[index])
                if found is None:
                    moving = tensor_map.MovingMap(device.api, makers[index](PLACEHOLDER_ADDRESS))
                    puts.setdefault(name, []).append(_mover(moving, prepared, offsets[index]))
                    continue
                inside = found
            # A missing bias stands as a second pointer to C that the kernel never reads.
            elif p.kind != "pointer" or not name or (name == "c" and "c" in places):
                continue
            places.setdefault(name, []).append((block, offsets[index] + inside, 0))
        for name, at in places.items():
            puts.setdefault(name, []).append(patching(at))
        return PatchedLaunch({name: in_order(each) for name, each in puts.items()}, prepared.launch)


def _mover(moving: tensor_map.MovingMap, prepared: PreparedLaunch, offset: int) -> Callable[[int], None]:
    """What has the driver write an address into a tensor map."""
    return lambda address: prepared.set_bytes(offset, moving.move(address))


@dataclass(frozen=True)
class LibraryKernel:
    """A library's algorithm that won, on a device.

    Attributes:
        record: the result that chose it.
        solution: the algorithm in the library that is here.
    """

    record: Record
    solution: ServedAlgorithm

    def bytes(self, buffer: str) -> int:
        """Bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return self.solution.bytes(buffer)

    def bind(self, device: driver.Device) -> PatchedLaunch:
        """A launch for one thread."""
        return self.solution.bind(device)


@dataclass(frozen=True)
class HostLaunchedKernel:
    """A tuned kernel that the host code of its own library starts.

    Attributes:
        record: the result that chose it.
        call: what starts it.
    """

    record: Record
    call: HostLaunch

    def bytes(self, buffer: str) -> int:
        """Bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return sum(b.bytes for b in self.call.buffers if b.name == buffer)

    def bind(self, device: driver.Device) -> PatchedLaunch:
        """A launch for one thread."""
        prepared = PreparedCall(self.call, {})
        names = [str(p.value) for p in self.call.params if p.kind == "pointer" and p.value != "stream"]
        return PatchedLaunch({name: prepared.setter(name) for name in names}, prepared.launch)


Loaded = TunedKernel | LibraryKernel | HostLaunchedKernel
