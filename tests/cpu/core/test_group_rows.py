from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.nouns import Problem, cases, each, refuses
from tests.support.products import product
from tritongemm.core.group_rows import Groups, row_counts
from tritongemm.search.typical import typical

GROUPED = Problem(41, 72, 88, groups=Groups(5, spread="captured", counts=(7, 0, 33, 1, 0)))
MASKED = replace(GROUPED, groups=Groups(5, 40, "captured", (7, 0, 33, 1, 0)))


@given(st.integers(1, 100_000), st.integers(2, 300), st.sampled_from(["uniform", "skewed"]))
def test_counts_add_up(rows: int, groups: int, spread: str) -> None:
    counts = row_counts(rows, groups, spread)
    assert len(counts) == groups and sum(counts) == rows and min(counts) >= 0
    if spread == "uniform":
        assert max(counts) - min(counts) <= 1
    elif rows > 20 * groups:
        assert max(counts) > rows / groups > min(counts)


@each("problem", [GROUPED, MASKED, replace(GROUPED, groups=Groups(5, spread="skewed"))])
def test_a_grouped_problem_comes_back_from_json(problem: Problem) -> None:
    assert Problem.from_json(problem.to_json()) == problem
    assert {"row_counts", "operands"}.isdisjoint(problem.to_json())


def test_operands_keys_and_what_the_search_takes_groups_for() -> None:
    other = replace(GROUPED, groups=Groups(5, spread="captured", counts=(0, 7, 33, 1, 0)))
    problems = (GROUPED, other, MASKED, replace(GROUPED, groups=Groups(5)), Problem(41, 72, 88))
    assert len({p.key for p in problems}) == len(problems)
    assert Problem(41, 72, 88, groups=Groups(5)).key == "41x72x88_fp16_TT_groups5"
    assert GROUPED.at(100).row_counts == row_counts(100, 5, "skewed")
    assert (MASKED.at(8).group_m, MASKED.at(8).m, MASKED.at(64).m) == (8, 40, 41)
    assert Problem(3, 4, 5).at(7) == Problem(7, 4, 5)
    shapes = {name: spec.shape for name, spec in GROUPED.operands.items()}
    assert shapes == {"a": (41, 88), "b": (5, 88, 72), "c": (41, 72), "offsets": (5,)}
    assert GROUPED.group_numbers == (7, 7, 40, 41, 41) and MASKED.group_numbers == GROUPED.row_counts
    assert {name: spec.shape for name, spec in MASKED.operands.items()}["a"] == (5, 40, 88)
    used, entire = 3 * 88 * 72 * 2, 5 * 88 * 72 * 2
    assert GROUPED.bytes == 41 * (88 + 72) * 2 + used and GROUPED.held_bytes == 41 * (88 + 72) * 2 + entire + 5 * 4
    of_int4 = product("a16w4", 4, 64, 128, "bf16 int4", "weight_32", groups=Groups(8))
    assert of_int4.bytes == 2 * 4 * (128 + 64) + 4 * 64 * (64 + 4 * 2), "factors are read of the groups with rows alone"
    even = typical(Problem(64, 128, 256, groups=Groups(8)))
    assert (even.m, even.batch, even.groups) == (8, 8, None)
    one_large = typical(GROUPED)
    assert 26 <= one_large.m <= 33 and one_large.batch == 1 and typical(Problem(3, 4, 5)) == Problem(3, 4, 5)


@cases(
    ({"counts": (7, 0, 33, 1, 1)}, "add up to 42, M is 41"),
    ({"counts": (7, 34)}, "2 counts of rows for 5 groups"),
    ({"counts": (8, 0, 34, -1, 0)}, "at least 0"),
    ({"spread": "uniform"}, "belong together"),
    ({"spread": "uneven", "counts": ()}, "spread must be one of"),
    ({"group_form": "dense"}, "group_form must be one of"),
    ({"room": 40}, "the contiguous form has none"),
    ({"group_form": "masked"}, r"needs the rows that each group has room for \(--room, in a file group_room\)"),
    ({"group_form": "masked", "room": 32}, "a group has 33 rows, and room for 32"),
    ({"groups": 1}, "of a product of several groups"),
    ({"groups": 5000, "counts": (), "spread": "uniform"}, "at most 4096"),
)
def test_groups_that_can_not_be(change: dict[str, object], message: str, /) -> None:
    refuses(message, Problem.from_json, GROUPED.to_json() | change)
