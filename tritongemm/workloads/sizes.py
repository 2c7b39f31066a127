"""Stage: values of a command line, or a file of sizes or results → rows with their problems.

Each plug-in of formats/ reads one format and says which files are its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, ResultsFile
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.formats import make_problem, read_text
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Format

__all__ = ["Defaults", "FormatRow", "from_file", "from_options", "from_results"]


def from_options(m: int, n: int, k: int, defaults: Defaults) -> list[FormatRow]:
    """The one size of the command line.

    Raises:
        InputError: a size or dtype that can't be.
    """
    return [FormatRow(make_problem(defaults, m, n, k))]


def from_file(path: Path, defaults: Defaults) -> list[FormatRow]:
    """The rows of a file in any format of formats/, in its order.

    Raises:
        InputError: no such file, no format claims it, or a row is wrong; names file, row, line and field.
        UnavailableError: the backend of one of its configs needs a package that is missing.
    """
    return list(from_results(path, defaults).require_undamaged().rows)


def from_results(path: Path, defaults: Defaults) -> ResultsFile:
    """As `from_file`, but a damaged row costs itself alone: what the file holds, with the damaged rows apart.

    Raises:
        InputError: no such file, no format claims it, or it can't be read as a whole.
        UnavailableError: the backend of one of its configs needs a package that is missing.
    """
    text = read_text(path)
    format_ = _format_of(path, text)
    return _check_axes(path, format_, format_.read_usable(path, text, defaults))


def _format_of(path: Path, text: str) -> Format:
    formats = registry.every(Format)
    for format_ in formats:
        if format_.recognises(path, text):
            return format_
    missing = [str(why) for name in registry.names(Format) if not (why := _loads(name))]
    known = "; ".join([*(f.title for f in formats), *missing])
    raise InputError(f"{path} is in no known format; there are: {known}")


def _loads(name: str) -> Support:
    """Whether a format's own imports work."""
    try:
        registry.get(Format, name)
    except UnavailableError as error:
        return Support(str(error))
    return SUPPORTED


def _check_axes(path: Path, format_: Format, found: ResultsFile) -> ResultsFile:
    """What a file holds, where rows with a config that no kernel of its backend can have are damaged."""
    answers: dict[Config, Support] = {}
    rows: list[FormatRow] = []
    damaged = list(found.damaged)
    for row in found.rows:
        config = row.config
        if config is not None and config not in answers:
            answers[config] = registry.get(Backend, config.backend).check_axes(config)
        answer = SUPPORTED if config is None else answers[config]
        if answer:
            rows.append(row)
            continue
        axis, _, rest = answer.reason.partition(" ")
        reason = f"{row.where(str(path))} {format_.axis_keys.get(axis, axis)} {rest}"
        damaged.append(DamagedRow(row.number or 0, row.line, reason))
    return replace(found, rows=tuple(rows), damaged=tuple(sorted(damaged, key=lambda row: row.row)))
