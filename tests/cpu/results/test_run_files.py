import csv
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.evaluators import passed
from tests.support.nouns import Capsys, Config, OutputError, Patch, Problem, Record, Trial, apart, each, fails, matrices
from tests.support.stores import ONE, journal_of, merged, record, take
from tritongemm.cli import tune
from tritongemm.hip_ext.driver import driver
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.results import candidates_csv
from tritongemm.results.run_files import holding_module_folder, module_folder
from tritongemm.results.store import Store

BESIDE = (".journal", ".journal.old", ".lock", ".pid")


def put_text(path: Path) -> None:
    path.write_text("dear diary\n")


def put_link(path: Path) -> None:
    path.with_name("precious").write_text("mine")
    path.symlink_to("precious")


@each("suffix", BESIDE)
@each("put", [put_text, put_link, os.mkfifo, Path.mkdir])
def test_what_is_beside_an_output_is_refused_at_once(tmp_path: Path, suffix: str, put: Callable[[Path], None]) -> None:
    """A lock of another program, a pipe without a reader, a link that was planted: each stays as it is."""
    path = tmp_path / f"out.yaml{suffix}"
    put(path)
    before = path.lstat()
    for resume in (True, False):
        with pytest.raises(
            OutputError, match=rf"out\.yaml{suffix} is .*; move it away, or choose another file with -o"
        ):
            take(tmp_path / "out.yaml", resume=resume)
    assert path.lstat() == before and not (tmp_path / "out.yaml").exists()
    if put is put_link:
        assert (tmp_path / "precious").read_text() == "mine"


def test_a_link_planted_while_a_run_holds_its_output_is_not_followed(tmp_path: Path) -> None:
    """Neither its process's number nor its journal is written through one."""
    path, precious = tmp_path / "out.yaml", tmp_path / "precious"
    precious.write_text("mine")
    with take(path) as store:
        store.add_record(record(ONE))
        store.merge()
        for planted in (tmp_path / "out.yaml.pid", journal_of(path)):
            planted.unlink()
            planted.symlink_to(precious)
    fails(OutputError, "is a link", take, path)
    assert precious.read_text() == "mine"


def test_results_that_are_read_only_are_refused(path: Path) -> None:
    merged(path, record(ONE))
    path.chmod(0o444)
    before = path.read_bytes()
    fails(OutputError, r"out\.yaml is read-only, so it is not replaced; choose", take, path)
    assert path.read_bytes() == before and path.stat().st_mode & 0o777 == 0o444


def test_the_holder_of_an_output_is_reported_whatever_is_there(path: Path, tmp_path: Path) -> None:
    with take(path):
        assert (tmp_path / "out.yaml.pid").read_text() == str(os.getpid())
        fails(OutputError, rf"held by another run \(process {os.getpid()}\)", take, path)
        (tmp_path / "out.yaml.pid").unlink()
        fails(OutputError, r"held by another run \(process unknown\)", take, path)


@each("name", ["n" * 256, "n" * 243 + ".yaml", "/proc/out.yaml", "file/out.yaml", "."])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    complaint = "is a folder, not a file that can be replaced;" if name == "." else f"{name} can't be written: .*"
    fails(OutputError, rf"{complaint} ?choose another file with -o", take, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_output_has_its_folder_of_modules() -> None:
    """But for one with and one without the suffix, whose folder names its owner."""
    names = ["x.yaml", "x.yml", "x.YAML", "tuned.gfx942", "tuned.gfx90a", "a.b.yaml", "x.v1", "x.v2"]
    folders = [module_folder(Path("d") / name) for name in names]
    assert len(set(folders)) == len(names) and folders[:2] == [Path("d/x_kernels"), Path("d/x.yml_kernels")]


def test_two_outputs_never_share_a_folder_of_modules(tmp_path: Path) -> None:
    one, other = tmp_path / "x.yaml", tmp_path / "x"
    folder = module_folder(one)
    assert folder == module_folder(other)
    folder.mkdir()
    half = folder / ".generated_kernel_1_1_1.py.724.4d05fe43"
    half.write_text("def")
    with holding_module_folder(folder, one):
        assert not half.exists(), "what a killed run left half-written is swept"
        for output in (one, other):
            with (
                pytest.raises(OutputError, match=r"another run writes its modules into .*x_kernels; wait for it"),
                holding_module_folder(folder, output),
            ):
                pass
    with holding_module_folder(folder, one):
        pass
    with (
        pytest.raises(
            OutputError, match=r"x_kernels holds the modules of x\.yaml, which .*choose another file with -o"
        ),
        holding_module_folder(folder, other),
    ):
        pass


SIZE = Problem(16, 32, 64, *matrices("bf16", c="fp32", layout="TN"))
OURS = Config("tile", 16, 32, 32, 1, 2, 4, 2)
LIBRARY = Config("Cijk_MT16x32x64", 16, 32, 64, options=(("index", 77), ("version", 130100)), backend="blaslt")
ASM = Config("_ZN5aiter3fooE", 32, 64, 64, 1, 3, backend="asm")
TRIALS = (
    Trial(OURS, "ok", samples=(3e-6,), timer="graph-events"),
    Trial(OURS, "ok", "", (2e-6, 2e-6), "graph-events", "final", 1e-3, 1e-2),
    Trial(LIBRARY, "ok", samples=(2.5e-6,), timer="graph-events"),
    Trial(LIBRARY, "wrong", 'error 3 > 0.01, "in" all', stage="final", error=3.0, tolerance=1e-2, outside=1.0),
    Trial(ASM, "compile_failed", "there is no x.co"),
)
RECORD = Record(SIZE, "gfx942", OURS, "triton", 2e-6, 0.0, "graph-events", library_seconds=4e-6, library="torch")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_candidate(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "all.csv"
    candidates_csv.check(path)
    with Store.open(tmp_path / "out.yaml", "gfx942", {}, {}) as store:
        store.add_trials(SIZE, TRIALS)
        store.add_record(RECORD)
        late = Trial(Config("tile", 64, 64, 64), "timeout", "compile took more than 1 s")
        assert candidates_csv.write(path, store, [SIZE, Problem(1, 1, 1)], {SIZE: [late]}) == 5
    found = rows(path)
    assert list(found[0]) == list(candidates_csv.COLUMNS)
    torch, ours, *others = found
    assert (torch["backend"], torch["us"], torch["winner"]) == ("torch", "4.0", "0")
    expected = {
        "size": SIZE.key, "M": "16", "layout": "TN", "backend": "triton", "splitK": "2", "status": "ok",
        "stage": "final", "screen_us": "3.0", "us": "2.0", "winner": "1",
    }  # fmt: skip
    assert {key: ours[key] for key in expected} == expected
    assert ours["tflops"] == f"{SIZE.flops / 2e-6 / 1e12:.4g}" and Config.parse(ours["config"]) == OURS
    assert ours["kernel"] == OURS.kernel_name
    by_status = {r["status"]: r for r in others}
    wrong = by_status["wrong"]
    assert (wrong["solution"], wrong["error"], wrong["outside"], wrong["us"]) == ("77", "3", "1", "")
    assert wrong["reason"] == TRIALS[3].reason and wrong["screen_us"] == "2.5"
    assert by_status["compile_failed"]["kernel"] == ASM.template
    assert by_status["timeout"]["reason"].startswith("compile took")
    faulty = replace(RECORD, library_seconds=None, library_wrong="error 9 > 0.1")
    first = next(candidates_csv.rows(SIZE, TRIALS, faulty))
    assert (first["backend"], first["status"], first["reason"]) == ("torch", "wrong", "error 9 > 0.1")


def test_places_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for path, complaint in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "x.csv", "can't be written: "),
        (Path("/proc/x.csv"), "can't be written: "),
        (tmp_path / ("n" * 252 + ".csv"), "can't be written: "),
        (tmp_path / "pipe", "is a pipe"),
        (Path("/dev/null"), "is a device"),
    ):
        fails(OutputError, f"^--profile_file {path} {complaint}.*; choose another file$", candidates_csv.check, path)


@apart("notes.txt", "link.csv", "out.yaml", "out.yaml.journal", "out.yaml.pid", "sizes.yaml")
def test_nothing_else_is_replaced(named: str, /, tmp_path: Path, capsys: Capsys) -> None:
    """Not a file of the user's, a link, or what the run itself reads or writes; it is said before anything is tried."""
    texts = {"notes.txt": "mine\n", "real.csv": "", "sizes.yaml": "- {M: 16, N: 16, K: 16}\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    argv = ["--gemm_size_file", str(tmp_path / "sizes.yaml"), "--target", "gfx1100", "-o", str(tmp_path / "out.yaml")]
    assert tune.main([*argv, "--profile_file", str(tmp_path / named)]) == 2
    assert f"--profile_file {tmp_path / named} is " in capsys.readouterr().err
    assert {name: (tmp_path / name).read_text() for name in texts} == texts and (tmp_path / "link.csv").is_symlink()
    assert not (tmp_path / "out.yaml").exists()


def test_a_resumed_run_writes_the_same(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(driver, "find_vendor", lambda: None)
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    path = tmp_path / "all.csv"
    size = ["-m", "16", "-n", "16", "-k", "16", "--target", "gfx1100", "--budget", "2", "--num_threads", "1"]
    argv = [*size, "-o", str(tmp_path / "out.yaml"), "--profile_file", str(path)]
    assert tune.main(argv) == 0
    before = path.read_text()
    assert [r["backend"] for r in rows(path)] == ["triton"] * 2 and [r["winner"] for r in rows(path)].count("1") == 1
    path.write_text(before.splitlines()[0] + "\nold\n")
    assert tune.main(argv) == 0
    assert path.read_text() == before and not [p for p in tmp_path.iterdir() if p.name.startswith(".all")]
    assert tune.main([*argv[:-1], str(tmp_path)]) == 2
