"""AITER's untuned sizes of every family → rows of results in that family's header, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Format

BEST = Record(
    Problem(16, 512, 4096, "bf16", "bf16", "bf16", row_major_b=False), "sm90", Config("tile", 16, 16, 16), "triton",
    5e-6, 0.01, "events", library="torch", library_seconds=9e-6, compute_units=132,
)  # fmt: skip


def read(name: str, text: str, family: str = "dense") -> list[FormatRow]:
    return registry.get(Format, "aiter").read(Path(name), text, Defaults(family=family))


def written(text: str, *records: Record) -> tuple[list[str], tuple[str, ...]]:
    """The lines of a file after results were told in it, and what was lost."""
    found = registry.get(Format, "aiter").translate(records, {"": text})
    return found.files[""].splitlines(), tuple(reason for _, reason in found.untold)


@pytest.mark.parametrize(
    ("name", "head", "row", "key"),
    [
        ("bf16_untuned_gemm.csv", "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle",
         "16,7168,2048,True,torch.bfloat16,torch.bfloat16,False,False", "16x7168x2048_bf16_TN_biasn"),
        ("a8w8_untuned_gemm.csv", "M,N,K,q_dtype_w", "1, 1280, 8192,torch.int8", "1x1280x8192_int8-int8-bf16_TN_a8w8"),
        ("a8w8_bpreshuffle_untuned_gemm.csv", "M,N,K,q_dtype_w", "16,2112,7168,torch.float8_e4m3fn\t",
         "16x2112x7168_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_shuffled_16x16"),
        ("a8w8_blockscale_untuned_gemm.csv", "M,N,K", "16, 2112, 7168",
         "16x2112x7168_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale"),
        ("a8w8_blockscale_bpreshuffle_untuned_gemm.csv", "M,N,K", "16,2112,7168",
         "16x2112x7168_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale_shuffled_16x16"),
        ("a4w4_blockscale_untuned_gemm.csv", "M,N,K", "1, 16384, 16384",
         "1x16384x16384_fp4e2m1-fp4e2m1-bf16_TN_a4w4_blockscale_shuffled_16x16"),
        ("a8w8_untuned_batched_gemm.csv", "B,M,N,K", "16, 1, 1280, 8192",
         "1x1280x8192_int8-int8-bf16_TN_batch16_a8w8"),
        ("bf16_untuned_batched_gemm.csv", "B,M,N,K", "16, 1, 1280, 8192", "1x1280x8192_bf16_TN_batch16"),
    ],
)  # fmt: skip
def test_sizes_of_every_family_become_tuned_rows_of_its_header(name: str, head: str, row: str, key: str) -> None:
    """On a GPU that AITER does not run on the rows name our kernels, and are read back as the same results."""
    (size,) = read(name, f"{head}\n{row}\n")
    assert size.problem.key == key and size.config is None
    best = replace(BEST, problem=size.problem, config=replace(BEST.config, split_k=3))
    lines, lost = written("", best)
    keys = head.split(",")
    assert lines[0].split(",")[: len(keys) + 2] == ["gfx", "cu_num", *keys] and not lost
    assert lines[1].startswith("sm90,132," + row.replace(" ", "").strip())
    assert f",{best.config.name}," in lines[1]
    (again,) = read(name.replace("untuned", "tuned"), "\n".join(lines) + "\n")
    assert again.record and (again.problem, again.record.config) == (size.problem, best.config)
    assert (again.target, again.compute_units, again.record.seconds) == ("sm90", 132, best.seconds)


def test_a_library_that_won_elsewhere_is_told_by_our_name_for_it() -> None:
    won = replace(BEST, winner="torch", seconds=9e-6, library_seconds=5e-6)
    lines, lost = written("", won)
    assert not lost and ",torch,0," in lines[1] and lines[1].split(",")[13] == "5.0"
    (again,) = read("bf16_tuned_gemm.csv", "\n".join(lines) + "\n")
    assert again.config and again.config.backend == "torch"
    odd = lines[1].replace(",torch,0,", ",x,0,").replace(again.config.name, "nosuch.x__bm1__bn1__bk1__gm1__sk1__w1__s1")
    (again,) = read("bf16_tuned_gemm.csv", f"{lines[0]}\n{odd}\n")
    assert again.config is None, "a backend that is not here"


def test_the_users_word_may_not_contradict_the_columns() -> None:
    with pytest.raises(InputError, match="are not those of family a4w4_blockscale, but of bf16"):
        read("bf16_untuned_gemm.csv", "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle\n", "a4w4_blockscale")


def test_batched_sizes_are_told_apart_by_the_name_of_their_file() -> None:
    with pytest.raises(InputError, match="name one with --family, or in the file's name: batched_a8w8, batched_bf16"):
        read("sizes.csv", "B,M,N,K\n4,1,2,3\n")


def test_one_scale_for_an_operand_is_taken_for_no_other_scales() -> None:
    head, kind = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle", "torch.float8_e4m3fn,torch.bfloat16,True,False"
    found = registry.get(Format, "aiter").read_usable(
        Path("bf16_untuned_gemm.csv"), f"{head}\n16,256,512,False,{kind}\n", Defaults()
    )
    assert [d.reason for d in found.damaged if "scaleAB is True" not in d.reason] == []
    for row in found.rows:
        assert row.problem.family == "a8w8" and row.problem.scale_a and row.problem.scale_a.rows == 0
        lines, lost = written("", replace(BEST, problem=row.problem))
        assert not lost and f"16,256,512,False,{kind},triton" in lines[1]
