import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.linear_layers import problem
from tests.support.model_configs import without_transformers  # noqa: F401
from tests.support.nouns import Capsys, FormatRow, Patch, cases, each, fails, load_target
from tritongemm.cli import arguments, capture, export, gradlib, library, optimize, options, shell, tune
from tritongemm.report.console import Reporter
from tritongemm.tune import requested_rows

SIZE = ("-m", "16", "-n", "16", "-k", "16")


def test_ranges_sizes_and_files_that_can_not_be_read(tmp_path: Path, capsys: Capsys) -> None:
    args = options.parse(["-m", "1", "-n", "2147483647", "-k", "+7", "--rotating_tensor=-1", "--timeout", "31536000"])
    assert (args.m, args.n, args.k, args.rotating_tensor, args.timeout) == (1, 2**31 - 1, 7, -1, 31536000.0)
    assert options.parse([*SIZE, "--budget", "1.5e2s"]).budget == (0, 150.0)
    assert options.parse([*SIZE, "--errRatio", ".5", "--min_gain", "0"]).err_ratio == 0.5
    args = options.parse(["--m", "1", "--n=2", "--k", "3", "--dtype", "bf16"])
    assert (args.m, args.n, args.k, args.dtype_a, args.dtype_b, args.dtype_c) == (1, 2, 3, "bf16", None, None)
    assert export.main([str(tmp_path / "a\u202eb"), "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/a\\u202eb: there is no such file\n"


def test_compilers_go_with_the_cores(monkeypatch: Patch) -> None:
    """A user may ask for some more of them than there are cores, and for no millions."""
    for cores, most in ((1, 16), (64, 256)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert arguments.processes(str(most)) == most
        fails(argparse.ArgumentTypeError, f"not a whole number from 0 to {most}", arguments.processes, str(most + 1))


@each("folder", [".", "./", "/"])
def test_a_folder_is_no_file_of_results(capsys: Capsys, folder: str) -> None:
    """Its name is empty, and those of journal, lock and modules can't begin with it."""
    for run in (options.parse, gradlib.main):
        words = SIZE if run is options.parse else ["-i", "sizes.csv"]
        with pytest.raises(SystemExit) as exit_:
            run([*words, "-o", folder])
        assert exit_.value.code == 2 and f"'{folder}' is a folder; name a file in it" in capsys.readouterr().err


@each("option", ["-o", "--profile_file", "--gemm_size_file"])
def test_a_name_that_a_terminal_would_obey(capsys: Capsys, option: str) -> None:
    """What a command prints to be copied is printed as it is, so no such name gets in."""
    with pytest.raises(SystemExit) as exit_:
        options.parse([*SIZE, option, "\x1b[31mred\x1b[0m.yaml"])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and "has control characters; choose another name" in err and "\x1b" not in err


@each("name", ["lib.tar.gz", "lib.tgz", "LIB.ZIP", "lib.yaml"])
def test_a_folder_is_not_called_as_a_file(capsys: Capsys, tmp_path: Path, name: str) -> None:
    of_folders: Any = (library, ["build"]), (library, ["merge"]), (export, []), (optimize, [])
    for command, words in of_folders:
        fails(SystemExit, "", command.main, [*words, "x.yaml", "-o", str(tmp_path / name)])
        assert f"{name}' would be a folder; name one that does not end in" in capsys.readouterr().err
    assert arguments.output_folder(str(tmp_path / "lib.v2")) == str(tmp_path / "lib.v2")


@each("name", ["sm90", "sm_90", "SM_90a", "sm-90:sramecc+:xnack-", "h100", "NVIDIA H200", "gh200"])
def test_an_architecture_goes_by_its_gpus_names_too(name: str) -> None:
    """And what no GPU is called stays for the message."""
    assert load_target(options.architecture(name)).name == "sm90"
    assert options.architecture("h300") == "h300" and options.architecture("mi355x") == "MI355X"


@cases(
    ([], "there is no program to run"),
    (["nowhere.py"], "nowhere.py: there is no such script"),
    (["-m", "no.such.module"], "there is no module no.such.module"),
    (["-o", "program.py", "program.py"], "program.py is not a list of sizes"),
    (["-o", "other.csv", "program.py"], "other.csv is not a file of AITER's sizes"),
    (["-o", "columns.csv", "program.py"], "columns.csv has columns M,N,K,q_dtype_w, not M,N,K,bias"),
)
def test_what_can_not_run(words: list[str], said: str, /, tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    for name, text in (("program.py", "print(1)\n"), ("other.csv", "a,b\n"), ("columns.csv", "M,N,K,q_dtype_w\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITONGEMM_CAPTURE", "")  # so that what the command sets is undone
    assert capture.main(words) == shell.REFUSED and said in capsys.readouterr().err


TINY = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "num_local_experts": 4, "torch_dtype": "bfloat16",
    "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.mark.usefixtures("without_gpu")
def test_sizes_are_printed_and_nothing_is_tuned(model: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.chdir(model)
    assert tune.main(["--model_dir", str(model), "--tp", "2", "--nsets", "4,32", "64", "--print_sizes"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[1] for row in rows] == ["4", "32", "64"] * 4
    assert rows[0] == ["4x64x64_bf16_TN", "4", "64", "64", "3", "layers.*.self_attn.qkv_proj"]
    assert rows[-1][2:] == ["50", "64", "1", "lm_head"]
    assert "the 4 experts of 3 layers are grouped products, (N, K) = (96, 64) and (64, 48)" in err and "12 sizes" in err
    assert [path.name for path in model.iterdir()] == ["config.json"]


@pytest.mark.usefixtures("without_gpu")
def test_its_sizes_are_tuned(model: Path) -> None:
    argv = ["--model_dir", str(model), "--nsets", "1", "--target", "gfx1100", "--generate_only", "--budget", "1"]
    assert tune.main([*argv, "-o", str(model / "out.yaml"), "--num_threads", "1"]) == 0
    assert len(list((model / "out_kernels").glob("generated_kernel_1_*.py"))) == 4


ROWS = [
    FormatRow(problem(16, n, 64), count=8, callers=(f"model.layers.*.mlp.{name}",))
    for n, name in ((96, "gate_proj"), (112, "up_proj"), (64, "down_proj"))
]


def read(*more: str, rows: list[FormatRow] = ROWS) -> list[tuple[int, int]]:
    request = tune.read_request(options.parse(["--workload", "shapes.yaml", *more]))
    return [(span.problem.n, span.high) for span in requested_rows.read_spans(rows, request.sizes, Reporter().say)]


def test_layers_of_one_input_have_one_table_of_their_joined_product_unless_each_fills_a_gpu(capsys: Capsys) -> None:
    assert read() == [(96, 16), (112, 16), (64, 16), (208, 16)]
    layers = "model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj"
    assert f"joined: N 208, K 64, bf16 TN, M up to 16: {layers}" in str(capsys.readouterr())
    assert read("--no_join") == [(96, 16), (112, 16), (64, 16)]
    assert read("--m_range", "1-30000")[-1] == (208, 8 * 2**20 // 416)
    assert read(rows=[*ROWS, FormatRow(problem(16, 208, 64), count=8)]) == [(96, 16), (112, 16), (64, 16), (208, 16)]
    wide = [replace(row, problem=replace(row.problem, k=400_000)) for row in ROWS]
    assert read(rows=wide) == [(96, 16), (112, 16), (64, 16)]
