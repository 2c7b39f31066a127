"""Which M of a workload's products are searched, measured and left out."""

from tritongemm.core.format_row import FormatRow
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.workloads.m_spans import MOST_WANTED, MSpan, drop_small, group_spans

WIDE = Problem(1, 6144, 4096, *matrices("bf16", layout="TN"))


def row(m: int, n: int = 6144, k: int = 4096, count: float = 1.0) -> FormatRow:
    return FormatRow(Problem(m, n, k, *matrices("bf16", layout="TN")), count=count)


def test_products_are_grouped_and_their_m_ranked_by_work() -> None:
    rows = [row(16, count=100), row(512, count=2), row(7, n=1024), row(16, count=5), row(1, count=1000)]
    wide, narrow = group_spans(rows)
    assert (wide.problem, wide.low, wide.high, wide.wanted) == (WIDE, 1, 512, (1, 16, 512))
    assert (narrow.problem.n, narrow.low, narrow.high, narrow.wanted) == (1024, 1, 7, (7,))
    assert [(s.low, s.high, s.wanted) for s in group_spans(rows, (2, 100))] == [(2, 100, (16,)), (2, 100, (7,))]


def test_what_is_searched_is_measured_and_the_ladder_is_within_the_span() -> None:
    for low, high in ((1, 2048), (1, 1), (5, 5), (3, 777), (1, 8192)):
        span = MSpan(WIDE, low, high, tuple(range(max(low, high - 20), high + 1)))
        found, ladder = span.searched(), span.ladder()
        assert {low, high, *span.wanted[:MOST_WANTED]} <= set(found) <= set(ladder)
        assert set(span.wanted) <= set(ladder)
        assert ladder == sorted(set(ladder)) and low == ladder[0] and ladder[-1] == high
    assert {8, 16, 24, 32, 40, 48, 56, 64} <= set(MSpan(WIDE, 1, 64).ladder())


def test_a_product_of_no_weight_is_left_out() -> None:
    rows = [row(16, count=10), row(16, n=8, k=8, count=10), row(1, n=1024, count=10)]
    kept, small = drop_small(rows)
    assert kept == [rows[0], rows[2]]
    assert [(p.n, p.k) for p in small] == [(8, 8)] and 0 < min(small.values()) < 0.001
    assert drop_small(rows[1:2]) == (rows[1:2], {})


def test_rows_of_groups_are_spread_as_at_the_next_captured_m() -> None:
    few = Problem(8, 64, 32, groups=Groups(4, spread="captured", counts=(0, 8, 0, 0)))
    many = Problem(100, 64, 32, groups=Groups(4, spread="captured", counts=(10, 50, 20, 20)))
    rows = [FormatRow(many), FormatRow(few, count=5), FormatRow(Problem(16, 64, 32, groups=Groups(4, spread="skewed")))]
    (span,) = group_spans(rows)
    assert (span.low, span.high, span.captured) == (1, 100, (few, many))
    assert (span.at(8), span.at(100)) == (few, many)
    assert span.at(3).row_counts == (0, 3, 0, 0) and span.at(10).row_counts == (1, 5, 2, 2)
    assert span.at(200).row_counts == (20, 100, 40, 40)
    assert span.at(10).at(1) == span.problem  # which is what tables of a product are found by
