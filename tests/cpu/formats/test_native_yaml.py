import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.formats import read_text, write_text
from tests.support.nouns import Config, Family, FormatRow, Groups, RemarkWarning, cases, load_target, refuses, registry
from tritongemm.cli import options
from tritongemm.core.dtypes import DTYPES
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.core.record import SCHEMA, Record
from tritongemm.formats import Defaults, format_of
from tritongemm.search.pruning.prune import prune
from tritongemm.search.space import space
from tritongemm.workloads import sizes

RECORD = Record(
    problem=Problem(16, 32, 70, *matrices("bf16", "fp8e5m2", "fp32", layout="NT"), bias="n", batch=3),
    target="gfx942",
    config=Config("tile", 64, 32, 16, 8, 2, 4, 3, (("kpack", 2), ("swap_ab", 1), ("waves_per_eu", 0))),
    winner="torch", seconds=1.2345678901234568e-05, spread=0.0125, timer="events", error=3.1e-05, tolerance=0.002,
    library_seconds=1e-05, library="torch", tie=True, verified="float64, 'all' of it",
    toolchain={"triton": "3.6.0", "device": "MI300X: a \"chip\""}, cold=False,
)  # fmt: skip


def rows(text: str, defaults: Defaults | None = None) -> list[FormatRow]:
    return read_text(text, defaults=defaults)


@pytest.mark.parametrize(("arch", "m", "templates"), [("sm90", 777, 6), ("sm90", 1, 5), ("gfx950", 777, 2)])
def test_a_result_of_every_tile_that_can_win_is_read_again(tmp_path: Path, arch: str, m: int, templates: int) -> None:
    """What is written must be served, timed and checked by later runs; some tiles are no powers of two."""
    problem, target = Problem(m, 6144, 4096, *matrices("bf16", layout="TN")), load_target(arch)
    configs = {(c.template, *c.tile): c for c in prune(space(problem, target), problem, target).kept}.values()
    assert len({c.template for c in configs}) >= templates
    # A file has a row for each size, and a tile is read alike whatever multiple of K there is.
    sizes_of = (replace(problem, k=problem.k * (i + 1)) for i in range(len(configs)))
    written = [
        replace(RECORD, problem=size, target=arch, config=config)
        for size, config in zip(sizes_of, configs, strict=True)
    ]
    (path := tmp_path / "out.yaml").write_text(write_text(*written))
    assert [r.record for r in sizes.from_file(path, Defaults())] == written


def test_record_comes_back_equal_and_looks_like_tune_gemm() -> None:
    text = write_text(RECORD)
    (row,) = rows(text, Defaults.of("int8", layout="TN", bias="m"))
    assert row.record == RECORD and (row.problem, row.config) == (RECORD.problem, RECORD.config)
    head, line = text.splitlines()
    assert head.startswith(f"# Tuned by tritongemm, schema {SCHEMA}: ")
    assert [r.record for r in rows(line + "\n")] == [RECORD], "a file without it is read as well"
    assert line.startswith(
        '- {"M": 16, "N": 32, "K": 70, "rowMajorA": "N", "rowMajorB": "T", "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32, '
        '"BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 8, "SPLIT_K": 2, "num_warps": 4, "num_stages": 3, "waves_per_eu": 0, '
        '"kpack": 2, "TFLOPS": 0.017418, "time(us)": 12.345678901234568, '
    )
    # What a plain reader of YAML sees.
    (entry,) = yaml.safe_load(text)
    assert entry["time(us)"] == pytest.approx(12.345678901234568) and entry["options"] == {"swap_ab": 1}
    assert (entry["winner"], entry["tie"], entry["toolchain"]) == ("torch", True, RECORD.toolchain)
    assert entry["verified"] == RECORD.verified


def test_notes_of_a_result_and_num_sms_of_stream_k_are_written_back() -> None:
    noted = replace(RECORD, notes={"aiter": {"kernelId": 5, "odd": [1, 2.5, None, "x: y"]}})
    again = rows(write_text(noted))[0].record
    assert again == RECORD and again.notes == noted.notes == Record.from_json(noted.to_json()).notes
    stream = replace(RECORD, config=Config("stream_k", 64, 64, 64, options=(("num_sms", 304),)))
    both = replace(stream, config=replace(stream.config, split_k=4))
    assert '"NUM_SMS": 304' in write_text(stream) and "SPLIT_K" not in write_text(stream)
    for record in (stream, both):
        assert rows(write_text(record))[0].record == record


positive = st.floats(1e-9, 1e4, allow_nan=False)
small = st.integers(0, 10_000)


def two_powers(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most).map(lambda e: 2**e)


configs = st.builds(
    Config,
    template=st.sampled_from(["tile", "tma", "persistent", "stream_k"]),
    block_m=two_powers(8), block_n=two_powers(8), block_k=two_powers(11),
    group_m=st.integers(1, 99), split_k=st.integers(1, 99), num_warps=two_powers(4), num_stages=st.integers(1, 9),
    options=st.dictionaries(st.sampled_from(["kpack", "waves_per_eu", "num_sms", "swap_ab", "warp_specialize"]), small)
    .map(lambda d: tuple(d.items())),
    backend=st.sampled_from(["triton", "torch"]),
)  # fmt: skip
problems = st.builds(
    Problem,
    *[st.integers(1, 2**31 - 1)] * 3,
    *[st.tuples(st.sampled_from(sorted(DTYPES)), st.booleans()).map(lambda said: Operand(*said))] * 2,
    st.sampled_from(sorted(DTYPES)).map(Operand), st.sampled_from(["none", "m", "n"]), st.integers(1, 64),
)  # fmt: skip
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
records = st.builds(
    Record,
    problem=problems, target=words, config=configs, winner=words, seconds=positive, spread=positive, timer=words,
    error=st.none() | positive | st.just(float("inf")), tolerance=st.none() | positive,
    library_seconds=st.none() | positive, library=words, tie=st.booleans(), verified=words,
    toolchain=st.dictionaries(words, words, max_size=3), cold=st.booleans(), compute_units=st.integers(0, 10**6),
)  # fmt: skip


@given(records)
def test_any_record_comes_back_equal(record: Record) -> None:
    assert rows(write_text(record))[0].record == record


def test_one_problem_on_two_targets_and_on_devices_of_two_sizes() -> None:
    some = [*(replace(RECORD, compute_units=count) for count in (0, 304, 80)), replace(RECORD, target="gfx950")]
    text = write_text(*some)
    assert text.count("compute_units") == 2 and [r.record for r in rows(text)] == some
    refuses(r"row 2 \(line 3\) repeats row 1 \(line 2\)", rows, write_text(some[1], some[1]))


def test_orders_of_b_and_scales_come_back() -> None:
    plain = registry.get(Family, "a8w8").problem(Problem(64, 32, 128, *matrices("int8", c="bf16", layout="TN")))
    shuffled = replace(plain, b=plain.b._replace(order="shuffled_16x16"))
    assert plain.a.scaling and plain.b.scaling
    some = [replace(RECORD, problem=p) for p in (plain, shuffled)]
    first, second = write_text(*some).splitlines()[1:]
    assert "order_b" not in first and '"family": "a8w8", "order_b": "shuffled_16x16"' in second
    assert [r.record for r in rows(write_text(*some), Defaults(family="dense_bpreshuffle"))] == some
    odd = replace(RECORD, problem=replace(plain, b=plain.b._replace(scaling=None)))
    refuses("has scales that family a8w8 does not have", write_text, odd)


@cases(
    ("'problem': {'m': 16, 'n': 4096}", "has an unknown key 'problem'; there are: M, N, K"),
    ("'seconds': 1.0e-8", "has an unknown key 'seconds'; there are: M, N, K"),
    ("'m_from': 1", "has an unknown key 'm_from'; did you mean 'M_from'?"),
)
def test_a_key_that_is_not_known_does_not_win_over_a_field(unknown: str, words: str, /) -> None:
    """A field's own name is none of a row's keys; in a journal and a manifest other keys are refused likewise."""
    head, line = write_text(RECORD).splitlines()
    refuses(re.escape(f"row 1 (line 2) {words}"), rows, f"{head}\n{line[:-1]}, {unknown}}}\n")
    refuses("has unknown keys: power", Record.from_json, RECORD.to_json() | {"power": 1})


def test_ranges_of_m_that_overlap_are_named() -> None:
    problem = replace(RECORD.problem, m=64)
    first, second = (
        replace(RECORD, problem=problem, m_from=8),
        replace(RECORD, problem=replace(problem, m=99), m_from=64),
    )
    elsewhere = replace(second, compute_units=7)
    words = r"rows.yaml: row 2 \(line 3\) and row 1 \(line 2\) serve ranges of M that overlap \(64x.*, 99x.*\);"
    with pytest.warns(RemarkWarning, match=words) as said:
        assert [r.record for r in rows(write_text(second, first, elsewhere))] == [second, first, elsewhere]
    assert len(said) == 1
    rows(write_text(first, replace(second, m_from=65), elsewhere))


GROUPED = Problem(41, 72, 88, groups=Groups(5, spread="captured", counts=(7, 0, 33, 1, 0)))


def problems_of(text: str) -> list[Problem]:
    path = Path("sizes.yaml")
    return [row.problem for row in format_of(path, text).read(path, text, Defaults())]


def test_a_size_says_how_its_rows_are_spread_or_shared() -> None:
    size = "- {M: 41, N: 72, K: 88, groups: 5"
    assert problems_of(f"{size}, group_counts: [7, 0, 33, 1, 0]}}\n") == [GROUPED]
    assert problems_of(f"{size}, group_room: 16}}\n") == [Problem(41, 72, 88, groups=Groups(5, room=16))]
    for wrong, message in (
        (f"{size}, group_counts: [7, 0, 33, 1, 1]}}", "row 1 .line 1. can't be: the groups' rows add up to 42"),
        (f"{size}, group_counts: [7, x]}}", "group_counts: 2 must be a whole number"),
        (f"{size}, group_form: blocked}}", "group_form must be one of contiguous, masked"),
        ("- {M: 41, N: 72, K: 88, group_room: 9}", "group_room but no groups"),
    ):
        refuses(message, problems_of, wrong + "\n")
    size = "{N: 72, K: 88, groups: 4, group_shares: [0.6, 0.3, 0.1000001, 1e-07], group_samples: 9"
    few, many = problems_of(f"- {size}, M: 3}}\n- {size}, M: 1000}}\n")
    assert (sorted(few.row_counts), sorted(many.row_counts)) == ([0, 0, 1, 2], [0, 100, 300, 600])
    assert few.groups == Groups(4, spread="captured", counts=few.row_counts)
    assert problems_of(f"- {size}, M: 1000}}\n") == [many]  # their order is the same each time


@cases(
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
)
def test_shares_that_can_not_be(text: str, message: str, /) -> None:
    refuses(f"row 1 .line 1. .*{message}", problems_of, f"- {{M: 41, N: 72, K: 88, {text}}}\n")


def test_the_command_line_says_it_too() -> None:
    argv = ["-m", "41", "-n", "72", "-k", "88", "--groups", "5", "--spread", "7,0,33,1,0", "--target", "sm90"]
    given = options.defaults(options.parse(argv), load_target("sm90"))
    assert given.groups == Groups(5, 0, "captured", (7, 0, 33, 1, 0))
    assert problems_of("- {M: 41, N: 72, K: 88}\n") == [Problem(41, 72, 88)]
    for wrong in ("uneven", "1,,2", "1.5"):
        with pytest.raises(SystemExit):
            options.parse([*argv, "--spread", wrong])


SIZE = "'M': 5, 'N': 6, 'K': 7, 'dtype_a': 'bf16'"


def read(folder: Path, *rows: str) -> list[FormatRow]:
    path = folder / "shapes.yaml"
    path.write_text("".join(f"- {{{row}}}\n" for row in rows), encoding="utf-8")
    return sizes.from_file(path, Defaults())


def test_counts_and_callers_are_read_and_rows_of_one_problem_are_one_size(tmp_path: Path) -> None:
    (row,) = read(tmp_path, f"{SIZE}, 'count': 30, 'operation': 'linear', 'callers': ['a.*.b', 'c']")
    assert (row.count, row.operation, row.callers) == (30, "linear", ("a.*.b", "c"))
    (row,) = read(tmp_path, SIZE)
    assert (row.count, row.operation, row.callers) == (1, "", ())
    rows = read(
        tmp_path,
        SIZE,
        f"{SIZE}, 'count': 3, 'operation': 'linear', 'callers': ['a']",
        f"{SIZE}, 'bias': 'n', 'count': 2, 'operation': 'linear'",
        f"{SIZE}, 'count': 4, 'operation': 'mm', 'callers': ['b', 'a']",
    )
    assert [(row.count, row.operation, row.callers) for row in rows] == [
        (8, "linear, mm", ("a", "b")),
        (2, "linear", ()),
    ]
    refuses("repeats row 1", read, tmp_path, SIZE, f"{SIZE}, 'count': 2")


@cases(
    ("'count': 0", "count must be above 0"),
    ("'count': 1.0e+300", "count must be at most 1000000000000000000, not 1e"),
    ("'count': -1", "count must be a number of at least 0"),
    ("'count': .nan", "count must be a number of at least 0"),
    ("'count': [1]", "count must be a number of at least 0"),
    ("'operation': 3", "operation must be text"),
    ("'callers': 'a'", "callers must be a list of text"),
    ("'callers': [1]", "callers must be a list of text"),
)
def test_wrong_values_are_refused(text: str, written: str, /, tmp_path: Path) -> None:
    refuses(rf"shapes.yaml: row 1 \(line 1\) {written}", read, tmp_path, f"{SIZE}, {text}")
