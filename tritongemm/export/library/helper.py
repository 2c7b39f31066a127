"""The noun `LibraryHelper`: a kernel beside the products, e.g. one that quantises, as a manifest describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tritongemm.core.errors import InputError
from tritongemm.core.launch import Launch
from tritongemm.core.values import MAP, TEXT, TEXTS, FieldKind
from tritongemm.export.library.code_object import OBJECT_KINDS, SHA256, CodeObject, opened, require_all, sealed
from tritongemm.export.library.launch_values import launch_from_json, launch_to_json

HelperKey: TypeAlias = tuple[str, str]  # an architecture, and the digest of a `HelperKernel` for it

_NAME = FieldKind("a name of at most 64 characters", lambda v: TEXT.holds(v) and 0 < len(v) <= 64)
_KINDS = OBJECT_KINDS | {"name": _NAME, "target": _NAME, "asked": SHA256, "toolchain": TEXTS, "launch": MAP}


@dataclass(frozen=True)
class LibraryHelper(CodeObject):
    """A kernel beside the products, e.g. one that quantises activations, in a library.

    Attributes:
        kernel: its name.
        target: the architecture that it is compiled for.
        asked: digest of the `core.helper_kernel.HelperKernel` that it is; nothing else says what it computes.
        toolchain: versions that compiled it.
        launch: a launch of it, of any grid and numbers; its path is empty.
    """

    kernel: str
    target: str
    asked: str
    toolchain: Mapping[str, str]
    launch: Launch

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
        return sealed({**values, "toolchain": dict(self.toolchain), "launch": launch_to_json(self.launch)})

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
            launch=launch_from_json(values["launch"], values["object"]),
        )
