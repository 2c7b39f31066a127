"""A winner loaded on a device: a kernel of ours, a library's algorithm, or what a library's own host code starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritongemm.core.launch import HostLaunch, Launch, Param
from tritongemm.core.record import Record
from tritongemm.hip_ext.driver import driver, tensor_map
from tritongemm.hip_ext.driver.module import PreparedLaunch
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.runtime.patched_launch import PatchedLaunch, in_order, patching, words

if TYPE_CHECKING:
    from tritongemm.backends.blaslt.served_algorithm import ServedAlgorithm

_PLACE = 1 << 20  # any aligned address: a tensor map is moved before it is used


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
        makers = {i: _maker(device, p) for i, p in enumerate(launch.params) if p.kind == "tma"}
        packed = launch.pack({}, {i: made(_PLACE) for i, made in makers.items()})
        prepared = self.function.prepare(
            launch.grid, launch.block, launch.shared, packed, launch.cluster, offsets if makers else (), launch.overlap
        )
        block = words(prepared.params)
        places: dict[str, list[tuple[memoryview, int, int]]] = {}
        puts: dict[str, list[Callable[[int], None]]] = {}
        for index, p in enumerate(launch.params):
            name, inside = str(p.value), 0
            if p.kind == "tma":
                found = tensor_map.place(makers[index])
                if found is None:
                    moving = tensor_map.MovingMap(device.api, makers[index](_PLACE))
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


def _maker(device: driver.Device, p: Param) -> Callable[[int], bytes]:
    """A tensor map for a matrix at any address."""
    return lambda at: device.tensor_map(at, p.elem_type, p.elem_size, p.shape, p.stride, p.box, p.swizzle)


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
