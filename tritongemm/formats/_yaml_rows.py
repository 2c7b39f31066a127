"""Reads and writes rows of a YAML list of maps; every complaint names file, row, line and field."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tritongemm.core.errors import InputError
from tritongemm.core.values import SECONDS
from tritongemm.formats._rows import EXAMPLE
from tritongemm.formats._yaml_values import Integer, Real, Value, YamlFault, YamlRow, describe, read_rows, shown

_INTEGER = re.compile(r"[+-]?(0|[1-9]\d*)", re.ASCII)  # no octal 010
_MOST = 2**63 - 1  # drivers and compilers take whole numbers of 64 bits
_LONGEST_NAME = 100  # characters of a key for which a similar one is looked for
_LISTED_KEYS = 40  # of the known keys, where none is like the wrong one
_DIGITS = 21  # characters from which a whole number has more than 64 bits, whatever its sign


def is_row_list(path: Path, text: str) -> bool:
    """Return whether a file is YAML by its name, or begins with a list item."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return True
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith(("#", "---"))), "")
    return first.lstrip().startswith("-")


def read_entries(path: Path, text: str, keys: Collection[str]) -> Iterator[Entry]:
    """Yield the rows of a file, which may be damaged: `Entry.require_map` says so."""
    known = frozenset(keys)
    try:
        for number, row in enumerate(read_rows(text), start=1):
            yield Entry(path, number, row, keys, known)
    except YamlFault as fault:
        raise InputError(f"{path} {fault}") from None


class Entry:
    """One row, whose values are read by kind. Every method raises InputError for a value of another kind."""

    def __init__(self, path: Path, number: int, row: YamlRow, keys: Collection[str], known: frozenset[str]) -> None:
        self.row, self.line, self.remark = number, row.line, row.remark
        self._path, self._found, self._keys = path, row, keys
        self.values: dict[str, Any] = row.value if isinstance(row.value, dict) else {}
        self.unknown = [] if self.values.keys() <= known else [name for name in self.values if name not in known]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    @property
    def where(self) -> str:
        """File, row and line."""
        return f"{self._path}: row {self.row} (line {self.line})"

    def fail(self, what: str) -> NoReturn:
        """Raise the complaint `what` about this row."""
        raise InputError(f"{self.where} {what}")

    def require_map(self) -> None:
        """Complain where the row can't be read, or is no map."""
        if self._found.fault:
            self.fail(self._found.fault)
        if not isinstance(self._found.value, dict):
            self.fail(f"must be a map, such as {EXAMPLE[2:]}; it is {describe(self._found.value)}")

    def refuse_unknown_keys(self) -> None:
        """Complain about the first key that a row may not have."""
        for name in self.unknown:
            self.fail(f"has an unknown key {shown(name)}; {_nearest(name, self._keys)}")

    def plain(self, key: str) -> Any:
        """Return a key's value as a JSON value; None where it is not there."""
        return _plain(self.values.get(key))

    def integer(self, key: str, least: int, default: int) -> int:
        """Return a whole number of at least `least`."""
        return _integer(self, key, self.values[key], least) if key in self.values else default

    def text(self, key: str, default: str = "", choices: Collection[str] = ()) -> str:
        """Return the text; one of `choices`, if there are any."""
        if key not in self.values:
            return default
        value = self.values[key]
        if type(value) is not str:
            self.fail(f"{key} must be text, not {describe(value)}; put it in quotes")
        if choices and value not in choices:
            self.fail(f"{key} must be one of {', '.join(choices)}, not {shown(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fail(f"{key} must be true or false, not {describe(value)}")
        return value

    def number(self, key: str, may_be_infinite: bool = False) -> float | None:
        """Return a number of at least 0; also one in quotes, and what YAML takes for text, such as 1e-5."""
        if key not in self.values:
            return None
        value = _real(self.values[key])
        if not (0 <= value < math.inf or (value == math.inf and may_be_infinite)):
            self.fail(f"{key} must be a number of at least 0, and finite, not {describe(self.values[key])}")
        return value

    def shifted(self, key: str, places: int) -> float | None:
        """Return a positive number times ten to the power of `places`, without the rounding of a product."""
        if key not in self.values:
            return None
        try:
            value = float(Decimal(str(self.values[key])).scaleb(places))
        except ArithmeticError:
            value = math.nan
        if not 0 < value < math.inf:
            self.fail(f"{key} must be a positive number, not {describe(self.values[key])}")
        return value

    def seconds(self, key: str) -> float | None:
        """Return a time in microseconds, in seconds."""
        seconds = self.shifted(key, -6)
        if seconds is not None and not SECONDS.holds(seconds):
            self.fail(f"{key} must be {SECONDS.words}, not {describe(self.values[key])} microseconds")
        return seconds

    def texts(self, key: str) -> dict[str, str]:
        """Return a map of plain values, as they are written."""
        return {k: flow(v) if v is None or isinstance(v, bool) else str(v) for k, v in self._table(key).items()}

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of text."""
        values = self.values.get(key, [])
        if not isinstance(values, list) or any(type(v) is not str for v in values):
            self.fail(f"{key} must be a list of text, not {describe(values)}")
        return tuple(values)

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers, none negative."""
        values = self.values.get(key, [])
        if not isinstance(values, list):
            self.fail(f"{key} must be a list of whole numbers, not {describe(values)}")
        return tuple(_integer(self, f"{key}: {i}", v, 0) for i, v in enumerate(values, start=1))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers, none negative."""
        values = self.values.get(key, [])
        if not isinstance(values, list):
            self.fail(f"{key} must be a list of numbers, not {describe(values)}")
        found = tuple(map(_real, values))
        for i, (number, value) in enumerate(zip(found, values, strict=True), start=1):
            if not 0 <= number < math.inf:
                self.fail(f"{key}: {i} must be a number of at least 0, and finite, not {describe(value)}")
        return found

    def integers(self, key: str) -> dict[str, int]:
        """Return a map of whole numbers, none negative."""
        return {k: _integer(self, f"{key}: {k}", v, 0) for k, v in self._table(key).items()}

    def _table(self, key: str) -> dict[str, Value]:
        if key not in self.values:
            return {}
        table = self.values[key]
        if not isinstance(table, dict) or any(isinstance(v, list | dict) for v in table.values()):
            self.fail(f"{key} must be a map of plain values, not {describe(table)}")
        return table


def _integer(entry: Entry, key: str, value: Value, least: int) -> int:
    number = _decimal(value) if isinstance(value, Integer) else None
    if number is None or not least <= number <= _MOST:
        _refuse_number(entry, key, value, least)
    return number


def _refuse_number(entry: Entry, key: str, value: Value, least: int) -> NoReturn:
    number = _decimal(value) if isinstance(value, str) else None
    if number is None:
        entry.fail(f"{key} must be a whole number, not {describe(value)}")
    if not isinstance(value, Integer):
        entry.fail(f"{key} must be a whole number, not {describe(value)}; remove the quotes")
    bound = f"least {least}" if number < least else f"most {_MOST}"
    entry.fail(f"{key} must be at {bound}, not {shown(value)[1:-1]}")


@lru_cache(maxsize=1 << 14)
def _decimal(text: str) -> int | None:
    """Return a text's whole number, or a number of its sign that is too large as well; None for anything else."""
    return int(text[:_DIGITS]) if _INTEGER.fullmatch(text) else None


def _real(value: Value) -> float:
    """Return the number of a value; NaN for anything else."""
    try:
        return float(str(value).lower().replace(".inf", "inf"))
    except ValueError:
        return math.nan


def _nearest(name: str, keys: Collection[str]) -> str:
    lower = {k.lower(): k for k in keys}
    near = difflib.get_close_matches(name.lower(), lower, n=1) if len(name) <= _LONGEST_NAME else []
    near = [key for key in (f"{name.lower()}_a",) if key in lower] or near  # of an operand's property, such as dtype
    if near:
        return f"did you mean {lower[near[0]]!r}?"
    listed = list(keys)[:_LISTED_KEYS]
    more = f" and {len(keys) - len(listed)} more, in docs/reference/formats.md" if len(keys) > len(listed) else ""
    return f"there are: {', '.join(listed)}{more}"


def _plain(value: Value) -> Any:
    """Return a value as JSON has it; others, such as dates, become text."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if not isinstance(value, Integer | Real):
        return str(value) if isinstance(value, str) else value
    try:
        kind = "int" if isinstance(value, Integer) else "float"
        number = yaml.SafeLoader("").construct_object(yaml.ScalarNode(f"tag:yaml.org,2002:{kind}", str(value)))
        return number if math.isfinite(number) else str(value)
    except (ValueError, OverflowError):  # thousands of digits
        return str(value)


def flow(value: object) -> str:
    """Return a value in YAML's flow style; JSON as well, unless text is not printable or a number is not finite."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(str(k))}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Decimal):
        text = format(value.normalize(), "f")
        return text if "." in text else f"{text}.0"
    if isinstance(value, float):
        text = repr(value)  # YAML takes 1e-05 for text
        finite = text if "." in text else text.replace("e", ".0e")
        return finite if math.isfinite(value) else text.replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, str):
        return yaml.safe_dump(value, default_style='"', width=math.inf, allow_unicode=True).splitlines()[0]
    return str(value)
