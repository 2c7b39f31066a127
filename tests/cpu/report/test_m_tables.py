"""What is printed of tables over M."""

import io
from dataclasses import replace

from rich.console import Console

from tests.support.linear_layers import problem, record
from tritongemm.core.config import Config
from tritongemm.core.format_row import FormatRow
from tritongemm.report.console import Reporter
from tritongemm.report.tables import print_gain, print_held_out, print_table

RECORDS = [
    record(problem(1, 32, 64), m_from=1, held_out={}),
    record(problem(16, 32, 64), m_from=2, held_out={"5": [0.02, 1.5], "9": [0.0, 1.2]}),
    record(problem(32, 32, 64), Config("tma", 64, 32, 64, num_warps=4, num_stages=2), m_from=17),
    replace(record(problem(64, 32, 64), m_from=33, winner="torch"), held_out={"40": [0.1, 1.0]}),
]


def said(capsys_console: io.StringIO) -> str:
    return " ".join(capsys_console.getvalue().split())


def reporter() -> tuple[Reporter, io.StringIO]:
    text = io.StringIO()
    made = Reporter(console=Console(file=text, width=200, highlight=False))
    made._errors.file = text  # where lines of plain text go
    return made, text


def test_neighbours_that_one_kernel_serves_are_one_range() -> None:
    one, text = reporter()
    print_table(one, RECORDS)
    found = said(text)
    assert "M of N 32, K 64, bf16 TN" in found
    assert "1 to 16 2.00 to 2.00 1.500 to 1.500 triton tile" in found
    assert problem(1, 32, 64, "n").product == "N 32, K 64, bf16 TN, bias n"
    assert "17 to 32" in found and "33 to 64 2.00 to 2.00 1.500 to 1.500 torch" in found


def test_m_held_out_are_reported_together() -> None:
    one, text = reporter()
    print_held_out(one, RECORDS)
    found = said(text)
    assert "3 measured; slower than the best known there by 4.0% on average" in found
    assert "10.0% at worst; 1.216 of the library's speed (geometric mean), 1.000 at least" in found
    print_held_out(one, RECORDS[:1])
    assert said(text) == found


def test_a_workloads_gain_is_weighed_by_its_calls() -> None:
    """Where the library won, it serves: 3 us of 3; else 2 us of 3."""
    one, text = reporter()
    rows = [
        FormatRow(problem(16, 32, 64), count=9),
        FormatRow(problem(64, 32, 64), count=1),
        FormatRow(problem(7, 32, 64)),
    ]
    print_gain(one, rows, RECORDS)
    assert "0.030 ms by the library, 0.021 ms by what serves them, 1.429 times as fast" in said(text)
    one, text = reporter()
    print_gain(one, rows[2:], RECORDS)
    assert said(text) == ""
