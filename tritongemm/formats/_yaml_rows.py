"""Rows of a YAML list of maps, read by node, so that every complaint names file, row, line and field; and written."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tritongemm.core.errors import InputError
from tritongemm.formats._rows import EXAMPLE

_WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,17})")  # no octal 010, nothing that int() refuses for its length
# libyaml, where PyYAML has it, reads a thousand rows in a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def is_row_list(path: Path, text: str) -> bool:
    """Whether a file is YAML by its name, or begins with a list item."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith(("#", "---"))), "")
    return path.suffix.lower() in (".yaml", ".yml") or first.lstrip().startswith("-")


def read_entries(path: Path, text: str, keys: Collection[str]) -> list[Entry]:
    """The rows of a file.

    Args:
        path: for messages.
        text: contents.
        keys: those that a row may have.

    Raises:
        InputError: not YAML, not a list of maps, or a row with a repeated key.
    """
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or " ".join(str(error).split())
        raise InputError(f"{path}{where}: not YAML: {what}") from None
    if root is None:
        raise InputError(f"{path} holds no rows; write one line a size, such as {EXAMPLE}")
    if not isinstance(root, yaml.SequenceNode):
        raise InputError(f"{path} must be a list of maps, one a size, such as {EXAMPLE}; it is {_kind(root)}")
    lines = text.splitlines()
    return [Entry(path, number, node, keys, lines) for number, node in enumerate(root.value, start=1)]


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"{node.value!r}" if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a map"


class Entry:
    """One row, whose values are asked for by kind. Every method raises InputError for a value of another kind.

    Attributes:
        row: its number, from 1.
        line: where it starts, from 1.
        remark: what stands behind it on its last line.
        unknown: its keys that a row may not have.
    """

    def __init__(self, path: Path, row: int, node: yaml.Node, keys: Collection[str], lines: list[str]) -> None:
        self.row, self.line = row, node.start_mark.line + 1
        self.where = f"{path}: row {row} (line {self.line})"
        if not isinstance(node, yaml.MappingNode):
            self.fail(f"must be a map, such as {EXAMPLE[2:]}; it is {_kind(node)}")
        # A map in block style ends where the next row starts, so nothing can stand behind it.
        end = node.end_mark
        self.remark = lines[end.line][end.column :].strip() if node.flow_style and end.line < len(lines) else ""
        self._nodes: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fail(f"has {_kind(key)} as a key; a key is a name, such as M")
            name = str(key.value)
            if name in self._nodes:
                self.fail(f"has {name} twice; keep one of them")
            self._nodes[name] = value
        self._keys, self.unknown = keys, [name for name in self._nodes if name not in keys]

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def fail(self, what: str) -> NoReturn:
        """Raise the complaint `what` about this row."""
        raise InputError(f"{self.where} {what}")

    def refuse_unknown_keys(self) -> None:
        """Complain about the first key that a row may not have."""
        for name in self.unknown:
            self.fail(f"has an unknown key {name!r}; {_nearest(name, self._keys)}")

    def unknown_values(self) -> dict[str, Any]:
        """What the unknown keys say, as JSON values."""
        return {name: _plain(self._nodes[name]) for name in self.unknown}

    def line_of_text(self) -> str:
        """The row as one line of a file, every value as it is written."""
        return "- {" + ", ".join(f"{flow(k)}: {_flow_node(v)}" for k, v in self._nodes.items()) + "}"

    def whole(self, key: str, least: int, default: int) -> int:
        """A whole number of at least `least`."""
        return _whole(self, key, self._nodes[key], least) if key in self else default

    def text(self, key: str, default: str = "", choices: Collection[str] = ()) -> str:
        """Text; one of `choices`, if there are any."""
        node = self._nodes.get(key)
        if node is None:
            return default
        if not (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":str")):
            self.fail(f"{key} must be text, not {_kind(node)}; put it in quotes")
        if choices and node.value not in choices:
            self.fail(f"{key} must be one of {', '.join(choices)}, not {node.value!r}")
        return str(node.value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        node = self._nodes.get(key)
        if node is None:
            return default
        if not node.tag.endswith(":bool"):
            self.fail(f"{key} must be true or false, not {_kind(node)}")
        return str(node.value).lower() in ("true", "yes", "on")

    def number(self, key: str) -> float | None:
        """A number; also one in quotes, and what YAML takes for text, such as 1e-5."""
        node = self._nodes.get(key)
        if node is None:
            return None
        try:
            value = float(str(node.value).lower().replace(".inf", "inf"))
        except ValueError:
            value = math.nan
        if math.isnan(value):
            self.fail(f"{key} must be a number, not {_kind(node)}")
        return value

    def shifted(self, key: str, places: int) -> float | None:
        """A positive number times ten to the power of `places`, without the rounding of a product."""
        node = self._nodes.get(key)
        if node is None:
            return None
        try:
            value = float(Decimal(str(node.value)).scaleb(places))
        except InvalidOperation:
            value = math.nan
        if not 0 < value < math.inf:
            self.fail(f"{key} must be a positive number, not {_kind(node)}")
        return value

    def texts(self, key: str) -> dict[str, str]:
        """A map of plain values, as they are written."""
        return {k: str(v.value) for k, v in self._table(key).items()}

    def wholes(self, key: str) -> dict[str, int]:
        """A map of whole numbers, none negative."""
        return {k: _whole(self, f"{key}: {k}", v, 0) for k, v in self._table(key).items()}

    def _table(self, key: str) -> dict[str, yaml.Node]:
        node = self._nodes.get(key)
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode) or any(not isinstance(v, yaml.ScalarNode) for _, v in node.value):
            self.fail(f"{key} must be a map of plain values, not {_kind(node)}")
        table = {str(k.value): v for k, v in node.value}
        if len(table) < len(node.value):
            self.fail(f"{key} has a key twice; keep one of them")
        return table


def _whole(entry: Entry, key: str, node: yaml.Node, least: int) -> int:
    if not (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and _WHOLE.fullmatch(node.value)):
        quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"') and _WHOLE.fullmatch(node.value)
        entry.fail(f"{key} must be a whole number, not {_kind(node)}" + ("; remove the quotes" if quoted else ""))
    if int(node.value) < least:
        entry.fail(f"{key} must be at least {least}, not {node.value}")
    return int(node.value)


def _nearest(name: str, keys: Collection[str]) -> str:
    lower = {k.lower(): k for k in keys}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    return f"did you mean {lower[near[0]]!r}?" if near else f"there are: {', '.join(keys)}"


def _plain(node: yaml.Node) -> Any:
    """A value as JSON has it; what JSON has not, such as a date, is text."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one) for one in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value) for key, value in node.value}
    value = yaml.SafeLoader("").construct_object(node)
    return value if value is None or isinstance(value, str | bool | int | float) else str(node.value)


def flow(value: object) -> str:
    """A value in YAML's flow style, quoted as Python prints it, which is how tune_gemm's files look."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(str(k))}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, Decimal):
        text = format(value.normalize(), "f")
        return text if "." in text else f"{text}.0"
    if isinstance(value, str | float):
        style = '"' if isinstance(value, str) else None
        return yaml.safe_dump(value, default_style=style, width=math.inf, allow_unicode=True).splitlines()[0]
    return str(value)


def _flow_node(node: yaml.Node) -> str:
    """A node in flow style, with numbers as they are written."""
    if isinstance(node, yaml.MappingNode):
        return "{" + ", ".join(f"{_flow_node(k)}: {_flow_node(v)}" for k, v in node.value) + "}"
    if isinstance(node, yaml.SequenceNode):
        return "[" + ", ".join(map(_flow_node, node.value)) + "]"
    text = str(node.value)
    return flow(text) if node.tag.endswith(":str") else text
