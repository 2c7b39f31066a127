import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import raising
from tests.support.nouns import Defaults, InputError, OutputError, Patch, Problem, Record, cases, each, results_format
from tests.support.refusals import fails
from tests.support.stores import HOW, ONE, THREE, TOOLS, TWO, merged, record, rows, take, trial
from tritongemm.workloads import sizes


def test_merge_is_deterministic_and_keeps_other_rows(tmp_path: Path) -> None:
    """Rows of other problems keep their place; new ones follow in the order asked for, not of their arrival."""
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    for path, arrival in ((first, (ONE, THREE)), (second, (THREE, ONE))):
        merged(path, record(TWO))
        with take(path, resume=False) as store:
            for problem in arrival:
                store.add_record(record(problem))
            store.merge((ONE, THREE))
    assert first.read_bytes() == second.read_bytes()
    assert [r.record for r in sizes.from_file(first, Defaults())] == [record(TWO), record(ONE), record(THREE)]
    with take(first) as store:
        store.merge((THREE, ONE))
    assert first.read_bytes() == second.read_bytes(), "merging again changes nothing"


def test_measured_anew_replaces_the_row_in_its_place(path: Path) -> None:
    merged(path, record(ONE), record(TWO), order=(ONE, TWO))
    with take(path, toolchain={**TOOLS, "triton": "9.9"}, resume=False) as store:
        assert store.record(ONE) is None and store.trials(ONE) == {}
        store.add_record(record(ONE, 7e-6, toolchain={**TOOLS, "triton": "9.9"}))
        store.merge((ONE,))
    assert path.with_name("out.yaml.journal.old").exists(), "the old journal is set aside, not deleted"
    assert [r.record.seconds for r in sizes.from_file(path, Defaults()) if r.record] == [7e-6, 1e-5]


def test_results_without_their_journal_count(path: Path) -> None:
    with take(path) as store:
        store.add_record(record(ONE))
        store.merge()
        store.journal.unlink()
    with take(path) as store:
        assert store.record(ONE) == record(ONE)


def test_a_merge_that_fails_leaves_the_old_file(path: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    with take(path) as store:
        store.add_record(record(ONE))
        store.merge()
        old = path.read_bytes()
        store.add_record(record(TWO))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", raising(OSError(errno.ENOSPC, "No space left on device")))
            fails(OutputError, r"out\.yaml can't be written: No space left.*journal .* is safe", store.merge)
        assert path.read_bytes() == old
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".out")) == [], "no debris"
        store.merge()
    assert len(sizes.from_file(path, Defaults())) == 2


@cases(
    ({"target": "sm90"}, r"is for gfx942, this run for sm90: choose another -o"),
    ({"toolchain": {**TOOLS, "triton": "3.9.0"}}, r"another toolchain \(triton 3\.5\.1 → 3\.9\.0\): .*--no-resume"),
    ({"toolchain": {**TOOLS, "device": "MI300X"}}, r"another toolchain \(device unknown → MI300X\)"),
    (
        {"protocol": {**HOW, "iters": 5}},
        r"measured otherwise \(iters 200 → 5\): use the same options, another -o, or --no",
    ),
    ({"protocol": {"timer": "model"}}, r"\(timer events → model, iters 200 → None\)"),
)
def test_runs_that_do_not_go_together(other: dict[str, Any], complaint: str, /, tmp_path: Path) -> None:
    """Refused with what differs and what to do; nothing that was there is touched."""
    path = tmp_path / "out.yaml"
    with take(path) as store:
        store.add_trials(ONE, [trial(0)])
        store.add_record(record(ONE))
        store.merge()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    fails(OutputError, complaint, take, path, **other)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    path.with_name("out.yaml.journal").unlink()
    if "protocol" not in other:
        fails(OutputError, complaint, take, path, **other)
    take(path).close()


@cases(
    (b"- {M: 1, N: 1, K: 1}\n", OutputError, r"out\.yaml: line 1 is not a result; name another file"),
    (b"- {M: 1, N: 1}\n", InputError, r"out\.yaml: row 1 \(line 1\) has no K"),
    (b"\xff\xfe\x00", InputError, r"out\.yaml is not text"),
)
def test_an_output_is_something_else(text: bytes, error: type[Exception], complaint: str, /, tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    path.write_bytes(text)
    fails(error, complaint, take, path)
    assert path.read_bytes() == text


@given(st.permutations([record(p, s) for p, s in zip((THREE, ONE, TWO), (1e-5, 2e-5, 3e-5), strict=True)]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
def test_the_file_does_not_say_who_came_first(path: Path, arrival: list[Record]) -> None:
    texts = set()
    for given_order in ((), (THREE, TWO, ONE)):
        with take(path, resume=False) as store:
            for one in arrival:
                store.add_record(one)
            store.merge(given_order)
        texts.add(tuple(r.problem for r in rows(path) if r))
        path.unlink()
        store.journal.unlink()
    assert texts == {(ONE, TWO, THREE), (THREE, TWO, ONE)}


def test_an_interrupted_run_ends_with_the_same_file(path: Path) -> None:
    """Ctrl-C merges what is done; going on gives the order of the run that was not interrupted."""
    merged(path, record(TWO), order=(ONE, TWO, THREE))
    assert rows(path) == [record(TWO)]
    merged(path, record(THREE), record(ONE), order=(ONE, TWO, THREE))
    assert rows(path) == [record(ONE), record(TWO), record(THREE)]
    with take(path) as store:
        store.add_record(record(four := Problem(1, 1, 1)))
        store.merge((four, ONE))
    assert rows(path) == [record(ONE), record(TWO), record(THREE), record(four)], "rows keep their place"


def test_the_file_is_the_truth_for_what_was_merged(path: Path) -> None:
    with take(path) as store:
        for problem in (ONE, TWO):
            store.add_record(record(problem))
        store.merge()
        store.add_record(record(THREE))
    path.write_text("".join(x for x in path.read_text().splitlines(keepends=True) if '"M": 16,' not in x))
    with take(path) as store:
        assert store.record(ONE) is None, "taken out by hand: to be measured again"
        assert (store.record(TWO), store.record(THREE)) == (record(TWO), record(THREE))
    path.unlink()
    with take(path) as store:
        assert store.records() == [record(ONE), record(TWO), record(THREE)]
        store.merge()
    assert len(rows(path)) == 3


def test_measuring_anew_does_not_lose_what_was_not_merged(path: Path) -> None:
    """Killed before the merge, then --no-resume for another size, twice: the first result is in the file."""
    with take(path) as store:
        store.add_record(record(ONE))
    for _ in range(2):
        with take(path, resume=False) as store:
            assert store.record(ONE) is None
            store.add_record(record(TWO))
            store.merge((TWO,))
        assert rows(path) == [record(ONE), record(TWO)]


@each("resume", [True, False])
def test_another_gpu_is_refused_whatever_is_asked(tmp_path: Path, resume: bool) -> None:
    """Neither a prediction nor another chip of the same architecture may replace what a GPU measured."""
    path = tmp_path / "out.yaml"
    measured = {**TOOLS, "device": "H200"}
    merged(path, record(ONE, toolchain=measured), toolchain=measured)
    for other, ours in ({**TOOLS, "device": "H100"}, "H100"), (TOOLS, "no GPU"):
        with pytest.raises(OutputError, match=f"was measured on H200, this run has {ours}: choose another -o"):
            take(path, toolchain=other, resume=resume)
    fails(OutputError, "is for gfx942, this run for sm90", take, path, toolchain=measured, target="sm90", resume=resume)
    assert rows(path) == [record(ONE, toolchain=measured)]


def test_a_run_without_a_time_blocks_no_other(path: Path) -> None:
    take(path).close()
    with take(path, target="sm90") as store:
        store.add_trials(ONE, [dataclasses.replace(trial(0), status="wrong", samples=())])
    with take(path, target="sm90") as store:
        assert store.trials(ONE)
    take(path, target="gfx942").close()
    with take(path, target="sm90") as store:
        assert not store.trials(ONE)
        store.add_trials(ONE, [trial(0)])
    fails(OutputError, "is for sm90, this run for gfx942", take, path)


def test_rows_of_an_older_toolchain_beside_those_asked_for(path: Path) -> None:
    newer = {**TOOLS, "triton": "3.9.0"}
    merged(path, record(ONE), record(TWO))
    merged(path, record(ONE, toolchain=newer), toolchain=newer, resume=False)
    with take(path, toolchain=newer, problems=[ONE]) as store:
        assert (store.record(ONE), store.record(TWO)) == (record(ONE, toolchain=newer), None)
        assert len(store.records()) == 2
    for problems in (None, [TWO]):
        with pytest.raises(OutputError, match=r"line 3 of .*another toolchain \(triton 3\.5\.1 → 3\.9\.0\)"):
            take(path, toolchain=newer, problems=problems)


def test_files_that_others_own_keep_their_links_modes_and_text(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    with take(real) as store:
        store.add_record(record(ONE))
        store.merge()
        link.symlink_to(real)
        fails(OutputError, r"link\.yaml is held by another run", take, link)
    real.chmod(0o664)
    merged(link, record(TWO))
    assert link.is_symlink() and len(rows(real)) == 2 and real.stat().st_mode & 0o777 == 0o664
    journal = tmp_path / "out.yaml.journal"
    for text in (b"dear diary", b"dear diary\n", b'{"head": 1}\n'):
        journal.write_bytes(text)
        fails(OutputError, "is not a journal of tritongemm; move it away", take, tmp_path / "out.yaml")
        assert journal.read_bytes() == text
    with pytest.raises(OutputError, match="is a device, not a file that can be replaced; choose another file with -o"):
        take(Path("/dev/null"))


def test_what_a_killed_run_left_half_written_is_swept(tmp_path: Path) -> None:
    """A run killed while it replaces its file leaves the new text; the next one deletes that, and nothing else."""
    debris = tmp_path / ".out.yaml.724.4d05fe43"
    others = [tmp_path / name for name in (".out.yaml.724.4d05fe43.bak", ".out.yaml", ".new.yaml.724.4d05fe43")]
    for path in (debris, *others):
        path.write_text("half")
    with take(tmp_path / "out.yaml"):
        assert not debris.exists() and all(path.exists() for path in others)


def test_nothing_is_added_to_what_was_given_back(tmp_path: Path) -> None:
    store = take(tmp_path / "out.yaml")
    store.close()
    store.close()
    fails(OutputError, "was given back", store.add_trials, ONE, [trial(0)])
    assert not list(tmp_path.glob("*.pid"))


def test_a_name_that_says_another_kind_of_file(tmp_path: Path) -> None:
    """YAML is not written into a CSV; nothing is made, and the message says what to write."""
    for name, instead in (
        ("out.csv", r"out\.yaml; a CSV of every candidate .*--profile_file"),
        ("o.JSON", r"o\.yaml$"),
        ("o.txt", r"o\.yaml$"),  # hipBLASLt's override file
    ):
        fails(OutputError, rf"results are written as YAML, not as .*; write -o .*{instead}", take, tmp_path / name)
    assert not list(tmp_path.iterdir())
    for name in ("out", "out.yml", "results.2026-01-02", "h200.v2"):
        take(tmp_path / name).close()


def test_rows_of_devices_of_several_sizes_are_kept(path: Path) -> None:
    """A run that does not say how large its device is replaces none of them but the one that does not say either."""
    large, small = (record(ONE, 1e-6 * n, compute_units=n) for n in (304, 80))
    path.write_text(results_format().write([record(TWO), large, small]))
    with take(path) as store:
        assert store.record(ONE) == small and store.records() == [record(TWO), large, small]
        assert store.beside({TWO}) == [small]
        store.add_record(record(THREE))
        store.merge()
    assert rows(path) == [record(TWO), large, small, record(THREE)]
    path.write_text(results_format().write([large, record(ONE), small]))
    path.with_name("out.yaml.journal").unlink()
    with take(path, resume=False) as store:
        store.add_record(record(ONE, 5e-6))
        assert store.record(ONE) == record(ONE, 5e-6)
        store.merge()
    assert rows(path) == [large, record(ONE, 5e-6), small]
    path.write_text(results_format().write([record(ONE), large]))
    path.with_name("out.yaml.journal").unlink()
    with take(path, compute_units=304, resume=False) as store:
        store.add_record(better := record(ONE, 1e-7, compute_units=304))
        store.merge()
    assert rows(path) == [record(ONE), better]


def test_devices_of_another_size_are_refused(path: Path) -> None:
    """A part of a chip has its name; rows that do not say how large it is go with any."""
    merged(path, record(ONE))
    with take(path, compute_units=304) as store:
        assert store.record(ONE) == record(ONE)
        store.add_record(record(TWO, compute_units=304))
        store.merge()
        header = json.loads(store.journal.read_text().splitlines()[0])["header"]
        assert "compute_units" not in header, "the journal that is there is continued"
    for kept in (path, path.with_name("out.yaml.journal")):
        with pytest.raises(
            OutputError, match="is for a device of 304 compute units, this run has 80: choose another -o"
        ):
            take(path, compute_units=80)
        if kept == path:
            path.unlink()
            path.with_name("out.yaml.journal").unlink()
            with take(path, compute_units=304) as store:
                store.add_trials(ONE, [trial(0)])
                header = json.loads(store.journal.read_text().splitlines()[0])["header"]
                assert header["compute_units"] == 304
