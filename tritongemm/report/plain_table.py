"""Fits tables and lines of text to a terminal: the last columns of wide rows go to further lines; no word is cut."""

import os
from collections.abc import Collection, Iterator, Sequence
from math import inf
from typing import TextIO

from rich.cells import cell_len

_INDENT = "  "


def terminal_width(stream: TextIO) -> float:
    """Return the columns of the terminal that a stream is; without bound where it is a file or a pipe."""
    return os.get_terminal_size(stream.fileno()).columns or inf if stream.isatty() else inf


def keep_words(text: str, width: float) -> str:
    """Return a line with blanks where a terminal would cut a word: to its edge, so that what is copied is one line."""
    line, *words = text.split(" ")
    for word in words:
        used = cell_len(line) % width
        fits = used + 1 + cell_len(word) < width
        line += " " * (1 if fits else int(-used % width) or 1) + word
    return line


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
