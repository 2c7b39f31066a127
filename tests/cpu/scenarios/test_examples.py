import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import ROOT
from tests.support.evaluators import passed
from tests.support.nouns import Backend, Capsys, Config, Defaults, KernelBackend, Patch, load_target, registry, sizes
from tests.support.plugins import dropped
from tests.support.reports import problem, result, write_results
from tritongemm.cli import check, convert, library, lookup, report
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.serving import dispatcher
from tritongemm.serving.dispatcher import Dispatcher

EXAMPLES = ROOT / "examples"
MEASURED = EXAMPLES / "results/h200_48_sizes.yaml"
QUICK = ("--target", "gfx1100", "--budget", "1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch, without_gpu: None) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    monkeypatch.setattr(dispatcher, "default", Dispatcher())
    yield tmp_path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Measured results of an H200: those of the examples, or two made up where the file is not there."""
    made = [result(problem(m, 64, 64), 1e-6 * m, config=Config("tile", 16, 16, 32)) for m in (1, 16)]
    return MEASURED if MEASURED.is_file() else write_results(tmp_path / "h200.yaml", made)


def run(monkeypatch: Patch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_tune_from_python(monkeypatch: Patch, capfd: Capsys) -> None:
    run(monkeypatch, "tune_from_python.py", "--nk", "16", "16", *QUICK)
    out = capfd.readouterr().out
    assert out.startswith("Predicted, not measured") and "0 of 3 rows serve, as no GPU is here" in out
    assert "fallback: x is on cpu" in out and Path("tuned.yaml").is_file()


def test_capture_and_tune(monkeypatch: Patch, capfd: Capsys) -> None:
    run(monkeypatch, "capture_and_tune.py", "--width", "16", *QUICK)
    out = capfd.readouterr().out
    assert '"count": 3' in out and "4x16x32_bf16_TN_biasn" in out and "0 of 2 linear layers are served" in out


def test_serve_a_model(results: Path, monkeypatch: Patch, capfd: Capsys) -> None:
    run(monkeypatch, "serve_model.py", str(results), "--tokens", "2")
    out = capfd.readouterr().out
    assert "0 of 15 linear layers are served" in out and "10 of 10 tokens agree" in out


def test_serve_vllm(results: Path, monkeypatch: Patch, capfd: Capsys) -> None:
    """On a stand-in: the plug-in finds the variables when the engine starts."""
    seen: list[tuple[str, ...]] = []

    class Engine:
        def __init__(self, model: str) -> None:
            from tritongemm.system import settings

            seen.append((model, *map(str, settings.tuned_configs())))

        def generate(self, prompts: list[str], sampling: object) -> list[object]:
            return []

    vllm = ModuleType("vllm")
    vars(vllm).update(LLM=Engine, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    for name in ("TRITONGEMM_CONFIG", "TRITONGEMM_LOG"):
        monkeypatch.setenv(name, "")
    run(monkeypatch, "serve_vllm.py", str(results), "MODEL")
    assert seen == [("MODEL", str(results))]


def test_own_backend(tmp_path: Path, monkeypatch: Patch) -> None:
    with dropped(Backend, EXAMPLES / "own_backend.py", tmp_path, monkeypatch) as name:
        backend, target, size = registry.get(KernelBackend, name), load_target("gfx942"), problem(33, 48, 64)
        configs = backend.candidates(size, target)
        assert [config.block_n for config in configs] == [16, 64, 64]
        artifact, code, file = backend.compile(backend.compile_job(configs[0], size, target))
        assert code.startswith(b"\x7fELF") and file.endswith(".hsaco") and backend.launch(artifact, size, target)


def test_read_results(results: Path, monkeypatch: Patch, capfd: Capsys) -> None:
    run(monkeypatch, "read_results.py", str(results))
    *rows, mean, winners = capfd.readouterr().out.splitlines()
    assert len(rows) in (2, 48) and mean.startswith("geometric mean of the gains: 1.") and "triton" in winners


def test_commands_on_the_results(results: Path, capfd: Capsys) -> None:
    """A few rows are packed and checked, as each takes a second to compile."""
    assert report.main([str(results), "-o", "report.html"]) == 0
    n = "4096" if results == MEASURED else "64"
    assert lookup.main([str(results), "-m", "16", "-n", n, "-k", n, "-dtype_a", "bf16"]) == 0
    assert convert.main([str(results), "-o", "bf16_tuned_gemm.csv"]) == 0
    records = [row.record for row in sizes.from_file(results, Defaults()) if row.record is not None]
    few = write_results(Path("few.yaml"), [record for record in records if record.winner == "triton"][:2])
    assert library.main(["build", str(few), "-o", "kernels.zip"]) == 0
    assert check.main(["kernels.zip"]) in (0, 1)  # 1 where the rows were compiled by another Triton
    out = capfd.readouterr().out
    assert "exact: " in out and "report.html: " in out
