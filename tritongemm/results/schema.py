"""What a line of a journal says: nouns of today, from lines of any schema.

A journal begins with its header, whose key ``schema`` is the number of the form that its lines have; without one it
is 1. Every line is read by itself, because a journal of schema 1 that is continued has lines of both.

- A key of a trial that is not known here is passed over; a record that has one is not used.
- A key of a problem that is not known here makes it another problem, so the line is kept and not used.
- A problem of schema 1 says what scales it has, and in which order its B lies, by the name of its family alone.
- In a journal of a newer schema a line that can't be read is kept and not used.
- Otherwise a line that is not JSON, lacks a key or has a value that can't be is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import SCHEMA, Record
from tritongemm.core.scaling import Scaling
from tritongemm.core.trial import Trial
from tritongemm.core.values import FLAG, MAP, TEXT, TEXTS, WHOLE, FieldKind, one_of, require
from tritongemm.plugins import registry

__all__ = [
    "SCHEMA", "Line", "NewerLineError", "UnreadTrial", "defer_trial", "read_line", "read_problem", "read_record",
    "read_trial", "schema_of",
]  # fmt: skip

# How the line of a trial begins, and what stands between its problem and its trial.
_PROBLEM, _TRIAL = b'{"problem": ', b', "trial": '
_PROBLEM_KEYS = frozenset(f.name for f in fields(Problem))
_SCALING_KEYS = frozenset(f.name for f in fields(Scaling))
_TRIAL_KEYS = frozenset(f.name for f in fields(Trial))
_HEADER_KINDS = {"target": TEXT, "toolchain": TEXTS, "protocol": MAP, "compute_units": WHOLE}
_MAP_OR_NONE = FieldKind("a map or null", lambda v: v is None or MAP.holds(v))
# What `Problem` itself does not check; it knows the range of a size and the names of dtypes and biases.
_PROBLEM_KINDS = {
    **dict.fromkeys(
        ("dtype_a", "dtype_b", "dtype_c", "bias", "family", "order_b", "scales", "group_form", "spread"), TEXT
    ),
    **dict.fromkeys(("row_major_a", "row_major_b"), FLAG),
    **dict.fromkeys(("scale_a", "scale_b"), _MAP_OR_NONE),
    "counts": FieldKind("a list of whole numbers", lambda v: isinstance(v, list) and all(WHOLE.holds(n) for n in v)),
    "room": WHOLE,
}
_SCALING_KINDS = {
    "dtype": one_of(*DTYPES),
    "layout": TEXT,
    **dict.fromkeys(("rows", "depth"), WHOLE),
    "pad": FieldKind(
        "two whole numbers", lambda v: isinstance(v, list) and len(v) == 2 and all(WHOLE.holds(n) and n for n in v)
    ),
}


class NewerLineError(Exception):
    """A line can be used by a newer version only; its text says why."""


@dataclass(frozen=True)
class Line:
    """What one line of a journal says.

    Attributes:
        kind: ``header``, ``record``, ``trial`` or ``merged``; ``newer`` for a line that is kept and not used.
        value: a mapping for a header, a `Record`, a problem with a `Trial` or an `UnreadTrial`, or a list of problems;
            for ``newer`` the line as it was read.
        reason: why the line can't be used; "" where it can.
    """

    kind: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class UnreadTrial:
    """A trial whose line is as it was written. It is read when it is asked for: a finished run asks for few.

    Attributes:
        line: of the journal, without its checksum.
    """

    line: bytes

    def read(self) -> Trial:
        """The trial.

        Raises:
            InputError, KeyError, TypeError, ValueError: it can't be.
        """
        return read_trial(json.loads(self.line)["trial"])


def schema_of(header: Mapping[str, Any]) -> int:
    """Number of the form in which a journal is written, from its header.

    Raises:
        InputError: it is no number.
    """
    number = header.get("schema", 1)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"schema must be a number from 1 on, not {number!r}")
    return number


def defer_trial(line: bytes, problems: dict[Hashable, Problem]) -> Line | None:
    """The line of a trial, as it was written, whose problem alone is read now; None for another line.

    Args:
        line: its JSON.
        problems: those of the lines before, by the JSON up to their end; it gets this one's.

    Raises:
        InputError, KeyError, TypeError, ValueError, AttributeError: the line is damaged.
    """
    start, found, _ = line.partition(_TRIAL)
    if not found or not start.startswith(_PROBLEM):
        return None
    try:
        if start not in problems:
            problems[start] = read_problem(json.loads(start[len(_PROBLEM) :]))
    except NewerLineError:
        return None
    return Line("trial", (problems[start], UnreadTrial(line)))


def read_line(entry: Any, schema: int, problems: dict[Hashable, Problem]) -> Line:
    """What a line says; its kind is the first that it has of the keys which are tried here.

    Args:
        entry: the line's JSON.
        schema: of the journal.
        problems: those of the lines before, by their JSON; most lines are about a problem of another one.

    Raises:
        InputError, KeyError, TypeError, ValueError, AttributeError: the line is damaged.
    """
    if not isinstance(entry, dict):
        raise InputError("it is no map")
    if "header" in entry:
        return Line("header", _read_header(entry["header"]))
    try:
        if "record" in entry:
            return Line("record", read_record(entry["record"]))
        if "trial" in entry:
            return Line("trial", (_known_problem(entry["problem"], problems), read_trial(entry["trial"])))
        if "merged" in entry:
            return Line("merged", _read_problems(entry["merged"]))
        if schema > SCHEMA:
            raise NewerLineError(f"its kind is not known here ({', '.join(entry)})")
    except NewerLineError as error:
        return Line("newer", entry, str(error))
    except (InputError, KeyError, TypeError, ValueError, AttributeError) as error:
        if schema > SCHEMA:
            return Line("newer", entry, f"a newer version wrote it: {error}")
        raise
    raise InputError("it is of no known kind")


def _read_header(data: Any) -> dict[str, Any]:
    """What a journal's header says.

    Raises:
        InputError, KeyError: it can't be.
    """
    _require_map(data, "header")
    require(data, _HEADER_KINDS)
    missing = [key for key in ("target", "toolchain", "protocol") if key not in data]
    if missing:
        raise InputError(f"header has no {', '.join(missing)}")
    schema_of(data)
    return dict(data)


def _known_problem(data: Any, problems: dict[Hashable, Problem]) -> Problem:
    """As `read_problem`, from the problems that are known where it is one of them."""
    _require_map(data, "problem")
    key = tuple(data.items())
    try:
        if key not in problems:
            problems[key] = read_problem(data)
        return problems[key]
    except TypeError:  # scales are maps, which are no keys
        return read_problem(data)


def _require_map(data: Any, field: str) -> None:
    require({field: data}, {field: MAP})


def read_problem(data: Mapping[str, Any]) -> Problem:
    """The problem of a line.

    Raises:
        NewerLineError: it has a key that is not known here.
        InputError, TypeError: it can't be.
    """
    _require_map(data, "problem")
    require(data, _PROBLEM_KINDS)
    for side in ("scale_a", "scale_b"):
        require(data.get(side) or {}, _SCALING_KINDS)
    unknown = [name for name in data if name not in _PROBLEM_KEYS]
    unknown += [name for side in ("scale_a", "scale_b") for name in data.get(side) or () if name not in _SCALING_KEYS]
    if unknown:
        raise NewerLineError(f"its problem has a key that is not known here ({', '.join(unknown)})")
    problem = Problem.from_json(dict(data))
    if problem.scale_a or problem.scale_b:
        return problem
    try:
        family, typical = registry.family_of(problem.family)
    except InputError:  # a plug-in that is not here
        return problem
    p, order_b = problem, data.get("order_b", typical.order_b)
    if p.family == family.name and p.order_b == order_b and not any(family.scaling(p.dtype_a, p.dtype_b)):
        return problem
    return family.problem(
        p.m, p.n, p.k, p.dtype_a, p.dtype_b, p.dtype_c, row_major_a=p.row_major_a, row_major_b=p.row_major_b,
        bias=p.bias, batch=p.batch, groups=p.groups, order_b=order_b, group_form=p.group_form, spread=p.spread,
        counts=p.counts, room=p.room, scales=p.scales, shared=p.shared,
    )  # fmt: skip


def _read_problems(data: list[Mapping[str, Any]]) -> list[Problem]:
    """The problems of a list that are known here."""
    found = []
    for one in data:
        try:
            found.append(read_problem(one))
        except NewerLineError:
            continue
    return found


def read_trial(data: Mapping[str, Any]) -> Trial:
    """The trial of a line, without the keys that are not known here.

    Raises:
        InputError, KeyError, TypeError, ValueError: it can't be.
    """
    _require_map(data, "trial")
    return Trial.from_json({k: v for k, v in data.items() if k in _TRIAL_KEYS})


def read_record(data: Mapping[str, Any]) -> Record:
    """The record of a line.

    Raises:
        NewerLineError: its problem has a key that is not known here.
        InputError, KeyError, TypeError: it can't be, or has a key that is not known here.
    """
    _require_map(data, "record")
    return Record.from_json(data, read_problem(data["problem"]))
