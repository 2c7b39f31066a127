"""Tables whose rows fit into a line look as rich lays them out."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tritongemm.report.console import Reporter
from tritongemm.report.plain_table import align

COLUMNS = ("size", "us", "config")
cells = st.text(st.sampled_from("ab1. -ä漢字é\u0301"), max_size=6).map(str.strip)


def by_rich(rows: list[tuple[str, ...]]) -> list[str]:
    table = Table(box=None, pad_edge=False)
    table.collapse_padding = True
    for column in COLUMNS:
        table.add_column(column, justify="right" if column == "us" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(table, highlight=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@given(st.lists(st.tuples(cells, cells, cells), max_size=4))
def test_it_looks_as_rich_lays_it_out(rows: list[tuple[str, ...]]) -> None:
    """Characters of two cells and of none too."""
    lines = align(COLUMNS, rows, ("size", "config"))
    assert lines == by_rich(rows)


@pytest.mark.parametrize(("width", "folded"), [(60, False), (30, True)])
def test_rows_that_do_not_fit_are_folded(width: int, folded: bool) -> None:
    """In a terminal; all of a row is there either way."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, highlight=False)
    Reporter(console=console).table("Times", COLUMNS, [("16x16x16_fp16_TT", "1.00", "tile 16x16x16 w4 s2")])
    lines = out.getvalue().splitlines()
    assert (len(lines) > 3) is folded and max(map(cell_len, lines)) <= width
    assert lines[0].strip() == "Times" and lines[1].split() == list(COLUMNS)
    assert "".join(line[22:] for line in lines[2:]).replace(" ", "").endswith("16x16x16w4s2")
