"""Aligns tables in plain text; of rows wider than the terminal the last columns go to further lines."""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from math import inf

from rich.cells import cell_len

_INDENT = "  "


def terminal_width() -> float:
    """Return the columns of the terminal that is the standard output; without bound where that is a file or a pipe."""
    return os.get_terminal_size(sys.stdout.fileno()).columns or inf if sys.stdout.isatty() else inf


def align(
    columns: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str], width: float = inf
) -> list[str]:
    """Return the lines of a table's head and rows, with a blank between columns, of at most `width` cells if possible.

    Columns in `words` are aligned on the left; the others hold numbers.
    """
    cells = zip(columns, *rows, strict=True)
    padded = [list(_pad(column, is_left=column[0] in words)) for column in cells]
    parts = [list(zip(*part, strict=True)) for part in _split(padded, width)]
    lines = zip(*([" ".join(line).rstrip() for line in part] for part in parts), strict=True)
    return [f"\n{_INDENT}".join(line for line in row if line.strip()) for row in lines]


def _split(columns: Sequence[list[str]], width: float) -> Iterator[list[list[str]]]:
    """Yield the columns of each line; the first has what fits, others begin with a blank."""
    part, left = list[list[str]](), width
    for column in columns:
        needed = cell_len(column[0])
        if part and needed >= left:
            yield part
            part, left = [], width - len(_INDENT)
        left -= needed + bool(part)
        part.append(column)
    yield part


def _pad(texts: Sequence[str], is_left: bool) -> Iterator[str]:
    """Yield the texts of one width; some characters are two cells wide, and some none."""
    cells = [cell_len(text) for text in texts]
    width = max(cells)
    for text, count in zip(texts, cells, strict=True):
        blanks = " " * (width - count)
        yield text + blanks if is_left else blanks + text
