"""What another program does to the files of a run: edits of the results are kept, damage does not spread into them."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import CONFIG, ONE, THREE, TWO, journal_of, record, rows, take, written
from tests.support.tables import each
from tritongemm.core.errors import DamagedFileWarning
from tritongemm.core.problem import Problem
from tritongemm.formats import results_format
from tritongemm.results.journal import encode
from tritongemm.results.store import Store

FOUR, FIVE = Problem(4, 4, 4), Problem(5, 5, 5)


def begun(path: Path) -> Store:
    """A store of which three results are merged and a fourth is not."""
    with take(path) as store:
        for problem in (ONE, TWO, THREE):
            store.add_record(record(problem))
        store.merge()
    store = take(path)
    store.add_record(record(FOUR))
    return store


def test_edits_of_the_results_are_taken_over(tmp_path: Path) -> None:
    """A row that was added, one that was changed and one that was taken out while a run held the file."""
    path = tmp_path / "out.yaml"
    with begun(path) as store:
        edited = [record(ONE), record(THREE, 7e-6), record(FIVE, 2e-6)]
        path.write_text("# my own remark\n" + results_format().write(edited))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.merge((FOUR,))
        assert rows(path) == [record(ONE), record(THREE, 7e-6), record(FIVE, 2e-6), record(FOUR)]
        store.add_record(record(ONE, 1e-6))
        store.merge((FOUR,))
    assert rows(path) == [record(ONE, 1e-6), record(THREE, 7e-6), record(FIVE, 2e-6), record(FOUR)]
    assert not list(tmp_path.glob("*.edited*"))


def test_an_edit_of_a_size_that_was_measured_meanwhile_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with begun(path) as store:
        path.write_text(results_format().write([record(FOUR, 9e-3), record(ONE)]))
        store.merge((FOUR,))
    assert {r.problem: r.seconds for r in rows(path) if r} == {ONE: 1e-5, FOUR: 1e-5}


def unsummed(line: bytes) -> dict[str, Any]:
    """What a line of a journal says, without its checksum."""
    return {key: value for key, value in json.loads(line).items() if key != "crc32"}


@each(
    "text",
    [
        b"- {M: 1\n",
        b"\xff\xfe",
        b"- {M: 1, N: 1, K: 1}\n",
        results_format().write([record(ONE, target="sm90")]).encode(),
    ],
)
def test_an_edit_that_can_not_be_read_is_kept_beside(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "out.yaml"
    with begun(path) as store:
        path.write_bytes(text)
        with pytest.warns(DamagedFileWarning, match=r"was edited while .*edited text is kept in .*out\.yaml\.edited"):
            store.merge((FOUR,))
    assert (tmp_path / "out.yaml.edited").read_bytes() == text
    assert rows(path) == [record(ONE), record(TWO), record(THREE), record(FOUR)]


def test_a_run_that_has_nothing_to_add_leaves_an_edit_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with begun(path) as store:
        store.merge()
        path.write_bytes(b"- {M: 1\n")
        store.merge()
    assert path.read_bytes() == b"- {M: 1\n" and not list(tmp_path.glob("*.edited*"))


@each(
    ("field", "value"),
    [
        ("seconds", math.nan), ("seconds", 1e-320), ("target", "sm90"), ("toolchain", None), ("problem", "abc"),
        ("config", CONFIG.name.replace("tile", "zzz.tile")), ("problem", {**ONE.to_json(), "family": "absent"}),
    ],
)  # fmt: skip
def test_a_damaged_value_does_not_poison_the_results(tmp_path: Path, field: str, value: Any) -> None:
    """The line is passed over although its checksum agrees, and the results stay readable."""
    path = tmp_path / "out.yaml"
    entries = [unsummed(line) for line in written(path).splitlines()]
    place = next(n for n, e in enumerate(entries) if e.get("record", {}).get("problem") == TWO.to_json())
    entries[place]["record"][field] = value
    journal_of(path).write_bytes(b"".join(map(encode, entries)))
    with pytest.warns(DamagedFileWarning, match=rf"damaged lines \({place + 1}\) are passed over"):
        store = take(path)
    with store:
        assert store.record(TWO) is None, "it is measured again"
        store.merge((ONE, TWO, THREE))
    assert rows(path) == [record(ONE), record(THREE)]
