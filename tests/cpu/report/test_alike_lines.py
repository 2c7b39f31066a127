"""Messages about many rows, of which one stands for all that are alike."""

from tests.support.tables import each
from tritongemm.report.alike_lines import MOST_LISTED, summarise

PREDICTED = [f"left out: row {m} (line {m}): {m}x16x16_bf16_TN: its time is a prediction" for m in range(1, 110)]
DAMAGED = "left out: row 7 (line 9) has no K"


def test_one_of_each_kind_with_a_count() -> None:
    lines = [*PREDICTED[:50], DAMAGED, *PREDICTED[50:]]
    assert list(summarise(lines)) == [f"{PREDICTED[0]}; 108 others likewise (--verbose lists them)", DAMAGED]


@each(("count", "verbose"), [(MOST_LISTED, False), (109, True)])
def test_few_are_listed_and_all_where_everything_is_said(count: int, verbose: bool) -> None:
    assert list(summarise(PREDICTED[:count], verbose)) == PREDICTED[:count]
