"""Calls of other M find rows of AITER's own files where AITER finds them, and run at their true M."""

import csv
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support import DATA
from tests.support.linear_layers import (
    TILE,
    StandInKernel,
    StandInLibrary,
    problem,
    record,
    stand_in_device,
    stand_in_kernels,
)
from tests.support.nouns import SUPPORTED, Caplog, Config, Patch, Problem, Record, Support, cases
from tritongemm.core.served_call import CallSignature, LoadedKernel, Resolution
from tritongemm.serving import kernel_loading, source_row, stored_kernels
from tritongemm.serving.choice_log import ChoiceLog
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.source_row import SourceRow, kind_of, padded_ms
from tritongemm.serving.sources.library_winner import LibraryWinner
from tritongemm.serving.sources.tuned_record import TunedRecord

ASKED = (1, 2, 3, 5, 7, 13, 17, 33, 63, 100, 130, 257, 300, 500, 777, 1000, 1500, 3000, 5000, 9000)


def aiters(m: int, n: int = 32, k: int = 64, **changes: Any) -> SourceRow:
    return SourceRow(record(problem(m, n, k), **changes), "bf16_tuned_gemm.csv", f"row of M {m}", padded=True)


def test_all_of_aiters_rows_are_found_where_aiter_finds_them() -> None:
    """93 weights of its shipped files for gfx950; the counts were taken with AITER's own functions."""
    lines = (DATA / "aiter" / "bf16_gfx950_sizes.csv").read_text(encoding="utf-8").splitlines()[1:]
    sizes = {(int(row["N"]), int(row["K"])): list(map(int, row["M"].split())) for row in csv.DictReader(lines)}
    table = RecordTable(aiters(m, n, k) for (n, k), ms in sizes.items() for m in ms)
    found: Counter[str] = Counter()
    for n, k in sizes:
        for m in ASKED:
            row = table.find(problem(m, n, k), "sm90", 132)
            if isinstance(row, Support):
                found["miss"] += 1
            else:
                steps = ["exact" if row.problem.m == m else "bucket", *padded_ms(m, n)]
                found["exact" if steps[0] == "exact" else f"gl{steps[1:].index(row.problem.m)}"] += 1
    assert len(sizes) == 93 and found == {"exact": 136, "gl0": 836, "gl1": 643, "miss": 245}


@cases(
    (13, 64, [16, 16]),
    (256, 64, [256, 256]),
    (257, 64, [288, 512]),
    (1025, 64, [1088, 2048]),
    (4097, 64, [4224, 8192]),
    (9000, 5120, [9088, 8192]),
    (9000, 4096, [9088, 16384]),
)
def test_the_steps_are_aiters(m: int, n: int, expected: list[int], /) -> None:
    assert list(padded_ms(m, n)) == expected


def test_own_rows_go_first_and_files_of_rows_are_named(tmp_path: Path) -> None:
    wide = record(problem(24, 32, 64), m_from=10)
    table = RecordTable([aiters(16), aiters(32), wide])
    assert table.find(problem(13, 32, 64), "sm90", 132) == wide
    found = {m: table.find(problem(m, 32, 64), "sm90", 132) for m in (5, 16, 25)}
    assert [kind_of(r, m) for m, r in found.items() if isinstance(r, Record)] == ["bucket", "exact", "bucket"]
    why = str(RecordTable([record(problem(16, 32, 64))]).find(problem(13, 32, 64), "sm90", 132))
    assert why == "13x32x64_bf16_TN was never tuned for sm90; rows of this N x K are of M 16"
    assert isinstance(table.find(problem(13, 32, 64, bias="n"), "sm90", 132), Support)
    assert isinstance(RecordTable([aiters(16, compute_units=80)]).find(problem(13, 32, 64), "sm90", 132), Support)
    assert SourceRow(record(problem(1, 2, 3))).where == "a record that was given"


def test_a_bucket_is_bound_to_the_true_m_and_says_whose_row_it_is() -> None:
    asked: list[int] = []

    def bind(m: int) -> LoadedKernel:
        asked.append(m)
        return StandInKernel()

    row, lost = aiters(16), aiters(64, winner="torch")
    device = stand_in_kernels(RecordTable([row, lost]), {row.record.problem: StandInKernel()}, StandInKernel())
    device.binders[row.record.problem, 0] = bind
    answer = TunedRecord().resolve(CallSignature(problem(13, 32, 64)), device)
    assert isinstance(answer, Resolution) and answer.kind == "bucket" and asked == [13]
    assert answer.text == f"M 16, the padded M of 13: {TILE.name} (2.00 us, 1.50x torch) at M 16"
    library = LibraryWinner().resolve(CallSignature(problem(50, 32, 64)), device)
    assert isinstance(library, Resolution) and "64x32x64_bf16_TN on sm90, the padded M of 50" in library.text


def test_an_algorithm_of_a_bucket_is_loaded_and_checked_at_the_true_m(monkeypatch: Patch) -> None:
    checked: list[tuple[Problem, int]] = []

    def check(kernel: LoadedKernel, record: Record, device: Any) -> Support:
        checked.append((record.problem, record.m_from))
        return SUPPORTED

    monkeypatch.setattr(source_row, "find_winner", lambda record: StandInLibrary())
    monkeypatch.setattr(stored_kernels, "check_kernel", check)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    row = aiters(16, config=Config("one", 0, 0, 0, backend="library"), winner="library").record
    none, without = kernel_loading.load_kernels(stand_in_device(), [row])
    _, binders = kernel_loading.load_kernels(stand_in_device(), [row], {row.problem})
    assert isinstance(none[row.problem], StandInKernel) and without == {}
    assert isinstance(binders[row.problem](13), StandInKernel) and checked[-1] == (problem(13, 32, 64), 0)
    assert str(binders[row.problem](3)) == "not for 3 rows"


def test_each_size_is_logged_once_where_that_is_asked_for(monkeypatch: Patch, caplog: Caplog) -> None:
    log, choice = ChoiceLog(), Resolution("bucket", "M 16 …")
    with caplog.at_level(logging.INFO, "tritongemm"):
        for name, value in (("AITER_LOG_TUNED_CONFIG", "0"), ("TRITONGEMM_LOG", "config")):
            monkeypatch.setenv(name, value)
            for _ in range(2):
                log.log("13x32x64", "cuda:0", choice, "a.csv: row 3 (line 4)")
                log.log("13x32x64", "cuda:1", Resolution("fallback", "not loaded yet", lasting=False), "")
    assert [r.getMessage() for r in caplog.records] == ["13x32x64 on cuda:0: bucket: M 16 …; a.csv: row 3 (line 4)"]
