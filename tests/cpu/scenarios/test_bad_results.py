from pathlib import Path

import pytest

from tests.support.evaluators import passed
from tests.support.nouns import Capsys, Patch
from tritongemm.cli import export, tune
from tritongemm.measure.offline_evaluator import OfflineEvaluator

pytestmark = pytest.mark.usefixtures("without_gpu")

ROW = (
    "- {{M: {m}, N: 16, K: 64, BLOCK_SIZE_M: 16, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 16, time(us): 5, timer: events, "
    "target: {target}, num_warps: {warps}{more}}}\n"
)
RIGHT = ROW.format(m=16, target="gfx942", warps=1, more="")
BAD = {  # what is wrong with a row: its warps and further keys, its target, and the reason that is reported
    "warps": ("1048576", "", "67108864 threads in a workgroup, which has 1 to 1024"),
    "group": ("1", ", GROUP_SIZE_M: 99999999999", "99999999999 is beyond the 32 bits in which kernels count"),
    "template": ("4", ", template: tma", "gfx942 does not run template tma on such operands; only "),
    "unknown": ("1", ", template: nonesuch", "no kernel template is called 'nonesuch'; there are: fragments, "),
    "option": ("1", ", options: {frob: 1}", "nothing reads frob; its options can be "),
    "large_option": ("1", ", options: {xcds: 1000000000}", "xcds must be 1 to 8, not 1000000000"),
    "split": ("1", ", SPLIT_K: 1000000000", "split_k must be at most 64, not 1000000000"),
    "stages": ("1", ", num_stages: 1000000000", "num_stages must be at most 16, not 1000000000"),
    "tile": ("3", "", "num_warps must be a power of two, not 3"),
    "batch": ("1", ", batch: 100000", "100000 workgroups along z, of which a launch has 1 to 65535"),
    "groups": ("1", ", groups: 2", "does not run template tile on such operands; only grouped"),
    "target": ("1", "", "it is a result for sm90, not for gfx942"),
}


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: Patch) -> list[str]:
    """The arguments of a command that runs results again: one that is right, and after it all that are bad."""
    rows = [RIGHT]
    for m, (name, (warps, more, _)) in enumerate(BAD.items(), start=17):
        rows.append(ROW.format(m=m, target="sm90" if name == "target" else "gfx942", warps=warps, more=more))
    path = tmp_path / "stored.yaml"
    path.write_text("".join(rows))
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    return ["--gemm_size_file", str(path), "-o", str(tmp_path / "out.yaml"), "--num_threads", "1"]


def reported(said: str, first: str, path: str) -> list[str]:
    lines = [line for line in said.splitlines() if line.startswith(first)]
    for number, line in enumerate(lines, start=2):
        assert line.startswith(f"{first}{path}: row {number} (line {number}): {15 + number}x16x64_fp16_TT"), line
    return lines


def test_commands_refuse_or_leave_out_each_by_itself(argv: list[str], tmp_path: Path, capsys: Capsys) -> None:
    assert export.main([argv[1], "-o", str(tmp_path / "kernels"), "--target", "gfx942"]) == 0
    lines = reported(capsys.readouterr().err, "left out: ", argv[1])
    assert len(lines) == len(BAD) and all(why in line for line, (*_, why) in zip(lines, BAD.values(), strict=True))
    rows = (tmp_path / "kernels" / "kernels.csv").read_text().splitlines()
    assert len(rows) == 2 and rows[1].startswith("tile__bm16__bn16__bk16__")
    assert tune.main([*argv, "--compare_wo_tuning"]) == 1
    said = capsys.readouterr()
    lines = reported(said.err, "refused: ", argv[1])
    assert len(lines) == len(BAD) and all(why in line for line, (*_, why) in zip(lines, BAD.values(), strict=True))
    assert f"1 of {1 + len(BAD)} results are right, {len(BAD)} are refused" in said.err
    (right,) = [line.split() for line in said.out.splitlines() if line.startswith("16x16x64")]
    assert right[1] == "ok" and tune.main([*argv, "--benchmark"]) == 1
    said = capsys.readouterr()
    assert reported(said.err, "refused: ", argv[1]) == lines
    (foreign,) = [line.split() for line in said.out.splitlines() if line.startswith(f"{16 + len(BAD)}x16x64")]
    assert foreign[1:4] == ["-", "5.00", "-"] and "refused" in foreign, "no prediction stands beside another GPU's time"


def test_what_a_template_lacks_is_named(tmp_path: Path, capsys: Capsys) -> None:
    """Each of these divided by zero, or hung a GPU."""
    lacking = (64, 16, 4, 3), (64, 64, 2, 3), (64, 64, 8, 3), (64, 64, 4, 1)
    rows = "".join(
        f"- {{M: {m}, N: 64, K: 64, BLOCK_SIZE_M: {rows}, BLOCK_SIZE_N: 64, BLOCK_SIZE_K: {depth}, num_warps: {warps}, "
        f"num_stages: {stages}, template: ws_tma}}\n"
        for m, (rows, depth, warps, stages) in enumerate(lacking, 64)
    )
    (tmp_path / "stored.yaml").write_text(rows)
    argv = ["--gemm_size_file", str(tmp_path / "stored.yaml"), "-o", str(tmp_path / "out.yaml"), "--target", "sm90"]
    assert tune.main([*argv, "--compare_wo_tuning"]) == 1
    reasons = [line for line in capsys.readouterr().err.splitlines() if line.startswith("refused: ")]
    wanted = ["block_k must be at least 32", "num_warps must be 4, 8 or 12", "a multiple of 64 rows", "at least 2"]
    assert all(why in line for line, why in zip(reasons, wanted, strict=True))


def test_a_size_that_no_launch_can_compute(tmp_path: Path, capsys: Capsys) -> None:
    """Neither its operands nor its grid could be; it is refused before anything is planned or compiled."""
    largest = ["-m", "2147483647", "-n", "2147483647", "-k", "16", "-o", str(tmp_path / "out" / "out.yaml")]
    assert tune.main(largest) == 2
    assert "its operands take 9223372165703794626 bytes, gfx942 has 206158430208" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
