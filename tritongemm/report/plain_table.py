"""Tables whose every row fits into a line of the terminal; rich folds the others, at ten times the cost of a row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.cells import cell_len


def align(columns: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str]) -> list[str]:
    """The lines of a table, its head first, with one blank between columns.

    Args:
        columns: their names.
        rows: texts, one for each column.
        words: names of columns that are aligned on the left; the others hold numbers.
    """
    cells = zip(columns, *rows, strict=True)
    padded = [_pad(column, is_left=column[0] in words) for column in cells]
    return [" ".join(line).rstrip() for line in zip(*padded, strict=True)]


def _pad(texts: Sequence[str], is_left: bool) -> Iterator[str]:
    """Texts of one width; some characters are two cells wide, and some none."""
    cells = [cell_len(text) for text in texts]
    width = max(cells)
    for text, count in zip(texts, cells, strict=True):
        blanks = " " * (width - count)
        yield text + blanks if is_left else blanks + text
