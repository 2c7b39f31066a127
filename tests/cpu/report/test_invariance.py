"""What is printed of the price of invariant rows."""

from dataclasses import replace

from tests.support.linear_layers import problem, record
from tritongemm.report.invariance import print_price
from tritongemm.report.listener import Listener

ROW = record(problem(16, 32, 64), order="1x64", row_bits="aa")


def test_times_are_compared_with_the_library_in_the_race_of_each() -> None:
    listener = Listener(lambda progress: None)
    others = [replace(ROW, order="", seconds=1e-6, library_seconds=6e-6), record(problem(17, 32, 64))]
    slower = replace(ROW, problem=ROW.problem.at(8), seconds=4e-6)
    print_price(listener, [ROW, slower], others, {ROW.problem: 3})
    assert [line.split() for line in listener.tables.splitlines()[1:]] == [
        ["size", "order", "us", "of", "library", "of", "unconstrained"],
        [ROW.problem.key, "1x64", "2.00", "1.500", "0.250"],
        [slower.problem.key, "1x64", "4.00", "0.750", "-"],
    ]
    assert listener.lines == [
        "rows have the same bits at every M; order of additions: 1x64 (2)",
        "1.061 of the library's speed (geometric mean of 2), 0.750 at least",
        "0.250 of the unconstrained winners' speed (geometric mean of 1), 0.250 at least",
        "all calls: 0.012 ms by the library, 0.010 ms by invariant rows, 1.200 times as fast",
    ]


def test_without_other_results_their_column_is_left_out() -> None:
    listener = Listener(lambda progress: None)
    print_price(listener, [replace(ROW, library_seconds=None)], (), {})
    assert "unconstrained" not in listener.tables
    assert listener.lines == ["rows have the same bits at every M; order of additions: 1x64 (1)"]
