"""Reads the products that a captured workload names in remarks, as it could not write them as sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tritongemm.campaigns.column_major import their_type
from tritongemm.core.values import POSITIVE
from tritongemm.plugins.contracts.call_logs import LoggedCall
from tritongemm.system.printable import printable

_ROW = re.compile(r"# left out: (?P<values>\{.*\})\s*")
_GRADIENT = "# Gradients were wanted"
_LARGEST = 2**31 - 1  # as of other sizes


@dataclass(frozen=True)
class LeftOut:
    """A product that was called and is no row of sizes.

    Attributes:
        line: of the file, from 1.
        reason: why.
        count: calls.
        call: it in the library's terms; None where its sizes are not known.
    """

    line: int
    reason: str
    count: float = 0.0
    call: LoggedCall | None = None

    def describe(self) -> str:
        """Return a line with the calls that are not counted, and why."""
        what = f"{self.count:g} calls of unknown sizes are not counted, nor is their time: " if self.count else ""
        return f"line {self.line}: {what}{self.reason}"


def read_left_out(text: str) -> Iterator[LeftOut]:
    """Yield the products in the remarks of a file that a capture wrote.

    Args:
        text: of the file.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(_GRADIENT):
            yield LeftOut(number, line.removeprefix("# "))
        elif match := _ROW.fullmatch(line):
            yield _read(number, match["values"])


def _read(line: int, text: str) -> LeftOut:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = {}
    if not POSITIVE.holds(values.get("count")):
        return LeftOut(line, "what the capture left out can't be read; its calls are not counted")
    words = [str(values[name]) for name in ("operation", "reason") if name in values]
    return LeftOut(line, printable(": ".join(words), 200), float(values["count"]), _read_call(values))


def _read_call(values: Mapping[str, Any]) -> LoggedCall | None:
    sizes = [values.get("N"), values.get("M"), values.get("K"), values.get("batch", 1)]
    if not all(isinstance(size, int) and 0 < size <= _LARGEST for size in sizes):
        return None
    m, n, k, batch = map(int, map(str, sizes))
    b, a, c = (their_type(str(values.get(f"dtype_{which}"))) for which in "bac")
    transposes = "".join("N" if values.get(f"rowMajor{which}") == "T" else "T" for which in "BA")
    return LoggedCall(m, n, k, transposes, (b, a, c, c), "f32_r", batch=batch, others=(str(values.get("operation")),))
