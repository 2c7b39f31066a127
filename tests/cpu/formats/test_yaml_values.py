import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.nouns import Defaults, InputError, apart, cases, results_format, sizes
from tritongemm.formats import _yaml_values as values
from tritongemm.formats._yaml_rows import flow

HERE = Path("rows.yaml")

TOKENS = (
    *("{", "}", "[", "]", "'", "''", '"', "\\", ": ", ":", ", ", ",", " ", " #", "#", "&a ", "*a", "!!str ", "|", "?"),
    *("M", "N", "a b", "time(us)", "yes", "No", "true", "null", "~", "é", "\u2028", "\u00a0", "\ufeff", "\t"),
    *("<<", "=", "0", "-0", "16", "010", "0x1F", "1_000", "1:30", "+5", "1.5", "-1.5e-05", "1e5", "1.5e5", "1.", ".5"),
    *(".inf", "NaN", "Infinity", "2026-01-02", "9" * 30),
)  # fmt: skip
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(TOKENS)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words
nested = st.recursive(scalars, lambda s: st.lists(s, max_size=3) | st.dictionaries(words, s, max_size=3), max_leaves=8)
written = st.dictionaries(words, nested, max_size=6).map(flow)
# A row as a user writes one, and one with a part replaced by something else.
typed = st.lists(st.sampled_from(TOKENS), max_size=12).map(lambda some: "{" + "".join(some) + "}")
pairs = st.lists(st.tuples(words, st.sampled_from([": ", ":", " : "]), words).map("".join), max_size=4)
maps = pairs.map(lambda some: "{" + ", ".join(some) + "}")
damaged = st.builds(
    lambda row, place, token: row[: place % len(row)] + token + row[place % len(row) + 1 :],
    written, st.integers(0, 500), st.sampled_from(TOKENS),
)  # fmt: skip
rows = written | typed | maps | damaged


def kinds(value: Any) -> Any:
    """A value with the types of all that is in it; subclasses of text compare equal to text."""
    if isinstance(value, dict):
        return {key: kinds(one) for key, one in value.items()}
    return [kinds(one) for one in value] if isinstance(value, list) else (type(value), value)


@given(rows, st.sampled_from(["", " ", " # TFLOPS: 3", "# x", " x"]))
@example("{'a': 'it''s'}", "")
@example("{'a': 1, 'a': 2}", "")
@example("{M:1}", "")
@example("{M: 1,}", "")
@example("{M: yes, N: no}", "")
@example("{'a': NaN, 'b': 1e5}", "")
@example("{'" + "k" * 2000 + "': 1}", "")
@example("{'a': " + "[" * 200 + "]" * 200 + "}", "")
@example("{'a': 1}", " # {'b': 2}")
def test_json_says_what_yaml_says(row: str, behind: str) -> None:
    """Where JSON reads a line at all."""
    line = f"- {row}{behind}"
    own = values._read_json(1, line)
    if own is not None:
        (same,) = values._read_events(line, [line], {})
        assert (kinds(own.value), own.remark, own.fault) == (kinds(same.value), same.remark, same.fault)


def test_json_reads_what_we_write() -> None:
    """So the test above says something, and files of thousands of rows are read quickly."""
    record = {"M": 16, "time(us)": 1.5, "spread": 3.1e-05, "timer": "a, b: c", "tie": False, "toolchain": {"a": "3.6"}}
    for row in (flow(record), '{"M": 1, "text": "a \\"b\\" \\\\"} # TFLOPS: 500.58 time(us): 1095.0'):
        assert values._read_json(7, f"- {row}") is not None, row
    for row in (
        "{M: 010}",
        '{"M": 1e5}',
        "{M: yes}",
        "{'a': 1}",
        '{"a": "\\u00e9"}',
        '{"a": .inf}',
        '{"a": 1, "a": 2}',
    ):
        assert values._read_json(7, f"- {row}") is None, row


@given(st.lists(written | maps | st.sampled_from(["", "  ", "# a remark: [", "#"]), max_size=6), st.booleans())
@example(["{a: &x 1}", "{b: *x}"], True)
def test_a_file_of_rows_in_lines_is_read_as_one(some: list[str], ends: bool) -> None:
    """Also where a name given in one line is used in another. A line that is not YAML by itself is refused."""
    text = "\n".join(f"- {row}" if row.startswith("{") else row for row in some) + ("\n" if ends else "")
    try:
        entire = list(values._read_events(text, text.splitlines(), {}))
    except values.YamlFault:
        return
    found = list(values.read_rows(text))
    if any(row.fault.startswith("is not YAML") for row in found):
        return  # a quoted text goes over several lines that look like rows and remarks
    assert [(r.line, kinds(r.value), r.remark, r.fault) for r in found] == [
        (r.line, kinds(r.value), r.remark, r.fault) for r in entire
    ]


ROW = "{M: 1, N: 1, K: 1}"


@apart(
    (f"- {ROW}\n- {{M: {'[' * 300_000}\n", "row 2 (line 2) has lists and maps nested more than 100 deep (column "),
    (f"- {ROW}\n- {{M: {'{a: ' * 300_000}\n", "row 2 (line 2) has lists and maps nested more than 100 deep (colu"),
    (f"- {ROW}\n- {'[' * 1_000_000}\n", "rows.yaml has lists and maps nested more than 100 deep (line 2, column "),
    (f"- {'- ' * 300_000}1\n", "rows.yaml has lists and maps nested more than 100 deep (line 1, column "),
    (f"-\n  M: {'[' * 300_000}\n", "rows.yaml has lists and maps nested more than 100 deep (line 2, column "),
    ("[" * 300_000, "rows.yaml has lists and maps nested more than 100 deep (line 1, column "),
    ids=["lists", "maps", "a-row", "in-blocks", "a-value-in-blocks", "the-file"],
)  # fmt: skip
def test_lists_in_lists_do_not_take_the_stack(text: str, complaint: str, /, tmp_path: Path) -> None:
    """It killed the interpreter: libyaml's composer calls itself for each."""
    path = tmp_path / "rows.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        sizes.from_file(path, Defaults())
    assert complaint in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_hundred_lists_are_kept_and_rows_in_block_style_cost_themselves() -> None:
    """Values that a newer version may write, in either way of reading."""
    deep = "[" * 98 + "1" + "]" * 98
    for text in (f"- {{'a': {deep}}}\n", f'- {{"a": {deep}}}\n'):
        (row,) = values.read_rows(text)
        assert not row.fault and json.dumps(row.value) == json.dumps({"a": json.loads(deep.replace("1", '"1"'))})
    first, second = values.read_rows("-\n  M: 1\n  M: 2\n  N: [1, {a: 1, a: 2}]\n-\n  M: 3\n")
    assert first.fault == "has M twice; keep one of them" and second.value == {"M": "3"} and second.line == 6
    # Python makes no number of it.
    line = results_format().write([]).strip() + "\n- {M: 1, N: 1, K: 1, BLOCK_SIZE_M: 16, BLOCK_SIZE_N: 16, "
    line += f"BLOCK_SIZE_K: 16, target: sm90, time(us): 1.0, notes: {{x9: {'9' * 5000}, x8: .inf}}}}\n"
    (read,) = results_format().read(HERE, line, Defaults())
    assert read.record is not None and read.record.notes == {"x9": "9" * 5000, "x8": ".inf"}


def test_aliases_do_not_take_the_memory() -> None:
    """A list of lists of lists, each the one before ten times; and a list that holds itself."""
    text = "- {a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"
    text += "".join(f", a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)) + "}\n"
    (row,) = values.read_rows(text)
    assert row.fault == "has more than 10000 values" and row.value is None
    (row,) = values.read_rows("- {a: &a [*a]}\n")
    assert row.fault == "has *a, but nothing before it is called &a"
    (row,) = values.read_rows("- {a: [" + ", ".join(["1"] * 20_000) + "]}\n")
    assert row.fault == "has more than 10000 values"


@cases(
    ("{a: 1, b: {c: 1, c: 2}}", "has b: c twice; keep one of them"),
    (f"{{a: 1, ? {'b' * 600} : 2}}", f"has the key '{'b' * 100}…', of 600 characters; one has at most 500"),
    ("{a: 1, ? [b] : 2}", "has a list as a key; a key is a name, such as M"),
    ("{a: !!python/name:os.system 1}", "has '1' with the tag 'tag:yaml.org,2002:python/name:os.system'; leave the"),
    ("{a: !!int x}", "has 'x' with the tag 'tag:yaml.org,2002:int'; leave the tag out"),
    ("{a: 1", "is not YAML: "),
    ("{a: 1} x", "is not YAML: "),
    ("{a: '\x07'}", "is not YAML: unacceptable character"),
)
def test_a_row_that_can_not_be_read_costs_itself(row: str, fault: str, /) -> None:
    before, found, after = values.read_rows(f"- {ROW}\n- {row}\n- {ROW}\n")
    assert not before.fault and not after.fault and before.value == after.value and after.line == 3
    assert found.fault.startswith(fault) and found.value is None and found.line == 2
