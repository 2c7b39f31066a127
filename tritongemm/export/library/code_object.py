"""The noun `CodeObject`: what a manifest says of a file of code in a library."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.values import FieldKind, integer, one_of, require

MOST_OBJECT_BYTES = 64 << 20
OBJECTS = "objects"  # the folder of code objects in a library
SUFFIXES = ("cubin", "hsaco")
_SHA256 = re.compile("[0-9a-f]{64}")

SHA256 = FieldKind("a SHA-256", lambda v: isinstance(v, str) and bool(_SHA256.fullmatch(v)))
OBJECT_KINDS = {
    "object": FieldKind("the SHA-256 of a code object", SHA256.holds),
    "suffix": one_of(*SUFFIXES),
    "bytes": integer(1, MOST_OBJECT_BYTES),
}


@dataclass(frozen=True)
class CodeObject:
    """A file of code of a library."""

    sha256: str  # of the code object, which names it
    suffix: str  # `cubin` or `hsaco`
    size: int  # its bytes

    @property
    def member(self) -> str:
        """Where a library holds the code object; no manifest can name another place."""
        return f"{OBJECTS}/{self.sha256}.{self.suffix}"

    def fault(self, code: bytes) -> str:
        """Return why these bytes are not the code object; "" where they are."""
        if len(code) != self.size:
            return f"its code object {self.member} has {len(code)} bytes, not {self.size}"
        if hashlib.sha256(code).hexdigest() != self.sha256:
            return f"its code object {self.member} is damaged"
        return ""

    def object_to_json(self) -> dict[str, Any]:
        """Return the code object as JSON values of a manifest."""
        return {"object": self.sha256, "suffix": self.suffix, "bytes": self.size}


def require_all(what: str, data: Mapping[str, Any], kinds: Mapping[str, FieldKind]) -> None:
    """Refuse values that are missing or of another kind."""
    if missing := sorted(kinds.keys() - data.keys()):
        raise InputError(f"{missing[0]} of {what} is missing")
    require(data, kinds)


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values with a hash of their own, so that an edit of a number is noticed."""
    return {**values, "sha256": _hash(values)}


def opened(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of `sealed`."""
    values = {name: value for name, value in data.items() if name != "sha256"}
    if data.get("sha256") != _hash(values):
        raise InputError("it was changed after it was written")
    return values


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
