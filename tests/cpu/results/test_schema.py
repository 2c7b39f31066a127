import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import DATA, stores
from tests.support.nouns import Problem, cases, each, fails, results_format
from tritongemm.core.errors import DamagedFileWarning, NewerFileError, OutputError
from tritongemm.core.record import SCHEMA
from tritongemm.results import history, journal
from tritongemm.results.rewriting import HeldRows, read_trials

WRITTEN = DATA / "schema2"  # by the first version that wrote schema 2; they must never change


def written_run(folder: Path) -> Path:
    """The output of a run of 23 problems of all kinds, of which one was tuned again after the last merge."""
    shutil.copy(WRITTEN / "results.yaml", folder / "out.yaml")
    shutil.copy(WRITTEN / "journal.jsonl", folder / "out.yaml.journal")
    return folder / "out.yaml"


def test_written_files_come_back_and_a_run_goes_on_from_them(tmp_path: Path) -> None:
    path = written_run(tmp_path)
    text = stores.journal_of(path).read_bytes()
    read = journal.read(stores.journal_of(path))
    assert not read.damaged and len(read.lines) == text.count(b"\n") == 118
    for line, found in zip(text.splitlines(keepends=True), read.lines.values(), strict=True):
        entry = {k: v for k, v in json.loads(line).items() if k != "crc32"}
        match found.kind:
            case "trial":
                again: Any = {"problem": found.value[0].to_json(), "trial": found.value[1].read().to_json()}
            case "record":
                again = {"record": found.value.to_json()}
            case "merged":
                again = {"merged": [problem.to_json() for problem in found.value]}
            case _:
                again = {"header": found.value}
        assert journal.encode({**entry, **again}) == line
    merged = {line.value.problem: line.value for line in [*read.lines.values()][:-1] if line.kind == "record"}
    assert {r.problem: r.to_json() for r in stores.rows(path) if r} == {p: r.to_json() for p, r in merged.items()}
    assert len(stores.rows(path)) == len(merged) == 23
    before = stores.journal_of(path).read_bytes()
    with stores.take(path, problems=(), toolchain={**stores.TOOLS, "triton": "3.6.0"}) as store:
        assert all(len(store.trials(r.problem)) == 4 for r in store.records())
        store.merge()
        assert stores.journal_of(path).read_bytes().startswith(before)
        again = path.with_name("again.yaml")
        again.write_text(results_format().write(store.records()))
    assert stores.rows(path) == stores.rows(again) and next(r.seconds for r in stores.rows(path) if r) == 7e-6


@each("resume", [True, False])
def test_a_newer_journal_is_refused_and_kept(tmp_path: Path, resume: bool) -> None:
    path = written_run(tmp_path)
    stores.rewrite_header(path, {"schema": SCHEMA + 1, "devices": 8})
    stores.append(path, {"uplift": 1.5})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    refusal = rf"out\.yaml\.journal: a newer version .*schema {SCHEMA + 1}; this one reads up to {SCHEMA}\); update tri"
    fails(NewerFileError, refusal, stores.take, path, resume=resume, problems=())
    fails(NewerFileError, refusal, history.read, stores.journal_of(path))
    fails(NewerFileError, refusal, read_trials, path, [stores.ONE])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix not in (".lock", ".pid")} == before


def test_a_newer_results_file_is_refused_and_kept(path: Path) -> None:
    path.write_text(
        results_format().write([stores.record(stores.ONE)]).replace(f"schema {SCHEMA}", f"schema {SCHEMA + 1}")
    )
    before = path.read_bytes()
    for use in (stores.rows, stores.take, HeldRows):
        fails(NewerFileError, rf"out\.yaml: a newer version .*schema {SCHEMA + 1}", use, path)
    assert path.read_bytes() == before


def test_a_newer_file_that_appears_during_a_run_is_kept_beside(path: Path, tmp_path: Path) -> None:
    with stores.take(path) as store:
        store.add_record(stores.record(stores.ONE))
        newer = results_format().write([stores.record(stores.TWO)]).replace(f"schema {SCHEMA}", f"schema {SCHEMA + 1}")
        path.write_text(newer)
        with pytest.warns(DamagedFileWarning, match="a newer version .*; the edited text is kept in"):
            store.merge()
    assert newer in [p.read_text() for p in tmp_path.iterdir()] and stores.rows(path) == [stores.record(stores.ONE)]


@cases(
    ({"problem": stores.ONE.to_json(), "trial": {**stores.trial(0).to_json(), "watts": 3}}, ""),
    (
        {"problem": {**stores.ONE.to_json(), "zero_points": True}, "trial": stores.trial(0).to_json()},
        "unknown keys: zero_points",
    ),
    ({"record": {**stores.record(stores.ONE).to_json(), "power": {}}}, "has unknown keys: power"),
    ({"uplift": 1.5}, "it is of no known kind"),
)
def test_a_line_with_something_unknown_is_damaged(line: dict[str, Any], reason: str, /, tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    stores.take(path).close()
    stores.append(path, line)
    match = rf"Line 2: .*{reason}" if reason else "can't be, and is measured"
    with pytest.warns(DamagedFileWarning, match=match), stores.take(path) as store:
        assert store.trials(stores.ONE) == {} and store.record(stores.ONE) is None
    assert stores.journal_lines(path)[1:] == [line]


def test_a_family_that_is_not_here(path: Path) -> None:
    """A plug-in may come back; its lines are not damaged."""
    with stores.take(path) as store:
        absent = Problem(1, 2, 3, family="absent")
        store.add_trials(absent, [stores.trial(0)])
    with stores.take(path) as store:
        assert list(store.trials(absent).values()) == [stores.trial(0)]


@each("number", [0, SCHEMA - 1, "2", True, 1.5, None])
def test_a_schema_that_is_no_number_is_damage(tmp_path: Path, number: object) -> None:
    path = tmp_path / "out.yaml"
    stores.take(path).close()
    stores.rewrite_header(path, {**stores.journal_lines(path)[0]["header"], "schema": number})
    fails(OutputError, r"line 1, the header, is damaged \(schema must be 2", stores.take, path)
