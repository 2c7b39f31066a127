"""The command from end to end on a machine without a GPU, and what it survives: kills, Ctrl-C, bad input."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tritongemm import generate, machine, options, sizes, tune, worker
from tritongemm.config import Config
from tritongemm.errors import TargetError
from tritongemm.hip_ext import code_object, driver
from tritongemm.offline import Offline
from tritongemm.store import Store
from tritongemm.target import Target
from tritongemm.task import Plan
from tritongemm.trial import Trial

SIZES = "# three sizes, one set of binaries\n- {M: 16, N: 16, K: 16}\n- {M: 8, N: 16, K: 16}\n- {M: 5, N: 16, K: 16, rowMajorA: T}\n"
# The target with the smallest space, so that planning takes no time.
SEARCH = ("--target", "gfx1100", "--budget", "3", "--num_threads", "2")


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Any:
    """These tests are about machines without one, wherever they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "present", lambda: None)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("HIP_VISIBLE_DEVICES", "")
        yield


@dataclass(frozen=True)
class Tuned:
    """One finished run."""

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
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """The uninterrupted run of the sizes file that other tests compare with."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("tuned")
    (folder / "sizes.yaml").write_text(SIZES)
    argv = ["--gemm_size_file", str(folder / "sizes.yaml"), "--tuning-results_file", str(folder / "out.yaml"), "--keep", "--verbose", *SEARCH]  # fmt: skip
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
        assert 0 < row["error"] <= row["tolerance"] and row["verified"].startswith("interpreter ")
        assert set(row["toolchain"]) == {"triton", "torch"}
    read = sizes.from_file(tuned.results, sizes.Defaults())
    assert all(r.record and r.config and r.record.config == r.config for r in read)


def test_it_says_what_it_does(tuned: Tuned) -> None:
    assert tuned.out.startswith("no GPU here: compiling for gfx1100 (")
    assert "Predicted, not measured (timer: model)" in tuned.out
    assert "16x16x16_fp16_TT:" in tuned.out and " kept" in tuned.out and " removed " in tuned.out
    assert "trials: 12 ok" in tuned.out, "three screened and one checked for each size"
    assert f"results: {tuned.results}" in tuned.out


def test_it_keeps_modules(tuned: Tuned) -> None:
    """A winner for each size, and with --keep the module of all candidates, not only of those checked."""
    names = {p.name for p in (tuned.folder / "out_kernels").iterdir()}
    sizes_ = ("16_16_16", "8_16_16", "5_16_16")
    assert names == {f"{kind}_{s}.py" for s in sizes_ for kind in ("gemm", "generated_kernel")}
    text = (tuned.folder / "out_kernels" / "generated_kernel_8_16_16.py").read_text()
    assert text.count('\n    "tile__') >= 5


def test_running_it_again_is_quick_and_changes_nothing(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    before, journal = tuned.results.read_bytes(), tuned.folder / "out.yaml.journal"
    lines = journal.read_bytes()
    started = time.monotonic()
    assert tune.main(tuned.argv) == 0
    assert time.monotonic() - started < 3
    assert "3 of 3 sizes are in" in capsys.readouterr().err
    assert (tuned.results.read_bytes(), journal.read_bytes()) == (before, lines)


def journal_of(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of a journal."""
    path = folder / "out.yaml.journal"
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(x) for x in text[: text.rfind(b"\n") + 1].splitlines()]


ARGV = ("--gemm_size_file", "sizes.yaml", "-o", "out.yaml", *SEARCH)
MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from tritongemm.tune import main; sys.exit(main())"
)


def start(folder: Path, cache: Path) -> subprocess.Popen[str]:
    """The command of `tuned` in another folder, as a process of its own."""
    env = {**os.environ, "TRITONGEMM_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *ARGV],
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def signalled(process: subprocess.Popen[str], number: int, folder: Path, ready: Any) -> tuple[int, str]:
    """Send a signal once the journal is `ready`; exit status and what was written to stderr."""
    limit = time.monotonic() + 60
    while process.poll() is None and not ready(journal_of(folder)) and time.monotonic() < limit:
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_kill_nine_at_any_moment(tuned: Tuned, tmp_path: Path) -> None:
    """Killed at random moments from a cold cache, then run to the end: the same file as without, nothing done twice."""
    (tmp_path / "sizes.yaml").write_text(SIZES)
    cache, seed = tmp_path / "cache", random.randrange(2**32)
    rng = random.Random(seed)
    whole = len(journal_of(tuned.folder))
    for lines in sorted(rng.sample(range(whole), 2)):
        status, err = signalled(start(tmp_path, cache), signal.SIGKILL, tmp_path, lambda j, n=lines: len(j) > n)
        assert status in (-signal.SIGKILL, 0), err
    process = start(tmp_path, cache)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (tmp_path / "out.yaml").read_bytes() == tuned.results.read_bytes(), f"seed {seed}"
    entries = journal_of(tmp_path)
    trials = Counter(
        (json.dumps(e["problem"]), e["trial"]["config"], e["trial"]["stage"]) for e in entries if "trial" in e
    )
    records = Counter(json.dumps(e["record"]["problem"]) for e in entries if "record" in e)
    assert set(trials.values()) == {1}, f"seed {seed}: a final and its record are written at once, so none is run twice"
    assert len(trials) == 12 and set(records.values()) == {1} and len(records) == 3
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out")], "no debris"


def test_ctrl_c_merges_and_says_how_to_go_on(tuned: Tuned, tmp_path: Path, session_cache: Path) -> None:
    (tmp_path / "sizes.yaml").write_text(SIZES)
    records: Any = lambda j: any("record" in e for e in j[:-1])  # the line before the last is known to the run as well
    status, err = signalled(start(tmp_path, session_cache), signal.SIGINT, tmp_path, records)
    assert "Traceback" not in err
    if status == 0:  # it was done before the signal came
        assert (tmp_path / "out.yaml").read_bytes() == tuned.results.read_bytes()
        return
    assert status == 130, err
    assert "stopped; what is done is in out.yaml. Go on with:" in err
    (command,) = [x.strip() for x in err.splitlines() if x.strip().startswith("python -m ")]
    partial = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert partial == tuned.rows[: len(partial)] and partial
    assert command == "python -m tritongemm.tune " + shlex.join(ARGV)


def test_checking_its_own_results(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tuned.folder / "checked.yaml")
    assert (
        tune.main(["--gemm_size_file", str(tuned.results), "--compare_wo_tuning", "--target", "gfx1100", "-o", folder])
        == 0
    )
    said = capsys.readouterr()
    assert "3 of 3 results are right" in said.err and "interpreter" in said.out
    assert not (tuned.folder / "checked.yaml").exists()


STORED = (
    "# as tune_gemm leaves them\n"
    "- {'M': 16, 'N': 16, 'K': 16, 'rowMajorA': 'T', 'rowMajorB': 'T', 'BLOCK_SIZE_M': 16, 'BLOCK_SIZE_N': 16, "
    "'BLOCK_SIZE_K': 16, 'GROUP_SIZE_M': 1, 'SPLIT_K': 1, 'num_warps': 1, 'num_stages': 0, 'waves_per_eu': 0} "
    "# TFLOPS: 0.01 time(us): 5.5\n"
    "- {M: 16, N: 16, K: 32, BLOCK_SIZE_M: 16, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 2048}\n"
)


def test_a_stored_result_that_is_wrong(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One kernel that adds one too many, one that does not fit the LDS: status 1, and a table that says which."""
    (tmp_path / "stored.yaml").write_text(STORED)
    argv = ["--gemm_size_file", str(tmp_path / "stored.yaml"), "-o", str(tmp_path / "out.yaml"), "--num_threads", "1"]
    write = generate.module

    def spoiled(*args: Any) -> Path:
        path = write(*args)
        path.write_text(path.read_text().replace("acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b, acc) + 1"))
        return path

    with monkeypatch.context() as patch:
        patch.setattr(generate, "module", spoiled)
        assert tune.main([*argv, "--compare_wo_tuning"]) == 1
    said = capsys.readouterr()
    out = said.out.splitlines()
    (wrong,) = [x.split() for x in out if x.startswith("16x16x16_fp16_TT")]
    (large,) = [x.split() for x in out if x.startswith("16x16x32_fp16_TT")]
    assert wrong[1] == "wrong" and float(wrong[2]) > float(wrong[3])
    assert large[1] == "out_of_resources" and "65536" in large
    assert "0 of 2 results are right, 2 are not" in said.err
    monkeypatch.setattr(Offline, "_checked", passed)
    assert tune.main([*argv, "--benchmark"]) == 1
    out = capsys.readouterr().out.splitlines()
    (timed,) = [x.split() for x in out if x.startswith("16x16x16_fp16_TT")]
    assert float(timed[1]) > 0 and "model" in timed
    assert any(x.startswith("16x16x32_fp16_TT") and "out_of_resources" in x for x in out)


def test_results_of_one_size_on_two_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels lie in one module; the second does not displace the first."""
    row = "- {M: 16, N: 16, K: 16, BLOCK_SIZE_M: 16, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 16, time(us): 1, target: "
    (tmp_path / "stored.yaml").write_text(f"{row}gfx942, num_warps: 1}}\n{row}gfx950, NUM_SMS: 304, num_warps: 1}}\n")
    monkeypatch.setattr(Offline, "_checked", passed)
    argv = ["--gemm_size_file", str(tmp_path / "stored.yaml"), "-o", str(tmp_path / "out.yaml"), "--num_threads", "1"]
    assert tune.main([*argv, "--compare_wo_tuning"]) == 0


def test_one_size_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's first command: gfx942, results under output/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Offline, "_checked", passed)  # the interpreter has its say elsewhere
    assert tune.main(["-m", "16", "-n", "16", "-k", "16", "--budget", "1"]) == 0
    (row,) = yaml.safe_load(Path("output/tuning_results_gfx942.yaml").read_text())
    assert (row["M"], row["target"], row["timer"]) == (16, "gfx942", "model")
    assert [p.name for p in Path("output/tuning_results_gfx942_kernels").iterdir()] == ["gemm_16_16_16.py"]
    assert "16x16x16_fp16_TT" in capsys.readouterr().out


def table(out: str) -> dict[str, list[str]]:
    """Rows of a printed table by their first column."""
    return {row[0]: row[1:] for row in map(str.split, out.splitlines()) if row}


def test_compiles_that_fail_are_counted_with_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A size of which nothing compiles is a failure; a compile that was too slow is tried again by the next run."""
    argv = ["-m", "7", "-n", "16", "-k", "48", "--target", "gfx1100", "--budget=2", "-o", str(tmp_path / "out.yaml")]

    def late(self: Any, request: Any, timeout: float) -> Any:
        raise worker.ChildTimeout

    with monkeypatch.context() as patch:
        patch.setattr(worker.Child, "ask", late)
        assert tune.main([*argv, "--compile_only", "--timeout", "7"]) == 1
        said = capsys.readouterr()
        assert table(said.out)["7x16x48_fp16_TT"][:6] == ["2", "2", "0", "0", "0", "2"]
        assert "2 timeout: compile took more than 7 s" in said.err and "no config could be compiled" in said.err
        assert tune.main(argv) == 1
        err = capsys.readouterr().err
        assert "no candidate passed: 2 timeout, tile__" in err and "results: " not in err
    assert len(journal_of(tmp_path)) == 1, "the header alone"
    monkeypatch.setattr(Offline, "_checked", passed)
    assert tune.main(argv) == 0
    assert [e["trial"]["status"] for e in journal_of(tmp_path) if "trial" in e] == ["ok"] * 3


def test_stages_to_stop_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Modules only; binaries only, which the tuning that follows finds; nothing recorded before it."""
    size = ["-m", "1", "-n", "2", "-k", "3", "--target", "gfx1100", "--budget=1", "-o", str(tmp_path / "out.yaml")]
    module = tmp_path / "out_kernels" / "generated_kernel_1_2_3.py"
    assert tune.main([*size, "--generate-only"]) == 0
    assert "gfx1100" in module.read_text()
    capsys.readouterr()
    assert tune.main([*size, "--compile_only"]) == 0
    assert table(capsys.readouterr().out)["1x2x3_fp16_TT"][:6] == ["1", "1", "1", "0", "0", "0"], "one compiled"
    assert tune.main([*size, "--compile_only"]) == 0
    assert table(capsys.readouterr().out)["1x2x3_fp16_TT"][:6] == ["1", "1", "0", "1", "0", "0"], "one from the cache"
    assert len(journal_of(tmp_path)) == 1 and not (tmp_path / "out.yaml").exists()
    monkeypatch.setattr(Offline, "_checked", passed)
    monkeypatch.setattr("tritongemm.worker.Child.ask", lambda *_: pytest.fail("a compiler was asked"))
    assert tune.main(size) == 0
    (row,) = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert (row["target"], row["timer"]) == ("gfx1100", "model")
    assert not module.exists(), "modules of all candidates go unless kept"


def test_another_target(tmp_path: Path, session_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-m", "16", "-n", "16", "-k", "16", "--target", "gfx950", "--budget=1", "-o", str(tmp_path / "out.yaml")]
    assert tune.main([*argv, "--compile-only"]) == 0
    assert "compiling for gfx950 (" in capsys.readouterr().err
    found = [p.read_bytes() for p in session_cache.glob("*/*/kernel.hsaco")]
    assert "gfx950" in map(code_object.arch, found)


def passed(self: Any, problem: Any, config: Config, path: Path) -> Any:
    """The interpreter's verdict, without asking it."""
    return Trial(config, "ok", stage="final", error=0.0, tolerance=1e-3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"is empty"),
        ("- {M: 16, N: 16}\n", "row 1 (line 1) has no K"),
        ("- {M: 16, N: 16, K: -3}\n", "row 1 (line 1) K must be at least 1, not -3"),
        ("- {M: 16, N: 16, K: '16'}\n", "K must be a whole number, not '16'; remove the quotes"),
        ("M: 16\n", "must be a list of maps"),
        ("- {M: 1, N: 1, K: 1}\n- {M: 1, N: 1, K: 1, num_wraps: 4}\n", "row 2 (line 2) has an unknown key 'num_wraps'; did you mean"),
        ("- {M: 1, N: 1, K: 1}\n- {M: 1, N: 1, K: 1}\n", "row 2 (line 2) repeats row 1"),
        ("- {M: 1, N: 1, K: 1, dtype_a: fp7}\n", "unknown dtype 'fp7'"),
        ("- {M: 1\n", "not YAML"),
        ("- {M: 1, N: 1, K: 1, dtype_a: fp8e4m3fn}\n", "1x1x1_fp8e4m3fn-fp8e4m3fn-fp16_TT: gfx942 has no matrix instruction"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str) -> None:
    """Refused before anything is made, with status 2 and no traceback."""
    path = tmp_path / "sizes.yaml"
    path.write_text(text)
    assert tune.main(["--gemm_size_file", str(path), "-o", str(tmp_path / "out" / "out.yaml")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and complaint in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


SIZE = ("-m", "16", "-n", "16", "-k", "16")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("-m", "0", "-n", "16", "-k", "16"), "M must be between 1 and 2147483647, not 0"),
        (("-m", "16", "-n", "-16", "-k", "16"), "N must be between 1 and 2147483647, not -16"),
        ((*SIZE, "--target", "gfx1"), "unknown target 'gfx1'; there are: gfx1100, "),
        ((*SIZE, "-dtype_a", "fp7"), "unknown dtype 'fp7'; there are: fp16, "),
        ((*SIZE, "-dtype_a", "int8", "-dtype_c", "fp16"), "int8 operands need an integer C"),
        ((*SIZE, "--gpu_ids", "0"), "need a GPU"),
        (("--gemm_size_file", "absent.yaml"), "absent.yaml: there is no such file"),
    ],
)
def test_bad_options(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tune.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and complaint in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "name a size with -m, -n and -k, or a file of sizes with --gemm_size_file"),
        (("-m", "16"), "name a size"),
        ((*SIZE, "--gemm_size_file", "x"), "exclude each other"),
        ((*SIZE, "--compare_wo_tuning"), "name their file with --gemm_size_file"),
        (("-m", "16.0", "-n", "1", "-k", "1"), "invalid int value: '16.0'"),
        ((*SIZE, "--iters", "0"), "--iters must be at least 1"),
        ((*SIZE, "--budget", "90m"), "'90m' is neither a number of configs nor, as 90s, of seconds"),
        ((*SIZE, "--budget=-1s"), "--budget must not be negative"),
        ((*SIZE, "--num-threads", "-1"), "--num_threads must not be negative"),
        ((*SIZE, "--timeout", "0"), "--timeout must be positive"),
        ((*SIZE, "--errRatio", "1"), "--errRatio is a share of the elements"),
        (("--gemm_size_file", "x", "--benchmark", "--profile_file", "y"), "--profile_file is written by tuning"),
        ((*SIZE, "--gpu_ids", "0", "--ngpus", "2"), "exclude each other"),
        ((*SIZE, "--compare", "--benchmark"), "not allowed with"),
        ((*SIZE, "--init_type", "ones"), "invalid choice: 'ones'"),
        ((*SIZE, "--strategy", "abacus"), "invalid choice: 'abacus'"),
    ],
)
def test_options_that_can_not_be(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        tune.main(argv)
    assert exit_.value.code == 2 and complaint in capsys.readouterr().err


def test_outputs_that_can_not_be(tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not writable, held by another run, or somebody else's: status 2, and the way out."""
    copy = tmp_path / "copy.yaml"
    shutil.copy(tuned.results, copy)
    copy.write_text(copy.read_text().replace("'triton': '", "'triton': '0."))
    held = tmp_path / "held.yaml"
    (tmp_path / "file").write_text("")
    with Store.open(held, "gfx1100", {}, {}):
        for path, complaint in (
            (tmp_path / "file" / "out.yaml", "can't be written"),
            (Path("/proc/out.yaml"), "/proc/out.yaml can't be written: No such file or directory; choose another file"),
            (tmp_path, "is a folder; name a file with -o"),
            (held, f"held by another run (process {os.getpid()})"),
            (copy, "another toolchain (triton 0."),
            (tuned.folder / "sizes.yaml", "line 2 is not a result; name another file with -o"),
        ):
            assert tune.main([*SIZE, "--target", "gfx1100", "-o", str(path)]) == 2
            err = capsys.readouterr().err
            assert "error: " in err and complaint in err and "Traceback" not in err
    assert tune.main([*SIZE, "--target", "gfx950", "-o", str(tuned.results)]) == 2
    assert "is for gfx1100, this run for gfx950: choose another -o" in capsys.readouterr().err


def test_folders_that_can_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of modules or of compiled kernels: it says which, and no config is remembered as one that does not compile."""
    (tmp_path / "out_kernels").write_text("")
    argv = [*SIZE, "--target", "gfx1100", "--budget=1", "-o", str(tmp_path / "out.yaml")]
    assert tune.main(argv) == 2
    err = capsys.readouterr().err
    assert "out_kernels/generated_kernel_16_16_16.py can't be written: " in err and "choose another file with -o" in err
    (tmp_path / "out_kernels").unlink()
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    assert tune.main(argv) == 2
    err = capsys.readouterr().err
    assert (
        f"compiled kernels can't be kept in {tmp_path / 'cache'}: Not a directory" in err and "TRITONGEMM_CACHE" in err
    )
    assert len(journal_of(tmp_path)) == 1, "the header alone"


def test_underscores_and_dashes() -> None:
    one = options.parse(["--gemm_size_file=a_b.yaml", "--num_threads", "3", "-dtype_a", "bf16", "-col_b", "--bias_vector", "--tuning_results_file", "o_o"])  # fmt: skip
    other = options.parse(["--gemm-size-file=a_b.yaml", "--num-threads", "3", "-dtype-a", "bf16", "-col-b", "--bias-vector", "m", "-o", "o_o"])  # fmt: skip
    assert vars(one) == vars(other)
    assert (one.gemm_size_file, one.output, one.dtype_a, one.col_b, one.bias_vector) == (
        "a_b.yaml",
        "o_o",
        "bf16",
        True,
        "m",
    )
    assert options.parse([*SIZE, "--no_warmup"]).warmup == 0 and not options.parse([*SIZE, "--no_resume"]).resume


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        tune.main(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for group in ("what to tune", "what to do", "where", "search", "measuring", "results", "examples"):
        assert f"\n{group}" in text
    for option in (
        "-m M", "-col_a", "-col_b", "-dtype_a", "-dtype_c", "--bias-vector", "--gemm-size-file", "--compare", "--benchmark",
        "--compare-wo-tuning", "--generate-only", "--compile-only", "--target", "--gpu-ids", "--ngpus", "--num-threads",
        "--iters", "--warmup", "--init-type", "--rotating-tensor", "--timeout", "-o FILE", "--resume", "--keep", "--verbose",
    ):  # fmt: skip
        assert option in text, option


class FakeDevice:
    """What `machine.find` asks a device."""

    def __init__(self, ordinal: int = 0) -> None:
        self.arch, self.name = "sm90", "NVIDIA H200"
        self.properties = {"compute_units": 120, "lds_bytes": 1000, "memory_bytes": 2**37, "l2_bytes": 12345}

    def device_count(self) -> int:
        return 2

    device = __init__


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice()
    monkeypatch.setattr(driver, "present", lambda: "nvidia")
    monkeypatch.setattr(driver, "open", lambda _: fake)
    monkeypatch.setattr(fake, "device", lambda _: fake, raising=False)


def test_the_machine_corrects_the_target(two_gpus: None) -> None:
    here = machine.find(None)
    target: Target = here.target
    assert (here.devices, here.vendor, target.name, target.product) == ((0,), "nvidia", "sm90", "H200")
    assert (target.compute_units, target.l2_bytes, target.llc_bytes) == (120, 12345, 12345)
    assert machine.find(None, "1,0").devices == (1, 0) and machine.find(None, ngpus=2).devices == (0, 1)
    assert machine.toolchain(here)["device"] == "NVIDIA H200"
    away = machine.find("gfx950")
    assert away.devices == () and "without running" in away.why and "device" not in machine.toolchain(away)


def test_what_is_tried_on_a_gpu(two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guided search, unless the run ends before anything could guide it; a budget of configs or of seconds."""
    plans: list[Plan] = []
    monkeypatch.setattr(tune.Pipeline, "tune", lambda self, problems: plans.append(self.plan) or {})
    argv = [
        *SIZE,
        "--libtype",
        "triton",
        "--profiler",
        "events",
        "--num_threads",
        "1",
        "-o",
        str(tmp_path / "out.yaml"),
    ]
    for more in (
        (),
        ("--compile_only",),
        ("--strategy", "guided", "--generate_only"),
        ("--budget", "7"),
        ("--budget", "1.5s"),
    ):
        assert tune.main([*argv, *more]) == 0
    assert [p.strategy for p in plans[:3]] == ["guided", "exhaustive", "guided"]
    assert [(p.budget, p.seconds) for p in plans[2:]] == [(0, 0.0), (7, 0.0), (0, 1.5)]


@pytest.mark.parametrize(("ids", "count"), [("2", 0), ("0,0", 0), ("-1", 0), ("a", 0), (None, 3)])
def test_devices_that_are_not_there(two_gpus: None, ids: str | None, count: int) -> None:
    with pytest.raises(TargetError, match=r"this machine has 0 to 1|whole numbers with commas between, not 'a'"):
        machine.find(None, ids, count)
