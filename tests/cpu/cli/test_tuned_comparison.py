"""AITER's --run_config and --compare: rows timed again, and new rows that are taken over where they are better."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.nouns import Capsys, Config, Machine, Patch, Record, Trial, TunerFormat, apart, loader, registry
from tritongemm.cli import gradlib, tune
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext import machine
from tritongemm.results import tuned_file
from tritongemm.results.revalidation import RetimedResult
from tritongemm.results.store import Store
from tritongemm.tune import cluster
from tritongemm.tune.request import TuneRequest
from tritongemm.tune.revalidate import Revalidation
from tritongemm.workloads import sizes

SM90 = Machine(loader.load_target("sm90"), "", (), "H200", "")
OLD, NEW = Config("tile", 16, 16, 64), Config("tile", 16, 32, 64)
# Microseconds of the row that is there, of the new one and of the baseline, by M; None for one that does not run.
TIMES = {
    16: (10.0, 9.0, 20.0), 17: (10.0, 9.9, 20.0), 18: (0.0, 5.0, 6.0), 19: (10.0, None, 20.0), 20: (None, 8.0, 9.0),
}  # fmt: skip
BETTER = [16, 18, 20]
HEADER = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle"


def result(m: int, config: Config, us: float) -> Record:
    problem = Problem(m, 64, 128, *matrices("bf16", layout="TN"))
    return Record(problem, "sm90", config, "triton", us * 1e-6, 0.01, "events", compute_units=132)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A file of tuned configs, sizes beside it, and a run that tunes them as `TIMES` says."""
    path, aiter = tmp_path / "bf16_tuned_gemm.csv", registry.get(TunerFormat, "aiter")
    tuned_file.write(path, aiter, [result(m, OLD, 10) for m, (old, *_) in TIMES.items() if old != 0])
    untuned = "".join(f"{m},64,128,False,torch.bfloat16,torch.bfloat16,False,False\n" for m in TIMES)
    (tmp_path / "bf16_untuned_gemm.csv").write_text(f"{HEADER}\n{untuned}")

    def run(request: TuneRequest, *_: object) -> int:
        candidate = request.outputs.path
        assert candidate is not None and candidate.name == "bf16_tuned_gemm_candidate.csv"
        assert candidate.read_text() == path.read_text()
        records = [result(m, NEW, 7) for m in TIMES]
        tuned_file.write(candidate, aiter, records)
        with Store.open(candidate.with_suffix(".yaml"), "sm90", {}, {}, compute_units=132) as store:
            for record in records:
                store.add_record(record)
            store.merge()
        return 0

    def retime(_: Revalidation, rows: Sequence[FormatRow], baseline: str) -> list[RetimedResult]:
        found = []
        for row in rows:
            assert row.config is not None and baseline == "torch"
            old, new, library = TIMES[row.problem.m]
            us = old if row.config == OLD else new
            ok = Trial(row.config, "ok", samples=(us * 1e-6,)) if us else Trial(row.config, "crashed", "it hangs")
            found.append(RetimedResult(row.problem, ok, library * 1e-6, row.record))
        return found

    monkeypatch.setattr(tune, "run", run)
    monkeypatch.setattr(machine, "count_devices", lambda: 1)
    monkeypatch.setattr(cluster, "find_machine", lambda *_: SM90)
    monkeypatch.setattr(Revalidation, "retime", retime)
    monkeypatch.chdir(tmp_path)
    return path


def test_only_better_rows_are_taken_over(output: Path, capsys: Capsys) -> None:
    before = output.read_text()
    words = ["-i", "bf16_untuned_gemm.csv", "--compare"]
    assert gradlib.main(words) == 0
    said = capsys.readouterr()
    cells = {int(line.split("x")[0]): line.split() for line in said.out.splitlines() if "_bf16_TN" in line}
    assert [cells[m][1:] for m in TIMES] == [
        ["10.00", "9.00", "10.00", "%", "better"], ["10.00", "9.90", "1.00", "%", "less", "than", "3", "%"],
        ["6.00", "5.00", "16.67", "%", "better"], ["10.00", "-", "-", "fails:", "it", "hangs"],
        ["-", "8.00", "-", "new"],
    ]  # fmt: skip
    assert output.read_text() == before and "which --update_improved takes over" in said.err
    assert gradlib.main([*words, "--update_improved"]) == 0
    assert "3 of 5 new rows are 3 % faster or more" in capsys.readouterr().err
    rows = registry.get(TunerFormat, "aiter").read(output, output.read_text(), Defaults())
    assert {row.problem.m: row.config for row in rows} == {m: NEW if m in BETTER else OLD for m in TIMES}
    kept = [line for line in before.splitlines() if line.split(",")[2] in ("17", "19")]
    assert set(kept) <= set(output.read_text().splitlines())
    assert sorted(row.problem.m for row in sizes.from_results(output.with_suffix(".yaml"), Defaults()).rows) == BETTER
    assert gradlib.main([*words, "--update_improved", "--min_improvement_pct", "0.5"]) == 0
    rows = registry.get(TunerFormat, "aiter").read(output, output.read_text(), Defaults())
    assert {row.problem.m for row in rows if row.config == NEW} == {*BETTER, 17}


def test_the_rows_of_a_file_are_timed(output: Path, capsys: Capsys) -> None:
    assert gradlib.main(["--run_config", str(output)]) == 1, "one does not run"
    said = capsys.readouterr()
    assert "16x64x128_bf16_TN" in said.out and "it hangs" in said.out and "18x" not in said.out
    assert gradlib.main(["-i", "bf16_untuned_gemm.csv", "--run_config"]) == 1
    assert capsys.readouterr().out.count("torch.default") == len(TIMES), "the baseline's own choice"
    output.write_text(output.read_text().replace("sm90", "sm100"))
    assert gradlib.main(["--run_config", str(output)]) == 2
    assert "nothing can be timed on sm90 with 132 compute units: no row is for it" in capsys.readouterr().err


def test_rows_of_aiters_own_kernels_and_layers_with_experts_stay(output: Path, capsys: Capsys) -> None:
    """Nothing here can time them."""
    output.write_text(output.read_text().replace(OLD.name, "a_kernel_of_theirs"))
    before = output.read_text()
    assert gradlib.main(["-i", "bf16_untuned_gemm.csv", "--compare", "--update_improved", "--shape_grouped"]) == 0
    assert "its row names a kernel that only AITER has" in capsys.readouterr().out
    assert [line for line in output.read_text().splitlines() if ",18,64,128," not in line] == before.splitlines()
    head = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
    row = "16,256,128,8,2,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0"
    Path("untuned_fmoe.csv").write_text(f"{head}\n{row}\n")
    assert gradlib.main(["-i", "untuned_fmoe.csv", "--compare"]) == 2
    assert "--compare is of single products" in capsys.readouterr().err


@apart(
    ("-i x.csv --update_improved", "--update_improved needs --compare"),
    ("-i x.csv --min_improvement_pct 1", "--min_improvement_pct needs --compare"),
    ("--run_config", "name either"),
    ("-i bf16_untuned_gemm.csv --compare", "--compare times rows on a GPU, and there is none"),
    ("-i bf16_untuned_gemm.csv --run_config", "--run_config times rows on a GPU, and there is none"),
)
def test_what_is_not_compared(words: str, complaint: str, /, output: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setattr(machine, "count_devices", lambda: 0)
    assert gradlib.main(words.split()) == 2 and complaint in capsys.readouterr().err
