"""Reads and writes the lines of a journal as nouns.

A journal begins with its header, whose key ``schema`` is the number of the form that all its lines have. A line that
is not JSON, or has an unknown key or an impossible value, is damaged; a journal of a newer schema is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError, NewerFileError
from tritongemm.core.problem import JSON_KEYS, Problem
from tritongemm.core.record import SCHEMA, Record
from tritongemm.core.trial import Trial
from tritongemm.core.values import MAP, NATURAL, SECONDS_OR_NONE, TEXT, TEXTS, FieldKind, require

# the beginning of a trial's line, and the separator between its problem and its trial
_PROBLEM, _TRIAL = b'{"problem": ', b', "trial": '
_HEADER_KINDS = {
    "schema": FieldKind(str(SCHEMA), lambda v: v == SCHEMA),
    "target": TEXT,
    "toolchain": TEXTS,
    "protocol": MAP,
}


@dataclass(frozen=True)
class Line:
    """One line of a journal."""

    kind: str  # `header`, `record`, `trial`, `merged` or `baseline`
    # A mapping for a header, a `Record`, a problem with an `UnreadTrial`, a list of problems, or the key of a problem
    # with the baseline's seconds or None.
    value: Any

    @property
    def is_timed(self) -> bool:
        """Whether it is of a trial that did not fail."""
        return self.kind == "trial" and b'"status": "ok"' in self.value[1].line


@dataclass(frozen=True)
class UnreadTrial:
    """The line of a trial, which is parsed on request, as a finished run needs few."""

    line: bytes  # of the journal, without its checksum

    def read(self) -> Trial:
        """Return the trial."""
        return Trial.from_json(_require_map(json.loads(self.line)["trial"], "trial"))


def read_line(path: Path, line: bytes, problems: dict[bytes, Problem]) -> Line:
    """Parse a line; of a trial only its problem."""
    start, is_trial, _ = line.partition(_TRIAL)
    if is_trial and start.startswith(_PROBLEM):
        if start not in problems:
            problems[start] = read_problem(json.loads(start[len(_PROBLEM) :]))
        return Line("trial", (problems[start], UnreadTrial(line)))
    entry = _require_map(json.loads(line), "a line")
    if "header" in entry:
        return Line("header", _read_header(path, entry["header"]))
    if "record" in entry:
        return Line("record", read_record(entry["record"]))
    if "merged" in entry:
        return Line("merged", [read_problem(one) for one in entry["merged"]])
    if "baseline" in entry:
        known = _require_map(entry["baseline"], "baseline")
        require(known, {"problem": TEXT, "seconds": SECONDS_OR_NONE})
        return Line("baseline", (known["problem"], known["seconds"]))
    raise InputError("it is of no known kind")


def _read_header(path: Path, data: Any) -> dict[str, Any]:
    schema = _require_map(data, "header").get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise NewerFileError(path, schema, SCHEMA)
    require(data, {**_HEADER_KINDS, "compute_units": NATURAL})
    if missing := _HEADER_KINDS.keys() - data.keys():
        raise InputError(f"header has no {', '.join(sorted(missing))}")
    return dict(data)


def _require_map(data: Any, field: str) -> Mapping[str, Any]:
    require({field: data}, {field: MAP})
    return data  # type: ignore[no-any-return]


def read_problem(data: Mapping[str, Any]) -> Problem:
    """Return the problem of a line."""
    problem = Problem.from_json(_require_map(data, "problem"))
    if unknown := [name for name in data if name not in JSON_KEYS]:
        raise InputError(f"its problem has unknown keys: {', '.join(unknown)}")
    return problem


def read_record(data: Mapping[str, Any]) -> Record:
    """Return the record of a line."""
    return Record.from_json(_require_map(data, "record"), read_problem(data["problem"]))
