"""Results of a run written to another tool's file, beside what that tool has written there."""

import dataclasses
from pathlib import Path

import pytest

from tests.support.stores import record, take
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, OutputError
from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import WritableFormat
from tritongemm.results import tuned_file
from tritongemm.results.tuned_file import TunedFile
from tritongemm.search_spaces import loader

ASM = "_ZN5aiter24bf16gemm_bf16_tn_256x256E"
HEADER = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
)
TYPES = "False,torch.bfloat16,torch.bfloat16,False,False"
THERE = f"gfx942,304,16,512,4096,{TYPES},flydsl,7,0,8.0,flydsl_bf16_x,0.0,1.0,1.0"
WIDE, TALL = (Problem(m, 512, 4096, *matrices("bf16", layout="TN")) for m in (16, 4096))
MI300X = loader.load_target("gfx942")


def opened(path: Path) -> TunedFile:
    written = TunedFile.find(path)
    assert written is not None
    return written


def test_a_name_or_what_is_there_says_whose_file_it_is(tmp_path: Path) -> None:
    assert opened(tmp_path / "bf16_tuned_gemm.csv").results == tmp_path / "bf16_tuned_gemm.yaml"
    (tmp_path / "mine.csv").write_text(HEADER + "\n")
    assert opened(tmp_path / "mine.csv").results == tmp_path / "mine.yaml"
    assert [TunedFile.find(tmp_path / name) for name in ("out.csv", "out.yaml", "tuned", "bf16_tuned.json")] == [
        None
    ] * 4
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not text"):
        TunedFile.find(tmp_path / "bytes.csv")


def test_the_best_finalist_that_aiter_has_is_written_with_its_own_time(tmp_path: Path) -> None:
    asm = Config(ASM, 256, 256, 64, num_warps=4, num_stages=2, backend="asm")
    trials = [
        Trial(asm, "ok", samples=(7e-5,), timer="events", stage="final"),
        Trial(dataclasses.replace(asm, split_k=2), "ok", samples=(1e-5,), timer="events"),  # a first look, no race
        Trial(dataclasses.replace(asm, split_k=3), "wrong", "off", timer="events", stage="final"),
        Trial(Config("tile", 16, 16, 16, group_m=2), "ok", samples=(6e-5,), timer="events", stage="final"),
    ]
    written, other = opened(tmp_path / "bf16_tuned_gemm.csv"), f"# {THERE}"
    written.path.write_text(f"{HEADER}\n{other}\n{THERE}\n")
    with take(written.results, compute_units=304) as store:
        store.add_trials(TALL, trials, record(TALL, 5e-5, compute_units=304))
        found = written.write(store, [TALL, WIDE])
    row = f"gfx942,304,4096,512,4096,{TYPES},asm,0,1,70.0,{ASM},0.0,245.43,599.19"
    assert written.path.read_text().splitlines() == [HEADER, other, THERE, row]
    ((lost, reason),) = found.omitted
    assert lost.problem == TALL and "(50.00 us); written as asm" in reason


def test_what_the_file_has_for_this_gpu_is_not_tuned(tmp_path: Path) -> None:
    written = opened(tmp_path / "bf16_tuned_gemm.csv")
    rows = [FormatRow(WIDE), FormatRow(TALL)]
    assert written.wanted(rows, None, MI300X, again=False) == (rows, ())
    written.path.write_text(f"{HEADER}\n{THERE}\n{THERE.replace(',512,', ',wide,')}\n")
    wanted, damaged = written.wanted(rows, None, MI300X, again=False)
    assert [row.problem for row in wanted] == [TALL] and [row.line for row in damaged] == [3]
    assert written.wanted(rows, None, MI300X, again=True)[0] == rows
    smaller = dataclasses.replace(MI300X, compute_units=80)
    assert written.wanted(rows, None, smaller, again=False)[0] == rows


def test_of_the_file_itself_this_gpus_rows_are_tuned_anew(tmp_path: Path) -> None:
    written = opened(tmp_path / "bf16_tuned_gemm.csv")
    written.path.write_text(f"{HEADER}\n{THERE}\n")
    rows = [FormatRow(WIDE, target="gfx942", compute_units=304), FormatRow(TALL, target="gfx950", compute_units=256)]
    assert written.wanted(rows, written.path, MI300X, again=True)[0] == rows[:1]
    assert written.wanted(rows, tmp_path / "other.csv", MI300X, again=True)[0] == rows


def test_a_place_is_checked_before_hours_are_spent(tmp_path: Path) -> None:
    (tmp_path / "bf16_tuned_gemm.csv").symlink_to(tmp_path / "elsewhere.csv")
    with pytest.raises(OutputError, match="is a link"):
        opened(tmp_path / "bf16_tuned_gemm.csv").check()


def test_a_format_is_found_by_name_contents_or_word(tmp_path: Path) -> None:
    (tmp_path / "mine.dat").write_text(HEADER + "\n")
    for name, word in (("bf16_tuned_gemm.csv", ""), ("mine.dat", ""), ("x.dat", "aiter"), ("y.yaml", "")):
        assert isinstance(tuned_file.output_format(tmp_path / name, word), WritableFormat)
    with pytest.raises(InputError, match="name one by --to: aiter, "):
        tuned_file.output_format(tmp_path / "x.dat")
