"""The noun `LibraryEntry`: a tuned result with the code object that computes it, as a library's manifest tells it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.values import FLAG, TEXTS, FieldKind, require
from tritongemm.library.launch_table import LaunchTable
from tritongemm.library.launch_values import table_from_json, table_to_json

MOST_OBJECT_BYTES = 64 << 20
OBJECTS = "objects"  # the folder of code objects in a library
SUFFIXES = ("cubin", "hsaco")
_SHA256 = re.compile("[0-9a-f]{64}")

# What a library holds one result for: a product, a target, compute units, and whether it serves a range of M.
EntryKey: TypeAlias = "tuple[Problem, str, int, bool]"

_KERNEL_KINDS = {
    "object": FieldKind("the SHA-256 of a code object", lambda v: isinstance(v, str) and bool(_SHA256.fullmatch(v))),
    "suffix": FieldKind(f"one of {', '.join(SUFFIXES)}", lambda v: isinstance(v, str) and v in SUFFIXES),
    "bytes": FieldKind(
        f"a whole number from 1 to {MOST_OBJECT_BYTES}",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MOST_OBJECT_BYTES,
    ),
    "source": FieldKind(
        "a hash in hexadecimal digits", lambda v: isinstance(v, str) and bool(re.fullmatch("[0-9a-f]{40,64}", v))
    ),
    "toolchain": TEXTS,
    "tf32": FLAG,
    "launches": FieldKind("a map", lambda v: isinstance(v, Mapping)),
}


@dataclass(frozen=True)
class LibraryKernel:
    """A code object of a library and how it is launched.

    Attributes:
        sha256: of the code object, which names it.
        suffix: ``cubin`` or ``hsaco``.
        size: its bytes.
        source: hash of all that it was compiled from: the kernel's text, constants, options and the compiler's version.
        toolchain: versions that compiled it; ``driver`` is that of the machine's GPU, where it had one.
        tf32: it rounds float32 operands to tf32.
        launches: at each M that it serves.
    """

    sha256: str
    suffix: str
    size: int
    source: str
    toolchain: Mapping[str, str]
    tf32: bool
    launches: LaunchTable

    @property
    def member(self) -> str:
        """Where a library holds the code object; no manifest can name another place."""
        return f"{OBJECTS}/{self.sha256}.{self.suffix}"

    def fault(self, code: bytes) -> str:
        """Why some bytes are not the code object; "" where they are."""
        if len(code) != self.size:
            return f"its code object {self.member} has {len(code)} bytes, not {self.size}"
        if hashlib.sha256(code).hexdigest() != self.sha256:
            return f"its code object {self.member} is damaged"
        return ""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        told = {"object": self.sha256, "suffix": self.suffix, "bytes": self.size, "source": self.source}
        launches = table_to_json(self.launches)
        return {**told, "toolchain": dict(self.toolchain), "tf32": self.tf32, "launches": launches}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LibraryKernel:
        """The kernel that `to_json` told.

        Raises:
            InputError: a value is missing or wrong.
        """
        if missing := sorted(_KERNEL_KINDS.keys() - data.keys()):
            raise InputError(f"{missing[0]} of its kernel is missing")
        require(data, _KERNEL_KINDS)
        launches = table_from_json(data["launches"], data["object"])
        return cls(
            sha256=data["object"],
            suffix=data["suffix"],
            size=data["bytes"],
            source=data["source"],
            toolchain=data["toolchain"],
            tf32=data["tf32"],
            launches=launches,
        )


@dataclass(frozen=True)
class LibraryEntry:
    """A tuned result in a library.

    Attributes:
        record: the result.
        kernel: its code; None where a library that is not ours won, or an algorithm of one.
    """

    record: Record
    kernel: LibraryKernel | None = None

    @property
    def key(self) -> EntryKey:
        """What it is the result of."""
        record = self.record
        return record.problem, record.target, record.compute_units, record.m_from > 0

    @property
    def name(self) -> str:
        """What messages call it."""
        record = self.record
        low = f"M {record.m_from} to " if record.m_from else ""
        return f"{low}{record.problem.key} on {record.target} of {record.compute_units} compute units"

    def usable(self) -> Support:
        """Whether the kernel can serve its record."""
        record, kernel = self.record, self.kernel
        if kernel is None:
            return SUPPORTED
        if record.predicted:
            return Support("its time is a prediction (timer: model), which serves nobody")
        if (kernel.launches.low, kernel.launches.high) != (record.m_from or kernel.launches.low, record_m(record)):
            return Support("its launches are not those of its range of M")
        return SUPPORTED

    def to_json(self) -> dict[str, Any]:
        """JSON values with a hash of their own, so that an edit of a number is noticed."""
        told: dict[str, Any] = {"record": self.record.to_json()}
        if self.kernel is not None:
            told["kernel"] = self.kernel.to_json()
        return {**told, "sha256": _hash(told)}

    @classmethod
    def from_record(cls, data: Any) -> LibraryEntry:
        """The record of an entry whose other values may be wrong, without its kernel.

        Raises:
            InputError, KeyError, TypeError: the record can't be read either.
        """
        return cls(Record.from_json(data["record"]))

    @classmethod
    def from_json(cls, data: object) -> LibraryEntry:
        """The entry that `to_json` told.

        Raises:
            InputError: it was changed, a value is missing or wrong, or the kernel can't serve the record.
            KeyError, TypeError: a field is missing or no map.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("record"), Mapping):
            raise InputError("it is no entry with a record")
        told = {name: value for name, value in data.items() if name != "sha256"}
        if data.get("sha256") != _hash(told):
            raise InputError("it was changed after it was written")
        kernel = LibraryKernel.from_json(told["kernel"]) if "kernel" in told else None
        entry = cls(Record.from_json(told["record"]), kernel)
        if not (usable := entry.usable()):
            raise InputError(str(usable))
        return entry


def record_m(record: Record) -> int:
    """The M by which a record's launches differ: its rows, or those that each group has room for."""
    return record.problem.room or record.problem.m


def _hash(told: Mapping[str, Any]) -> str:
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
