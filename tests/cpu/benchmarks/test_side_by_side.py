import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.nouns import Capsys, Config, Defaults, Machine, Patch, Problem, Record, Trial, load_target, matrices
from tests.support.tables import apart
from tritongemm.hip_ext import machine
from tritongemm.workloads import sizes

PROBLEM = Problem(16, 4096, 4096, *matrices("bf16", layout="TN"))
NAMES = ["torch", "inductor", "ours"]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            patch.setenv(name, "")  # so that it ends with these tests: processes are lent to those of one environment
            del os.environ[name]
        yield importlib.import_module("side_by_side")
    for name in [n for n in sys.modules if n.split(".")[0] in ("side_by_side", "competitors")]:
        del sys.modules[name]


@pytest.fixture
def board(script: ModuleType) -> ModuleType:
    return importlib.import_module("competitors._board")


@pytest.fixture
def no_gpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "find_machine", lambda *_: Machine(load_target("sm90"), "", (), "H100", "no GPU here"))


def row(m: int, n: int, us: dict[str, float | str], **more: Any) -> dict[str, Any]:
    """A size; a text stands for the reason why there is no time."""
    times = {k: {"us": v, "tuning_s": 2.0, **more} if isinstance(v, float) else {"reason": v} for k, v in us.items()}
    return {"m": m, "n": n, "k": 64, "key": f"{m}x{n}x64_bf16_TN", "roofline_us": 5.0, "times": times}


def rows() -> list[dict[str, Any]]:
    return [
        row(1, 10, {"torch": 10.0, "inductor": 8.0, "ours": 5.0}),
        row(1, 20, {"torch": 10.0, "inductor": "RuntimeError: no", "ours": 20.0}),
        row(16, 10, {"torch": 9.0, "inductor": 9.0, "ours": 9.0}),
    ]


def test_means_lines_and_remarks(board: ModuleType) -> None:
    found = board.summary(rows(), NAMES)
    ours, inductor = found["ours"], found["inductor"]
    assert ours["geomean"] == pytest.approx(1.0) and ours["by_m"] == pytest.approx({"1": 1.0, "16": 1.0})
    assert ours["worst"] == 0.5 and ours["worst_at"] == "1x20x64_bf16_TN"
    assert ours["roofline"] == pytest.approx((1.0 * 0.25 * 5 / 9) ** (1 / 3))
    assert ours["beats_torch"] == pytest.approx(1 / 3) and ours["fastest"] == pytest.approx(2 / 3)
    assert inductor["sizes"] == 2 and inductor["tuning_s"] == 4.0
    assert inductor["ours_over_it"] == pytest.approx(1.6**0.5), "only over the sizes that both ran"
    found = board.summary([row(1, 1, {"torch": "no", "ours": "no"})], ["torch", "ours"])
    assert found["ours"]["geomean"] is None and found["ours"]["sizes"] == 0 and found["ours"]["by_m"] == {"1": None}
    assert "ours, 1 sizes (1x1x64_bf16_TN …): no" in board.table(
        [row(1, 1, {"torch": 1.0, "ours": "no"})], ["torch", "ours"]
    )
    head, first, second = board.heading(NAMES), *(board.line(r, NAMES) for r in rows()[:2])
    assert len(head) == len(first) == len(second)
    assert first.split() == ["1x10x64", "10.00", "1.000", "0.50", "8.00", "1.250", "0.62", "5.00", "2.000", "1.00"]
    assert second.split()[4] == "-"
    table = board.table(rows(), NAMES)
    assert "ratio, M = 16" in table and "inductor, 1 sizes (1x20x64_bf16_TN …): RuntimeError: no" in table
    one = row(1, 1, {"torch": 1.0, "autotune": 1.0}, detail={"tried": 100, "kept": 3000})
    (said,) = [line for line in board.remarks([one], ["autotune"]) if "kept configs" in line]
    assert "tried 100 of 3000" in said and "about 1 minutes" in said


def test_a_plot_wants_matplotlib(
    board: ModuleType, tmp_path: Path, script: ModuleType, monkeypatch: Patch, capsys: Capsys
) -> None:
    board.plot(tmp_path / "out.png", rows(), NAMES, "title")
    assert (tmp_path / "out.png").stat().st_size > 1000
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.main(["--plot", "out.png"])
    assert "--plot needs matplotlib" in capsys.readouterr().err


@apart(
    (["--competitors", "ours,cutlass"], "--competitors cutlass: there are torch, inductor"),
    (["--resume"], "name it with --json"),
    (["--rounds", "2"], "--rounds at least 5"),
    (["--autotune-configs", "0"], "at least 1"),
)
def test_argument_errors(arguments: list[str], said: str, /, script: ModuleType, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as end:
        script.main(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_torch_always_runs_first_and_winners_hold(script: ModuleType) -> None:
    assert script.parse(["--competitors", "ours,inductor"]).competitors == ["torch", "inductor", "ours"]
    found = script.problems(script.SIZES)
    assert len(found) == len(set(found)) == 48 and PROBLEM in found
    assert {p.m for p in found} == {1, 16, 64, 256, 1024, 4096} and len({(p.n, p.k) for p in found}) == 8
    hold = importlib.import_module("competitors._hold")
    base: dict[str, Any] = {
        "problem": PROBLEM, "target": "sm90", "config": Config("tile", 16, 64, 64), "spread": 0.0,
        "timer": "events",
    }  # fmt: skip
    won = Record(**base, winner="triton", seconds=1e-6, library_seconds=2e-6, library="torch")
    lost = Record(**base, winner="torch", seconds=3e-6, library_seconds=2e-6, library="torch")
    assert hold.gains([won, lost]) == [won]
    found = hold.outcome([{"then": 2.0, "now": n} for n in (2.0, 1.97, 2.2)] + [{"then": 2.0, "reason": "gone"}])
    assert found["gains"] == 4 and found["within"] == 0.5 and found["not_lower"] == 0.75
    assert "gone" in hold.line({"key": "k", "then": 2.0, "reason": "gone", "config": "c"})


def test_it_needs_a_gpu_and_linear_layers(script: ModuleType, no_gpu: None, capsys: Capsys, tmp_path: Path) -> None:
    assert script.main([]) == 2 and script.main(["--recheck", "x.yaml"]) == 2
    assert capsys.readouterr().err.count("needs a GPU") == 2
    file = tmp_path / "sizes.yaml"
    file.write_text("- {M: 16, N: 16, K: 16}\n- {M: 7, N: 33, K: 777, bias: n}\n")
    assert script.main(["--gemm_size_file", str(file)]) == 2
    assert "7x33x777_bf16_TN_biasn is not x[M, K] @ w[N, K].T" in capsys.readouterr().err


def test_finished_runs_print_without_a_gpu(script: ModuleType, no_gpu: None, tmp_path: Path, capsys: Capsys) -> None:
    file, out = tmp_path / "sizes.yaml", tmp_path / "out.json"
    file.write_text("- {M: 16, N: 4096, K: 4096}\n")
    done = row(16, 4096, {"torch": 2.0, "ours": 1.0}) | {"k": 4096, "key": PROBLEM.key}
    protocol = {"graph_us": 400, "rounds": 50, "autotune_configs": 100, "strategy": None}
    head = {"device": "H100", "toolchain": machine.toolchain(machine.find_machine(None)), "protocol": protocol}
    out.write_text(json.dumps({**head, "rows": [done, row(1, 1, {"torch": 1.0})]}))
    common = ["--gemm_size_file", str(file), "--json", str(out), "--resume"]
    assert script.main([*common, "--competitors", "torch,ours"]) == 0
    assert json.loads(out.read_text())["summary"]["ours"]["geomean"] == 2.0
    assert script.main([*common, "--competitors", "inductor"]) == 2, "a row without a competitor is measured again"
    assert script.main([*common, "--rounds", "9"]) == 2 and "is of protocol" in capsys.readouterr().err
    out.write_text(json.dumps({**head, "device": "another", "rows": []}))
    assert script.main(common) == 2 and "is of device another" in capsys.readouterr().err


def test_sizes_for_the_tuner_are_read_back_and_the_best_of_a_journal(script: ModuleType, tmp_path: Path) -> None:
    tuned = importlib.import_module("competitors._tuned")
    half = Problem(7, 33, 777, *matrices(layout="TN"))
    file = tmp_path / "sizes.yaml"
    file.write_text(tuned.sizes_text([PROBLEM, half]))
    assert [r.problem for r in sizes.from_file(file, Defaults())] == [PROBLEM, half]
    quick, sure, other = (Config("tile", 16, n, 64) for n in (32, 64, 128))
    library = Config("kernel", 0, 0, 0, backend="blaslt")
    trials = [
        Trial(quick, "ok", samples=(1e-6,)),
        Trial(sure, "ok", samples=(3e-6,), stage="final"),
        Trial(other, "ok", samples=(4e-6,), stage="final"),
        Trial(library, "ok", samples=(1e-7,), stage="final"),
        Trial(quick, "wrong", stage="final"),
    ]
    lines = [json.dumps({"problem": PROBLEM.to_json(), "trial": t.to_json()}) for t in trials]
    journal = tmp_path / "out.yaml.journal"
    journal.write_text("\n".join(['{"header": {}}', *lines, '{"torn']))
    assert tuned.best_triton(journal) == {PROBLEM: sure} and tuned.best_triton(tmp_path / "none") == {}
