"""Journals and results files of other versions: older ones go on, and newer ones lose nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import DATA
from tests.support.stores import (
    HOW,
    ONE,
    THREE,
    TOOLS,
    TWO,
    append,
    journal_lines,
    record,
    rewrite_header,
    rows,
    take,
    trial,
)  # fmt: skip
from tritongemm.core.errors import DamagedFileWarning, NewerVersionWarning, OutputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import SCHEMA
from tritongemm.core.scaling import Scaling
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.results import schema

OLD = DATA / "schema1"
SHUFFLED = "shuffled_16x16"


def problem(family: str, dtype: str, order_b: str = "plain", **sizes: int) -> Problem:
    m, n, k = {"m": 64, "n": 32, "k": 128, **sizes}.values()
    plugin: Family = registry.get(Family, family)
    return plugin.problem(m, n, k, dtype, dtype, "bf16", row_major_b=False, order_b=order_b)


PROBLEMS = [
    Problem(16, 16, 16),
    Problem(777, 6144, 4096, "bf16", "bf16", "bf16", row_major_b=False, bias="n"),
    problem("a8w8", "fp8e4m3fnuz"),
    problem("a8w8", "int8", SHUFFLED),
    problem("a8w8_blockscale", "fp8e4m3fnuz", SHUFFLED, n=256, k=256),
    problem("dense", "bf16", SHUFFLED),
    problem("a4w4_blockscale", "fp4e2m1"),
    problem("a4w4_blockscale", "fp4e2m1", SHUFFLED),
]


def old_run(folder: Path) -> Path:
    """The files of an older version, as its run left them."""
    path = folder / "out.yaml"
    shutil.copy(OLD / "results.yaml", path)
    shutil.copy(OLD / "journal.jsonl", folder / "out.yaml.journal")
    return path


def test_an_older_journal_goes_on_without_a_new_trial(tmp_path: Path) -> None:
    """Every problem has its trials and its result, those with scales and a shuffled B under their names of today."""
    path = old_run(tmp_path)
    before = path.with_name("out.yaml.journal").read_bytes()
    with take(path, problems=PROBLEMS) as store:
        for one in PROBLEMS:
            assert len(store.trials(one)) == 3, one.key
            result = store.record(one)
            assert result and (result.problem, result.seconds, result.compute_units) == (one, 1.1e-5, 0)
        assert len(store.trials(Problem(1, 2, 3))) == 1 and store.record(Problem(1, 2, 3)) is None
        store.merge(PROBLEMS)
        assert path.with_name("out.yaml.journal").read_bytes().startswith(before)
    assert [r.problem for r in rows(path) if r] == PROBLEMS
    with take(path, problems=PROBLEMS) as store:
        assert [store.record(one) for one in PROBLEMS] == rows(path)
        merged = path.read_bytes()
        store.merge(PROBLEMS)
    assert path.read_bytes() == merged


def test_an_older_journal_alone_tells_all(tmp_path: Path) -> None:
    path = old_run(tmp_path)
    path.unlink()
    with take(path) as store:
        assert [r.problem for r in store.records()] == PROBLEMS


def test_lines_of_dense_problems_are_as_they_were(tmp_path: Path) -> None:
    """Byte for byte, but for the header's schema and the checksums: an older version reads what this one writes."""
    old = (OLD / "journal.jsonl").read_bytes().splitlines()
    dense = [line for line in old if b'"family": "dense"}, ' in line and b"merged" not in line]
    assert len(dense) == 9
    path = tmp_path / "out.yaml"
    with take(path) as store:
        for line in map(json.loads, dense):
            if "trial" in line:
                store.add_trials(schema.read_problem(line["problem"]), [schema.read_trial(line["trial"])])
            else:
                store.add_record(schema.read_record(line["record"]))
        # Behind what a line held before there were these stand `elapsed` and `crc32`.
        older = [line.partition(b', "elapsed": ')[0] + b"}" for line in store.journal.read_bytes().splitlines()[1:]]
        assert older == dense
    with take(tmp_path / "new.yaml") as store:
        header = json.loads(store.journal.read_bytes())["header"]
    assert header == {**json.loads(old[0])["header"], "schema": SCHEMA} == {
        "target": "gfx942", "toolchain": TOOLS, "protocol": HOW, "schema": SCHEMA,
    }  # fmt: skip


def test_problems_with_scales_come_back_from_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with take(path) as store:
        for one in PROBLEMS:
            store.add_trials(one, [trial(0)], record(one, compute_units=304))
    lines = journal_lines(path)
    assert lines[5]["problem"]["scale_a"] == Scaling().to_json() and "order_b" not in lines[5]["problem"]
    assert lines[7]["problem"]["order_b"] == SHUFFLED
    with take(path) as store:
        assert store.records() == [record(p, compute_units=304) for p in PROBLEMS]
        assert all(len(store.trials(p)) == 1 for p in PROBLEMS)


def test_a_key_that_is_not_known(tmp_path: Path) -> None:
    """Of a trial it stays in its line; a record that has one is damaged, as the key may say what it is a result of."""
    path = tmp_path / "out.yaml"
    with take(path):
        pass
    append(
        path,
        {"problem": ONE.to_json(), "trial": {**trial(0).to_json(), "device": 3}, "host": "a"},
        {"record": {**record(ONE).to_json(), "power": {"watts": 750.5}}},
    )
    before = path.with_name("out.yaml.journal").read_bytes()
    with pytest.warns(DamagedFileWarning, match="Line 3: has unknown keys: power"), take(path) as store:
        assert list(store.trials(ONE).values()) == [trial(0)] and store.record(ONE) is None
        store.add_record(record(TWO))
    assert path.with_name("out.yaml.journal").read_bytes().startswith(before)


def newer_line(kind: str, groups: int = 8) -> dict[str, Any]:
    """A line about a problem with a key of tomorrow."""
    data = {**ONE.to_json(), "groups_v9": groups}
    if kind == "record":
        return {"record": {**record(ONE, 3e-6).to_json(), "problem": data}}
    return {"problem": data, "trial": trial(7).to_json()}


def test_a_problem_with_an_unknown_key_is_not_another_problem(tmp_path: Path) -> None:
    """Its lines are kept and not used, said once; its result is not taken for merged."""
    path = tmp_path / "out.yaml"
    with take(path) as store:
        store.add_record(record(TWO))
        store.merge()
    append(path, newer_line("trial"), newer_line("record"), {"merged": []}, newer_line("record", 9))
    with pytest.warns(NewerVersionWarning, match=r"3 of the lines of .*journal need a newer .*groups_v9") as said:
        store = take(path)
    assert len(said) == 1
    with store:
        assert store.trials(ONE) == {} and store.record(ONE) is None and store.records() == [record(TWO)]
        store.add_record(record(ONE))
        store.merge((ONE,))
    assert rows(path) == [record(TWO), record(ONE)]
    lines = journal_lines(path)
    assert [next(iter(line)) for line in lines[-3:]] == ["record", "merged", "record"]
    assert lines[-1] == newer_line("record", 9), "a newer version finds its result after the merge"
    before = path.with_name("out.yaml.journal").read_bytes()
    with pytest.warns(NewerVersionWarning), take(path) as store:
        store.merge((ONE,))
    assert path.with_name("out.yaml.journal").read_bytes() == before, "merging again changes nothing"


def test_scales_with_an_unknown_key_are_newer_too(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with take(path):
        pass
    data = PROBLEMS[2].to_json()
    data["scale_a"] = {**data["scale_a"], "zero_points": True}
    append(path, {"problem": data, "trial": trial(0).to_json()})
    with pytest.warns(NewerVersionWarning, match=r"\(zero_points\)"), take(path) as store:
        assert not store.trials(PROBLEMS[2])


def test_measuring_anew_carries_a_newer_result_over(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with take(path):
        pass
    append(path, newer_line("record"))
    with pytest.warns(NewerVersionWarning):
        take(path, resume=False).close()
    assert journal_lines(path)[1:] == [newer_line("record")]


def test_a_kind_of_line_of_tomorrow(tmp_path: Path) -> None:
    """In a journal that says so it is kept; in one of today it is damage."""
    path = tmp_path / "out.yaml"
    with take(path):
        pass
    append(path, {"uplift": 1.5})
    with pytest.warns(DamagedFileWarning, match=r"damaged lines \(2\) are .* Line 2: it is of no known kind"):
        take(path).close()
    header = journal_lines(path)[0]["header"]
    rewrite_header(path, {**header, "schema": SCHEMA + 1})
    with pytest.warns(NewerVersionWarning, match=r"its kind is not known here \(uplift\)"):
        take(path).close()
    assert journal_lines(path)[1] == {"uplift": 1.5}


def test_values_of_tomorrow_are_no_damage(tmp_path: Path) -> None:
    """A status, a stage or a result that only a newer version knows: its line is kept, and the others are used."""
    path = tmp_path / "out.yaml"
    with take(path):
        pass
    rewrite_header(path, {**journal_lines(path)[0]["header"], "schema": SCHEMA + 1})
    lines = [
        {"problem": ONE.to_json(), "trial": {**trial(0).to_json(), "status": "paused"}},
        {"problem": ONE.to_json(), "trial": {**trial(1).to_json(), "samples": [[1e-6, 2e-6]]}},
        {"record": {**record(ONE).to_json(), "seconds": {"hot": 1e-6}}},
        {"problem": ONE.to_json(), "trial": {**trial(2).to_json(), "watts": 700}},
    ]
    append(path, *lines)
    with pytest.warns(NewerVersionWarning, match="3 of the lines of .* a newer version wrote it: status must be"):
        store = take(path)
    with store:
        assert list(store.trials(ONE).values()) == [trial(2)] and store.record(ONE) is None
    assert journal_lines(path)[1:] == lines


def test_rows_of_a_newer_version_keep_their_places(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with take(path) as store:
        for one in (ONE, TWO):
            store.add_record(record(one))
        store.merge()
        store.journal.unlink()
    head, first, second = path.read_text().splitlines()
    newer = first[:-1].replace("'M': 16", "'M': 17") + ", 'groups_v9': 8}"
    head = head.replace(f"schema {SCHEMA}", f"schema {SCHEMA + 1}")
    path.write_text("\n".join([head, newer, first, second, ""]))
    with pytest.warns(NewerVersionWarning, match=r"1 of the rows of .*groups_v9") as said, take(path) as store:
        assert store.records() == [record(ONE), record(TWO)]
        store.add_record(record(THREE))
        store.merge()
    assert len(said) == 1
    assert path.read_text().splitlines()[:4] == [head, newer, first, second]
    assert len(path.read_text().splitlines()) == 5


def test_a_family_that_is_not_here(tmp_path: Path) -> None:
    """A plug-in may come back; its lines are not damaged."""
    path = tmp_path / "out.yaml"
    with take(path) as store:
        absent = Problem(1, 2, 3, family="absent")
        store.add_trials(absent, [trial(0)])
    with take(path) as store:
        assert list(store.trials(absent).values()) == [trial(0)]


@pytest.mark.parametrize("number", [0, "2", True, 1.5])
def test_a_schema_that_is_no_number_is_damage(tmp_path: Path, number: object) -> None:
    path = tmp_path / "out.yaml"
    with take(path):
        pass
    rewrite_header(path, {**journal_lines(path)[0]["header"], "schema": number})
    with pytest.raises(OutputError, match=r"line 1, the header, is damaged .*schema must be a number from 1 on"):
        take(path)
