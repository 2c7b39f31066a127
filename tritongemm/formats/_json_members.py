"""Reads and replaces members of a JSON file's outermost object, at the places of their values.

A member is replaced or added in the text, in the file's own indentation; every other byte stays.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tritongemm.core.errors import InputError
from tritongemm.core.values import MOST
from tritongemm.system.printable import printable
from tritongemm.system.reading import RepeatedKeyError, keys_once

_INDENT = 4  # blanks, as the servers' own tuners write
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Member:
    """One member of the outermost object."""

    key: str  # its name
    value: Any  # what it holds; numbers that JSON has no word for, such as NaN, are floats
    line: int  # where its name stands, from 1
    start: int  # place of its name in the text
    # value_start, value_end: place of its value in the text
    value_start: int
    value_end: int


_DECODER = json.JSONDecoder(object_pairs_hook=keys_once)


class _Reader:
    """Reads the members of one text."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text

    def read(self) -> list[Member]:
        """Return the members, in their order."""
        found, lines, counted = list[Member](), 1, 0
        at = self._after(0, "{")
        while found or not self._text.startswith("}", at):
            start = at
            key, at = self._value(at)
            if not isinstance(key, str):
                self._fail(start, "a name in quotes is expected")
            value_start = self._after(at, ":")
            value, end = self._value(value_start)
            lines, counted = lines + self._text.count("\n", counted, start), start
            found.append(Member(key, value, lines, start, value_start, end))
            at = self._skip(end)
            if not self._text.startswith(",", at):
                break
            at = self._after(at, ",")
        if self._after(at, "}") < len(self._text):
            self._fail(at + 1, "nothing is expected after the object")
        return found

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return match.end() if match else at

    def _after(self, at: int, sign: str) -> int:
        """Return the place behind a sign that must be there."""
        at = self._skip(at)
        if not self._text.startswith(sign, at):
            self._fail(at, f"{sign} is expected" if at < len(self._text) else "the file ends too early")
        return self._skip(at + 1)

    def _value(self, at: int) -> tuple[Any, int]:
        try:
            return _DECODER.raw_decode(self._text, at)
        except json.JSONDecodeError as error:
            self._fail(error.pos, "the file ends too early" if error.pos >= len(self._text) else error.msg)
        except RecursionError:
            self._fail(at, "lists or objects are nested too deep")
        except RepeatedKeyError as error:
            self._fail(at, f"the key {printable(error.key)!r} stands twice in one object")
        except ValueError:  # of more digits than Python reads
            self._fail(at, "a number has too many digits")

    def _fail(self, at: int, why: str) -> NoReturn:
        line, column = self._text.count("\n", 0, at) + 1, at - self._text.rfind("\n", 0, at)
        raise InputError(f"{self._path}: line {line}, column {column}: {why}; it must be one JSON object") from None


def read_members(path: Path, text: str) -> list[Member]:
    """Return the members of the object that a text holds."""
    return _Reader(path, text).read()


def read_integer(values: Mapping[str, Any], key: str, least: int) -> int:
    """Return a whole number of an object, of at least `least`."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise InputError(f"{key} must be a whole number from {least} to {MOST}, not {printable(repr(value), 40)}")
    return value


def with_members(
    text: str, members: Sequence[Member], values: Mapping[str, Any], rank: Callable[[str], int] = lambda key: 0
) -> str:
    """Return a text whose object has these values too; its other members stay as they are.

    A new member is before the first one of a higher rank.
    """
    if not members:
        return json.dumps(dict(sorted(values.items(), key=lambda item: rank(item[0]))), indent=_INDENT) + "\n"
    gap = text[text.index("{") + 1 : members[0].start]
    if len(members) > 1:
        gap = text[members[0].value_end : members[1].start].partition(",")[2]
    known = {member.key: member for member in members}
    edits = [
        (member.value_start, member.value_end, _rendered(values[member.key], gap))
        for member in members
        if member.key in values and values[member.key] != member.value
    ]
    last, added = members[-1].value_end, sorted(values.keys() - known.keys(), key=lambda key: (rank(key), key))
    for key in added:
        entry = f"{json.dumps(key)}: {_rendered(values[key], gap)}"
        place = next((m.start for m in members if rank(m.key) > rank(key)), last)
        edits.append((place, place, f",{gap}{entry}" if place == last else f"{entry},{gap}"))
    pieces, at = [], 0
    for start, end, new in sorted(edits, key=lambda edit: edit[0]):
        pieces += [text[at:start], new]
        at = end
    return "".join([*pieces, text[at:]])


def _rendered(value: Any, gap: str) -> str:
    """Return a value as JSON, in lines where the members of the file have lines of their own."""
    if "\n" not in gap:
        return json.dumps(value)
    indent = gap.rpartition("\n")[2]
    end = "\r\n" if "\r\n" in gap else "\n"
    return json.dumps(value, indent=indent).replace("\n", end + indent)
