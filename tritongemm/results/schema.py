"""What a line of a journal says: nouns of today, from lines of any schema.

A journal begins with its header, whose key ``schema`` is the number of the form that its lines have; without one it
is 1. Every line is read by itself, because a journal of schema 1 that is continued has lines of both.

- A key of a trial or a record that is not known here is passed over; a record keeps it in `Record.extra`.
- A key of a problem that is not known here makes it another problem, so the line is kept and not used.
- A problem of schema 1 says what scales it has, and in which order its B lies, by the name of its family alone.
- A line that is not JSON, lacks a key or has a value that can't be is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import SCHEMA, Record
from tritongemm.core.scaling import Scaling
from tritongemm.core.trial import Trial
from tritongemm.plugins import registry

__all__ = ["SCHEMA", "Line", "NewerLineError", "read_line", "read_problem", "read_record", "read_trial", "schema_of"]

_PROBLEM_KEYS = frozenset(f.name for f in fields(Problem))
_SCALING_KEYS = frozenset(f.name for f in fields(Scaling))
_TRIAL_KEYS = frozenset(f.name for f in fields(Trial))


class NewerLineError(Exception):
    """A line can be used by a newer version only; its text says why."""


@dataclass(frozen=True)
class Line:
    """What one line of a journal says.

    Attributes:
        kind: ``header``, ``record``, ``trial`` or ``merged``; ``newer`` for a line that is kept and not used.
        value: a mapping for a header, a `Record`, a problem with a `Trial`, or a list of problems; for ``newer`` the
            line as it was read.
        reason: why the line can't be used; "" where it can.
    """

    kind: str
    value: Any
    reason: str = ""


def schema_of(header: Mapping[str, Any]) -> int:
    """Number of the form in which a journal is written, from its header.

    Raises:
        InputError: it is no number.
    """
    number = header.get("schema", 1)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"schema must be a number from 1 on, not {number!r}")
    return number


def read_line(entry: Any, schema: int) -> Line:
    """What a line says; a kind of line is told from others by its first key here.

    Args:
        entry: the line's JSON.
        schema: of the journal.

    Raises:
        InputError, KeyError, TypeError, ValueError, AttributeError: the line is damaged.
    """
    try:
        if "header" in entry:
            return Line("header", dict(entry["header"]))
        if "record" in entry:
            return Line("record", read_record(entry["record"]))
        if "trial" in entry:
            return Line("trial", (read_problem(entry["problem"]), read_trial(entry["trial"])))
        if "merged" in entry:
            return Line("merged", _read_problems(entry["merged"]))
        if schema > SCHEMA and isinstance(entry, dict):
            raise NewerLineError(f"its kind is not known here ({', '.join(map(str, entry))})")
    except NewerLineError as error:
        return Line("newer", entry, str(error))
    raise InputError("it is of no known kind")


def read_problem(data: Mapping[str, Any]) -> Problem:
    """The problem of a line.

    Raises:
        NewerLineError: it has a key that is not known here.
        InputError, KeyError, TypeError: it can't be.
    """
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
        bias=p.bias, batch=p.batch, groups=p.groups, order_b=order_b,
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
    return Trial.from_json({k: v for k, v in data.items() if k in _TRIAL_KEYS})


def read_record(data: Mapping[str, Any]) -> Record:
    """The record of a line; keys that are not known here are kept in its `extra`.

    Raises:
        NewerLineError: its problem has a key that is not known here.
        InputError, KeyError, TypeError: it can't be.
    """
    problem = read_problem(data["problem"])
    return Record.from_json({**data, "problem": problem.to_json()})
