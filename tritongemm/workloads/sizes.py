"""Stage: values of a command line or of Python, or a file of sizes or results → rows with their problems.

Each plug-in of formats/ reads one format and says which files are its own.
"""

import json
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, SupportsIndex

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile
from tritongemm.core.problem import Problem
from tritongemm.formats import format_of, make_problem, read_text, results_format

# A size in Python: (m, n, k), a problem, or a row of a size file, such as {"M": 16, "N": 4096, "K": 4096}.
Size = tuple[int, int, int] | Problem | Mapping[str, Any]

__all__ = ["Defaults", "FormatRow", "from_file", "from_options", "from_results", "from_values"]


def from_options(m: int, n: int, k: int, defaults: Defaults) -> list[FormatRow]:
    """Return the one size of the command line."""
    return [FormatRow(make_problem(defaults, m, n, k))]


def from_values(values: Sequence[Size], defaults: Defaults) -> list[FormatRow]:
    """Return the rows of sizes that are values: problems first, then (m, n, k) and mappings with a size file's keys.

    An InputError names the place of what can't be among those that are no problems.
    """
    problems = [FormatRow(value) for value in values if isinstance(value, Problem)]
    words = [value for value in values if not isinstance(value, Problem)]
    for value in words:
        if not isinstance(value, Mapping) and not (isinstance(value, Sized) and len(value) == len("MNK")):
            raise InputError(f"{value!r} is no size; write (m, n, k)")
    rows = [value if isinstance(value, Mapping) else dict(zip("MNK", value, strict=True)) for value in words]
    text = "".join(f"- {json.dumps(row, default=_plain)}\n" for row in rows)
    read = results_format().read_usable(Path("sizes"), text, defaults).require_undamaged() if rows else ResultsFile()
    return [*problems, *read.rows]


def _plain(value: Any) -> int | str:
    """Return a number of another package as an int, or anything else as its name, such as ``torch.bfloat16``."""
    return int(value) if isinstance(value, SupportsIndex) else str(value)


def from_file(path: Path, defaults: Defaults) -> list[FormatRow]:
    """Return the rows of a file in any format, in its order; an InputError names file, row, line and field."""
    return list(from_results(path, defaults).require_undamaged().rows)


def from_results(path: Path, defaults: Defaults) -> ResultsFile:
    """Return the rows of a file in any format, its damaged rows apart.

    A file that can't be read raises an InputError; a config whose backend needs a missing package an UnavailableError.
    """
    text = read_text(path)
    return format_of(path, text).read_usable(path, text, defaults)
