"""The noun `Scaling`: how the scale factors of one operand are laid over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Scaling:
    """The scale factors of A or of B.

    Attributes:
        dtype: name of their type, e.g. ``fp32`` or ``e8m0``.
        rows: rows of A (columns of B) that share a factor; 0 where all of them do.
        depth: elements along K that share a factor; 0 where a whole row does, so that the epilogue can apply it.
        layout: how the factors lie in memory: ``rows`` [rows, groups along K], ``groups`` [groups along K, rows], or
            the name of a plug-in of numerics/scale_layouts.
        pad: multiples to which rows and groups are padded in memory.
    """

    dtype: str = "fp32"
    rows: int = 1
    depth: int = 0
    layout: str = "rows"
    pad: tuple[int, int] = (1, 1)

    @property
    def applied(self) -> str:
        """Where a kernel multiplies by the factors: the ``epilogue``, or the ``mainloop`` where they change along K."""
        return "mainloop" if self.depth else "epilogue"

    def shape(self, rows: int, k: int) -> tuple[int, int]:
        """Extents of the factors in memory, for an operand of so many rows (columns of B) and K elements."""
        across = _padded(-(-rows // self.rows) if self.rows else 1, self.pad[0])
        groups = _padded(-(-k // self.depth) if self.depth else 1, self.pad[1])
        return (groups, across) if self.layout == "groups" else (across, groups)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**self.__dict__, "pad": list(self.pad)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Scaling:
        """What `to_json` was called on."""
        return cls(**{**data, "pad": tuple(data.get("pad", (1, 1)))})


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
