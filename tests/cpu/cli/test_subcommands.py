import doctest
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tritongemm
from tests.support.evaluators import passed
from tests.support.nouns import Capsys, Patch, cases, each
from tritongemm.cli import arguments, completion, lookup, options, subcommands
from tritongemm.cli.arguments import COMMANDS
from tritongemm.measure.offline_evaluator import OfflineEvaluator


def ended(monkeypatch: Patch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tritongemm", *words])
    with pytest.raises(SystemExit) as end:
        subcommands.main()
    return end.value.code


@each("words", [[], *([name] for name in COMMANDS), ["library", "list"]])
def test_every_command_says_its_version(monkeypatch: Patch, capsys: Capsys, words: list[str]) -> None:
    assert ended(monkeypatch, *words, "--version") == 0
    assert capsys.readouterr().out == f"tritongemm {tritongemm.__version__}\n"


@cases(
    ("lokup t.yaml", "lookup?"),
    ("launch_plan -m 1", "launch-plan?"),
    ("library biuld t.yaml", "build?"),
    ("lookup t.yaml --taget sm90", "--target by --taget?"),
    ("lookup t.yaml --compute_unit=3", ""),
    ("report t.yaml --ouput=page.html", "--output by --ouput?"),
    ("library merge a --ouput b", "--output by --ouput?"),
    ("gradlib --tuned-fiel=t.csv", "--tuned_file by --tuned-fiel?"),
    ("tune -m 1 -n 1 -k 1 --strategy gided", "guided?"),
    ("lookup t.yaml --json", "none"),
)
def test_a_mistyped_word(words: str, meant: str, /, monkeypatch: Patch, capsys: Capsys) -> None:
    if not meant:  # the start of an option, and _ for -
        assert lookup.parser().parse_args(words.split()[1:]).compute_units == 3
        return
    assert ended(monkeypatch, *words.split()) == 2
    said = capsys.readouterr().err
    assert (f"did you mean {meant} (tritongemm " in said or meant == "none") and said.count("\n") == 1
    assert meant != "none" or "did you mean" not in said


def test_a_program_keeps_its_own_options() -> None:
    """Words behind the program's name are its own, also where they are like options of the command."""
    words = ["-o", "s.yaml", "app.py", "--out_put", "x", "--modul_e", "-m", "y"]
    args = subcommands.full_parser().parse_args(["capture", *words])
    assert (args.output, args.program) == ("s.yaml", words[2:])


def test_what_to_copy_goes_by_how_the_command_was_started(monkeypatch: Patch) -> None:
    for path, name in (("/opt/bin/tritongemm", "tritongemm"), ("/x/tune.py", "python -m tritongemm")):
        monkeypatch.setattr(sys, "argv", [path])
        assert arguments.started_as() == name


def test_a_shell_completes(capsys: Capsys, tmp_path: Path) -> None:
    assert completion.main(["bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    words = ("loo", "tune --strategy gui", "library bu", "check --rep")
    lines = [f"COMP_WORDS=(tritongemm {text}); COMP_CWORD={len(text.split())}; _shtab_tritongemm" for text in words]
    program = "\n".join([f"source {script}", *(f'{line}; echo "${{COMPREPLY[@]}}"' for line in lines)])
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["lookup", "guided", "build", "--repair"], done.stderr


def test_options_go_by_one_name() -> None:
    """Where commands share an option, it has one spelling; foreign ones are beside it."""
    args = options.parse(["-m", "1", "-n", "1", "-k", "1", "--gpus", "0,1", "--output", "t.yaml"])
    same = options.parse(["-m", "1", "-n", "1", "-k", "1", "--gpu_ids", "0,1", "--tuning_results_file", "t.yaml"])
    assert args == same


PUBLIC = [name for name in tritongemm.__all__ if not name.startswith("__")]


@each("name", PUBLIC)
def test_an_example_is_true(name: str, tmp_path: Path, monkeypatch: Patch, without_gpu: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    known = {"torch": torch, "tritongemm": tritongemm}
    example = doctest.DocTestParser().get_doctest(getattr(tritongemm, name).__doc__, known, name, None, None)
    assert example.examples, f"{name} has no example"
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example, out=report.append)
    assert not report, "".join(report)
