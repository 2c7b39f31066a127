import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.formats import write_text
from tests.support.nouns import Capsys, DamagedFileWarning, Defaults, FormatRow, InputError, Patch, Record, each, sizes
from tests.support.stores import CONFIG, ONE, THREE, TWO, record
from tritongemm.cli import export as export_command
from tritongemm.cli import tune
from tritongemm.results.revalidation import VerifiedResult
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.source_row import read_source
from tritongemm.tune.revalidate import Revalidation

pytestmark = pytest.mark.usefixtures("without_gpu")

GOOD = [dataclasses.replace(record(p), config=dataclasses.replace(CONFIG, num_warps=1)) for p in (ONE, TWO, THREE)]

# What happens to the second of three rows, and what is reported of it.
DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "torn": (lambda row: row[:100], "is not YAML"),
    "a quote lost": (lambda row: row.replace('"M": 32', '"M: 32'), "is not YAML"),
    "a letter changed": (lambda row: row.replace('"K": 16', '"J": 16'), "has an unknown key 'J'"),
    "a size of none": (lambda row: row.replace('"M": 32', '"M": 0'), "M must be at least 1, not 0"),
    "a time of none": (lambda row: row.replace('"time(us)": 10.0', '"time(us)": .nan'), "time(us) must be a positive"),
    "the first row again": (lambda row: row.replace('"M": 32', '"M": 16'), "repeats row 1 (line 2)"),
    "another thing": (lambda row: "- {'I': 'am', 'no': 'row'}", "has an unknown key 'I'"),
    "nested": (lambda row: row[:-1] + ", 'x': " + "[" * 300_000 + "}", "nested more than 100 deep"),
}


@pytest.fixture(params=DAMAGE)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    damage, complaint = DAMAGE[request.param]
    lines = write_text(*GOOD).splitlines()
    lines[2] = damage(lines[2])
    path = tmp_path / "tuned.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path, complaint


def test_the_others_are_read_and_serve_and_nothing_is_tuned(damaged: tuple[Path, str], capsys: Capsys) -> None:
    path, complaint = damaged
    found = sizes.from_results(path, Defaults())
    assert [(row.record, row.number, row.line) for row in found.rows] == [(GOOD[0], 1, 2), (GOOD[2], 3, 4)]
    ((row, line, reason),) = [dataclasses.astuple(one) for one in found.damaged]
    assert (row, line) == (2, 3) and reason.startswith(f"{path}: row 2 (line 3) ") and complaint in reason
    assert len(reason) < 700 and "\n" not in reason
    with pytest.warns(DamagedFileWarning) as warned:
        assert [row.record for row in read_source(path)] == [GOOD[0], GOOD[2]]
        Dispatcher().load(path)
    assert len(warned) == 2, "one for each reading"
    assert complaint in str(warned[0].message) and str(warned[0].message).endswith("; the row is not used")
    # Before any work: the user decides what to do with the row, and nothing of the file is changed.
    before = path.read_bytes()
    assert tune.main(["-m", "16", "-n", "16", "-k", "16", "-o", str(path)]) == 2
    assert complaint in capsys.readouterr().err
    assert tune.main(["--gemm_size_file", str(path), "-o", str(path.with_name("new.yaml"))]) == 2
    assert complaint in capsys.readouterr().err and path.read_bytes() == before
    assert not path.with_name("new.yaml").exists()


@pytest.fixture
def three_of_five(tmp_path: Path) -> Path:
    first, second, third = write_text(*GOOD).splitlines()[1:]
    path = tmp_path / "tuned.yaml"
    path.write_text("\n".join([first[:50], first, second.replace('"M": 32', '"M": -32'), second, third]) + "\n")
    return path


@pytest.mark.parametrize("option", ["--compare_wo_tuning", "--benchmark"])
def test_the_others_are_checked_and_timed(three_of_five: Path, capsys: Capsys, monkeypatch: Patch, option: str) -> None:
    asked: list[Record | None] = []

    def keep(_: Revalidation, rows: list[FormatRow], *__: object) -> list[VerifiedResult]:
        asked.extend(row.record for row in rows)
        return []

    monkeypatch.setattr(Revalidation, "verify", keep)
    monkeypatch.setattr(Revalidation, "retime", keep)
    monkeypatch.setattr(tune, "_list_refused", lambda *_: ())  # it wants an answer for each row
    assert tune.main(["--gemm_size_file", str(three_of_five), option, "--target", "gfx942"]) == 1 and asked == GOOD
    err = capsys.readouterr().err
    assert f"left out: {three_of_five}: row 1 (line 1) is not YAML" in err
    assert f"left out: {three_of_five}: row 3 (line 3) M must be at least 1, not -32" in err


def test_the_others_are_exported(three_of_five: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    exported: list[Record] = []

    def keep(records: list[Record], folder: Path, _: object) -> tuple[list[Path], list[str]]:
        exported.extend(records)
        return [folder / "kernels.csv"], []

    monkeypatch.setattr(export_command, "export", keep)
    assert export_command.main([str(three_of_five), "-o", str(three_of_five.parent)]) == 1 and exported == GOOD
    assert capsys.readouterr().err.count("left out: ") == 2


@each("argv", [("--compare_wo_tuning",), ("--benchmark",)])
def test_a_file_without_a_right_row_is_refused(tmp_path: Path, capsys: Capsys, argv: tuple[str, ...]) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text("- {M: 0, N: 1, K: 1}\n- {M: 1}\n")
    complaint = f"{path}: row 1 (line 1) M must be at least 1, not 0"
    assert tune.main(["--gemm_size_file", str(path), *argv]) == 2
    assert export_command.main([str(path), "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count(complaint) == 2
    with pytest.raises(InputError, match="M must be at least 1"):
        read_source(path)


def test_many_damaged_rows_are_reported_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text(write_text(*GOOD) + "- {M: 0, N: 1, K: 1}\n" * 30)
    with pytest.warns(DamagedFileWarning, match=r"row 4 \(line 5\) .*; rows 4, 5, .*, 13 and 20 others are not used$"):
        assert len(read_source(path)) == 3
