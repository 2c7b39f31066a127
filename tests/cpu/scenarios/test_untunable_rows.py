from pathlib import Path

import pytest

from tests.support.nouns import Capsys, Patch, apart
from tritongemm.cli import gradlib, tune

pytestmark = [
    pytest.mark.usefixtures("without_gpu"),
    pytest.mark.filterwarnings("ignore::tritongemm.core.errors.UntunableRowsWarning"),
]

HEADER = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
BF16 = "torch.bfloat16"
GOOD = f"4,256,128,8,2,ActivationType.Silu,{BF16},{BF16},{BF16},QuantType.No,1,0"
SCALES = f"4,256,128,8,2,ActivationType.Silu,{BF16},torch.int8,torch.int8,QuantType.per_256x128,1,0"
MIXED = f"4,256,128,8,2,ActivationType.Silu,{BF16},torch.int8,torch.float4_e2m1fn_x2,QuantType.per_1x32,1,0"
FLAGS = ("--target", "gfx942", "--budget", "1", "--libtype", "triton", "--generate_only", "--num_threads", "1")


def write(*rows: str) -> str:
    path = Path("untuned_fmoe.csv")
    path.write_text("\n".join([HEADER, *rows, ""]))
    return str(path)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@apart(
    (SCALES, "q_type: no family here has experts with scales per_256x128; there are: No, per_Token, "),
    (SCALES.replace("QuantType.per_256x128", ""), "q_type: no family here has experts with scales of no q_type"),
    (MIXED, "q_dtype_a, q_dtype_w: experts' torch.int8 by torch.float4_e2m1fn_x2 is multiplied by no family here"),
)
def test_a_file_without_another_row_is_refused(row: str, reason: str, /, folder: Path, capsys: Capsys) -> None:
    expected = f"error: untuned_fmoe.csv: row 1 (line 2) can't be tuned here: {reason}"
    assert tune.main(["--gemm_size_file", write(row), "-o", "out.yaml", *FLAGS]) == 2
    said = capsys.readouterr().err
    assert said.startswith(expected) and said.endswith("; no row of the file can\n")
    assert gradlib.main(["-i", write(row), "--family", "fmoe", "--target", "gfx942"]) == 2
    assert capsys.readouterr().err.startswith(expected)
    assert [path.name for path in folder.iterdir()] == ["untuned_fmoe.csv"]


def test_the_other_rows_are_tuned_and_the_row_is_named_at_the_end(folder: Path, capsys: Capsys) -> None:
    path = write(GOOD, SCALES, GOOD.replace("4,", "8,", 1), MIXED)
    assert tune.main(["--gemm_size_file", path, "-o", "out.yaml", *FLAGS]) == 1
    *_, first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("not tuned: untuned_fmoe.csv: row 2 (line 3) can't be tuned here: q_type: ")
    assert second.startswith("not tuned: untuned_fmoe.csv: row 4 (line 5) can't be tuned here: q_dtype_a, q_dtype_w: ")
    assert len(list((folder / "out_kernels").glob("generated_kernel_*.py"))) == 4, "two products of each good row"
    assert tune.main(["--gemm_size_file", write(GOOD), "-o", "other.yaml", *FLAGS]) == 0
    assert "not tuned" not in capsys.readouterr().err


def test_many_such_rows_are_counted(capsys: Capsys) -> None:
    rows = [SCALES.replace("4,", f"{number},", 1) for number in range(1, 16)]
    assert tune.main(["--gemm_size_file", write(GOOD, *rows), "-o", "out.yaml", *FLAGS]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("not tuned: ")]
    assert len(said) == 1 and said[0].endswith("; 14 others likewise (--verbose lists them)")
