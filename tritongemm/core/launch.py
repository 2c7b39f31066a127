"""The classes `Launch` and `HostLaunch`, which describe one kernel launch as plain data.

The driver, the launch plan and the dispatcher all start a kernel from the same numbers.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.integers import round_up
from tritongemm.core.support import Support
from tritongemm.core.target import Target

_PACK = {"pointer": ("Q", 8), "i32": ("i", 4), "u32": ("I", 4), "i64": ("q", 8), "f32": ("f", 4)}
_RANGES = {"i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1), "i64": (-(2**63), 2**63 - 1)}  # what each can hold
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # of one launch along x, y and z, by any driver


@dataclass(frozen=True)
class Param:
    """One kernel parameter."""

    kind: str  # `pointer`, `i32`, `u32`, `i64`, `f32`, `tma` (a 128-byte tensor map) or `pad`
    # Buffer name for a pointer or tensor map ("" is a null pointer), the number otherwise, bytes for `pad`.
    value: str | int | float = 0
    box: tuple[int, int] = (0, 0)  # `tma`: (rows, columns) of the block a program copies
    shape: tuple[int, int] = (0, 0)  # `tma`: (rows, columns) of the matrix
    stride: int = 0  # `tma`: elements between rows
    # elem_type, elem_size, swizzle: `tma`: codes as the compiler reports them
    elem_type: int = 0
    elem_size: int = 0
    swizzle: int = 0

    def __post_init__(self) -> None:
        """Refuse a number that its type can't hold. Raises InputError: names the number and the type."""
        if self.kind in _RANGES:
            low, high = _RANGES[self.kind]
            if not low <= int(self.value) <= high:
                raise InputError(f"a parameter of type {self.kind} can't be {self.value}: it holds {low} to {high}")

    @property
    def size(self) -> int:
        """Bytes in the parameter block."""
        if self.kind == "tma":
            return 128
        return int(self.value) if self.kind == "pad" else _PACK[self.kind][1]

    @property
    def alignment(self) -> int:
        """Bytes that its offset in the parameter block is a multiple of."""
        return {"tma": 64, "pad": 1}.get(self.kind, self.size)


@dataclass(frozen=True)
class Buffer:
    """Memory a launch needs."""

    # `a`, `b`, `c`, `bias`, `workspace` (any contents) or `semaphore` (zero before the first launch; every launch
    # leaves it zero).
    name: str
    bytes: int  # size

    @property
    def fill(self) -> int:
        """The byte to fill it with before the first launch: zero for counters, else that of a NaN, which shows."""
        return 0 if self.name == "semaphore" else 0xFF


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    path: str  # code object
    symbol: str  # kernel in it
    grid: tuple[int, int, int]  # programs along x, y, z
    block: tuple[int, int, int]  # threads along x, y, z
    shared: int  # dynamic LDS / shared memory in bytes
    params: tuple[Param, ...]  # kernel parameters in order
    buffers: tuple[Buffer, ...]  # memory the parameters point to
    cluster: int = 1  # programs of one cluster (Hopper and later)
    # Byte offset of each parameter as the binary says; empty for natural alignment. (A tensor map is aligned in the
    # constant bank, not in the parameter block.)
    at: tuple[int, ...] = ()
    # Programmatic dependent launch: the kernel itself waits for the launch before it, and may be started while that one
    # still runs.
    overlap: bool = False
    # Memory that is set to zero before each launch, on the same stream; the kernel adds into it.
    zeroed: tuple[Buffer, ...] = ()
    sha256: str = ""  # of the code object; "" if it is not known

    def read_code(self) -> bytes:
        """Return the code object, as it was compiled; an InputError if the file's content has changed since."""
        code = Path(self.path).read_bytes()
        if self.sha256 and sha256(code).hexdigest() != self.sha256:
            raise InputError(f"{self.path} is not the file that was compiled; delete it, and it is compiled again")
        return code

    def offsets(self) -> list[int]:
        """Return the byte offset of each parameter."""
        if self.at:
            return list(self.at)
        offsets, end = [], 0
        for param in self.params:
            end = round_up(end, param.alignment)
            offsets.append(end)
            end += param.size
        return offsets

    def fault(self, target: Target) -> str:
        """Return why a GPU can't start it: too many workgroups, threads or bytes of shared memory; "" if it can."""
        if self.shared > target.lds_bytes:
            return f"{self.shared} bytes of shared memory, of which a workgroup has {target.lds_bytes}"
        return shape_fault(self.grid, self.block, target)

    def pack(self, addresses: Mapping[str, int], tensor_maps: Mapping[int, bytes] | None = None) -> bytes:
        """Return the bytes of the parameter block.

        `addresses` are of buffers by name; a missing one is null. `tensor_maps` are 128 bytes for each ``tma``
        parameter by its index.
        """
        block = bytearray()
        for index, (param, offset) in enumerate(zip(self.params, self.offsets(), strict=True)):
            block += bytes(offset - len(block))
            if param.kind == "tma":
                block += (tensor_maps or {})[index]
            elif param.kind == "pad":
                block += bytes(param.size)
            elif param.kind == "pointer":
                block += struct.pack("<Q", addresses.get(str(param.value), 0))
            else:
                block += struct.pack("<" + _PACK[param.kind][0], param.value)
        return bytes(block)


def shape_fault(grid: tuple[int, int, int], block: tuple[int, int, int], target: Target) -> str:
    """Return why a GPU can't start a grid of workgroups with this many threads; "" if it can."""
    for axis, count, most in zip("xyz", grid, MOST_PROGRAMS, strict=True):
        if not 1 <= count <= most:
            return f"{count} workgroups along {axis}, of which a launch has 1 to {most}"
    threads = prod(block)
    if not 1 <= threads <= target.max_threads:
        return f"{threads} threads in a workgroup, which has 1 to {target.max_threads}"
    along_x = grid[0] * block[0]
    if target.launch_threads and along_x > target.launch_threads:
        return f"{along_x} threads along x, of which a launch has at most {target.launch_threads}"
    return ""


@dataclass(frozen=True)
class HostLaunch:
    """A call of a C function that queues kernels on a stream: ``int symbol(params…)``.

    It returns 0 if it queued them, a negative number if it refuses, and else the GPU runtime's error code.

    The call may be captured into a graph: it neither waits nor allocates. ``const char* message(int)`` in the same
    library explains what it returns instead of 0.
    """

    path: str  # shared library
    sha256: str  # of that library, which is loaded only while it has this content
    symbol: str  # the function
    params: tuple[Param, ...]  # its parameters in order; the pointer called `stream` is the stream's handle
    buffers: tuple[Buffer, ...]  # memory the parameters point to
    runtime: str = ""  # library whose symbols it needs loaded before it, "" for none


@dataclass(frozen=True)
class StridePlaces:
    """The parameters of a launch that are strides."""

    most_lead: int  # the most elements from one stored row of an operand to the next
    # By `stride_` or `batch_` and an operand's name, the index of the parameter that says how far its rows, or its
    # products, are apart, and what that was compiled to be a multiple of.
    places: Mapping[str, tuple[int, int]]

    def move(self, launch: Launch, strides: Mapping[str, tuple[int, int]]) -> Launch | Support:
        """Return the launch on operands with other strides, or why its binary can't read them.

        `strides` are elements from one stored row to the next and from one product to the next.
        """
        params = list(launch.params)
        for operand, (lead, apart) in strides.items():
            if lead > self.most_lead:
                return Support(f"rows of {operand} {lead} elements apart are beyond the 32 bits of offsets in a tile")
            for name, value in ((f"stride_{operand}", lead), (f"batch_{operand}", apart)):
                if name not in self.places:
                    continue
                index, divisor = self.places[name]
                if value % divisor:
                    return Support(f"{name} of {value} is no multiple of {divisor}, as the kernel was compiled for")
                params[index] = replace(params[index], value=value)
        return replace(launch, params=tuple(params))
