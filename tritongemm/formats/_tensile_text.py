"""Splits one of Tensile's library logic files at its lines: what is not changed stays as it is.

PyYAML wrote it: a list whose elements begin in the first column, and solutions two columns further in. Files have tens
of thousands of lines, of which a merge moves a few hundred; what is parsed is one element or solution at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tritongemm.core.errors import InputError
from tritongemm.system.printable import printable

_ALIAS = re.compile(r"(?<![^\s\[{,:])[*&]\w")
_VERSION, _SCHEDULE, _TARGET, _DEVICES, _PROBLEM, _SOLUTIONS, _ORDER, _SIZES = range(8)
_KIND = 11  # the element that defines how sizes are looked up
_ELEMENTS = 12
_INDEX = re.compile(r"(?m)^    SolutionIndex: ([0-9]{1,9})$", re.ASCII)
_NAME = re.compile(r"(?m)^    SolutionNameMin: (\S{1,2000})$")
_ROW = re.compile(
    r"(?m)^  - - \[([0-9]{1,19}(?:, [0-9]{1,19})*)\]\n    - \[([0-9]{1,9}), ([0-9]{1,30}\.[0-9]{1,30})\]\n", re.ASCII
)
_FIRST_LINE = re.compile(r"\s*(?:---\s*\n)?(?:#[^\n]*\n)*- +\{?MinimumRequiredVersion:")
_ADVICE = "it is not as Tensile writes it"

Size = tuple[int, ...]  # M, N, batch, K; then ldd, ldc, lda, ldb where rows are apart


def begins_logic(text: str) -> bool:
    """Return whether a text begins as a logic file."""
    return _FIRST_LINE.match(text[:4000]) is not None


@dataclass(frozen=True)
class Solution:
    """One kernel of a file."""

    index: int  # its number, which the table of sizes names
    name: str  # `SolutionNameMin`
    text: str  # its lines, from the third column on

    def at(self, index: int) -> Solution:
        """Return the same solution with another number."""
        return Solution(index, self.name, _INDEX.sub(f"    SolutionIndex: {index}", self.text))

    def same_as(self, other: Solution) -> bool:
        """Return whether both are one kernel but for their numbers."""
        return self.at(0).text == other.at(0).text or self._values() == other._values()

    def _values(self) -> Any:
        values = _load(f"  {self.text}", f"solution {self.name}")
        return {k: v for k, v in values[0].items() if k != "SolutionIndex"} if isinstance(values, list) else values


@dataclass
class Logic:
    """A logic file of exact sizes."""

    path: Path  # for messages
    head: str  # what stands before the first element, such as `---`
    elements: list[str]  # text of each
    tail: str  # what stands behind the last
    solutions: dict[int, Solution] = field(default_factory=dict)  # by their numbers, in the order of the file
    # Number of the solution and its efficiency, by size, in the order of the file.
    sizes: dict[Size, tuple[int, float]] = field(default_factory=dict)
    lines: dict[Size, int] = field(default_factory=dict)  # where the row of each size begins, from 1
    line_end: str = "\n"  # of every line of the file; the pieces have the plain one

    @cached_property
    def problem_type(self) -> dict[str, Any]:
        """What its products are, by Tensile's keys."""
        found = self._value(_PROBLEM)
        if not isinstance(found, dict):
            raise InputError(f"{self.path}: element 5 must be a map of the problem's type; {_ADVICE}")
        return found

    @cached_property
    def target(self) -> tuple[str, int]:
        """Name of the architecture, and the compute units that it is for; 0 for any."""
        found = self._value(_TARGET)
        if isinstance(found, dict):
            return str(found.get("Architecture", "")), int(found.get("CUCount") or 0)
        return str(found), 0

    def differs(self, other: Logic) -> str:
        """Return in what another file does not belong to this one; "" where it does."""
        names = {
            _VERSION: "version of Tensile",
            _SCHEDULE: "schedule",
            _TARGET: "architecture",
            _PROBLEM: "problem type",
        }
        return next((name for place, name in names.items() if self._value(place) != other._value(place)), "")

    @cached_property
    def by_name(self) -> dict[str, Solution]:
        """Solutions by their names; of equal names the first."""
        return {s.name: s for s in reversed(self.solutions.values())}

    def add_solution(self, solution: Solution) -> int:
        """Return the number of a solution, which is added where the file does not have it."""
        known = self.by_name.get(solution.name)
        if known is None:
            known = solution.at(max(self.solutions, default=-1) + 1)
            self.solutions[known.index] = self.by_name[known.name] = known
        if not known.same_as(solution):
            raise InputError(
                f"{self.path}: solution {printable(solution.name)} has other parameters than in the file that is "
                "merged: another Tensile made one of them; tune with the one that hipBLASLt is built with"
            )
        return known.index

    def text(self) -> str:
        """Return the file; elements that were not changed are as they were."""
        elements = list(self.elements)
        listed = "".join(f"  {solution.text}" for solution in self.solutions.values())
        elements[_SOLUTIONS] = f"- {listed[2:]}" if listed else "- []\n"
        elements[_SIZES] = _table(self.sizes)
        return "".join([self.head, *elements, self.tail]).replace("\n", self.line_end)

    def _value(self, place: int) -> Any:
        found = _load(self.elements[place], f"{self.path}: element {place + 1}")
        return found[0] if isinstance(found, list) and len(found) == 1 else found


def read_logic(path: Path, text: str) -> Logic:
    """Return a file of exact sizes."""
    text, line_end = _plain_lines(path, text)
    if _ALIAS.search(text):
        raise InputError(f"{path} has an anchor or an alias of YAML; {_ADVICE}")
    head, elements, tail = _split(path, text)
    logic = Logic(path, head, elements, tail, line_end=line_end)
    kind = logic._value(_KIND)
    if kind != "Equality":
        raise InputError(
            f"{path} is a logic file of kind {printable(str(kind), 40)}; only exact sizes (Equality) are written"
        )
    for number, solution in enumerate(_read_solutions(path, elements[_SOLUTIONS]), start=1):
        if solution.index in logic.solutions:
            raise InputError(
                f"{path}: solution {number} has number {solution.index}, as an earlier one does; {_ADVICE}"
            )
        logic.solutions[solution.index] = solution
    _read_sizes(logic)
    return logic


def _plain_lines(path: Path, text: str) -> tuple[str, str]:
    """Return the text with plain ends of lines, and how its own end: as Tensile writes them, or all as on Windows."""
    if "\r" not in text:
        return text, "\n"
    plain = text.replace("\r\n", "\n")
    if "\r" in plain or text.count("\r\n") < text.count("\n"):
        raise InputError(
            f"{path} has lines that end in several ways (LF, CRLF or CR); write it with one, as dos2unix does"
        )
    return plain, "\r\n"


def _split(path: Path, text: str) -> tuple[str, list[str], str]:
    """Return what stands before the elements, each of them, and what stands behind."""
    body, tail = (text[:-4], text[-4:]) if text.endswith("\n...\n") else (text, "")
    if not body.endswith("\n"):
        body += "\n"
    starts = [match.start() for match in re.finditer(r"(?m)^- ", body)]
    if len(starts) < _ELEMENTS:
        also = "; a logic file that is a map, as of newer architectures, can't be read here" if not starts else ""
        raise InputError(f"{path} has {len(starts)} of the {_ELEMENTS} elements of a logic file{also}; it may be cut")
    return body[: starts[0]], [body[a:b] for a, b in zip(starts, [*starts[1:], len(body)], strict=True)], tail


def _read_solutions(path: Path, element: str) -> Iterator[Solution]:
    """Yield the solutions of a file."""
    if element.strip() == "- []":
        return
    body = f"  {element[2:]}"
    starts = [match.start() for match in re.finditer(r"(?m)^  - ", body)]
    if not starts or starts[0] or re.search(r"(?m)^ {0,3}[^ \n]", re.sub(r"(?m)^  - ", "    ", body)):
        raise InputError(f"{path}: element 6 must be a list of solutions, two columns in; {_ADVICE}")
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(body)], strict=True), start=1):
        text = body[start + 2 : end]
        index, name = _INDEX.findall(text), _NAME.findall(text)
        if len(index) != 1 or len(name) != 1:
            raise InputError(f"{path}: solution {number} must have a SolutionIndex and a SolutionNameMin; {_ADVICE}")
        yield Solution(int(index[0]), name[0].strip("'\""), text)


def _read_sizes(logic: Logic) -> None:
    """The table of sizes."""
    table, begins = _rows(logic), "".join([logic.head, *logic.elements[:_SIZES]]).count("\n") + 1
    for number, row in enumerate(table, start=1):
        where = f"{logic.path}: size {number}"
        try:
            numbers, (index, efficiency) = row
            size, efficiency = tuple(numbers), float(efficiency)
        except (TypeError, ValueError):
            raise InputError(f"{where} must be [[M, N, batch, K], [solution, efficiency]]") from None
        if len(size) not in (4, 8) or not all(type(one) is int and 0 <= one < 2**63 for one in size):
            raise InputError(
                f"{where} must have M, N, batch and K, and perhaps ldd, ldc, lda and ldb, not {shown(size)}"
            )
        if size in logic.sizes:
            raise InputError(f"{where}, {shown(size)}, is there already; keep one of them")
        if type(index) is not int or index not in logic.solutions:
            raise InputError(f"{where}, {shown(size)}, names solution {printable(repr(index), 40)}, which is not there")
        logic.sizes[size] = index, efficiency
        logic.lines[size] = begins + 2 * (number - 1)


def _rows(logic: Logic) -> list[Any]:
    """Return the rows of the table of sizes, as they are."""
    body = f"  {logic.elements[_SIZES][2:]}"
    found = list(_ROW.finditer(body))
    if found and sum(len(match[0]) for match in found) == len(body):  # a hundred times as fast as YAML
        return [[[*map(int, m[1].split(", "))], [int(m[2]), float(m[3])]] for m in found]
    table = logic._value(_SIZES)
    if not isinstance(table, list):
        raise InputError(f"{logic.path}: element 8 must be the table of sizes; {_ADVICE}")
    return table


def shown(size: Size) -> str:
    """Return a size for messages."""
    return printable(str(list(size)), 120)


def _load(text: str, where: str) -> Any:
    """Return the value of a piece of YAML."""
    try:
        return yaml.safe_load(text)  # by Python: libyaml nests without a limit
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{where} is no YAML: {printable(str(error).splitlines()[0], 120)}") from None


def _table(sizes: dict[Size, tuple[int, float]]) -> str:
    """Return the table of sizes as Tensile writes it."""
    rows = [[list(size), [index, efficiency]] for size, (index, efficiency) in sizes.items()]
    return str(yaml.safe_dump([rows], default_flow_style=None, width=1 << 20))
