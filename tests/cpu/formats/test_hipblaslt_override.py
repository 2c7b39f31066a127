from pathlib import Path
from typing import Any

import pytest

from tests.support import foreign_rows
from tests.support.foreign_rows import algorithm, product
from tests.support.nouns import Capsys, Config, Problem, Record, WritableFormat, matrices, refuses, registry
from tritongemm.cli import convert
from tritongemm.core.errors import UntunableRowsWarning
from tritongemm.formats import Defaults, results_format

FORMAT = registry.get(WritableFormat, "hipblaslt_override")
PATH = Path("tuning.txt")
KEY = "transA,transB,batch_count,m,n,k,a_type,b_type,c_type,compute_type"
HEAD = f"    {KEY},solution_index"
# As hipblaslt-bench writes it: more columns, and an older word for the last.
BENCH = (
    "    transA,transB,grouped_gemm,batch_count,m,n,k,alpha,lda,beta,a_type,b_type,c_type,d_type,compute_type,us,"
    "soulution_index\n    T,N,0,1,6144,16,4096,1,4096,0,bf16_r,bf16_r,bf16_r,bf16_r,f32_r,9.28735,49257\n"
)
TUNED = f"Git Version: bf2c3184\n{BENCH}{HEAD}\n    N,T,8,64,128,32,f16_r,f16_r,f32_r,f32_r,7\n"


def result(problem: Problem, config: Config | None = None, **more: Any) -> Record:
    return foreign_rows.result(problem, config or algorithm(), **{"winner": "blaslt", "library": "torch", **more})


def test_rows_of_the_library_are_sizes_of_ours_and_f8_is_ocp_s() -> None:
    """hipBLASLt's reader takes it so: in this file, unlike in its logs, only the other name is of gfx942's encoding."""
    first, second = FORMAT.read(PATH, TUNED, Defaults.of("int8", bias="m"))
    assert first.problem == product() and (first.line, first.number) == (3, 1) and first.config is None
    assert second.problem == Problem(128, 64, 32, *matrices(c="fp32", layout="NT"), batch=8)
    named = f"{HEAD},solution_name\n    T,N,1,6144,16,4096,bf16_r,bf16_r,bf16_r,c_f32_r,7,Cijk_Alik_Bljk_MT64x32x64_x\n"
    (row,) = FORMAT.read(PATH, named, Defaults())
    assert row.config is not None and row.config.template == "Cijk_Alik_Bljk_MT64x32x64_x"
    assert row.config.tile == (32, 64, 64) and row.config.option("index") == 7
    for name, ours in (("f8_r", "fp8e4m3fn"), ("f8_fnuz_r", "fp8e4m3fnuz"), ("bf8_fnuz_r", "fp8e5m2fnuz")):
        text = f"{HEAD}\n    T,N,1,6144,16,4096,{name},{name},bf16_r,f32_r,7\n"
        (row,) = FORMAT.read(PATH, text, Defaults(fp8_encoding="fnuz"))
        assert row.problem.a.dtype == row.problem.b.dtype == ours
    written = FORMAT.translate([result(product(dtype="fp8e4m3fnuz", dtype_c="bf16"))], {})
    assert ",f8_fnuz_r,f8_fnuz_r,bf16_r," in written.files[""]


def test_what_won_goes_before_and_a_row_has_no_bias() -> None:
    written = FORMAT.translate([result(product()), result(product(37))], {"": TUNED})
    assert written.count == 2 and not written.omitted
    lines = written.files[""].split("\n")
    assert lines[:3] == ["Git Version: bf2c3184", *TUNED.split("\n")[3:5]], "the other product as it was"
    assert lines[3:] == [
        HEAD, "    T,N,1,6144,16,4096,bf16_r,bf16_r,bf16_r,f32_r,44",
        HEAD, "    T,N,1,6144,37,4096,bf16_r,bf16_r,bf16_r,f32_r,44", "",
    ]  # fmt: skip
    assert FORMAT.translate([result(product()), result(product(37))], {"": written.files[""]}).files == written.files
    assert {r.problem.m for r in FORMAT.read(PATH, written.files[""], Defaults())} == {16, 37, 128}
    written = FORMAT.translate([result(product()), result(product(bias="n"), algorithm(45))], {"": TUNED})
    assert written.count == 1 and written.files[""].count(",44") == 1 and "45" not in written.files[""]
    assert "neither bias nor scales" in written.omitted[0][1]
    written = FORMAT.translate([result(product(), algorithm(version=(1 << 32) + 0xABC))], {})
    assert written.files[""].startswith(f"Git Version: 00000abc\n{HEAD}\n    T,N,1,6144,16,")


def test_rows_without_columns_are_named_and_the_command_keeps_other_types(tmp_path: Path, capsys: Capsys) -> None:
    refuses("no line of columns before it", FORMAT.read, PATH, "Git Version: 1\n    T,N,1,1,1,1\n", Defaults())
    text = f"{HEAD}\n    T,N,1,64,16,64,f64_r,f64_r,f64_r,f64_r,9\n"
    entire = f"{HEAD}\n    T,N,1,6144,16,4096,f32_r,f32_r,f32_r,f32_r,7\n"
    with pytest.warns(UntunableRowsWarning, match="multiplies full float32"):
        assert not FORMAT.read(PATH, entire, Defaults())
    with pytest.warns(UntunableRowsWarning, match="types f64_r, f64_r, f64_r, f64_r are none"):
        assert not FORMAT.read(PATH, text, Defaults())
    (tmp_path / "final.yaml").write_text(results_format().write([result(product())]), encoding="utf-8")
    assert convert.main([str(tmp_path / "final.yaml"), "-o", str(tmp_path / "tuning.txt")]) == 0
    assert "1 of 1 results written as hipBLASLt's override file" in capsys.readouterr().out
    assert (tmp_path / "tuning.txt").read_text(encoding="utf-8").endswith(",44\n")
