"""File formats, this project's and foreign ones: one file each. `_rows` has what they share with their callers."""

from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile
from tritongemm.formats._column_major import LIBRARY_TYPES, ColumnMajor
from tritongemm.formats._rows import (
    EXAMPLE,
    format_of,
    make_problem,
    plain_text,
    read_exactly,
    read_text,
    results_format,
    why_unrecognised,
)

__all__ = [
    "EXAMPLE", "LIBRARY_TYPES", "ColumnMajor", "Defaults", "FormatRow", "ResultsFile", "format_of", "make_problem",
    "plain_text", "read_exactly", "read_text", "results_format", "why_unrecognised",
]  # fmt: skip
