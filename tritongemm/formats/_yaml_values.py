"""The rows of a YAML list as values, one after the other.

A file whose every row is one line, as in the files that we write, is read line by line: what is wrong in a line costs
that row alone. A line that we write differs from JSON in its quotes only, and is read by `json`, which is written in C.
Every other line, and every other file as a whole, is read from libyaml's events. Both give the same values.

No value is nested so deeply, or repeated so often by aliases, that reading it takes the stack or the memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

import yaml

from tritongemm.formats._rows import EXAMPLE

_DEEPEST = 100  # Levels of lists and maps in a row; ours have two.
_TOO_DEEP = f"has lists and maps nested more than {_DEEPEST} deep"
_MOST_VALUES = 10_000  # Values of a row, where one that an alias repeats counts each time; ours have some fifty.
_LONGEST_KEY = 500  # Characters of a key; libyaml reads no key of more than 1024 that is written as ours are.
_LONGEST_SHOWN = 100  # Characters of a file's text that a message repeats.

# libyaml, where PyYAML has it, reads a thousand rows in a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"


class Whole(str):
    """A whole number, as it is written."""


class Real(str):
    """A number that is not whole, as it is written."""


class Other(str):
    """A plain value of another kind, such as a date, as it is written."""


Value: TypeAlias = "str | bool | list[Any] | dict[str, Any] | None"  # A plain str is text.
_Event: TypeAlias = Any  # One of yaml.events.
_Mark: TypeAlias = Any  # A place in a text, with a line and a column from 0; there are PyYAML's and libyaml's.
_Anchors: TypeAlias = "dict[str, tuple[Value, int]]"  # Values that have names, and how many values each holds.


class YamlRow(NamedTuple):
    """One row of a list.

    Attributes:
        line: where it starts, from 1.
        value: what it is; None where it can't be read.
        remark: what stands behind a map in flow style on its last line.
        fault: why it can't be read; "" where it can.
    """

    line: int
    value: Value
    remark: str = ""
    fault: str = ""


class YamlFault(Exception):
    """Text can't be read as a list of rows; says why in words that go on from the name of the file or row.

    Attributes:
        what: is wrong.
        mark: where; None where that is not known.
    """

    def __init__(self, what: str, mark: _Mark | None = None) -> None:
        self.what, self.mark = what, mark
        super().__init__(f"{what} (line {mark.line + 1}, column {mark.column + 1})" if mark else what)


def read_rows(text: str) -> Iterator[YamlRow]:
    """The rows of a YAML list.

    Raises:
        YamlFault: the text as a whole can't be read.
    """
    lines = text.splitlines()
    if not _has_a_row_a_line(text, lines):
        yield from _read_events(text, lines, {})
        return
    anchors: _Anchors = {}
    for number, line in enumerate(lines, start=1):
        if line.startswith("- {"):
            yield _read_own_line(number, line) or _read_line(number, line, anchors)


def shown(text: str) -> str:
    """A text of a file as a message repeats it: quoted, and cut to a length that can be read."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")


def describe(value: Value) -> str:
    """A value in the words of a message."""
    if isinstance(value, bool):
        return repr(str(value).lower())
    if isinstance(value, str):
        return shown(value) if value else "nothing"
    return "nothing" if value is None else "a list" if isinstance(value, list) else "a map"


def _has_a_row_a_line(text: str, lines: list[str]) -> bool:
    """Whether every line is a remark, empty, or begins a map in flow style as a row.

    Such a line that is YAML by itself means the same in the file: it ends its map, and the next line begins a row. One
    that is none, as its text in quotes goes on in lines that look like rows and remarks, is taken for damaged.
    """
    if len(lines) != text.count("\n") + (not text.endswith("\n")):  # YAML ends lines at fewer characters than Python
        return False
    others = [line for line in lines if not line.startswith("- {")]
    return len(others) < len(lines) and all(line.startswith("#") or not line.strip(" ") for line in others)


# --- lines that we wrote ----------------------------------------------------------------------------------------------

# A number with an exponent in JSON and in YAML; 1e5 and 1.5e5 are text in YAML.
_WITH_EXPONENT = re.compile(r"-?\d+\.\d+e[+-]\d+", re.IGNORECASE)
# A key or a value without quotes that YAML takes for text.
_WORD = re.compile(r"(?<=[{ ])(?!(?:true|false|null|yes|no|on|off)\b)([a-z_]\w*)(?=: |[,}])", re.ASCII | re.IGNORECASE)

_BEHIND = re.compile(r" *| +#.*")  # what may stand behind a row


def _real(text: str) -> Real:
    if "e" in text.lower() and not _WITH_EXPONENT.fullmatch(text):
        raise ValueError(text)
    return Real(text)


def _refuse(text: str) -> NoReturn:
    """NaN and Infinity, which are text in YAML."""
    raise ValueError(text)


def _map(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs) or max(map(len, found), default=0) > _LONGEST_KEY:
        raise ValueError
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_map, parse_int=Whole, parse_float=_real, parse_constant=_refuse)


def _read_own_line(number: int, line: str) -> YamlRow | None:
    """The row of a line that begins with ``- {``, where JSON means the same as YAML; None where it may not.

    With neither a double quote nor a backslash in the line, its single quotes can be made JSON's: a quote within a
    text, which YAML doubles, becomes two of JSON's quotes side by side and is refused. Where there are no quotes, as in
    sizes that were written by hand, words get JSON's; a word in a text of several is left, and is refused as well.
    """
    if '"' in line or "\\" in line or not line.isprintable():
        return None
    if len(line) > 2 * _MOST_VALUES or line.count("[") + line.count("{") > _DEEPEST:  # a value takes two characters
        return None
    if "'" in line:
        text = line[2:].replace("'", '"')
    else:
        text, blank, remark = line[2:].partition(" #")
        text = _WORD.sub(r'"\1"', text) + blank + remark
    try:
        found, end = _JSON.raw_decode(text)
    except ValueError:
        return None
    behind = line[len(line) - len(text) + end :]  # where both are the same but for quotes
    return YamlRow(number, found, behind.strip()) if _BEHIND.fullmatch(behind) else None


# --- all other YAML ---------------------------------------------------------------------------------------------------

_RESOLVER: Any = yaml.resolver.Resolver()
_KINDS = {f"{_TAG}{name}": kind for name, kind in (("str", str), ("int", Whole), ("float", Real))}


def _read_line(number: int, line: str, anchors: _Anchors) -> YamlRow:
    """The row of one line; `anchors` are those of the lines before it, and get its own."""
    try:
        (row,) = _read_events(line, [line], anchors)
    except YamlFault as fault:
        at = (
            "" if fault.mark is None else f" (column {fault.mark.column + 1})" if not fault.mark.line else " at its end"
        )
        return YamlRow(number, None, fault=fault.what + at)
    return row._replace(line=number)


def _read_events(text: str, lines: list[str], anchors: _Anchors) -> Iterator[YamlRow]:
    """The rows of a list in any style; arguments as those of `read_rows` and `_read_line`."""
    events = _events(text)
    if not any(isinstance(event, yaml.DocumentStartEvent) for event in events):
        raise YamlFault(f"holds no rows; write one line a size, such as {EXAMPLE}")
    root = next(events)
    if not isinstance(root, yaml.SequenceStartEvent):
        what = describe(root.value) if isinstance(root, yaml.ScalarEvent) else "a map"
        raise YamlFault(f"must be a list of maps, one a size, such as {EXAMPLE}; it is {what}")
    for event in events:
        if isinstance(event, yaml.SequenceEndEvent):
            break
        yield _read_row(event, events, lines, anchors)
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            raise YamlFault("holds more than one document", event.start_mark)


def _events(text: str) -> Iterator[_Event]:
    try:
        yield from yaml.parse(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        # The libyaml of PyYAML 6.0.4 has a limit of its own, 1000, and reads ahead to it before it tells of any level.
        what = _TOO_DEEP if "nesting depth" in problem else f"is not YAML: {problem}"
        raise YamlFault(what, getattr(error, "problem_mark", None)) from None


def _read_row(first: _Event, events: Iterator[_Event], lines: list[str], anchors: _Anchors) -> YamlRow:
    """The row that begins with an event; takes its other events."""
    row, last = _RowBuilder(anchors), first
    while not row.take(last):
        last = next(events)
    # A map in block style ends where the next row starts, so nothing can stand behind it.
    end, flow = last.end_mark, isinstance(first, yaml.MappingStartEvent) and first.flow_style
    remark = lines[end.line][end.column :].strip() if flow and end.line < len(lines) else ""
    return YamlRow(first.start_mark.line + 1, row.value, remark, row.fault)


class _RowFault(Exception):
    """A row can't be used, though it is YAML; its text says why."""


@dataclass
class _Open:
    """A list or map whose end has not come yet.

    Attributes:
        value: the list or map.
        anchor: its name; None where it has none.
        key: of a map, the key whose value comes next; None where a key comes next.
        count: values in it, itself included.
    """

    value: list[Any] | dict[str, Any]
    anchor: str | None
    key: str | None = None
    count: int = 1


class _RowBuilder:
    """Makes a row's value of its events. It does not call itself for what is nested.

    Args:
        anchors: values that have names; those of the row are added.

    Attributes:
        value: the row's; None until it is whole, or where it can't be used.
        fault: why it can't be used.
    """

    def __init__(self, anchors: _Anchors) -> None:
        self.value: Value = None
        self.fault = ""
        self._anchors = anchors
        self._open: list[_Open] = []
        self._depth = 0

    def take(self, event: _Event) -> bool:
        """Take the row's next event; whether it was its last.

        Raises:
            YamlFault: it is nested too deeply, where libyaml takes time as the square of the depth.
        """
        self._depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if self._depth > _DEEPEST:
            raise YamlFault(_TOO_DEEP, event.start_mark)
        if not self.fault:
            try:
                self._add(event)
            except _RowFault as fault:
                self.fault = str(fault)
        return not self._depth

    def _add(self, event: _Event) -> None:
        if isinstance(event, yaml.CollectionStartEvent):
            is_list = isinstance(event, yaml.SequenceStartEvent)
            self._open.append(_Open([] if is_list else {}, event.anchor))
            return
        value, count, anchor = self._finished(event)
        if anchor is not None:
            self._anchors[anchor] = value, count
        if not self._open:
            self.value = value
            return
        self._put(value, count, event.value if isinstance(event, yaml.ScalarEvent) else value)

    def _finished(self, event: _Event) -> tuple[Value, int, str | None]:
        """The value that an event ends, how many values it holds, and its name."""
        if isinstance(event, yaml.CollectionEndEvent):
            done = self._open.pop()
            return done.value, done.count, done.anchor
        if not isinstance(event, yaml.AliasEvent):
            return _scalar(event), 1, event.anchor
        if event.anchor not in self._anchors:
            raise _RowFault(f"has *{event.anchor}, but nothing before it is called &{event.anchor}")
        return *self._anchors[event.anchor], None

    def _put(self, value: Value, count: int, key: Value) -> None:
        """Put a value into the innermost list or map, where it may be a key."""
        parent = self._open[-1]
        parent.count += count
        if parent.count > _MOST_VALUES:
            raise _RowFault(f"has more than {_MOST_VALUES} values")
        if isinstance(parent.value, list):
            parent.value.append(value)
        elif parent.key is not None:
            parent.value[parent.key], parent.key = value, None
        elif not isinstance(key, str):
            raise _RowFault(f"has {describe(key)} as a key; a key is a name, such as M")
        elif len(key) > _LONGEST_KEY:
            raise _RowFault(f"has the key {shown(key)}, of {len(key)} characters; one has at most {_LONGEST_KEY}")
        elif key in parent.value:
            path = ": ".join([*(outer.key for outer in self._open[:-1] if outer.key), key])
            raise _RowFault(f"has {shown(path)[1:-1]} twice; keep one of them")
        else:
            parent.key = str(key)


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
