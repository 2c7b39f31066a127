"""CSVs of sizes as spreadsheets, scripts and people write them: each is read as meant, or refused with what to do.

Each goes through both commands that read such a file: `tune`, and `gradlib`, which changes types before `tune` reads
it.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.support.nouns import Capsys, Patch, TunerFormat, cases, each, fails, registry
from tritongemm.cli import gradlib, tune

pytestmark = pytest.mark.usefixtures("without_gpu")

NAME = "bf16_untuned_gemm.csv"
HEADER = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle"
KIND = "False,torch.bfloat16,torch.bfloat16,False,False"
FIRST, SECOND = f"16,64,128,{KIND}", f"32,64,128,{KIND}"
NO_CSV = "is no CSV: a cell that begins with a quotation mark must end with one in the same line"

# What is read as FIRST and SECOND.
MEANT = {
    "as it should be": f"{HEADER}\n{FIRST}\n{SECOND}\n",
    "columns in another order": "N,bias,K,M,dtype,bpreshuffle,outdtype,scaleAB\n"
    + "".join(f"64,False,128,{m},torch.bfloat16,False,torch.bfloat16,False\n" for m in (16, 32)),
    "an unknown last column": f"{HEADER},remark\n{FIRST},a\n{SECOND},b\n",
    "row numbers of pandas": f",{HEADER}\n0,{FIRST}\n1,{SECOND}\n",
    "a blank line above the names": f"\n{HEADER}\n{FIRST}\n{SECOND}\n",
    "a blank line in the middle": f"{HEADER}\n{FIRST}\n\n{SECOND}\n",
    "a line of commas": f"{HEADER}\n{FIRST}\n,,,,,,,\n{SECOND}\n",
    "a mark of the encoding": f"\ufeff{HEADER}\n{FIRST}\n{SECOND}\n",
    "a mark and a blank line": f"\ufeff\r\n{HEADER}\r\n{FIRST}\r\n{SECOND}\r\n",
    "line ends of Windows": f"{HEADER}\r\n{FIRST}\r\n\r\n{SECOND}\r\n",
    "line ends of old Macs": f"{HEADER}\r{FIRST}\r{SECOND}\r",
    "no end of the last line": f"{HEADER}\n{FIRST}\n{SECOND}",
    "cells in quotation marks": f'"M",{HEADER[2:]}\n"16",{FIRST[3:]}\n{SECOND[:-5]}"False"\n',
    "sizes as pandas writes floats": f"{HEADER}\n16.0,64.0,128,{KIND}\n{SECOND}\n",
    "blanks around cells": f"{HEADER}  \n 16 ,64 ,128\t,{KIND} \n{SECOND}   \n",
}

# What is refused by both commands, and what the message says after the file's name.
REFUSED = {
    "an unknown first column": (
        f"name,{HEADER}\na,{FIRST}\n",
        ": line 1 has the unknown column 'name'; remove it, or begin with M",
    ),
    "a misspelt column": (
        f"{HEADER[:-2]}\n{FIRST}\n",
        ": line 1 has the unknown column 'bpreshuff'; did you mean 'bpreshuffle'?",
    ),
    "names in small letters": (f"{HEADER.lower()}\n{FIRST}\n", ": line 1 has the unknown column 'scaleab'; did you"),
    "no names": (f"{FIRST}\n{SECOND}\n", ": line 1 has values in place of the names of columns; begin the file with"),
    "a title": (f"\nsizes\n{HEADER}\n{FIRST}\n", ": line 2 does not name the columns, but line 3 does; remove"),
    "no column K": (f"M,N,bias,dtype\n16,64,{KIND[:20]}\n", ": line 1 names no column K; a row needs M, N and K"),
    "a column twice": (f"M,{HEADER}\n16,{FIRST}\n", ": line 1 does not name the columns of a CSV, each once"),
    "semicolons": (f"{HEADER}\n{FIRST}\n".replace(",", ";"), ": line 1 separates the names of columns by ';'; write"),
    "tabs": (f"\n{HEADER}\n{FIRST}\n".replace(",", "\t"), ": line 2 separates the names of columns by '\\t'; write"),
    "a size of 0": (f"{HEADER}\n{FIRST}\n\n0,{FIRST[3:]}\n", ": row 2 (line 4) M must be a whole number from 1 to"),
    "a negative size": (f"{HEADER}\n16,-64,128,{KIND}\n", ": row 1 (line 2) N must be a whole number from 1 to"),
    "half a token": (f"{HEADER}\n16.5,64,128,{KIND}\n", ": row 1 (line 2) M must be a whole number from 1 to"),
    "a comma in a number": (f'{HEADER}\n"1,024",64,128,{KIND}\n', ": row 1 (line 2) M must be a whole number from 1"),
    "an exponent": (f"{HEADER}\n1e3,64,128,{KIND}\n", ": row 1 (line 2) M must be a whole number from 1 to 2147483647"),
    "another bias": (f"{HEADER}\n{FIRST.replace('False', 'maybe', 1)}\n", ": row 1 (line 2) bias must be True or"),
}  # fmt: skip


def run_tune(text: str | bytes) -> int:
    Path(NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    return int(tune.main(["--gemm_size_file", NAME, "--print_sizes"]))


def run_gradlib(text: str, monkeypatch: Patch) -> int:
    """Print the sizes that gradlib's command hands on from such a file, in fp16."""
    Path(NAME).write_bytes(text.encode())
    only_print = lambda request, reporter, command: tune._print_sizes(request, reporter)
    with monkeypatch.context() as patch:
        patch.setattr(tune, "run", only_print)
        return int(gradlib.main(["-i", NAME, "--indtype", "f16"]))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@each("text", MEANT.values())
def test_what_is_meant_is_read(text: str, monkeypatch: Patch, capsys: Capsys) -> None:
    assert run_tune(text) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "x64x" in line]
    assert listed == ["16x64x128_bf16_TN", "32x64x128_bf16_TN"] and run_gradlib(text, monkeypatch) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "x64x" in line]
    assert listed == ["16x64x128_fp16_TN", "32x64x128_fp16_TN"]


@pytest.mark.parametrize(("text", "complaint"), REFUSED.values(), ids=list(REFUSED))
def test_unclear_files_are_refused(text: str, complaint: str, folder: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """In one line that names the user's own file; no file of changed sizes is left, which a next run would meet."""
    for command in (run_tune, partial(run_gradlib, monkeypatch=monkeypatch)):
        assert command(text) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {NAME}{complaint}") and said.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == [NAME]


@cases(
    (f'{HEADER}\n{FIRST}\n"16,64,128,{KIND}\n', f": row 2 (line 3) {NO_CSV}"),
    (f'{HEADER}\n16,64,128,False,"torch.\nbfloat16",torch.bfloat16,False,False\n', f": row 1 (line 2) {NO_CSV}"),
    (f'"{HEADER}\n{FIRST}\n', f": line 1 {NO_CSV}"),
    (f"{HEADER}\n16,64,128,False,,torch.bfloat16,False,False\n", ": row 1 (line 2) dtype is empty; write a value"),
    (f"{HEADER}\n{FIRST}\n16,64\n", ": row 2 (line 3) has 2 values for 8 columns; write one for each"),
    (f"{HEADER}\n{FIRST},1\n", ": row 1 (line 2) has 9 values for 8 columns; write one for each"),
    (f"{HEADER}\n{FIRST}\n".encode("utf-16"), " is not text: byte 0 is not UTF-8; save it as UTF-8"),
)
def test_what_is_no_row_is_refused(text: str | bytes, complaint: str, /, capsys: Capsys) -> None:
    assert run_tune(text) == 2 and capsys.readouterr().err.startswith(f"error: {NAME}{complaint}")


@each("cell", ["dtype", "q_dtype_a", "q_dtype_w"])
def test_an_empty_type_of_experts_is_refused(cell: str, capsys: Capsys) -> None:
    types = {"dtype": "torch.bfloat16", "q_dtype_a": "torch.int8", "q_dtype_w": "torch.int8", cell: ""}
    Path("untuned_fmoe.csv").write_text(
        "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1\n"
        f"4,256,128,8,2,ActivationType.Silu,{','.join(types.values())},QuantType.per_Token,1,0\n"
    )
    assert tune.main(["--gemm_size_file", "untuned_fmoe.csv", "--print_sizes"]) == 2
    assert f"untuned_fmoe.csv: row 1 (line 2) {cell} is empty; write a value such as" in capsys.readouterr().err


@each("more", [[], ["--to", "aiter"]])
def test_an_output_that_is_not_understood_says_why(more: list[str], capsys: Capsys) -> None:
    output = Path("bf16_tuned_gemm.csv")
    output.write_text(f"gfx;cu_num;{HEADER.replace(',', ';')}\n")
    fails(SystemExit, "", tune.main, ["-m", "16", "-n", "64", "-k", "64", "-o", str(output), *more])
    said = capsys.readouterr().err
    assert said.startswith(f"error: {output}: line 1 separates the names of columns by ';'; write commas")
    assert "or choose another file with -o" in said and output.read_text().startswith("gfx;")


def test_a_blank_line_above_the_names_stays_where_rows_are_written() -> None:
    """Every line of a file that results are written in stays, and the file is found again as what it is."""
    format_ = registry.get(TunerFormat, "aiter")
    assert format_.arrange(f"\r\n{HEADER}\r\n{SECOND}\r\n{FIRST}\r\n") == f"\r\n{HEADER}\r\n{FIRST}\r\n{SECOND}\r\n"
