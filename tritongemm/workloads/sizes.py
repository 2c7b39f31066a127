"""Stage: values of a command line, or a file of sizes or results → rows with their problems.

Each plug-in of formats/ reads one format and says which files are its own.
"""

from __future__ import annotations

from pathlib import Path

from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile
from tritongemm.formats import format_of, make_problem, read_text

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
    """
    return list(from_results(path, defaults).require_undamaged().rows)


def from_results(path: Path, defaults: Defaults) -> ResultsFile:
    """What a file in any format holds, its damaged rows apart from those that can be used.

    Raises:
        InputError: no such file, no format claims it, or it can't be read as a whole.
        UnavailableError: the backend of one of its configs needs a package that is missing.
    """
    text = read_text(path)
    return format_of(path, text).read_usable(path, text, defaults)
