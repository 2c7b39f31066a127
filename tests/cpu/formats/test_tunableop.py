from pathlib import Path
from typing import Any

import pytest

from tests.support import foreign_rows
from tests.support.foreign_rows import algorithm, product
from tests.support.nouns import Config, Defaults, Problem, Record, UntunableRowsWarning, WritableFormat, registry
from tests.support.tables import cases, each

CSV = registry.get(WritableFormat, "tunableop_csv")
PATH = Path("tunableop_results0.csv")

HEAD = (
    "Validator,PT_VERSION,2.13.0\nValidator,ROCM_VERSION,7.1.0.0-20-a1b2c3d\n"
    "Validator,HIPBLASLT_VERSION,100100-bf2c3184\nValidator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-\n"
)
LINEAR = "GemmTunableOp_BFloat16_TN,tn_6144_16_4096_ld_4096_4096_6144"
TUNED = (
    HEAD + f"{LINEAR},Gemm_Hipblaslt_1219,0.0314\n"
    "GemmAndBiasTunableOp_Half_TN,tn_6144_16_4096_ld_4096_4096_6144,Gemm_Hipblaslt_7,0.03\n"
    "GemmTunableOp_double_NN,nn_64_64_64_ld_64_64_64,Gemm_Rocblas_3,0.011\n"
    "GemmStridedBatchedTunableOp_BFloat16_NT,nt_64_128_32_B_8_ld_64_128_64,Default,0.02\n"
)


def result(problem: Problem, winner: str = "torch", config: Config | None = None, **more: Any) -> Record:
    facts = {"winner": winner, "library_seconds": 3e-5, **more}
    return foreign_rows.result(problem, config or Config("tile", 16, 64, 64), **facts)


@cases(
    (LINEAR, product(), "mm"),
    ("GemmTunableOp_BFloat16_NN,nn_6144_16_4096_ld_6144_4096_6144", product(row_major_b=True), "mm"),
    ("GemmTunableOp_Half_NT,nt_8_16_32", product(16, 8, 32, "fp16", row_major_a=False, row_major_b=True), "mm"),
    ("GemmTunableOp_tf32_TN,tn_8_16_32_ld_32_32_8", product(16, 8, 32, "fp32"), "mm"),
    ("GemmTunableOp_BFloat16_TN,tn_8_1_32_ld_32_99_99", product(1, 8, 32), "mm"),  # a single row has no next one
    ("GemmAndBiasTunableOp_BFloat16_TN,tn_8_16_32_ld_32_32_8", product(16, 8, 32, bias="n"), "addmm"),
    ("GemmStridedBatchedTunableOp_Half_TN,tn_8_16_32_B_6_ld_32_32_8", product(16, 8, 32, "fp16", batch=6), "bmm"),
)
def test_the_first_size_is_our_n(line: str, expected: Problem, operation: str, /) -> None:
    (row,) = CSV.read(PATH, line + "\n", Defaults.of("int8", bias="m"))
    assert (row.problem, row.operation, row.count, row.line) == (expected, operation, 1, 1)


def test_scaled_products_and_versions_of_hipblaslt() -> None:
    line = "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_6144_16_4096_ld_4096_4096_6144_rw_1_bias_"
    one = line.replace("rw_1", "rw_0")
    rows = CSV.read(PATH, f"{line}None\n{line}BFloat16\n{one}None\n", Defaults())
    assert [(r.problem.family, r.problem.bias, r.problem.a.dtype, r.problem.scales) for r in rows] == [
        ("a8w8", "none", "fp8e4m3fn", ""),
        ("a8w8", "n", "fp8e4m3fn", ""),
        ("a8w8", "none", "fp8e4m3fn", "tensor"),
    ]
    with pytest.warns(UntunableRowsWarning, match="does not say what its scales are of"):
        assert not CSV.read(PATH, line.partition("_rw")[0] + "\n", Defaults())
    text = TUNED.replace("100100-bf2c3184", "1.1.0-bf2c3184")
    assert "Gemm_Hipblaslt_44" in CSV.translate([result(product(), "blaslt", algorithm())], {"": text}).files[""]


@cases(
    ("GemmTunableOp_float_TN,tn_8_16_32_ld_32_32_8", "it multiplies full float32"),
    ("GemmTunableOp_BFloat16_TN,tn_8_16_32_ld_64_32_8", "columns of A are 64 elements apart, of which it has 32"),
    ("GemmTunableOp_BFloat16_NN,nn_8_16_32_ld_9_32_8", "the columns of A are 9 elements apart, of which it has 8"),
    ("GemmTunableOp_BFloat16_NT,nt_8_16_32_ld_8_24_8", "columns of B are 24 elements apart, of which it has 16"),
    ("GemmTunableOp_BFloat16_TN,tn_8_16_32_ld_32_32_9", "the columns of C are 9 elements apart, of which it has 8"),
)
def test_other_products_of_the_same_sizes_are_kept_apart(line: str, why: str, /) -> None:
    """Of float32 that is not rounded to tf32, and of operands that are parts of larger ones."""
    types, layout = line.partition(",")[0].split("_")[1:]
    dense = {"TN": "tn_8_16_32_ld_32_32_8", "NN": "nn_8_16_32_ld_8_32_8", "NT": "nt_8_16_32_ld_8_16_8"}[layout]
    text = f"{HEAD}{line}\nGemmTunableOp_{types.replace('float', 'tf32')}_{layout},{dense}\n"
    with pytest.warns(UntunableRowsWarning, match=rf"row 5 \(line 5\) can't be tuned here: .*{why}"):
        (row,) = CSV.read(PATH, text, Defaults())
    assert row.count == 1 and row.line == 6
    written = CSV.translate([result(row.problem)], {"": text}).files[""]
    assert written == text.removesuffix("\n") + ",Default,0.03\n", "the other line has no result"


def test_tuned_files_change_in_retuned_lines_alone() -> None:
    with pytest.warns(UntunableRowsWarning, match=r"row 7 \(line 7\) can't be tuned here: 'double' has a dtype"):
        found = CSV.read_usable(PATH, TUNED, Defaults())
    assert [r.target for r in found.rows] == ["gfx942"] * 3 and [r.line for r in found.rows] == [5, 6, 8]
    twice = f"{LINEAR}\r\n\r\n{LINEAR},- {{ function: matmul, M: 6144, N: 16 }}\r\n"
    (row,) = CSV.read(PATH, twice, Defaults())
    assert row.count == 2, "two runs recorded it"
    ours = result(product(), "blaslt", algorithm())
    lost = result(product(bias="n", dtype="fp16"))
    written = CSV.translate([ours, lost], {"": TUNED})
    assert written.count == 2 and not written.omitted
    expected = TUNED.replace("Gemm_Hipblaslt_1219,0.0314", "Gemm_Hipblaslt_44,0.02")
    assert written.files[""] == expected.replace("Gemm_Hipblaslt_7,0.03", "Default,0.03")
    assert CSV.translate([ours, lost], {"": written.files[""]}).files == written.files


@each("text", [TUNED, TUNED.rstrip("\n"), TUNED.replace("\n", "\r\n")])
def test_a_product_that_is_not_there_is_added(text: str) -> None:
    new = [product(37), product(5, 64, 48, batch=3), product(9, 64, 48, "fp16", row_major_b=True, bias="n")]
    written = CSV.translate([result(p) for p in new], {"": text})
    end = "\r\n" if "\r" in text else "\n"
    assert written.files[""][len(text) :].strip().split(end) == [
        "GemmTunableOp_BFloat16_TN,tn_6144_37_4096_ld_4096_4096_6144,Default,0.03",
        "GemmStridedBatchedTunableOp_BFloat16_TN,tn_64_5_48_B_3_ld_48_48_64,Default,0.03",
        "GemmAndBiasTunableOp_Half_NN,nn_64_9_48_ld_64_48_64,Default,0.03",
    ]
    assert written.files[""].startswith(text) and written.files[""].endswith(end) == text.endswith(end)
    with pytest.warns(UntunableRowsWarning):
        assert [r.problem for r in CSV.read(PATH, written.files[""], Defaults())][-3:] == new


def test_what_stands_for_a_winner_is_written_in_its_place() -> None:
    ours, theirs = result(product(), "triton"), result(product(), "blaslt", algorithm())
    written = CSV.translate([ours, theirs, result(product())], {"": TUNED})
    assert written.files[""] == TUNED.replace("Gemm_Hipblaslt_1219,0.0314", "Gemm_Hipblaslt_44,0.02")
    assert written.count == 1
    ((best, reason),) = written.omitted
    assert best is ours and reason.endswith("which TunableOp can't run; Gemm_Hipblaslt_44 stands for it")
    default = result(product(), config=Config("torch", 0, 0, 0, backend="torch"), library_seconds=None)
    assert f"{LINEAR},Default,0.02\n" in CSV.translate([ours, default], {"": TUNED}).files[""]
    other = CSV.translate([theirs, result(product(), compute_units=80)], {"": TUNED})
    assert other.count == 1 and [why for _, why in other.omitted] == [
        "a result of another device of the same target is written"
    ]
