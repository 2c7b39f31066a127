"""Finds what a host call would launch, without a GPU: its own host code runs against a runtime that only records."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritongemm.core.launch import HostLaunch
from tritongemm.hip_ext.binaries import code_object, elf
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.hip_ext.libraries import load_kept

_STEP = 1 << 44  # between the addresses that stand for buffers; no buffer is as long


@dataclass(frozen=True)
class RecordedLaunch:
    """A kernel launch that a host call would have made."""

    kernel: str  # symbol
    # grid, block: workgroups, threads of one
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int  # bytes beside what the kernel declares
    kernarg: bytes  # parameter block with hidden arguments, pointers to buffers zero
    pointers: dict[str, int]  # byte offset in it of each buffer's pointer, by the buffer's name
    zeroed: tuple[str, ...]  # buffers set to zero before it


class LaunchRecorder:
    """Records launches in a process of its own, as its runtime takes the place of the real one."""

    def __call__(self, request: tuple[HostLaunch, str, str, str]) -> Iterator[list[RecordedLaunch]]:
        """Yield the kernels that a host call would launch, as one answer."""
        call, arch, runtime, sha256 = request
        names = [str(p.value) for p in call.params if p.kind == "pointer" and p.value not in ("", "stream")]
        addresses = {name: _STEP * (i + 1) for i, name in enumerate(names)}
        by_address = {address: name for name, address in addresses.items()}
        code = elf.device_code(Path(call.path).read_bytes(), arch)
        kernels = {k.symbol: k for k in code_object.read(code)}
        found: list[RecordedLaunch] = []
        zeroed: list[str] = []

        def on_memset(address: int, byte: int, size: int) -> None:
            zeroed.append(by_address[address])

        def on_launch(name: bytes, sizes: Any, lds: int, arguments: Any) -> None:
            kernel = kernels[name.decode()]
            block = bytearray()
            for index, argument in enumerate(kernel.explicit_args):
                block += bytes(argument.offset - len(block))
                block += ctypes.string_at(arguments[index], argument.size)
            pointers = {}
            for at in range(0, len(block) - 7, 8):
                buffer = by_address.get(int.from_bytes(block[at : at + 8], "little"))
                if buffer:
                    pointers[buffer] = at
                    block[at : at + 8] = bytes(8)
            grid, threads = (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5])
            params = code_object.append_hidden_args(bytes(block), kernel, grid, threads, lds)
            found.append(RecordedLaunch(kernel.symbol, grid, threads, lds, params, pointers, tuple(zeroed)))

        sizes_type, pointers_type = ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p)
        launch_type = ctypes.CFUNCTYPE(None, ctypes.c_char_p, sizes_type, ctypes.c_size_t, pointers_type)
        memset_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        listeners = launch_type(on_launch), memset_type(on_memset)
        load_kept(runtime, sha256, ctypes.RTLD_GLOBAL).listen(*listeners)
        PreparedCall(replace(call, runtime=""), addresses).launch(0)
        yield found
