"""Tables whose rows fit into a line look as rich lays them out."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tests.support.tables import each
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


@each(("width", "count"), [(60, 3), (41, 3), (40, 5), (10, 7)])
def test_rows_that_do_not_fit_go_on_in_the_next_line(width: int, count: int) -> None:
    """In a terminal; a column that is too wide by itself makes a line as long as it is."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, highlight=False)
    Reporter(console=console).table("Times", COLUMNS, [("16x16x16_fp16_TT", "1.00", "tile 16x16x16 w4 s2")])
    lines = out.getvalue().splitlines()
    assert len(lines) == count and max(map(cell_len, lines)) <= max(width, 21)
    head, row = lines[1 : 1 + (count - 1) // 2], lines[1 + (count - 1) // 2 :]
    assert lines[0] == "Times" and " ".join(head).split() == list(COLUMNS)
    assert " ".join(row).split() == ["16x16x16_fp16_TT", "1.00", *["tile", "16x16x16", "w4", "s2"]]
    assert all(line.startswith("  ") for line in (*head[1:], *row[1:]))
