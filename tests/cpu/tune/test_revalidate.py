import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluators import FakeEvaluator, passed
from tests.support.nouns import ArtifactCache, BuildPool, Capsys, Config, FormatRow, Patch, Record, settings
from tests.support.racing import SIZE
from tritongemm.cli import tune
from tritongemm.codegen import render
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.report.console import Reporter
from tritongemm.report.tables import print_retimed, print_verified
from tritongemm.tune.revalidate import Revalidation

pytestmark = pytest.mark.usefixtures("without_gpu")

STORED = (
    "# as tune_gemm leaves them\n"
    "- {'M': 16, 'N': 16, 'K': 16, 'rowMajorA': 'T', 'rowMajorB': 'T', 'BLOCK_SIZE_M': 16, 'BLOCK_SIZE_N': 16, "
    "'BLOCK_SIZE_K': 16, 'GROUP_SIZE_M': 1, 'SPLIT_K': 1, 'num_warps': 1, 'num_stages': 0, 'waves_per_eu': 0} "
    "# TFLOPS: 0.01 time(us): 5.5\n"
    "- {M: 16, N: 16, K: 32, BLOCK_SIZE_M: 16, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 2048}\n"
)


def test_a_stored_result_that_is_wrong(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    (tmp_path / "stored.yaml").write_text(STORED)
    argv = ["--gemm_size_file", str(tmp_path / "stored.yaml"), "-o", str(tmp_path / "out.yaml"), "--num_threads", "1"]
    source = render.kernel_source

    def spoiled(*args: Any) -> str:
        text = source(*args)
        assert "acc = tl.dot(a, b, acc)" in text
        return text.replace("acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b, acc) + 1")

    with monkeypatch.context() as patch:
        patch.setattr(render, "kernel_source", spoiled)
        assert tune.main([*argv, "--compare_wo_tuning"]) == 1
    said = capsys.readouterr()
    out = said.out.splitlines()
    (wrong,) = [x.split() for x in out if x.startswith("16x16x16_fp16_TT")]
    (large,) = [x.split() for x in out if x.startswith("16x16x32_fp16_TT")]
    assert wrong[1] == "wrong" and float(wrong[2]) > float(wrong[3])
    assert large[1] == "out_of_resources" and "65536" in large and "0 of 2 results are right, 2 are not" in said.err
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    assert tune.main([*argv, "--benchmark"]) == 1
    out = capsys.readouterr().out.splitlines()
    (timed,) = [x.split() for x in out if x.startswith("16x16x16_fp16_TT")]
    assert float(timed[1]) > 0 and "model" in timed and out[0].startswith("Predicted, not measured")
    assert any(x.startswith("16x16x32_fp16_TT") and "out_of_resources" in x for x in out)
    algorithm = "M: 8, N: 16, K: 16, template: heuristic, backend: blaslt, num_warps: 0, BLOCK_SIZE_M: 16"
    (tmp_path / "stored.yaml").write_text(f"- {{{algorithm}, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 16, time(us): 1}}\n")
    assert tune.main([*argv, "--benchmark"]) == 1
    assert re.search("8x16x16_fp16_TT .* not timed .* only a GPU can check a kernel of blaslt", capsys.readouterr().out)


def test_results_of_one_size_on_two_devices(tmp_path: Path, monkeypatch: Patch) -> None:
    """Their kernels are in one module; the second does not displace the first. The target is the rows' own."""
    row = "- {M: 16, N: 16, K: 16, BLOCK_SIZE_M: 16, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 16, time(us): 1, target: gfx950, "
    (tmp_path / "stored.yaml").write_text(
        f"{row}num_warps: 1}}\n{row}compute_units: 80, NUM_SMS: 304, num_warps: 1}}\n"
    )
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    argv = ["--gemm_size_file", str(tmp_path / "stored.yaml"), "-o", str(tmp_path / "out.yaml"), "--num_threads", "1"]
    assert tune.main([*argv, "--compare_wo_tuning"]) == 0


def test_recorded_gains_are_timed_again(capsys: Capsys) -> None:
    """Beside what was stored; a library's win is no gain of ours, and a size that can't run costs its row alone."""
    config = Config("default", 0, 0, 0, num_warps=0, num_stages=0, backend="torch")
    rows = []
    for m, seconds, winner in ((1, 1.99e-6, "torch"), (2, 1.9e-6, "torch"), (3, 1e-6, "blaslt"), (5, 2e-6, "torch")):
        problem = replace(SIZE, m=m)
        record = Record(problem, "gfx942", config, winner, seconds, 0.0, "sundial", library_seconds=3e-6, library="x")
        rows.append(FormatRow(problem, config, record))
    compiler = BuildPool(ArtifactCache(settings.cache_folder()), jobs=1)
    gpu = FakeEvaluator(seconds=lambda config: 2e-6, baseline_seconds=3e-6, fits=lambda problem: problem.m != 5)
    with Reporter() as reporter:
        again = Revalidation(gpu, compiler, reporter)
        retimed = again.retime(rows, "torch")
        print_retimed(reporter, retimed)
        said = capsys.readouterr()
        verified = again.verify(rows)
        print_verified(reporter, verified, "by eye")
    compiler.close()
    assert [r.gain_holds for r in retimed] == [True, False, None, None]
    assert [r.wrong for r in verified] == [False, False, False, True] and not any(r.unchecked for r in verified)
    table = {x.split()[0]: x.split()[1:] for x in said.out.splitlines() if x}
    assert table["1x16x32_fp16_TT"][:2] == ["2.00", "1.99"] and table["1x16x32_fp16_TT"][3:6] == [
        "3.00",
        "1.500",
        "1.508",
    ]
    assert table["5x16x32_fp16_TT"][-3:] == ["out", "of", "memory"] and "crashed" in table["5x16x32_fp16_TT"]
    assert "1 of 2 recorded gains hold within 2% (50%)" in said.err
    assert "3 of 4 results are right, 1 are not" in capsys.readouterr().err
