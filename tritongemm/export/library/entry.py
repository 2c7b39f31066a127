"""The nouns `LibraryEntry` and `LibraryHelper`: a result, or a kernel beside products, as a manifest has it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tritongemm.core.errors import InputError
from tritongemm.core.launch import Launch, StridePlaces
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.values import FLAG, MAP, TEXT, TEXTS, FieldKind
from tritongemm.export.library import launch_values
from tritongemm.export.library.code_object import OBJECT_KINDS, SHA256, CodeObject, opened, require_all, sealed
from tritongemm.export.library.launch_table import LaunchTable

# What a library holds one result for: a product, a target, compute units, and whether it serves a range of M.
EntryKey: TypeAlias = tuple[Problem, str, int, bool]

_KERNEL_KINDS = OBJECT_KINDS | {
    "source": FieldKind(
        "a hash in hexadecimal digits", lambda v: isinstance(v, str) and bool(re.fullmatch("[0-9a-f]{40,64}", v))
    ),
    "toolchain": TEXTS,
    "tf32": FLAG,
    "launches": MAP,
}


@dataclass(frozen=True)
class LibraryKernel(CodeObject):
    """A code object of a library and how it is launched."""

    # Hash of all that it was compiled from: the kernel's text, constants, options and the compiler's version.
    source: str
    toolchain: Mapping[str, str]  # versions that compiled it; `driver` is that of the machine's GPU, where it had one
    tf32: bool  # it rounds float32 operands to tf32
    launches: LaunchTable  # at each M that it serves
    # Where its launches have the strides of operands; None where it reads dense operands alone.
    strides: StridePlaces | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the kernel as JSON values of a manifest; those of its entry have the seal."""
        launches = launch_values.table_to_json(self.launches)
        values = {**self.object_to_json(), "source": self.source, "toolchain": dict(self.toolchain), "tf32": self.tf32}
        values |= {} if self.strides is None else {"strides": launch_values.places_to_json(self.strides)}
        return {**values, "launches": launches}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LibraryKernel:
        """Return the kernel of which `to_json` wrote these values."""
        require_all("its kernel", data, _KERNEL_KINDS)
        launches = launch_values.table_from_json(data["launches"], data["object"])
        strides = launch_values.places_from_json(data["strides"], launches.launch) if "strides" in data else None
        return cls(
            sha256=data["object"],
            suffix=data["suffix"],
            size=data["bytes"],
            source=data["source"],
            toolchain=data["toolchain"],
            tf32=data["tf32"],
            launches=launches,
            strides=strides,
        )


@dataclass(frozen=True)
class LibraryEntry:
    """A tuned result in a library."""

    record: Record  # the result
    kernel: LibraryKernel | None = None  # its code; None where another library won, or an algorithm of one

    @property
    def key(self) -> EntryKey:
        """The problem, target and compute units that it is the result of, and whether it serves a range of M."""
        record = self.record
        return record.problem, record.target, record.compute_units, record.m_from > 0

    @property
    def name(self) -> str:
        """The entry's name in messages."""
        record = self.record
        low = f"M {record.m_from} to " if record.m_from else ""
        return f"{low}{record.problem.key} on {record.target} of {record.compute_units} compute units"

    def usable(self) -> Support:
        """Return whether the entry's kernel can serve its record, and if not, why."""
        record, kernel = self.record, self.kernel
        if kernel is None:
            return SUPPORTED
        if record.predicted:
            return Support("its time is a prediction (timer: model), which is not served")
        if not kernel.launches.low <= (record.m_from or record_m(record)) <= record_m(record) <= kernel.launches.high:
            return Support("its launches are not those of its range of M")
        return SUPPORTED

    def readable(self) -> Support:
        """Return whether a reader of the manifest gets this entry, and if not, why."""
        try:
            same = LibraryEntry.from_json(json.loads(json.dumps(self.to_json()))).record == self.record
        except (InputError, KeyError, TypeError) as error:
            return Support(str(error))
        return SUPPORTED if same else Support("a manifest makes another result of it")

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values of a manifest, with the seal that shows whether they were edited."""
        values: dict[str, Any] = {"record": self.record.to_json()}
        if self.kernel is not None:
            values["kernel"] = self.kernel.to_json()
        return sealed(values)

    @classmethod
    def from_json(cls, data: object) -> LibraryEntry:
        """Return the entry of which `to_json` wrote these values."""
        if not isinstance(data, Mapping) or not isinstance(data.get("record"), Mapping):
            raise InputError("it is no entry with a record")
        values = opened(data)
        kernel = LibraryKernel.from_json(values["kernel"]) if "kernel" in values else None
        entry = cls(Record.from_json(values["record"]), kernel)
        if not (usable := entry.usable()):
            raise InputError(str(usable))
        return entry


def record_m(record: Record) -> int:
    """Return the M by which a record's launches differ: its rows, or those that each group has room for."""
    return record.problem.group_m


HelperKey: TypeAlias = tuple[str, str]  # an architecture, and the digest of a `HelperKernel` for it

_NAME = FieldKind("a name of at most 64 characters", lambda v: TEXT.holds(v) and 0 < len(v) <= 64)
_KINDS = OBJECT_KINDS | {"name": _NAME, "target": _NAME, "asked": SHA256, "toolchain": TEXTS, "launch": MAP}


@dataclass(frozen=True)
class LibraryHelper(CodeObject):
    """A kernel beside the products, e.g. one that quantises activations, in a library."""

    kernel: str  # its name
    target: str  # the architecture that it is compiled for
    asked: str  # digest of the `core.helper_kernel.HelperKernel` that it is; nothing else says what it computes
    toolchain: Mapping[str, str]  # versions that compiled it
    launch: Launch  # a launch of it, of any grid and numbers; its path is empty

    @property
    def key(self) -> HelperKey:
        """The architecture and the digest by which a library finds the kernel."""
        return self.target, self.asked

    @property
    def name(self) -> str:
        """The kernel's name in messages: with its architecture and the start of its digest."""
        return f"{self.kernel} for {self.target} ({self.asked[:12]})"

    def to_json(self) -> dict[str, Any]:
        """Return the kernel as JSON values of a manifest, with the seal that shows whether they were edited."""
        values = {"name": self.kernel, "target": self.target, "asked": self.asked, **self.object_to_json()}
        return sealed(
            {**values, "toolchain": dict(self.toolchain), "launch": launch_values.launch_to_json(self.launch)}
        )

    @classmethod
    def from_json(cls, data: object) -> LibraryHelper:
        """Return the kernel of which `to_json` wrote these values."""
        if not isinstance(data, Mapping):
            raise InputError("it is no kernel")
        values = opened(data)
        require_all("a helper kernel", values, _KINDS)
        return cls(
            sha256=values["object"],
            suffix=values["suffix"],
            size=values["bytes"],
            kernel=values["name"],
            target=values["target"],
            asked=values["asked"],
            toolchain=values["toolchain"],
            launch=launch_values.launch_from_json(values["launch"], values["object"]),
        )
