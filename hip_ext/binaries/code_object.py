"""Reads what a kernel needs from its binary, a cubin or hsaco, and fills the hidden arguments of an hsaco's kernel."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgpack

from tritongemm.core.errors import InputError
from tritongemm.hip_ext.binaries.elf import Elf

_EM_AMDGPU, _EM_CUDA = 224, 190
_NT_AMDGPU_METADATA = 32

# processor numbers in e_flags, for objects whose metadata names no target
_AMD_MACHINES = {0x30: "gfx908", 0x3F: "gfx90a", 0x40: "gfx940", 0x4B: "gfx941", 0x4C: "gfx942", 0x4F: "gfx950"}

_AMD_KINDS = {"global_buffer": "pointer", "dynamic_shared_pointer": "pointer", "by_value": "value"}

# EIATTR numbers and the width of the four entry formats
_MAX_THREADS, _REQUIRED_THREADS, _FRAME, _STACK, _PARAMETER, _PARAMETER_BYTES, _REGISTERS = 5, 16, 17, 18, 23, 25, 47
_HALF, _SIZED = 3, 4
_RESERVED_SHARED = 1024  # the system's own share of each block, which sm_90 and later count in the kernel's section
_WARP, _MOST_THREADS = 32, 1024


class Argument(NamedTuple):
    """A kernel parameter."""

    offset: int  # of its first byte in the parameter block
    size: int  # in bytes
    kind: str  # `pointer`, `value`, one of AMD's `hidden_…`, or "" where the binary does not say


@dataclass(frozen=True)
class KernelInfo:
    """What a code object states of one of its kernels."""

    symbol: str  # name to look it up by
    registers: int  # vector registers a thread uses (AMD: VGPRs including AGPRs)
    spills: int  # bytes of scratch (AMD) or local memory (NVIDIA) a thread uses
    shared: int  # bytes of static LDS / shared memory, beside what a launch adds
    wave_size: int  # threads of a wave or warp
    kernarg_bytes: int  # size of the parameter block
    max_threads: int  # most threads of a block
    args: tuple[Argument, ...] = ()  # parameters by offset; empty where the binary does not list them

    @property
    def explicit_args(self) -> tuple[Argument, ...]:
        """The parameters that a caller passes, by offset; AMD's driver adds the hidden ones behind them."""
        return tuple(a for a in self.args if not a.kind.startswith("hidden_"))

    @property
    def explicit_bytes(self) -> int:
        """The number of bytes of the parameters that a caller passes."""
        return max((a.offset + a.size for a in self.explicit_args), default=0)


def read(code: bytes) -> list[KernelInfo]:
    """Return the kernels of a cubin or hsaco, in the order of the file; an InputError where there are none."""
    elf = Elf(code)
    _machine(elf)
    try:
        kernels = list(_amd_kernels(elf) if elf.machine == _EM_AMDGPU else _nvidia_kernels(elf))
    except (struct.error, KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"code object: its kernel metadata is damaged ({type(error).__name__}: {error})") from error
    if not kernels:
        raise InputError("code object: it holds no kernel")
    return kernels


def arch(code: bytes) -> str:
    """Return the architecture a code object is for, ``sm90`` or ``gfx942``."""
    return _machine(Elf(code))


def _machine(elf: Elf) -> str:
    if elf.machine == _EM_CUDA:
        # ABI 8 (CUDA 13) moved the number up a byte to make room
        return f"sm{elf.flags >> 8 & 0xFF if elf.abi_version >= 8 else elf.flags & 0xFF}"
    if elf.machine == _EM_AMDGPU:
        target = str(_amd_metadata(elf).get("amdhsa.target", "")).rpartition("-")[2].partition(":")[0]
        number = elf.flags & 0xFF
        known = _AMD_MACHINES.get(number, target)
        if not known or (target and target != known):
            raise InputError(f"code object: its target is {target or 'not named'}, its machine number {number:#x}")
        return known
    raise InputError(f"code object: ELF machine {elf.machine} is neither an NVIDIA nor an AMD GPU")


def _amd_metadata(elf: Elf) -> dict[str, Any]:
    for name, kind, data in elf.notes():
        if name == "AMDGPU" and kind == _NT_AMDGPU_METADATA:
            try:
                metadata = msgpack.unpackb(data)
            except Exception as error:
                raise InputError(f"code object: its AMDGPU metadata can't be decoded: {error}") from error
            return metadata if isinstance(metadata, dict) else {}
    raise InputError("code object: an AMD object without kernel metadata; was it linked?")


def _amd_kernels(elf: Elf) -> Iterator[KernelInfo]:
    for kernel in _amd_metadata(elf).get("amdhsa.kernels", ()):
        rows = [(a[".offset"], a[".size"], a[".value_kind"]) for a in kernel.get(".args", ())]
        args = (Argument(offset, size, _AMD_KINDS.get(kind, kind)) for offset, size, kind in rows)
        yield KernelInfo(
            symbol=kernel[".name"],
            registers=kernel[".vgpr_count"],
            spills=kernel[".private_segment_fixed_size"],
            shared=kernel[".group_segment_fixed_size"],
            wave_size=kernel[".wavefront_size"],
            kernarg_bytes=kernel[".kernarg_segment_size"],
            max_threads=kernel[".max_flat_workgroup_size"],
            args=tuple(sorted(args)),
        )


def _nvidia_kernels(elf: Elf) -> Iterator[KernelInfo]:
    registers, stack = dict[int, int](), dict[int, int]()
    names = elf.symbol_names()
    for attribute, value in _entries(elf.section(".nv.info")):
        if attribute == _REGISTERS:
            index, count = struct.unpack("<II", value)
            registers[index] = count
        elif attribute in (_FRAME, _STACK):
            index, size = struct.unpack("<II", value)
            stack[index] = max(size, stack.get(index, 0))
    reserved = _RESERVED_SHARED if int(_machine(elf)[2:]) >= 90 else 0
    for index, count in registers.items():
        symbol = names[index]
        if f".nv.info.{symbol}" not in elf.sections:
            continue  # a device function, not a kernel
        size, threads, args = 0, _MOST_THREADS, []
        for attribute, value in _entries(elf.section(f".nv.info.{symbol}")):
            if attribute == _PARAMETER_BYTES:
                size = int.from_bytes(value, "little")
            elif attribute in (_REQUIRED_THREADS, _MAX_THREADS):
                threads = prod(struct.unpack("<III", value))
            elif attribute == _PARAMETER:
                _, _, offset, packed = struct.unpack("<IHHI", value)
                args.append(Argument(offset, packed >> 18, ""))
        shared = elf.sections.get(f".nv.shared.{symbol}")
        yield KernelInfo(
            symbol=symbol,
            registers=count,
            spills=stack.get(index, 0),
            shared=max(0, shared.size - reserved) if shared else 0,
            wave_size=_WARP,
            kernarg_bytes=size,
            max_threads=threads,
            args=tuple(sorted(args)),
        )


def _entries(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (attribute, value) of each entry of an `.nv.info` section."""
    at = 0
    while at < len(data):
        form, attribute, short = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + short]
            at += short
        else:
            yield attribute, struct.pack("<H", short)[: 2 if form == _HALF else 1]


_DIMENSIONS = 3  # HIP always launches in three


def append_hidden_args(
    block: bytes, kernel: KernelInfo, grid: tuple[int, int, int], threads: tuple[int, int, int], dynamic_lds: int
) -> bytes:
    """Return a parameter block with a kernel's hidden arguments; pointers into the runtime (heap, queue …) stay zero.

    `grid` counts workgroups, `threads` those of a workgroup, along x, y, z; `dynamic_lds` is the bytes that the launch
    adds.
    """
    values = {"hidden_grid_dims": _DIMENSIONS, "hidden_dynamic_lds_size": dynamic_lds}
    for axis, count, size in zip("xyz", grid, threads, strict=True):
        values |= {f"hidden_block_count_{axis}": count, f"hidden_group_size_{axis}": size}
    hidden = [a for a in kernel.args if a.kind.startswith("hidden_")]
    if not hidden:
        return block
    padded = bytearray(block.ljust(kernel.kernarg_bytes, b"\0"))
    for argument in hidden:
        value = values.get(argument.kind, 0)
        padded[argument.offset : argument.offset + argument.size] = value.to_bytes(argument.size, "little")
    return bytes(padded)
