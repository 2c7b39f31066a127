import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign_rows import AITER_HEADER as HEADER
from tests.support.nouns import Config, Defaults, Problem, Record, Trial, load_target, loader, matrices, registry
from tests.support.refusals import fails, refuses
from tests.support.stores import record, take
from tritongemm.core.errors import InputError, OutputError
from tritongemm.core.format_row import FormatRow, Translation
from tritongemm.plugins.contracts import ServerFormat, WritableFormat
from tritongemm.results import tuned_file
from tritongemm.results.tuned_file import TunedFile

ASM = "_ZN5aiter24bf16gemm_bf16_tn_256x256E"
TYPES = "False,torch.bfloat16,torch.bfloat16,False,False"
THERE = f"gfx942,304,16,512,4096,{TYPES},flydsl,7,0,8.0,flydsl_bf16_x,0.0,1.0,1.0"
WIDE, TALL = (Problem(m, 512, 4096, *matrices("bf16", layout="TN")) for m in (16, 4096))
MI300X = loader.load_target("gfx942")


def opened(path: Path) -> TunedFile:
    written = TunedFile.find(path)
    assert written is not None
    return written


def test_a_name_a_word_or_what_is_there_says_whose_file_it_is(tmp_path: Path) -> None:
    assert opened(tmp_path / "bf16_tuned_gemm.csv").results == tmp_path / "bf16_tuned_gemm.yaml"
    (tmp_path / "mine.csv").write_text(HEADER + "\n")
    assert opened(tmp_path / "mine.csv").results == tmp_path / "mine.yaml"
    assert [TunedFile.find(tmp_path / name) for name in ("out.csv", "out.yaml", "tuned", "bf16_tuned.json")] == [
        None
    ] * 4
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    refuses("is not text", TunedFile.find, tmp_path / "bytes.csv")
    (tmp_path / "mine.dat").write_text(HEADER + "\n")
    for name, word in (("bf16_tuned_gemm.csv", ""), ("mine.dat", ""), ("x.dat", "aiter"), ("y.yaml", "")):
        assert isinstance(tuned_file.output_format(tmp_path / name, word), WritableFormat)
    refuses("name one by --to: aiter, ", tuned_file.output_format, tmp_path / "x.dat")


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


def test_what_the_file_has_for_this_gpu_is_not_tuned_but_anew(tmp_path: Path) -> None:
    written = opened(tmp_path / "bf16_tuned_gemm.csv")
    rows = [FormatRow(WIDE), FormatRow(TALL)]
    assert written.wanted(rows, None, MI300X, again=False) == (rows, ())
    written.path.write_text(f"{HEADER}\n{THERE}\n{THERE.replace(',512,', ',wide,')}\n")
    wanted, damaged = written.wanted(rows, None, MI300X, again=False)
    assert [row.problem for row in wanted] == [TALL] and [row.line for row in damaged] == [3]
    assert written.wanted(rows, None, MI300X, again=True)[0] == rows
    assert written.wanted(rows, None, dataclasses.replace(MI300X, compute_units=80), again=False)[0] == rows
    tunable = opened(tmp_path / "tunableop_results0.csv")
    tunable.path.write_text("Validator,GCN_ARCH_NAME,gfx942:xnack-\nGemmTunableOp_Half_TN,tn_2_1_3,Default,0.1\n")
    assert tunable.wanted(rows, None, MI300X, again=True) == (rows, ())
    with pytest.raises(InputError, match=r"0.csv is of gfx942, not of gfx950; choose another"):
        tunable.wanted(rows, None, load_target("gfx950"), again=True)
    written = opened(tmp_path / "bf16_tuned_gemm.csv")
    written.path.write_text(f"{HEADER}\n{THERE}\n")
    rows = [FormatRow(WIDE, target="gfx942", compute_units=304), FormatRow(TALL, target="gfx950", compute_units=256)]
    assert written.wanted(rows, written.path, MI300X, again=True)[0] == rows[:1]
    assert written.wanted(rows, tmp_path / "other.csv", MI300X, again=True)[0] == rows


def test_places_sizes_and_configs_are_those_that_a_server_takes(tmp_path: Path) -> None:
    (tmp_path / "bf16_tuned_gemm.csv").symlink_to(tmp_path / "elsewhere.csv")
    fails(OutputError, "is a link", opened(tmp_path / "bf16_tuned_gemm.csv").check)
    assert [p.m for p in SIZES[:3]] == [1, 2, 4] and {p.layout for p in SIZES} == {"TN"}
    channels = SGLANG.list_sizes(6144, 4096, Defaults.of("fp8", family="a8w8"))
    assert 33 in [row.problem.m for row in channels] and channels[0].problem.family == "a8w8"
    with pytest.raises(InputError, match=r"vLLM has no tables of family a8w8 of fp8; choose --family: a8w8_blockscale"):
        VLLM.list_sizes(6144, 4096, Defaults(family="a8w8"))
    limits = VLLM.limits("a8w8_blockscale", load_target("sm90"))
    assert (limits.most_splits, limits.templates, limits.first) == (1, ("tile",), (TODAY,))
    assert dict(limits.axes) == {"block_k": (16, 32, 64, 128)}
    assert dict(SGLANG.limits("a8w8_blockscale", load_target("gfx942")).axes) == {"block_k": (128,)}
    assert SGLANG.limits("a8w8", load_target("sm90")).first == (), "there SGLang runs CUTLASS"


VLLM, SGLANG = (registry.get(ServerFormat, name) for name in ("vllm_dense_json", "sglang_dense_json"))
NAME = "N=6144,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
TOOLS = {"triton": "3.6.0", "torch": "2.13.0", "device": "NVIDIA H200"}
BLOCKS = Defaults(family="a8w8_blockscale")
SIZES = [row.problem for row in VLLM.list_sizes(6144, 4096, BLOCKS)]
TODAY = Config("tile", 64, 128, 128, 32, num_warps=4, num_stages=2)  # what vLLM runs without a table


def written_beside(place: Path, times: dict[Config, float], won: Record) -> tuple[Translation, dict[str, Any]]:
    """(what was written of finalists' times beside a server's table, the table's rows)."""
    written = opened(place)
    trials = [Trial(config, "ok", samples=(s,), timer="events", stage="final") for config, s in times.items()]
    with take(written.results, target="sm90", toolchain=TOOLS) as store:
        store.add_trials(won.problem, trials, won)
        found = written.write(store, [won.problem])
    return found, json.loads(place.read_text(encoding="utf-8"))


def test_the_fastest_config_that_the_server_runs_is_written_whichever_won(tmp_path: Path) -> None:
    """A library that won is nothing to a server without a plug-in; ours of more than it takes is nothing either."""
    assert opened(tmp_path / NAME).place == tmp_path
    (tmp_path / "README.txt").write_bytes(b"\xff")
    best, other, ours = (Config("tile", m, 64, 128, 8) for m in (16, 32, 64))
    ours = replace(ours, split_k=2)
    times = {ours: 1e-5, best: 2e-5, other: 3e-5, TODAY: 4e-5}
    record = Record(
        SIZES[3], "sm90", ours, "torch", 1e-5, 0.0, "events", library="torch", library_seconds=9e-6, toolchain=TOOLS
    )
    found, rows = written_beside(tmp_path / NAME, times, record)
    assert [*found.files] == [NAME] and not found.omitted
    assert rows["8"]["BLOCK_SIZE_M"] == 16 and rows["8"]["num_stages"] == best.num_stages
    assert rows["16"]["BLOCK_SIZE_M"] == 64 and len(rows) == len(SIZES), "elsewhere it runs what it does today"


def test_the_servers_own_kernel_is_written_where_it_was_raced(tmp_path: Path) -> None:
    """Whatever a template of ours with the same tiles took; with fields that only the own kernel has a row for."""
    place = tmp_path / NAME.replace("128,128", "128, 128")
    ours = Config("tile", 16, 64, 128, 8)
    slow, swapped = (replace(ours, backend="sglang", num_stages=s) for s in (2, 3))
    swapped = replace(swapped, split_k=4, options=(("swap_ab", 1),))
    times = {ours: 1e-5, swapped: 2e-5, slow: 3e-5, replace(swapped, backend="vllm"): 5e-6}
    assert SGLANG.can_express(swapped) and SGLANG.can_express(ours)
    assert not SGLANG.can_express(replace(swapped, backend="vllm"))
    assert not SGLANG.can_express(replace(ours, split_k=4)), "ours adds splits up in another way"
    assert not VLLM.can_express(replace(swapped, backend="vllm")), "vLLM's does not split"
    record = Record(SIZES[3], "sm90", ours, "triton", 1e-5, 0.0, "events", toolchain=TOOLS)
    found, rows = written_beside(place, times, record)
    assert found.count == 1 and not found.omitted
    assert (rows["8"]["SPLIT_K"], rows["8"]["SWAP_AB"], rows["8"]["num_stages"]) == (4, True, 3)
    assert "SPLIT_K" not in rows["16"]
    (read,) = (row for row in SGLANG.read(place, place.read_text(encoding="utf-8"), BLOCKS) if row.problem.m == 8)
    assert read.config == replace(swapped, backend="triton")
