"""Rows of grouped products in our YAML: written, read back, and refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tables import each
from tritongemm.cli import options
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.formats import Defaults, format_of, results_format
from tritongemm.search_spaces.loader import load_target

GROUPED = Problem(41, 72, 88, groups=Groups(5, spread="captured", counts=(7, 0, 33, 1, 0)))


def rows(text: str) -> list[Problem]:
    path = Path("sizes.yaml")
    return [row.problem for row in format_of(path, text).read(path, text, Defaults())]


@each(
    "problem",
    [
        GROUPED,
        replace(GROUPED, groups=Groups(5, 40, "captured", (7, 0, 33, 1, 0))),
        replace(GROUPED, groups=Groups(5, spread="skewed")),
        replace(GROUPED, groups=Groups(5, 9)),
    ],
)
def test_results_come_back(problem: Problem) -> None:
    record = Record(problem, "sm90", Config("grouped", 16, 32, 64), "triton", 1e-6, 0.0, "graph-events")
    text = results_format().write([record])
    (row,) = results_format().read(Path("tuned.yaml"), text, Defaults())
    assert row.record == record


def test_a_size_says_how_its_rows_are_spread() -> None:
    size = "- {M: 41, N: 72, K: 88, groups: 5"
    assert rows(f"{size}, group_counts: [7, 0, 33, 1, 0]}}\n") == [GROUPED]
    assert rows(f"{size}, group_room: 16}}\n") == [Problem(41, 72, 88, groups=Groups(5, room=16))]
    for wrong, message in (
        (f"{size}, group_counts: [7, 0, 33, 1, 1]}}", "row 1 .line 1. can't be: the groups' rows add up to 42"),
        (f"{size}, group_counts: [7, x]}}", "group_counts: 2 must be a whole number"),
        (f"{size}, group_form: blocked}}", "group_form must be one of contiguous, masked"),
        ("- {M: 41, N: 72, K: 88, group_room: 9}", "group_room but no groups"),
    ):
        with pytest.raises(InputError, match=message):
            rows(wrong + "\n")


def test_shares_are_rows_of_every_m() -> None:
    size = "{N: 72, K: 88, groups: 4, group_shares: [0.6, 0.3, 0.1000001, 1e-07], group_samples: 9"
    few, many = rows(f"- {size}, M: 3}}\n- {size}, M: 1000}}\n")
    assert (sorted(few.row_counts), sorted(many.row_counts)) == ([0, 0, 1, 2], [0, 100, 300, 600])
    assert few.groups == Groups(4, spread="captured", counts=few.row_counts)
    assert rows(f"- {size}, M: 1000}}\n") == [many]  # their order is the same each time


@each(
    ("text", "message"),
    [
        ("groups: 2, group_shares: [0.5, 0.4]", "shares add up to 0.9, not to 1"),
        ("groups: 2, group_shares: [0.5, 0.3, 0.2]", "3 shares of rows for 2 groups"),
        ("groups: 2, group_shares: [1.5, -0.5]", "group_shares: 2 must be a number of at least 0"),
        ("groups: 2, group_shares: [1.5, 0]", "from 0 to 1"),
        ("groups: 2, group_shares: [.nan, 1]", "group_shares: 1 must be a number"),
        ("groups: 2, group_shares: 1", "must be a list of numbers"),
        ("groups: 2, group_shares: [0.5, 0.5], group_counts: [20, 21]", "without group_counts"),
        ("groups: 2, group_shares: [0.5, 0.5], group_spread: uniform", "belong together"),
        ("groups: 2, group_shares: [0.5, 0.5], group_samples: 0", "group_samples must be at least 1"),
        ("group_shares: [1]", "several groups"),
    ],
)
def test_shares_that_can_not_be(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"row 1 .line 1. .*{message}"):
        rows(f"- {{M: 41, N: 72, K: 88, {text}}}\n")


def test_the_command_line_says_it_too() -> None:
    argv = ["-m", "41", "-n", "72", "-k", "88", "--groups", "5", "--spread", "7,0,33,1,0", "--target", "sm90"]
    given = options.defaults(options.parse(argv), load_target("sm90"))
    assert given.groups == Groups(5, 0, "captured", (7, 0, 33, 1, 0))
    assert rows("- {M: 41, N: 72, K: 88}\n") == [Problem(41, 72, 88)]
    for wrong in ("uneven", "1,,2", "1.5"):
        with pytest.raises(SystemExit):
            options.parse([*argv, "--spread", wrong])
