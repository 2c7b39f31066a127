"""The file of sizes that a capture writes: YAML of one row a line, which any number of processes add to.

A row is a JSON map, which is YAML too, and ends with what changes: how groups shared the rows, the number of calls, and
who called. Products that can't be tuned are remarks of the same form. Lines of other forms, of a person or another
program, are left as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import OutputError
from tritongemm.core.problem import PLAIN
from tritongemm.system.files import atomic_write, check_place, read_regular, sweep
from tritongemm.system.locks import held

if TYPE_CHECKING:  # the command that starts a program has no use for PyTorch
    from tritongemm.workloads.capturing.group_spreads import Spread
    from tritongemm.workloads.capturing.product import Product

ADVICE = "choose another file"
_AITERS_HEAD = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle"
_AITERS_DTYPES = ("fp16", "bf16", "fp32")  # that AITER multiplies unscaled
_MOST_CALLERS = 100  # of one row
_DIGITS = 7  # of a share: those of as many groups as there may be add up to 1 well enough
_ROW = re.compile(
    r"(?P<start>(?:- |# left out: )\{.*?)"
    r'(?:, "group_shares": (?P<shares>\[[^\]]*\]), "group_samples": (?P<samples>\d{1,18}))?'
    r', "count": (?P<count>\d{1,18}), "callers": (?P<callers>\[.*\])\}'
)
_HEAD = (
    "# Captured by tritongemm: what a program asked PyTorch to multiply, with the number of calls.\n"
    "# A graph of CUDA or HIP counts when it is captured, and again each time it is launched.\n"
)
_GRADIENT = "# Gradients were wanted: the products of the backward pass are not among them.\n"


@dataclass(frozen=True)
class Counted:
    """What is to be added to a file."""

    product: Product  # what was asked for
    calls: int  # how often, since it was last written
    callers: frozenset[str]  # of the product
    # How groups shared the rows of calls of its range of M, since it was last written; None where that is not known.
    spread: Spread | None = None


class WorkloadFile:
    """A file of sizes that counts are added to."""

    what = "a list of sizes"

    def __init__(self, path: Path) -> None:
        self.path = path
        check_place(path, self._is_one, self.what, ADVICE)
        with held(path, ADVICE):
            sweep(path.parent, path.name)

    @staticmethod
    def _is_one(start: bytes) -> bool:
        return start.lstrip()[:1] in (b"", b"#", b"-") and b"\0" not in start

    def add(self, counted: Sequence[Counted], with_gradient: bool) -> None:
        """Add calls to the file's rows, and rows that it lacks; say in it whether there were backward passes too."""
        with held(self.path, ADVICE):
            lines = read_lines(self.path) or [_HEAD]
            if with_gradient and _GRADIENT not in lines:
                lines.insert(0, _GRADIENT)
            atomic_write(self.path, "".join(_merged(lines, counted)), ADVICE)


class AiterUntuned(WorkloadFile):
    """AITER's file of sizes that it was asked for, ``bf16_untuned_gemm.csv``, whose rows stay as they are."""

    what = "a file of AITER's sizes"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if (lines := read_lines(path)) and lines[0].rstrip() != _AITERS_HEAD:
            raise OutputError(f"{path} has columns {lines[0].rstrip()[:80]}, not {_AITERS_HEAD}; {ADVICE}")

    @staticmethod
    def _is_one(start: bytes) -> bool:
        return not start or start.startswith(b"M,N,K")

    def add(self, counted: Sequence[Counted], with_gradient: bool) -> None:
        """Add the rows that the file lacks: layers of 16 and 32 bits, and of 8 bits with one scale factor a tensor."""
        with held(self.path, ADVICE):
            lines = read_lines(self.path) or [_AITERS_HEAD + "\n"]
            there = {line.strip() for line in lines}
            new = dict.fromkeys(row for one in counted if (row := _aiters_row(one.product)) and row not in there)
            if new:
                atomic_write(self.path, "".join(lines) + "".join(row + "\n" for row in new), ADVICE)


def open_file(path: Path) -> WorkloadFile:
    """Return the file that a capture adds to, which its name says the kind of."""
    return AiterUntuned(path) if path.suffix == ".csv" else WorkloadFile(path)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file with their ends, the last one's too; none where there is no file."""
    try:
        text = read_regular(path).decode("utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"{path} can't be added to: {error}; {ADVICE}") from None
    lines = text.splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else [*lines[:-1], lines[-1] + "\n"]


def _merged(lines: list[str], counted: Iterable[Counted]) -> list[str]:
    places = dict[str, int]()
    for place, line in enumerate(lines):
        if row := _ROW.match(line):
            places.setdefault(row["start"], place)
    for one in counted:
        start = _start(one.product)
        if start not in places:
            places[start] = len(lines)
            lines.append(_line(start, one.spread, one.calls, one.callers))
        else:
            lines[places[start]] = _with(lines[places[start]], one)
    return lines


def _with(line: str, one: Counted) -> str:
    """Return a row with more calls."""
    row = _ROW.match(line)
    assert row
    try:
        named = json.loads(row["callers"])
    except (ValueError, RecursionError):  # someone edited it
        named = []
    callers = {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    known = _read_spread(row["shares"], row["samples"])
    spread = one.spread.joined(known) if one.spread else known
    return _line(row["start"], spread, int(row["count"]) + one.calls, callers | one.callers)


def _read_spread(shares: str | None, samples: str | None) -> Spread | None:
    """Return the spread that a row has; None where it has none, or one that can't be."""
    from tritongemm.workloads.capturing.group_spreads import Spread

    try:
        numbers = [float(share) for share in json.loads(shares or "[]")]
    except (ValueError, TypeError, RecursionError):  # someone edited it
        return None
    possible = numbers and all(share >= 0 for share in numbers) and math.isclose(sum(numbers), 1, abs_tol=1e-3)
    return Spread(tuple(numbers), int(samples or 0)) if possible and int(samples or 0) else None


def _line(start: str, spread: Spread | None, calls: int, callers: Iterable[str]) -> str:
    shared = ""
    if spread:
        shares = [round(share, _DIGITS) for share in spread.shares]
        shared = f', "group_shares": {json.dumps(shares)}, "group_samples": {spread.samples}'
    return f'{start}{shared}, "count": {calls}, "callers": {json.dumps(sorted(callers)[:_MOST_CALLERS])}}}\n'


def _start(product: Product) -> str:
    """Return what a row begins with: all that does not change."""
    p = product
    values: dict[str, object] = {}
    if p.m:
        values = {"M": p.m, "N": p.n, "K": p.k}
        values |= {f"rowMajor{n}": "T" if one.row_major else "N" for n, one in (("A", p.a), ("B", p.b))}
        values |= {f"dtype_{n}": one.dtype for n, one in (("a", p.a), ("b", p.b), ("c", p.c))} | {"bias": p.bias}
        more = {"batch": p.batch, "shared": p.shared, "groups": p.groups, "family": p.family, "scales": p.scales}
        more |= {"order_b": p.b.order, "epilogue": p.epilogue}
        values |= {name: value for name, value in more.items() if value not in (1, "", PLAIN, "none")}
        values |= {"group_form": "masked", "group_room": p.room} if p.room else {}
    values |= {"reason": p.left_out} if p.left_out else {}
    values |= {"operation": p.operation}
    return ("# left out: " if p.left_out else "- ") + json.dumps(values)[:-1]


def _aiters_row(product: Product) -> str:
    """Return a product's row of AITER's file; "" where AITER has no word for it."""
    p = product
    is_tunable = not p.left_out and p.a.dtype in _AITERS_DTYPES
    if not p.is_layer or not (is_tunable or p.one_scale) or p.c.dtype not in DTYPES:
        return ""
    dtypes = (f"torch.{DTYPES[name].torch}" for name in (p.a.dtype, p.c.dtype))
    return ",".join(map(str, (p.m, p.n, p.k, p.bias != "none", *dtypes, p.one_scale, False)))
