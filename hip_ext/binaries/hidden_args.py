"""Builds the arguments behind a kernel's own that AMD's runtime fills in, for launches from raw bytes."""

from tritongemm.hip_ext.binaries.code_object import KernelInfo

_DIMENSIONS = 3  # HIP always launches in three


def append(
    block: bytes, kernel: KernelInfo, grid: tuple[int, int, int], threads: tuple[int, int, int], dynamic_lds: int
) -> bytes:
    """Return a parameter block with its hidden arguments; pointers into the runtime (heap, queue, calls) stay zero.

    Args:
        block: what the caller passes.
        kernel: has the offsets of the hidden arguments; without any the block is returned unchanged.
        grid: workgroups along x, y, z.
        threads: threads of a workgroup along x, y, z.
        dynamic_lds: bytes of LDS the launch adds.
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
