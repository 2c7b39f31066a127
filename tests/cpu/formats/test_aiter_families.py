import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cpu.formats.test_aiter import read
from tests.cpu.formats.test_aiter import save as written
from tests.support.nouns import Config, Defaults, Problem, Record, TunerFormat, apart, cases, matrices, registry, sizes
from tritongemm.core.errors import InputError, RemarkWarning

BEST = Record(
    Problem(16, 512, 4096, *matrices("bf16", layout="TN")), "sm90", Config("tile", 16, 16, 16), "triton",
    5e-6, 0.01, "events", library="torch", library_seconds=9e-6, compute_units=132,
)  # fmt: skip


@cases(
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
)  # fmt: skip
def test_sizes_of_every_family_become_tuned_rows_of_its_header(name: str, head: str, row: str, key: str, /) -> None:
    """On a GPU that AITER does not run on the rows name our kernels, and are read back as the same results."""
    (size,) = read(name, f"{head}\n{row}\n")
    assert size.problem.key == key and size.config is None
    best = replace(BEST, problem=size.problem, config=replace(BEST.config, split_k=3))
    lines, lost = written("", best)
    keys = head.split(",")
    assert lines[0].split(",")[: len(keys) + 2] == ["gfx", "cu_num", *keys] and not lost
    assert lines[1].startswith("sm90,132," + row.replace(" ", "").strip()) and f",{best.config.name}," in lines[1]
    (again,) = read(name.replace("untuned", "tuned"), "\n".join(lines) + "\n")
    assert again.record and (again.problem, again.record.config) == (size.problem, best.config)
    assert (again.target, again.compute_units, again.record.seconds) == ("sm90", 132, best.seconds)


def test_names_of_libraries_and_what_a_file_says_beside_its_family() -> None:
    lines, lost = written("", replace(BEST, winner="torch", seconds=9e-6, library_seconds=5e-6))
    assert not lost and ",torch,0," in lines[1] and lines[1].split(",")[13] == "5.0"
    (again,) = read("bf16_tuned_gemm.csv", "\n".join(lines) + "\n")
    assert again.config and again.config.backend == "torch"
    odd = lines[1].replace(",torch,0,", ",x,0,").replace(again.config.name, "nosuch.x__bm1__bn1__bk1__gm1__sk1__w1__s1")
    (again,) = read("bf16_tuned_gemm.csv", f"{lines[0]}\n{odd}\n")
    assert again.config is None, "a backend that is not here"
    with pytest.warns(RemarkWarning, match="sizes of family a8w8_blockscale; what other columns say is ignored.*: q_d"):
        read("a8w8_blockscale_untuned_x.csv", "M,N,K,q_dtype_w\n1,2,3,torch.int8\n")


def test_one_scale_for_an_operand_is_taken_for_no_other_scales() -> None:
    head, kind = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle", "torch.float8_e4m3fn,torch.bfloat16,True,False"
    found = registry.get(TunerFormat, "aiter").read_usable(
        Path("bf16_untuned_gemm.csv"), f"{head}\n16,256,512,False,{kind}\n", Defaults()
    )
    assert [d.reason for d in found.damaged if "scaleAB is True" not in d.reason] == []
    for row in found.rows:
        assert row.problem.family == "a8w8" and row.problem.a.scaling and row.problem.a.scaling.rows == 0
        lines, lost = written("", replace(BEST, problem=row.problem))
        assert not lost and f"16,256,512,False,{kind},triton" in lines[1]


@apart(
    ("a8w8_blockscale_bpreshuffle_untuned_x.csv", "dense", "M,N,K,q_dtype_w", "torch.int8",
     "16x512x4096_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale_shuffled_16x16"),
    ("sizes.csv", "a8w8_blockscale", "M,N,K,q_dtype_w", "torch.int8",
     "16x512x4096_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale"),
    ("a8w8_blockscale_untuned_x.csv", "a8w8", "M,N,K,q_dtype_w", "torch.int8",
     "16x512x4096_int8-int8-bf16_TN_a8w8"),
    ("a8w8_blockscale_tuned_x.csv", "dense", "M,N,K,q_dtype_w,us", "torch.int8,5.0",
     "name says a8w8_blockscale, and its columns M,N,K,q_dtype_w,us are those of a8w8_bpreshuffle, a8w8; rename"),
    ("a8w8_blockscale_untuned_x.csv", "dense", "M,N,K,bias,dtype", "True,torch.bfloat16",
     "name says a8w8_blockscale, .* those of bf16;"),
    ("bf16_untuned_gemm.csv", "a4w4_blockscale", "M,N,K,bias,dtype", "True,torch.bfloat16",
     "are not those of family a4w4_blockscale, but of bf16"),
    ("sizes.csv", "dense", "M,N,K,B", "4", r"in the file's name: batched_a8w8, .*batched_bf16"),
    ("bf16_untuned_x.csv", "dense", "M,N,K", "", "name says bf16 or batched_bf16, and its columns M,N,K"),
    ("a8w8_untuned_x.csv", "dense", "M,N,K,m", "16", "line 1 has the column M twice"),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::tritongemm.core.errors.RemarkWarning")
def test_files_name_and_columns_belong_together(name: str, family: str, columns: str, row: str, found: str, /) -> None:
    """Sizes may have columns beside their family's, as AITER's tuners take what they know; results may not."""
    try:
        (size,) = read(name, f"{columns}\n16,512,4096{',' * bool(row)}{row}\n", family)
    except InputError as error:
        assert re.search(found, str(error))
    else:
        assert size.problem.key == found


def test_batches_with_scales_in_powers_of_two_are_sizes_of_ours() -> None:
    """Their columns are in small letters, and no column says how many compute units a row is of."""
    head = "gfx,b,m,n,k,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    text = f"{head}\ngfx950,2,4,1024,4096,opus,311,1,7.84,opus_bmm_x,8.6,1075.87,0.0015\n"
    with pytest.warns(RemarkWarning, match="powers of two there; they are float32"):
        (row,) = read("dsv4_batched_gemm_a8w8_blockscale_mxscale_tuned.csv", text)
    assert row.problem.key == "4x1024x4096_fp8e4m3fn-fp8e4m3fn-bf16_TN_batch2_a8w8_blockscale_block_rows"
    assert (row.target, row.compute_units, row.config) == ("gfx950", 0, None)
    merged = registry.get(TunerFormat, "aiter").merge([(Path("a8w8_blockscale_mxscale.csv"), text)] * 2)
    assert merged and merged.text == text


def test_sizes_alone_are_of_any_family_that_is_named(tmp_path: Path) -> None:
    """Also of weights of four bits, which AITER has no such files of."""
    path = tmp_path / "sizes.csv"
    path.write_text("M,N,K\n16,256,512\n")
    named = {"a16w4": "weight_64", "a8w4": "row_weight_128", "a16w4_halves_32": ""}
    keys = [sizes.from_file(path, Defaults(family=f, scales=s))[0].problem.key for f, s in named.items()]
    assert [key.partition("TN_")[2] for key in keys] == [
        "a16w4_weight_64", "a8w4_row_weight_128", "a16w4_weight_128_halves_32"
    ]  # fmt: skip
