"""Extracts the code object of one architecture from a library compiled by HIP or a bundle of several."""

import struct

from tritongemm.core.errors import InputError
from tritongemm.hip_ext.binaries.elf import Elf

_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def device_code(library: bytes, arch: str) -> bytes:
    """Return the code object for an architecture.

    Args:
        library: a shared library with the section ``.hip_fatbin``, or the bundle itself.
        arch: e.g. ``gfx942``.

    Raises:
        InputError: no bundle, damaged, compressed, or for other architectures only.
    """
    bundle = library if library.startswith(_MAGIC) else Elf(library).section(".hip_fatbin")
    if not bundle.startswith(_MAGIC):
        raise InputError(f"no offload bundle: it starts with {bundle[:4]!r} (compressed ones are not read)")
    found = []
    try:
        (count,) = struct.unpack_from("<Q", bundle, len(_MAGIC))
        at = len(_MAGIC) + 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", bundle, at)
            triple = bundle[at + 24 : at + 24 + length].decode(errors="replace")
            at += 24 + length
            found.append(triple)
            if triple.startswith("hip") and triple.rstrip(":").split("--")[-1].split(":")[0] == arch and size:
                if offset + size > len(bundle):
                    raise InputError(f"offload bundle: {arch} ends at byte {offset + size} of {len(bundle)}")
                return bundle[offset : offset + size]
    except struct.error:
        raise InputError(f"offload bundle: truncated at {len(bundle)} bytes") from None
    raise InputError(f"offload bundle: for {', '.join(found)}, not {arch}")
