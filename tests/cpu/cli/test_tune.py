import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.evaluators import passed
from tests.support.nouns import Capsys, Defaults, Patch, raising, sizes
from tritongemm.cli import tune
from tritongemm.hip_ext.binaries import code_object
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.results.run_files import holding_module_folder
from tritongemm.results.store import Store
from tritongemm.system import child_process

pytestmark = pytest.mark.usefixtures("without_gpu")

SIZES = """# three sizes, one set of binaries
- {M: 16, N: 16, K: 16}
- {M: 8, N: 16, K: 16}
- {M: 5, N: 16, K: 16, rowMajorA: T}
"""
# The target with the smallest space, so that planning takes no time.
SEARCH = ("--target", "gfx1100", "--budget", "3", "--num_threads", "1")


@dataclass(frozen=True)
class Tuned:
    folder: Path
    argv: list[str]
    status: int
    out: str

    @property
    def results(self) -> Path:
        return self.folder / "out.yaml"

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = yaml.safe_load(self.results.read_text())
        return rows


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, without_gpu: None) -> Tuned:
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("tuned")
    (folder / "sizes.yaml").write_text(SIZES)
    files = ["--gemm_size_file", str(folder / "sizes.yaml"), "--tuning-results_file", str(folder / "out.yaml")]
    argv = [*files, "--keep", "--verbose", *SEARCH]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = tune.main(argv)
    return Tuned(folder, argv, status, out.getvalue())


def test_it_writes_results(tuned: Tuned) -> None:
    """Readable by tune_gemm's users, with our own fields; a prediction says so."""
    assert tuned.status == 0
    assert [(r["M"], r["N"], r["K"]) for r in tuned.rows] == [(16, 16, 16), (8, 16, 16), (5, 16, 16)]
    for row in tuned.rows:
        assert row["time(us)"] > 0 and row["TFLOPS"] > 0
        assert (row["timer"], row["target"], row["winner"]) == ("model", "gfx1100", "triton")
        assert 0 < row["error"] <= row["tolerance"] and " in the interpreter at " in row["verified"]
        assert set(row["toolchain"]) == {"triton", "torch"}
    read = sizes.from_file(tuned.results, Defaults())
    assert all(r.record and r.config and r.record.config == r.config for r in read)


def test_it_says_what_it_does_and_keeps_modules(tuned: Tuned) -> None:
    """A winner for each size, and with --keep a module of the candidates that were tried, not only of those checked."""
    assert tuned.out.startswith("no GPU here: compiling for gfx1100 (")
    assert "Predicted, not measured (timer: model)" in tuned.out
    assert "16x16x16_fp16_TT:" in tuned.out and " kept" in tuned.out and " removed " in tuned.out
    assert "trials: 12 ok" in tuned.out, "three screened and one checked for each size"
    assert f"results: {tuned.results}" in tuned.out
    assert "measured on a GPU they serve mm(x, b.t()) and, inside serve(), x @ b with b [K, N]; for" in tuned.out
    names = {p.name for p in (tuned.folder / "out_kernels").glob("*.py")}
    sizes_ = ("16_16_16", "8_16_16", "5_16_16")
    assert names == {f"{kind}_{s}.py" for s in sizes_ for kind in ("gemm", "generated_kernel")}
    assert (tuned.folder / "out_kernels" / "generated_kernel_8_16_16.py").read_text().count("\ntile__") == 3


def test_running_it_again_and_checking_its_results_change_nothing(tuned: Tuned, capsys: Capsys) -> None:
    before, journal = tuned.results.read_bytes(), tuned.folder / "out.yaml.journal"
    lines = journal.read_bytes()
    assert tune.main(tuned.argv) == 0 and "3 of 3 sizes are in" in capsys.readouterr().err
    assert (tuned.results.read_bytes(), journal.read_bytes()) == (before, lines)
    folder = str(tuned.folder / "checked.yaml")
    assert (
        tune.main(["--gemm_size_file", str(tuned.results), "--compare_wo_tuning", "--target", "gfx1100", "-o", folder])
        == 0
    )
    said = capsys.readouterr()
    assert "3 of 3 results are right" in said.err and "interpreter" in said.out
    assert "checked in Triton's interpreter at the smaller sizes shown, " in said.err and "need a GPU" in said.err
    assert not (tuned.folder / "checked.yaml").exists()


def test_winners_modules_are_written_again(tuned: Tuned, tmp_path: Path, capsys: Capsys) -> None:
    """A run that finds everything done makes them from the journal; without it, it names no folder of modules."""
    folder = tmp_path / "again"
    shutil.copytree(tuned.folder, folder)
    before = {p.name: p.read_text() for p in (folder / "out_kernels").glob("gemm_*.py")}
    argv = [arg.replace(str(tuned.folder), str(folder)) for arg in tuned.argv]
    shutil.rmtree(folder / "out_kernels")
    assert tune.main(argv) == 0
    assert {p.name: p.read_text() for p in (folder / "out_kernels").glob("*.py")} == before and len(before) == 3
    assert f"results: {folder / 'out.yaml'}; winners as modules: {folder / 'out_kernels'}" in capsys.readouterr().err
    shutil.rmtree(folder / "out_kernels")
    (folder / "out.yaml.journal").unlink()
    assert tune.main(argv) == 0 and f"results: {folder / 'out.yaml'}\n" in capsys.readouterr().err


def test_modules_that_another_run_kept_stay(tuned: Tuned, tmp_path: Path, monkeypatch: Patch) -> None:
    """A run without --keep deletes the modules of all candidates that it wrote, and no others."""
    folder = tmp_path / "again"
    shutil.copytree(tuned.folder, folder)
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    modules = {p.name for p in (folder / "out_kernels").glob("*.py")}
    size = ["-m", "16", "-n", "16", "-k", "32", "-o", str(folder / "out.yaml")]
    assert tune.main([*size, "--target", "gfx1100", "--budget", "1"]) == 0
    assert {p.name for p in (folder / "out_kernels").glob("*.py")} == modules | {"gemm_16_16_32.py"}


def journal_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out.yaml.journal"
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(x) for x in text[: text.rfind(b"\n") + 1].splitlines()]


def test_one_size_by_default(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """The README's first command: gfx942, results under output/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)  # the interpreter has its say elsewhere
    assert tune.main(["-m", "16", "-n", "16", "-k", "16", "--budget", "1"]) == 0
    (row,) = yaml.safe_load(Path("output/tuning_results_gfx942.yaml").read_text())
    assert (row["M"], row["target"], row["timer"]) == (16, "gfx942", "model")
    assert [p.name for p in Path("output/tuning_results_gfx942_kernels").glob("*.py")] == ["gemm_16_16_16.py"]
    assert "16x16x16_fp16_TT" in capsys.readouterr().out


def table(out: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in map(str.split, out.splitlines()) if row}


def test_compiles_that_fail_are_counted_with_reasons(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """A size of which nothing compiles is a failure; a compile that was too slow is tried again by the next run."""
    argv = ["-m", "7", "-n", "16", "-k", "48", "--target", "gfx1100", "--budget=2", "-o", str(tmp_path / "out.yaml")]

    with monkeypatch.context() as patch:
        patch.setattr(child_process.WorkerProcess, "ask", raising(child_process.WorkerTimeout))
        assert tune.main([*argv, "--compile_only", "--timeout", "7"]) == 1
        said = capsys.readouterr()
        assert table(said.out)["7x16x48_fp16_TT"][:6] == ["2", "2", "0", "0", "0", "2"]
        assert "2 timeout: compile took more than 7 s" in said.err
        assert "no config could be compiled; the first, tile__" in said.err
        assert tune.main(argv) == 1
        err = capsys.readouterr().err
        assert "no candidate passed: 2 timeout, tile__" in err and "results: " not in err
    assert len(journal_of(tmp_path)) == 1, "the header alone"
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    assert tune.main(argv) == 0
    assert [e["trial"]["status"] for e in journal_of(tmp_path) if "trial" in e] == ["ok"] * 3


def test_stages_to_stop_after(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """Modules only; binaries only, which the tuning that follows finds; nothing recorded before it."""
    size = ["-m", "1", "-n", "2", "-k", "3", "--target", "gfx1100", "--budget=1", "-o", str(tmp_path / "out.yaml")]
    module = tmp_path / "out_kernels" / "generated_kernel_1_2_3.py"
    assert tune.main([*size, "--generate-only"]) == 0 and "gfx1100" in module.read_text()
    capsys.readouterr()
    assert tune.main([*size, "--compile_only"]) == 0
    assert table(capsys.readouterr().out)["1x2x3_fp16_TT"][:6] == ["1", "1", "1", "0", "0", "0"], "one compiled"
    assert tune.main([*size, "--compile_only"]) == 0
    assert table(capsys.readouterr().out)["1x2x3_fp16_TT"][:6] == ["1", "1", "0", "1", "0", "0"], "one from the cache"
    assert len(journal_of(tmp_path)) == 1 and not (tmp_path / "out.yaml").exists()
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    monkeypatch.setattr(
        "tritongemm.system.child_process.WorkerProcess.ask", lambda *_: pytest.fail("a compiler was asked")
    )
    assert tune.main(size) == 0
    (row,) = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert (row["target"], row["timer"]) == ("gfx1100", "model")
    assert not module.exists(), "modules of all candidates go unless kept"


def test_another_target(tmp_path: Path, session_cache: Path, capsys: Capsys) -> None:
    argv = ["-m", "16", "-n", "16", "-k", "16", "--target", "gfx950", "--budget=1", "-o", str(tmp_path / "out.yaml")]
    assert tune.main([*argv, "--compile-only"]) == 0 and "compiling for gfx950 (" in capsys.readouterr().err
    assert "gfx950" in map(code_object.arch, [p.read_bytes() for p in session_cache.glob("*/*/kernel.hsaco")])


SIZE = ("-m", "16", "-n", "16", "-k", "16")


def test_budgets_are_not_spent_on_what_only_gpus_can_check(tmp_path: Path, session_cache: Path, capsys: Capsys) -> None:
    """Of this size the best predicted are all such."""
    argv = ["-m", "64", "-n", "512", "-k", "512", "-col_b", "-dtype_a", "bf16", "-dtype_b", "bf16", "-dtype_c", "bf16"]
    out = tmp_path / "out.yaml"
    assert tune.main([*argv, "--target", "sm90", "--budget=1", "-o", str(out)]) == 0
    assert "pruned" not in capsys.readouterr().out
    (row,) = yaml.safe_load(out.read_text())
    assert row["winner"] == "triton" and 0 < row["error"] <= row["tolerance"]


def test_outputs_that_can_not_be(tuned: Tuned, tmp_path: Path, capsys: Capsys) -> None:
    """Not writable, held by another run, or another program's: status 2, and the way out."""
    copy = tmp_path / "copy.yaml"
    shutil.copy(tuned.results, copy)
    copy.write_text(copy.read_text().replace('"triton": "', '"triton": "0.'))
    held = tmp_path / "held.yaml"
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    with holding_module_folder(tmp_path / "other_kernels", tmp_path / "other.yaml"):
        pass
    with Store.open(held, "gfx1100", {}, {}):
        for path, complaint in (
            (tmp_path / "file" / "out.yaml", "can't be written"),
            (Path("/proc/out.yaml"), "/proc/out.yaml can't be written: No such file or directory; choose another file"),
            (tmp_path, "is a folder, not a file that can be replaced; choose another file with -o"),
            (held, f"held by another run (process {os.getpid()})"),
            (copy, "another toolchain (triton 0."),
            (tmp_path / ("n" * 251 + ".yaml"), "can't be written: File name too long; choose another file with -o"),
            (tmp_path / "pipe", "is a pipe, not a file that can be replaced; choose another file with -o"),
            (tmp_path / "other", "other_kernels holds the modules of other.yaml, which this run would replace"),
            (tuned.folder / "sizes.yaml", "line 2 is not a result; name another file with -o"),
        ):
            assert tune.main([*SIZE, "--target", "gfx1100", "-o", str(path)]) == 2
            err = capsys.readouterr().err
            assert "error: " in err and complaint in err and "Traceback" not in err
            assert err.count("\n") == 2, "one line beside the target's"
    assert tune.main([*SIZE, "--target", "gfx950", "-o", str(tuned.results)]) == 2
    assert "is for gfx1100, this run for gfx950: choose another -o" in capsys.readouterr().err
    argv = [*SIZE, "--generate_only", "--budget=1", "-o", str(tmp_path / "h100.yaml"), "--target"]
    assert (tune.main([*argv, "h100"]), tune.main([*argv, "sm90"]), tune.main([*argv, "h200"])) == (0, 0, 2)
    assert "h100.yaml.journal was measured otherwise (figures None → H200): use" in capsys.readouterr().err
