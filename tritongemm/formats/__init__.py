"""File formats, our own and foreign ones: one file each. What they share with their callers is in `_rows`."""

from tritongemm.core.format_row import Defaults, FormatRow, ResultsFile
from tritongemm.formats._rows import EXAMPLE, make_problem, read_text, results_format

__all__ = ["EXAMPLE", "Defaults", "FormatRow", "ResultsFile", "make_problem", "read_text", "results_format"]
