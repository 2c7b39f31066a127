import dataclasses
import io
from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tests.support.linear_layers import problem, record
from tests.support.nouns import Capsys, Config, FormatRow, Patch, Problem, Record, each, load_target, matrices
from tritongemm.core.trial import OUR_FAULT, Trial
from tritongemm.report import console as console_module
from tritongemm.report import progress, tables
from tritongemm.report.alike_lines import MOST_LISTED, summarise
from tritongemm.report.console import Reporter
from tritongemm.report.listener import Listener
from tritongemm.report.plain_table import align, keep_words
from tritongemm.results.revalidation import RetimedResult, VerifiedResult
from tritongemm.system.printable import WORD_CHARACTERS, printable

SIZE, OTHER = Problem(16, 4096, 4096), Problem(64, 4096, 4096)
OURS = Config("tile", 16, 64, 64)
ALGORITHM = Config("heuristic", 16, 64, 64, backend="blaslt")
INSTANCE = Config("single", 16, 64, 128, backend="cutlass")


def final(config: Config, us: float) -> Trial:
    return Trial(config, "ok", samples=(us * 1e-6,) * 3, stage="final")


def row_of(problem: Problem, config: Config, us: float, library_us: float | None = None) -> Record:
    library = None if library_us is None else library_us * 1e-6
    return Record(
        problem, "sm90", config, config.backend, us * 1e-6, 0.002, "graph-events", library_seconds=library,
        library="torch",
    )  # fmt: skip


def table(records: list[Record], trials: dict[Problem, list[Trial]]) -> list[list[str]]:
    out = io.StringIO()
    Reporter(console=Console(file=out, width=120)).backends(records, trials.__getitem__)
    return [line.split() for line in out.getvalue().splitlines()]


def test_the_best_of_each_backend_side_by_side() -> None:
    trials = {
        SIZE: [final(OURS, 10.0), final(OURS, 9.0), final(ALGORITHM, 9.9), Trial(INSTANCE, "ok", samples=(1e-6,))],
        OTHER: [final(OURS, 12.0), final(INSTANCE, 15.0), Trial(ALGORITHM, "wrong", "error", stage="final")],
    }
    assert table([row_of(SIZE, OURS, 9.0, 12.0), row_of(OTHER, OURS, 12.0, 12.6)], trials) == [
        ["Best", "of", "each", "backend,", "us"],
        ["size", "torch", "blaslt", "cutlass", "triton", "lead", "noise"],
        [SIZE.key, "12.00", "9.90", "-", "9.00", "10.0%", "0.2%"],
        [OTHER.key, "12.60", "-", "15.00", "12.00", "5.0%", "0.2%"],
    ]


def test_libraries_that_are_wrong_are_counted(capsys: Capsys) -> None:
    wrong = dataclasses.replace(
        row_of(SIZE, OURS, 9.0, None), toolchain={"torch": "2.13.0"}, library_wrong="error 0.5 > 0.008"
    )
    for compare in (False, True):
        Reporter().records([wrong, row_of(OTHER, OURS, 12.0, 12.6)], load_target("gfx942"), compare)
        fault = f"{SIZE.key} (torch 2.13.0: error 0.5 > 0.008)"
        assert f"library wrong at 1 of 2 sizes, so it did not race there: {fault}\n" in (
            said := capsys.readouterr().err
        )
    assert "1 of 1 sizes won" in said


def test_both_powers_are_stated(capsys: Capsys) -> None:
    both = dataclasses.replace(row_of(SIZE, OURS, 10.0, 11.0), notes={"rested_us": 9.0, "rested_library_us": 10.8})
    odd = dataclasses.replace(row_of(OTHER, OURS, 12.0, 12.6), notes={"rested_us": "9", "rested_library_us": 0.0})
    Reporter().records([both, odd], load_target("sm90"), True)
    said = capsys.readouterr().err
    assert "1 of these sizes raced at sustained power, where it is 1.100; the same kernels after rests: 1.200" in said


def test_an_entry_that_left_a_race_early_is_compared_at_equal_heat() -> None:
    assert table([row_of(SIZE, OURS, 9.0, 12.0)], {SIZE: [final(OURS, 9.0)]}) == []
    # The first rounds ran on a hot GPU: there the algorithm took 1.1 of the kernel's time, not 1.3 of its median.
    kernel = Trial(OURS, "ok", samples=(12e-6, 12e-6, 10e-6, 10e-6, 10e-6), stage="final")
    algorithm = Trial(ALGORITHM, "ok", samples=(13.2e-6, 13.2e-6), stage="final")
    found = table([row_of(SIZE, OURS, 10.0, 12.0)], {SIZE: [algorithm, kernel]})
    assert found[2][1:5] == ["12.00", "11.00", "10.00", "10.0%"]


def printed(records: list[Record], width: int, compare: bool) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, highlight=False)
    Reporter(console=console).records(records, load_target("gfx942"), compare)
    return out.getvalue().splitlines()


@each("compare", [False, True])
def test_usual_rows_fit_into_120_columns(compare: bool) -> None:
    """On one line each, with a distinguishable config; the title names the clock once."""
    config = Config("tile", 128, 128, 64, 4, 2, 4, 3, (("kpack", 2), ("waves_per_eu", 0)))
    size = Problem(16384, 16384, 8192, *matrices("bf16", layout="TN"))
    tied = dataclasses.replace(row_of(size, config, 12345.67, 12345.67), error=1.2e-4, tie=True)
    title, head, row = printed([tied], 120, compare)
    assert title.strip() == "Median times (timer: graph-events)" and "timer" not in head
    assert row.startswith(size.key) and row.rstrip().endswith(config.short_name)
    assert ("library us" in head and "triton (tie)" in row) is compare and max(map(len, (title, head, row))) <= 120


@each("compare", [False, True])
def test_a_long_size_is_complete(compare: bool) -> None:
    size = Problem(1048576, 16384, 16, *matrices("fp8e4m3fnuz", "fp8e5m2fnuz", "bf16", layout="TN"))
    assert len(size.key) == 48
    config = Config("ws_tma_swapped", 128, 256, 64, 4, 2, 8, 4, (("a", 1), ("b", 2), ("c", 3)))
    lines = printed([row_of(size, config, 1234.5, 1234.5)], 120, compare)
    assert any(line.startswith(f"{size.key} ") for line in lines) and max(map(len, lines)) <= 120
    assert lines[-1].endswith("+3")


def test_two_clocks_have_a_column_and_counts_their_kind() -> None:
    other = dataclasses.replace(row_of(OTHER, OURS, 2.0), timer="model")
    title, head, *rows = printed([row_of(SIZE, OURS, 1.0), other], 120, False)
    assert title.strip() == "Predicted, not measured (timer: model)" and "timer" in head
    assert "graph-events" in rows[0] and "model" in rows[1]
    lines = [*PREDICTED[:50], DAMAGED, *PREDICTED[50:]]
    assert list(summarise(lines)) == [f"{PREDICTED[0]}; 108 others likewise (--verbose lists them)", DAMAGED]


HOSTILE = ("[/x]", "[bold red]y", ":key:", "\x1b[31mz\r", "long" * 9999)


@each("name", HOSTILE)
def test_what_comes_from_files_is_text(name: str) -> None:
    """No markup, emoji or escape sequence of a name has an effect wherever it is printed; nor is it too long."""
    reported = dataclasses.replace(row_of(SIZE, OURS, 1.0, 2.0), winner=name, timer=name, library=name)
    other = dataclasses.replace(reported, problem=OTHER, timer="events", config=dataclasses.replace(OURS, backend=name))
    out = io.StringIO()
    console = Console(file=out, width=5000, force_terminal=True, color_system=None)
    reporter = Reporter(verbose=True, console=console)
    reporter._errors = console
    reporter.records([reported, other], load_target("gfx942"), compare=True)
    reporter.backends([reported, other], {SIZE: [final(OURS, 9.0)], OTHER: [final(other.config, 9.0)]}.__getitem__)
    again = Trial(OURS, "wrong", name, timer=name)
    tables.print_verified(reporter, [VerifiedResult(SIZE, again, name)], "by eye")
    tables.print_retimed(reporter, [RetimedResult(SIZE, again, None, reported)])
    reporter.say(name)
    reporter.failed(SIZE, name)
    reporter.trial(SIZE, again)
    shown = printable(name)
    lines = out.getvalue().splitlines()
    assert sum(shown in line for line in lines) >= 8 and all(line.isprintable() for line in lines)
    assert max(len(word) for line in lines for word in line.split(" ")) <= WORD_CHARACTERS


def test_a_log_gets_lines_where_a_terminal_has_one_that_changes(capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setattr(console_module, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "monotonic", lambda: 0.0)
    with Reporter() as reporter:
        reporter.stage("plan", 2)
        reporter.stage("final", 2)
        reporter.stage("compile", 5)
        reporter.step("compile", 2)
        reporter.finished(row_of(SIZE, OURS, 9.0, 12.0))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "0 of 2 sizes (planned 0 of 2, compiled 2 of 5)"
    assert said[1].startswith("1 of 2 sizes, 1.33x torch so far, about 5 s left (planned 0 of 2")


def test_faults_of_ours_are_counted_and_short_runs_get_no_lines(capsys: Capsys) -> None:
    with Reporter() as reporter:
        for config, reason in (
            (OURS, "TypeError: x"),
            (dataclasses.replace(OURS, block_m=32), "TypeError: x"),
            (OURS, "NameError"),
        ):
            reporter.trial(SIZE, Trial(config, "compile_failed", OUR_FAULT + reason))
        reporter.trial(SIZE, Trial(INSTANCE, "compile_failed", "the compiler process died"))
    assert capsys.readouterr().err.splitlines() == [
        f"2 configs could not be compiled, a fault of tritongemm: TypeError: x; please report it, with {OURS.name} of "
        f"{SIZE.key}",
        f"1 config could not be compiled, a fault of tritongemm: NameError; please report it, with {OURS.name} of "
        f"{SIZE.key}",
    ]
    with Reporter() as reporter:
        reporter.stage("plan", 1)
        reporter.step("plan")
    assert capsys.readouterr().err == ""


PREDICTED = [f"left out: row {m} (line {m}): {m}x16x16_bf16_TN: its time is a prediction" for m in range(1, 110)]
DAMAGED = "left out: row 7 (line 9) has no K"


@each(("count", "verbose"), [(MOST_LISTED, False), (109, True)])
def test_few_are_listed_and_all_where_everything_is_said(count: int, verbose: bool) -> None:
    assert list(summarise(PREDICTED[:count], verbose)) == PREDICTED[:count]


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
    assert align(COLUMNS, rows, ("size", "config")) == by_rich(rows)


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


def test_neighbours_of_one_kernel_are_one_range_and_m_held_out_are_together() -> None:
    one, text = reporter()
    tables.print_table(one, RECORDS)
    found = said(text)
    assert "M of N 32, K 64, bf16 TN" in found and "1 to 16 2.00 to 2.00 1.500 to 1.500 triton tile" in found
    assert problem(1, 32, 64, "n").product == "N 32, K 64, bf16 TN, bias n"
    assert "17 to 32" in found and "33 to 64 2.00 to 2.00 1.500 to 1.500 torch" in found
    one, text = reporter()
    tables.print_held_out(one, RECORDS)
    found = said(text)
    assert "3 measured; slower than the best known there by 4.0% on average" in found
    assert "10.0% at worst; 1.216 of the library's speed (geometric mean), 1.000 at least" in found
    tables.print_held_out(one, RECORDS[:1])
    assert said(text) == found


def test_a_workloads_gain_is_weighed_by_its_calls() -> None:
    """Where the library won, it serves: 3 us of 3; else 2 us of 3."""
    one, text = reporter()
    rows = [
        FormatRow(problem(16, 32, 64), count=9),
        FormatRow(problem(64, 32, 64), count=1),
        FormatRow(problem(7, 32, 64)),
    ]
    tables.print_gain(one, rows, RECORDS)
    assert "0.030 ms by the library, 0.021 ms by what serves them, 1.429 times as fast" in said(text)
    one, text = reporter()
    tables.print_gain(one, rows[2:], RECORDS)
    assert said(text) == ""


ROW = record(problem(16, 32, 64), order="1x64", row_bits="aa")


def test_times_are_compared_with_the_library_in_the_race_of_each() -> None:
    listener = Listener(lambda progress: None)
    others = [replace(ROW, order="", seconds=1e-6, library_seconds=6e-6), record(problem(17, 32, 64))]
    slower = replace(ROW, problem=ROW.problem.at(8), seconds=4e-6)
    tables.print_invariance(listener, [ROW, slower], others, {ROW.problem: 3})
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
    listener = Listener(lambda progress: None)
    tables.print_invariance(listener, [replace(ROW, library_seconds=None)], (), {})
    assert "unconstrained" not in listener.tables
    assert listener.lines == ["rows have the same bits at every M; order of additions: 1x64 (1)"]


@given(st.text(alphabet="ab  ", max_size=60), st.integers(4, 12))
def test_a_terminal_cuts_no_word_that_fits(text: str, width: int) -> None:
    """The words and their order are those of the text, and blanks alone were added."""
    shown = keep_words(text, width)
    assert shown.split() == text.split() and keep_words(text, inf) == text
    rows = [shown[i : i + width] for i in range(0, len(shown), width)]
    fitting = {word for word in text.split() if len(word) < width}
    assert fitting <= {word for row in rows for word in row.split()}
