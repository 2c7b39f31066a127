import logging
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.support.linear_layers import problem, record
from tests.support.nouns import Patch, Record, cases, refuses, settings
from tests.support.reports import write_results as write
from tritongemm.serving import loaded_tables, source_row
from tritongemm.serving.record_table import RecordTable

HEADER = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: Patch) -> None:
    for name in [name for name in os.environ if name.startswith(("AITER_CONFIG", "TRITONGEMM_CONFIG"))]:
        monkeypatch.delenv(name)


def aiters(m: int, us: float, gfx: str = "gfx942,304", n: int = 512) -> str:
    kind = "False,torch.bfloat16,torch.bfloat16,False,False"
    return f"{gfx},{m},{n},256,{kind},torch,0,0,{us},native,0.0,1.0,1.0"


def write_aiters(path: Path, *lines: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    return path


def configured() -> list[Record]:
    return [r for table in loaded_tables.read_configured() for r in table.records]


def test_the_fastest_row_of_all_files_counts_and_the_first_on_ties(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    tie, slow, guess, other_device = (problem(m, 32, 64) for m in (1, 2, 3, 4))
    one = [record(tie, tie=True), record(slow, seconds=3e-6), record(guess, seconds=1e-6, timer="model")]
    two = [record(tie), record(slow), record(guess, seconds=9e-6), record(other_device, compute_units=132)]
    a = write(tmp_path / "a.yaml", [*one, record(other_device, compute_units=78)])
    b = write(tmp_path / "b.yaml", two)
    before = a.read_bytes(), b.read_bytes()
    monkeypatch.setenv("TRITONGEMM_CONFIG", f"{a}:{b}")
    with caplog.at_level(logging.INFO, "tritongemm"):
        found = configured()
    table = RecordTable(found)
    assert len(found) == 5 and table.find(tie, "sm90", 132) == one[0]
    assert [table.find(r.problem, "sm90", 132) for r in two[1:]] == two[1:]
    assert [r.getMessage() for r in caplog.records] == [
        f"3 of 8 rows are shadowed by faster ones of the same problem and device; the first is {a}: row 2 (line 3), "
        f"by {b}: row 2 (line 3)"
    ]
    assert (a.read_bytes(), b.read_bytes()) == before


def test_a_range_and_a_row_of_its_largest_m_stand_beside_each_other(tmp_path: Path, monkeypatch: Patch) -> None:
    wide, one = record(problem(64, 32, 64), m_from=33), record(problem(64, 32, 64), seconds=5e-6)
    a, b = write(tmp_path / "a.yaml", [wide]), write(tmp_path / "b.yaml", [one])
    monkeypatch.setenv("TRITONGEMM_CONFIG", f"{a}:{b}")
    table = RecordTable(configured())
    assert table.find(problem(64, 32, 64), "sm90", 132) == one and table.find(problem(40, 32, 64), "sm90", 132) == wide
    assert table.list_records("sm90", 132) == [wide, one]


def test_aiters_list_is_read_behind_ours_and_what_is_missing_is_passed_over(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    csv = write_aiters(tmp_path / "bf16_tuned_gemm.csv", aiters(16, 0), aiters(32, 4.5))
    own = write(tmp_path / "a.yaml", [record(problem(16, 512, 256), target="gfx942", compute_units=304)])
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(own))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", f"{tmp_path / 'gone.csv'}:{csv}:{own}")
    with caplog.at_level(logging.INFO, "tritongemm"):
        found = configured()
    assert [(r.problem.m, r.seconds) for r in found] == [(16, 2e-6), (32, 4.5e-6)]
    reported = [r.getMessage() for r in caplog.records]
    assert len(reported) == 1 and "gone.csv: there is no such file; AITER_CONFIG_GEMM_BF16 names it" in reported[0]
    monkeypatch.setenv("TRITONGEMM_CONFIG", f"{own}:{tmp_path / 'gone.yaml'}")
    refuses(r"gone\.yaml", configured)


def test_placeholders_never_win_and_a_device_of_other_compute_units_misses(tmp_path: Path, monkeypatch: Patch) -> None:
    new = write_aiters(tmp_path / "bf16_new.csv", aiters(1, 0), aiters(2, 0), aiters(2, 7.0), aiters(3, -1))
    legacy = [line.removeprefix("gfx942,") for line in (aiters(1, 5.0), aiters(4, 6.0))]
    old = write_aiters(tmp_path / "bf16_old.csv", *legacy, header=HEADER.removeprefix("gfx,"))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", f"{new}:{old}")
    with pytest.warns(UserWarning, match="1 rows repeat others"):
        table = RecordTable(configured())
    assert {r.problem.m: r.seconds for r in table.list_records("gfx942", 304)} == {1: 5e-6, 2: 7e-6, 4: 6e-6}
    assert str(table.find(problem(4, 512, 256), "gfx942", 80)) == (
        "4x512x256_bf16_TN was tuned on 304 compute units; the device has 80"
    )


def merged_names(variable: str) -> list[str]:
    import os

    os.environ["TRITONGEMM_CONFIG"] = variable
    return [repr(r) for r in configured()]


def test_two_processes_find_the_same(tmp_path: Path) -> None:
    a = write(tmp_path / "a.yaml", [record(problem(m, 32, 64), seconds=m * 1e-6) for m in (1, 2, 3)])
    b = write(tmp_path / "b.yaml", [record(problem(m, 32, 64), seconds=(4 - m) * 1e-6) for m in (1, 2, 3)])
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        one, two = pool.map(merged_names, [f"{a}:{b}"] * 2)
    assert one == two and len(one) == 3


BLOCKS = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
ASM = "_ZN5aiter42fp8gemm_bf16_blockscale_BpreShuffle_32x128E"


@cases(
    ("AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE", BLOCKS,
     f"gfx950,256,16,512,7168,asm,6,7,7.9691,{ASM},14.74,476.98,0.0029",
     "16x512x7168_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale_shuffled_16x16"),
    ("AITER_CONFIG_GEMM_A8W8_BLOCKSCALE", BLOCKS,
     "sm90,132,16,512,7168,triton,0,1,7.9,tile__bm16__bn32__bk128__gm1__sk1__w4__s3,1.0,1.0,0.0",
     "16x512x7168_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale"),
    ("AITER_CONFIG_GEMM_A4W4", BLOCKS.replace("libtype,", ""),
     "gfx950,256,1,512,4096,21,3,5.4,_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E,0.78,194.57,0.0",
     "1x512x4096_fp4e2m1-fp4e2m1-bf16_TN_a4w4_blockscale_shuffled_16x16"),
    ("AITER_CONFIG_A8W8_BATCHED_GEMM", BLOCKS.replace("libtype,", "").replace("M,N", "B,M,N"),
     "sm90,132,16,1,1280,8192,0,1,9.1,tile__bm16__bn32__bk128__gm1__sk1__w4__s3,1.0,1.0,0.0",
     "1x1280x8192_int8-int8-bf16_TN_batch16_a8w8"),
)  # fmt: skip
def test_each_of_aiters_variables_says_what_its_files_are_of(
    variable: str, header: str, row: str, key: str, /, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Two families have the same columns, and the file's name does not decide."""
    path = write_aiters(tmp_path / "mine.csv", row, header=header)
    monkeypatch.setenv(variable, str(path))
    (found,) = source_row.read_source(path, settings.aiter_configs()[0].family)
    assert found.record.problem.key == key and found.padded and len(loaded_tables.read_configured()) == 1


def test_a_file_of_another_family_than_its_variables_is_passed_over(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AITER_CONFIG_GEMM_A4W4", str(write_aiters(tmp_path / "bf16_tuned_gemm.csv", aiters(32, 4.5))))
    assert not configured()
    assert "not those of family a4w4_blockscale, but of bf16; none of its rows is served" in caplog.text
