"""What options may say, in every command that has them."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import each
from tritongemm.cli import arguments, export, gradlib, launch_plan, library, optimize, options
from tritongemm.search_spaces.loader import load_target

SIZE = ("-m", "16", "-n", "16", "-k", "16")


def test_the_ends_of_a_range_belong_to_it() -> None:
    args = options.parse(
        ["-m", "1", "-n", "2147483647", "-k", "+7", "--rotating_tensor", "-1", "--timeout", "31536000"]
    )
    assert (args.m, args.n, args.k, args.rotating_tensor, args.timeout) == (1, 2**31 - 1, 7, -1, 31536000.0)
    assert options.parse([*SIZE, "--budget", "1.5e2s"]).budget == (0, 150.0)
    assert options.parse([*SIZE, "--errRatio", ".5", "--min_gain", "0"]).err_ratio == 0.5


def test_compilers_go_with_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may ask for some more of them than there are cores, and for no millions."""
    for cores, most in ((1, 16), (64, 256)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert arguments.processes(str(most)) == most
        with pytest.raises(argparse.ArgumentTypeError, match=f"not a whole number from 0 to {most}"):
            arguments.processes(str(most + 1))


@each("folder", [".", "./", "/"])
def test_a_folder_is_no_file_of_results(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    """Its name is empty, and those of journal, lock and modules can't begin with it."""
    for run in (options.parse, gradlib.main):
        words = SIZE if run is options.parse else ["-i", "sizes.csv"]
        with pytest.raises(SystemExit) as exit_:
            run([*words, "-o", folder])
        assert exit_.value.code == 2 and f"'{folder}' is a folder; name a file in it" in capsys.readouterr().err


@each("option", ["-o", "--profile_file", "--gemm_size_file"])
def test_a_name_that_a_terminal_would_obey(capsys: pytest.CaptureFixture[str], option: str) -> None:
    """What a command prints to be copied is printed as it is, so no such name gets in."""
    with pytest.raises(SystemExit) as exit_:
        options.parse([*SIZE, option, "\x1b[31mred\x1b[0m.yaml"])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and "has control characters; choose another name" in err and "\x1b" not in err


@each(
    ("words", "complaint"),
    [
        (("--all", "²"), "--all: '²' is not a whole number from 0 to 2147483647"),
        (("--all", "9" * 100_000), "9…9"),
        (("-m", "8", "-m", "9"), "-m: is given twice"),
    ],
)
def test_launch_plans_are_as_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        launch_plan.main(["-o", str(tmp_path / "plans"), *words])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and complaint in err and err.count("\n") == 1 and len(err) < 500
    assert not list(tmp_path.iterdir())


def test_export_says_what_it_can_not_read_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(tmp_path / "a\u202eb"), "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/a\\u202eb: there is no such file\n"


@each("name", ["lib.tar.gz", "lib.tgz", "LIB.ZIP", "lib.yaml"])
def test_a_folder_is_not_called_as_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    of_folders: Any = (library, ["build"]), (library, ["merge"]), (export, []), (optimize, [])
    for command, words in of_folders:
        with pytest.raises(SystemExit):
            command.main([*words, "x.yaml", "-o", str(tmp_path / name)])
        assert f"{name}' would be a folder; name one that does not end in" in capsys.readouterr().err
    assert arguments.output_folder(str(tmp_path / "lib.v2")) == str(tmp_path / "lib.v2")


@each("name", ["sm90", "sm_90", "SM_90a", "sm-90", "h100", "NVIDIA H200", "gh200"])
def test_an_architecture_goes_by_its_gpus_names_too(name: str) -> None:
    assert load_target(options.architecture(name)).name == "sm90"


def test_what_no_gpu_is_called_stays_for_the_message() -> None:
    assert options.architecture("h300") == "h300" and options.architecture("mi355x") == "MI355X"


def test_sizes_and_types_go_by_both_kinds_of_names() -> None:
    args = options.parse(["--m", "1", "--n=2", "--k", "3", "--dtype", "bf16"])
    assert (args.m, args.n, args.k, args.dtype_a, args.dtype_b, args.dtype_c) == (1, 2, 3, "bf16", None, None)
