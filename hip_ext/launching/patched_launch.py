"""Prepares launches: encodes tensor maps, packs parameters, and writes addresses into the block between launches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from tritongemm.core.launch import Buffer, Launch, Param
from tritongemm.core.served_call import LaunchSteps
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.module import PreparedLaunch

WORD_BYTES = 8  # of an address


def as_words(block: bytearray) -> memoryview:
    """Return a parameter block as words of 8 bytes, the fastest form to write an address to many places."""
    return memoryview(block)[: len(block) // WORD_BYTES * WORD_BYTES].cast("Q")


def address_writers(launch: LaunchSteps) -> dict[str, Callable[[int], None]]:
    """Return by operand a function that writes an address to all its places, whose offsets are multiples of 8."""
    blocks = [as_words(step.params) for step in launch.steps]
    return {name: _writer([(blocks[i], at, more) for i, at, more in found]) for name, found in launch.slots.items()}


def _writer(slots: Sequence[tuple[memoryview, int, int]]) -> Callable[[int], None]:
    indexed = [(block, offset // WORD_BYTES, distance) for block, offset, distance in slots]

    def write(address: int) -> None:
        for block, index, distance in indexed:
            block[index] = address + distance

    return write


def call_all(functions: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
    """Return a function that calls all of these with its own argument, one after the other."""
    if len(functions) == 1:
        return functions[0]

    def call(argument: int) -> None:
        for function in functions:
            function(argument)

    return call


class MemoryFiller(Protocol):
    """Fills device memory, e.g. the driver's device."""

    def memset(self, address: int, byte: int, nbytes: int, stream: int = 0) -> None:
        """Fill with one byte value, in stream order."""


class ZeroedLaunch:
    """Fills and a launch on one stream, which may be captured together; belongs to one thread."""

    def __init__(self, device: MemoryFiller, buffers: Sequence[Buffer], launch: Callable[[int], object]) -> None:
        self._device, self._buffers, self._launch = device, tuple(buffers), launch
        self._addresses = dict.fromkeys((buffer.name for buffer in buffers), 0)

    def set_address(self, name: str, address: int) -> None:
        """Set the address of a buffer."""
        self._addresses[name] = address

    def __call__(self, stream: int) -> None:
        """Queue the fills and then the kernel on the stream of a handle."""
        for buffer in self._buffers:
            self._device.memset(self._addresses[buffer.name], 0, buffer.bytes, stream)
        self._launch(stream)


PLACEHOLDER_ADDRESS = 1 << 20  # a tensor map needs an aligned address until it gets its own

TensorMapMaker: TypeAlias = Callable[[int], bytes]  # the tensor map of a matrix at an address


def tensor_map_makers(device: driver.Device, launch: Launch) -> dict[int, TensorMapMaker]:
    """Return the maker of each tensor map among a launch's parameters, by the index of the parameter."""
    return {index: _maker(device, param) for index, param in enumerate(launch.params) if param.kind == "tma"}


def _maker(device: driver.Device, p: Param) -> TensorMapMaker:
    return lambda address: device.tensor_map(address, p.elem_type, p.elem_size, p.shape, p.stride, p.box, p.swizzle)


def prepare_launch(
    function: driver.Function,
    launch: Launch,
    makers: Mapping[int, TensorMapMaker],
    addresses: Mapping[str, int] | None = None,
) -> PreparedLaunch:
    """Return a launch, whose `tensor_map_makers` are given, with everything but the stream fixed.

    Without `addresses` these are written into the parameters later: until then pointers are null and tensor maps are at
    `PLACEHOLDER_ADDRESS`, and where there are such maps the driver gets the offset of each parameter.
    """
    if addresses is None:
        packed = launch.pack({}, {index: make(PLACEHOLDER_ADDRESS) for index, make in makers.items()})
        offsets = tuple(launch.offsets()) if makers else ()
    else:
        maps = {index: make(addresses[str(launch.params[index].value)]) for index, make in makers.items()}
        packed, offsets = launch.pack(addresses, maps), ()
    return function.prepare(launch.grid, launch.block, launch.shared, packed, launch.cluster, offsets, launch.overlap)
