"""A winner loaded on a device: a kernel of ours, a library's algorithm, or what a library's own host code starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritongemm.bound import Bound
from tritongemm.hip_ext import driver, serving
from tritongemm.hip_ext.shared_object import PreparedCall
from tritongemm.launch import HostCall, Launch
from tritongemm.record import Record

if TYPE_CHECKING:
    from tritongemm.backends._blaslt_served import Solution

_PLACE = 1 << 20  # any aligned address: a tensor map is moved before it is used


@dataclass(frozen=True)
class Kernel:
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

    def bind(self, device: driver.Device) -> Bound:
        """A launch for one thread."""
        launch = self.launch
        maps: dict[int, serving.MovingMap] = {}
        for index, p in enumerate(launch.params):
            if p.kind == "tma":
                data = device.tensor_map(_PLACE, p.elem_type, p.elem_size, p.shape, p.stride, p.box, p.swizzle)
                maps[index] = serving.MovingMap(device.api, data)
        offsets = launch.offsets()
        packed = launch.pack({}, {i: bytes(m.data) for i, m in maps.items()})
        prepared = self.function.prepare(
            launch.grid, launch.block, launch.shared, packed, launch.cluster, offsets if maps else (), launch.overlap
        )

        def place(index: int) -> Callable[[int], None]:
            offset = offsets[index]
            if index in maps:
                move, put_bytes = maps[index].move, prepared.set_bytes
                return lambda address: put_bytes(offset, move(address))  # type: ignore[arg-type]
            put = prepared.set_pointer
            return lambda address: put(offset, address)

        places: dict[str, list[Callable[[int], None]]] = {}
        for index, p in enumerate(launch.params):
            # A missing bias stands as a second pointer to C that the kernel never reads.
            if p.kind == "tma" or (p.kind == "pointer" and p.value and not (p.value == "c" and "c" in places)):
                places.setdefault(str(p.value), []).append(place(index))
        return Bound({name: _all(puts) for name, puts in places.items()}, prepared.launch)


def _all(puts: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
    """What gives an address to all who want it."""
    if len(puts) == 1:
        return puts[0]

    def put(address: int) -> None:
        for each in puts:
            each(address)

    return put


@dataclass(frozen=True)
class Library:
    """A library's algorithm that won, on a device.

    Attributes:
        record: the result that chose it.
        solution: the algorithm in the library that is here.
    """

    record: Record
    solution: Solution

    def bytes(self, buffer: str) -> int:
        """Bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return self.solution.bytes(buffer)

    def bind(self, device: driver.Device) -> Bound:
        """A launch for one thread."""
        return self.solution.bind(device)


@dataclass(frozen=True)
class Hosted:
    """A tuned kernel that the host code of its own library starts.

    Attributes:
        record: the result that chose it.
        call: what starts it.
    """

    record: Record
    call: HostCall

    def bytes(self, buffer: str) -> int:
        """Bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return sum(b.bytes for b in self.call.buffers if b.name == buffer)

    def bind(self, device: driver.Device) -> Bound:
        """A launch for one thread."""
        prepared = PreparedCall(self.call, {})
        names = [str(p.value) for p in self.call.params if p.kind == "pointer" and p.value != "stream"]
        return Bound({name: prepared.setter(name) for name in names}, prepared.launch)


Loaded = Kernel | Library | Hosted
