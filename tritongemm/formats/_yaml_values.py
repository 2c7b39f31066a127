"""The rows of a YAML list as values, one after the other.

A file whose every row is one line, as in the files that we write, is read line by line: what is wrong in a line costs
that row alone. A line that is JSON, as we write it, is read by `json`. Every other line, and every other file, is read
from libyaml's events. Both give the same values.

No value is nested so deeply, or repeated so often by aliases, that reading it takes the stack or the memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn, TypeAlias

import yaml

from tritongemm.formats._rows import EXAMPLE

_DEEPEST = 100  # levels of lists and maps in a row; ours have two
_TOO_DEEP = f"has lists and maps nested more than {_DEEPEST} deep"
_MOST_VALUES = 10_000  # values of a row, where one that an alias repeats counts each time; ours have some fifty
_LONGEST_KEY = 500  # characters of a key; libyaml reads no key of more than 1024 that is written as ours are
_LONGEST_SHOWN = 100  # characters of a file's text that a message repeats

# libyaml, where PyYAML has it, reads a thousand rows in a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"


class Integer(str):
    """A whole number, as it is written."""


class Real(str):
    """A number that is not an integer, as it is written."""


class Other(str):
    """A plain value of another kind, such as a date, as it is written."""


Value: TypeAlias = str | bool | list[Any] | dict[str, Any] | None  # A plain str is text.
_Event: TypeAlias = Any  # One of yaml.events.
_Mark: TypeAlias = Any  # A place in a text, with a line and a column from 0; there are PyYAML's and libyaml's.
_Anchors: TypeAlias = dict[str, tuple[Value, int]]  # Values that have names, and how many values each holds.


class YamlRow(NamedTuple):
    """One row of a list."""

    line: int  # where it starts, from 1
    value: Value  # what it is; None where it can't be read
    remark: str = ""  # what stands behind a map in flow style on its last line
    fault: str = ""  # why it can't be read; "" where it can


class YamlFault(Exception):
    """Text can't be read as a list of rows; the message continues the name of the file or row."""

    def __init__(self, what: str, mark: _Mark | None = None) -> None:
        self.what, self.mark = what, mark
        super().__init__(f"{what} (line {mark.line + 1}, column {mark.column + 1})" if mark else what)


def read_rows(text: str) -> Iterator[YamlRow]:
    """Yield the rows of a YAML list."""
    lines = text.splitlines()
    if not _has_a_row_a_line(text, lines):
        yield from _read_events(text, lines, {})
        return
    anchors: _Anchors = {}
    for number, line in enumerate(lines, start=1):
        if line.startswith("- {"):
            yield _read_json(number, line) or _read_line(number, line, anchors)


def shown(text: str) -> str:
    """Return a file's text for messages: quoted, and cut to a readable length."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")


def describe(value: Value) -> str:
    """Return a value's kind for messages."""
    if isinstance(value, bool):
        return repr(str(value).lower())
    if isinstance(value, str):
        return shown(value) if value else "nothing"
    return "nothing" if value is None else "a list" if isinstance(value, list) else "a map"


def _has_a_row_a_line(text: str, lines: list[str]) -> bool:
    """Return whether every line is a remark, empty, or begins a map in flow style as a row.

    Such a line that is YAML by itself means the same in the file: it ends its map, and the next line begins a row. One
    that is none, as its text in quotes goes on in lines that look like rows and remarks, is taken for damaged.
    """
    if len(lines) != text.count("\n") + (not text.endswith("\n")):  # YAML ends lines at fewer characters than Python
        return False
    others = [line for line in lines if not line.startswith("- {")]
    return len(others) < len(lines) and all(line.startswith("#") or not line.strip(" ") for line in others)


# --- lines that are JSON ----------------------------------------------------------------------------------------------

# A number with an exponent in JSON and in YAML; 1e5 and 1.5e5 are text in YAML.
_WITH_EXPONENT = re.compile(r"-?\d+\.\d+e[+-]\d+", re.IGNORECASE)
_OTHER_ESCAPE = re.compile(r"""\\[^"\\nrtbf]""")  # of a character that YAML may write otherwise
_BEHIND = re.compile(r" *| +#.*")  # what may stand behind a row


def _real(text: str) -> Real:
    if "e" in text.lower() and not _WITH_EXPONENT.fullmatch(text):
        raise ValueError(text)
    return Real(text)


def _refuse(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which are text in YAML."""
    raise ValueError(text)


def _map_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs) or max(map(len, found), default=0) > _LONGEST_KEY:
        raise ValueError
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_map_of, parse_int=Integer, parse_float=_real, parse_constant=_refuse)


def _read_json(number: int, line: str) -> YamlRow | None:
    """Return the row of a line that begins with ``- {``, if it is JSON that means the same in YAML; else None."""
    if not line.isprintable() or _OTHER_ESCAPE.search(line):
        return None
    if len(line) > 2 * _MOST_VALUES or line.count("[") + line.count("{") > _DEEPEST:  # a value takes two characters
        return None
    try:
        found, end = _JSON.raw_decode(line, 2)
    except ValueError:
        return None
    return YamlRow(number, found, line[end:].strip()) if _BEHIND.fullmatch(line, end) else None


# --- all other YAML ---------------------------------------------------------------------------------------------------

_RESOLVER: Any = yaml.resolver.Resolver()
_KINDS = {f"{_TAG}{name}": kind for name, kind in (("str", str), ("int", Integer), ("float", Real))}


def _read_line(number: int, line: str, anchors: _Anchors) -> YamlRow:
    """Return the row of one line; `anchors` are those of the lines before it, and get its own."""
    try:
        (row,) = _read_events(line, [line], anchors)
    except YamlFault as fault:
        at = (
            "" if fault.mark is None else f" (column {fault.mark.column + 1})" if not fault.mark.line else " at its end"
        )
        return YamlRow(number, None, fault=fault.what + at)
    return row._replace(line=number)


def _read_events(text: str, lines: list[str], anchors: _Anchors) -> Iterator[YamlRow]:
    """Yield the rows of a list in any style; arguments as those of `read_rows` and `_read_line`."""
    events = _Events(text, anchors)
    while not isinstance(root := events.take(), yaml.StreamEndEvent | yaml.DocumentStartEvent):
        pass
    if isinstance(root, yaml.StreamEndEvent):
        raise YamlFault(f"holds no rows; write one line a size, such as {EXAMPLE}")
    root = events.take()
    if not isinstance(root, yaml.SequenceStartEvent):
        what = describe(root.value) if isinstance(root, yaml.ScalarEvent) else "a map"
        raise YamlFault(f"must be a list of maps, one a size, such as {EXAMPLE}; it is {what}")
    while not isinstance(event := events.take(), yaml.SequenceEndEvent):
        yield _read_row(event, events, lines)
    while not isinstance(event := events.take(), yaml.StreamEndEvent):
        if isinstance(event, yaml.DocumentStartEvent):
            raise YamlFault("holds more than one document", event.start_mark)


def _read_row(first: _Event, events: _Events, lines: list[str]) -> YamlRow:
    """Return the row that begins with an event, and take its other events."""
    value, fault = None, ""
    try:
        value, _ = events.build(first)
    except _RowFault as error:
        fault = str(error)
        while events.depth > 1:  # the rest of the row; the list of rows is one level
            events.take()
    # A map in block style ends where the next row starts, so nothing can stand behind it.
    end, flow = events.last.end_mark, isinstance(first, yaml.MappingStartEvent) and first.flow_style
    remark = lines[end.line][end.column :].strip() if flow and end.line < len(lines) else ""
    return YamlRow(first.start_mark.line + 1, value, remark, fault)


class _RowFault(Exception):
    """A row can't be used, though it is YAML; the message says why."""


class _Events:
    """libyaml's events of a text, and the values that they make."""

    def __init__(self, text: str, anchors: _Anchors) -> None:
        self.last: _Event = None
        self.depth = 0
        self._events, self._anchors = yaml.parse(text, Loader=_LOADER), anchors

    def take(self) -> _Event:
        """Return the next event."""
        try:
            self.last = next(self._events)
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or " ".join(str(error).split())
            # PyYAML 6.0.4's libyaml has a limit of its own, 1000, and reads ahead to it before it reports any level.
            what = _TOO_DEEP if "nesting depth" in problem else f"is not YAML: {problem}"
            raise YamlFault(what, getattr(error, "problem_mark", None)) from None
        self.depth += isinstance(self.last, yaml.CollectionStartEvent) - isinstance(self.last, yaml.CollectionEndEvent)
        if self.depth > _DEEPEST + 1:
            raise YamlFault(_TOO_DEEP, self.last.start_mark)
        return self.last

    def build(self, event: _Event, path: str = "") -> tuple[Value, int]:
        """Return the value that begins with an event, and how many values are in it, itself included."""
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _RowFault(f"has *{event.anchor}, but nothing before it is called &{event.anchor}")
            return self._anchors[event.anchor]
        if isinstance(event, yaml.ScalarEvent):
            built: tuple[Value, int] = _scalar(event), 1
        else:
            built = self._list(path) if isinstance(event, yaml.SequenceStartEvent) else self._map(path)
        if event.anchor is not None:
            self._anchors[event.anchor] = built
        return built

    def _list(self, path: str) -> tuple[Value, int]:
        found: list[Any] = []
        count = 1
        while not isinstance(event := self.take(), yaml.SequenceEndEvent):
            value, held = self.build(event, path)
            found.append(value)
            count = _require_few(count + held)
        return found, count

    def _map(self, path: str) -> tuple[Value, int]:
        found: dict[str, Any] = {}
        count = 1
        while not isinstance(event := self.take(), yaml.MappingEndEvent):
            key, held = self.build(event)
            key = str(event.value) if isinstance(event, yaml.ScalarEvent) else key
            if not isinstance(key, str):
                raise _RowFault(f"has {describe(key)} as a key; a key is a name, such as M")
            if len(key) > _LONGEST_KEY:
                raise _RowFault(f"has the key {shown(key)}, of {len(key)} characters; one has at most {_LONGEST_KEY}")
            if key in found:
                raise _RowFault(f"has {shown(path + key)[1:-1]} twice; keep one of them")
            found[str(key)], more = self.build(self.take(), f"{path}{key}: ")
            count = _require_few(count + held + more)
        return found, count


def _require_few(count: int) -> int:
    if count > _MOST_VALUES:
        raise _RowFault(f"has more than {_MOST_VALUES} values")
    return count


def _scalar(event: _Event) -> Value:
    text, tag = event.value, event.tag
    quoted = bool(event.style)
    meant = f"{_TAG}str" if quoted else _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))
    if tag == f"{_TAG}str":
        return str(text)
    if tag not in (None, "!", meant):
        raise _RowFault(f"has {shown(text)} with the tag {shown(tag)}; leave the tag out")
    if meant == f"{_TAG}bool":
        return text.lower() in ("true", "yes", "on")
    kind: type[str] = _KINDS.get(meant, Other)
    return None if meant == f"{_TAG}null" else kind(text)
