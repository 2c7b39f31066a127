import bz2
import gzip
import json
import lzma
import os
import threading
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.support.call_logs import line, trace
from tests.support.nouns import InputError, Patch, apart, load_target, refuses
from tritongemm.campaigns import log_file, workload
from tritongemm.campaigns.log_file import LogFile
from tritongemm.campaigns.workload import JobWorkload, read_workload
from tritongemm.system import reading

GFX942 = load_target("gfx942")
TEXT = line(n=16, count=3) + line("bench", n=32) + trace(n=48)
COLOURED = "".join(f"\x1b[1;32m{one}\x1b[0m\x1b[K\n" for one in TEXT.replace("M:", "\x1b[4mM\x1b[m:").splitlines())
ROCBLAS = (
    '- { rocblas_function: "rocblas_gemm_ex", a_type: "bf16_r", b_type: "bf16_r", c_type: "bf16_r", d_type: "bf16_r", '
    "compute_type: \"f32_r\", transA: 'T', transB: 'N', M: 64, N: 128, K: 256, alpha: 1.0, lda: 256, ldb: 256, "
    "beta: 0.0, ldc: 64, ldd: 64, batch_count: 1, call_count: 7 }\n"
)
COUNTS = {16: 3, 32: 1, 48: 1}


def in_container(text: str, ends: bool = True) -> str:
    more = {"stream": "stderr", "time": "2026-05-04T15:08:47.123456789Z"}
    lines = [json.dumps({"log": one} | more, separators=(",", ":")) for one in text.splitlines(keepends=True)]
    return "\n".join(lines) + "\n" * ends


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


def read(log: Path, data: bytes) -> JobWorkload:
    log.write_bytes(data)
    return read_workload(LogFile(log), GFX942)


def counts(workload: JobWorkload) -> dict[int, float]:
    return {one.problem.m: one.count for one in workload.products if one.problem}


@apart(
    gzip.compress(TEXT.encode()), gzip.compress(TEXT[:300].encode()) + gzip.compress(TEXT[300:].encode()),
    bz2.compress(TEXT.encode()), lzma.compress(TEXT.encode()), TEXT.encode("utf-16"),
    TEXT.replace("\n", "\r\n").encode("utf-8-sig"), COLOURED.encode(), in_container(TEXT).encode(),
    in_container(COLOURED).encode(),
)  # fmt: skip
def test_a_log_is_the_same_in_any_dress(data: bytes, /, log: Path) -> None:
    found = read(log, data)
    assert counts(found) == COUNTS and not found.remarks


def test_containers_lines_of_bench_and_rocblas_are_read(log: Path) -> None:
    """Quotes are escaped in them, and a command would end with what Docker adds."""
    found = read(log, in_container(ROCBLAS + line("bench", n=32)).encode())
    assert sorted(one.count for one in found.products) == [1, 7] and not found.remarks
    plain = read(log, (ROCBLAS + line("bench", n=32)).encode())
    assert [one.call for one in plain.products] == [one.call for one in found.products]


def test_containers_lines_may_be_cut_or_continued(log: Path) -> None:
    """A line of more than 16 KiB is split; one that a killed container cut counts nothing."""
    entire = line("bench", n=32)
    assert counts(read(log, (in_container(entire[:40]) + in_container(entire[40:])).encode())) == {32: 1}
    found = read(log, (in_container(TEXT) + in_container(entire[:40])).encode())
    assert counts(found) == COUNTS and "line 4: the command is cut" in found.remarks[0]
    found = read(log, (in_container(TEXT) + in_container(entire)[:60]).encode())
    assert counts(found) == COUNTS and "line 4: the command is cut" in found.remarks[0]


@pytest.mark.parametrize("odd", ['{"log":5}', '{"log":"\\ud800\\n"}', '{"log":' + "[" * 100_000, '{"log":"a'])
def test_other_json_among_the_lines_is_passed_over(log: Path, odd: str) -> None:
    assert counts(read(log, (odd + "\n" + TEXT).encode())) == COUNTS


@apart(
    (gzip.compress(TEXT.encode())[:-30], "job.log is compressed, and cut or damaged"),
    (gzip.compress(TEXT.encode())[:15] + b"\0\0\0\0" * 50, "is compressed, and cut or damaged|can't be read"),
    (lzma.compress(TEXT.encode())[:-30], "is compressed, and cut or damaged"),
    (bz2.compress(TEXT.encode())[:40] + b"0" * 40, "can't be read|cut or damaged"),
    (b"\x28\xb5\x2f\xfd" + b"0" * 40, "is compressed by zstd; name <"),
)
def test_what_can_t_be_decompressed(data: bytes, complaint: str, /, log: Path) -> None:
    refuses(complaint, read, log, data)


@hypothesis.given(piece=st.integers(1, 900))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=25)
def test_where_pieces_end_changes_nothing(log: Path, piece: int) -> None:
    """Counts, numbers of lines, faults and what stands between the lines are as of one piece."""
    noise = "gfx90a seen\n" + line()[:90] + "\n" + '- {"M": 8, "N": 64}\n' + "./rocblas-bench -f axpy -n 5\n"
    text = (TEXT + noise) * 3 + line("bench", n=16) + line("bench")[:-1]
    with pytest.MonkeyPatch.context() as patch:
        entire = read(log, text.encode())
        patch.setattr(log_file, "_PIECE", piece)
        assert read(log, text.encode()) == entire
    assert counts(entire) == {16: 9, 32: 3, 48: 3} and len(entire.remarks) == 8


def test_large_logs_long_lines_and_many_calls(log: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(reading, "MOST_BYTES", 1000)
    monkeypatch.setattr(log_file, "MOST_BYTES", 1000)
    assert counts(read(log, TEXT.encode() * 5)) == {16: 15, 32: 5, 48: 5}
    with pytest.raises(InputError, match=r"job\.log has more than 0 MiB, and no line of a log that is known"):
        read(log, b"nothing of that kind\n" * 100)
    monkeypatch.setattr(log_file, "_PIECE", 100)
    monkeypatch.setattr(log_file, "_LONGEST_LINE", 700)
    found = read(log, ("." * 500 + line(n=16).rstrip() + "." * 1000 + line("bench", n=64) + TEXT).encode())
    assert counts(found) == COUNTS and len(found.remarks) == 3
    assert all(one.startswith(f"{log}: line 1: ") for one in found.remarks)


def test_a_log_is_the_same_compressed_and_ends_where_it_was_opened(log: Path) -> None:
    log.write_text(TEXT, encoding="utf-8")
    opened = LogFile(log)
    before = opened.digest
    with log.open("a", encoding="utf-8") as file:
        file.write(line(n=64))
    assert counts(read_workload(opened, GFX942)) == COUNTS and opened.digest == before != LogFile(log).digest
    log.write_text(TEXT, encoding="utf-8")
    plain = LogFile(log).digest
    log.write_bytes(gzip.compress(TEXT.encode()))
    assert LogFile(log).digest == plain


def test_a_pipe_is_read_once_and_used_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(TEXT.encode(),))
    writer.start()
    opened = LogFile(pipe)
    writer.join()
    assert opened.digest and counts(read_workload(opened, GFX942)) == COUNTS


def test_more_calls_than_are_kept(log: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(workload, "MOST_CALLS", 2)
    refuses(r"job\.log holds more than 2 different GEMMs; name a log of a shorter", read, log, TEXT.encode())
