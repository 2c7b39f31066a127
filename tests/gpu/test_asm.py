import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gpu.test_commands import run
from tests.support.nouns import Backend, Config, KernelBackend, Machine, Patch, Problem, Record, matrices, registry
from tritongemm.backends.asm.manifest import read
from tritongemm.build.pool import BuildPool
from tritongemm.codegen import modules
from tritongemm.export import kernel_manifest
from tritongemm.hip_ext.compilers import toolchain
from tritongemm.measure.gpu_evaluator import GpuEvaluator

SIZE = Problem(250, 512, 1024, *matrices("bf16", layout="TN"))
BIASED = Problem(64, 320, 520, *matrices(), bias="n")
CONFIGS = [Config("tile", 64, 64, 64, 4, 1, 4, 3), Config("tile", 64, 128, 64, 1, 2, 4, 3)]


@pytest.fixture(scope="module")
def manifests(gpu_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Kernels of both problems, as `tritongemm export` writes them."""
    folder, arch = tmp_path_factory.mktemp("exported"), gpu_machine.target.name
    if not arch.startswith("sm"):
        pytest.skip("tiles of this test are for NVIDIA")
    paths: list[Path] = []
    for index, config in enumerate(CONFIGS):
        records = [Record(p, arch, config, "triton", 1e-6, 0.0, "events") for p in (SIZE, BIASED)]
        paths += kernel_manifest.export(records, folder / str(index), gpu_machine)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITONGEMM_ASM_MANIFESTS", ":".join(map(str, paths)))
        yield paths


@pytest.mark.parametrize("problem", [SIZE, BIASED, Problem(77, 528, 2048, *matrices("bf16", layout="TN"))])
def test_exported_kernels_are_right_and_race(
    manifests: list[Path], gpu: GpuEvaluator, gpu_machine: Machine, compiler: BuildPool, problem: Problem
) -> None:
    configs = registry.get(KernelBackend, "asm").candidates(problem, gpu_machine.target)
    assert len(configs) == 2
    built = list(
        compiler.stream(registry.get(KernelBackend, "asm").compile_job(c, problem, gpu_machine.target) for c in configs)
    )
    assert [b.status for b in built] == ["ok", "ok"], [b.reason for b in built]
    assert all(t.status == "ok" for t in gpu.screen(problem, built, float("inf")))
    final = gpu.race(problem, built, "torch")
    assert [t.status for t in final.trials] == ["ok", "ok"], [t.reason for t in final.trials]
    assert all(t.error is not None and t.tolerance and t.error <= t.tolerance for t in final.trials)
    assert len(final.samples) == 3


def test_ptx_runs(
    manifests: list[Path],
    gpu: GpuEvaluator,
    gpu_machine: Machine,
    compiler: BuildPool,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    """The same kernel from its PTX, assembled by ptxas for this GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    facts, config = gpu_machine.target, CONFIGS[0]
    wanted = registry.get(KernelBackend, "triton").compile_job(config, SIZE, facts).identity
    kernel = getattr(modules.run_text(wanted["source"], config.template), config.template)
    types = {**wanted["signature"], **dict.fromkeys(wanted["constants"], "constexpr")}
    known = {n: 16 for n, t in wanted["signature"].items() if t.startswith("*")} | wanted["divisors"]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", d]] for n, d in known.items()}
    source = ASTSource(kernel, types, wanted["constants"], attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", int(facts.name[2:]), 32), options=wanted["options"])
    (tmp_path / "kernel.ptx").write_text(compiled.asm["ptx"])
    row = next(r for r in read(manifests[0]) if r.others["dtypes"] == "bf16")
    text = manifests[0].read_text().replace(row.object, "kernel.ptx")
    (tmp_path / "kernels.csv").write_text("\n".join(x for x in text.splitlines() if "bf16" in x or "knl" in x) + "\n")
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", str(tmp_path / "kernels.csv"))
    (chosen,) = registry.get(KernelBackend, "asm").candidates(SIZE, facts)
    built = compiler.build(registry.get(KernelBackend, "asm").compile_job(chosen, SIZE, facts))
    assert built.status == "ok", built.reason
    assert Path(built.path).read_bytes() == toolchain.assemble(tmp_path / "kernel.ptx", facts.name)
    (trial,) = gpu.verify(SIZE, [built])
    assert trial.status == "ok", trial.reason


def test_tuned_checked_timed_and_served(manifests: list[Path], tmp_path: Path, monkeypatch: Patch) -> None:
    import torch

    import tritongemm

    bad = tmp_path / "bad"
    shutil.copytree(manifests[0].parent, bad)
    for code in bad.glob("*.cubin"):
        code.write_bytes(code.read_bytes()[:1000])
    (bad / "kernels.csv").write_text((bad / "kernels.csv").read_text().replace("tile__", "truncated__"))
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", ":".join(map(str, [*manifests, bad / "kernels.csv"])))
    out, profile = tmp_path / "out.yaml", tmp_path / "all.csv"
    size = ("-m", "250", "-n", "512", "-k", "1024", "-col_b", "-dtype_a", "bf16", "-o", str(out))
    status, said = run(*size, "--libtype", "asm", "--compare", "--profile_file", str(profile))
    assert status == 0, said
    (row,) = yaml.safe_load(out.read_text())
    assert row["backend"] == "asm" and row["library"] == "torch"
    assert "truncated" in profile.read_text() and "compile_failed" in profile.read_text()
    stored = ("--gemm_size_file", str(out), "-o", str(tmp_path / "other.yaml"))
    status, said = run(*stored, "--compare_wo_tuning")
    assert status == 0 and "1 of 1 results are right" in said, said
    status, said = run(*stored, "--benchmark")
    assert status == 0 and "graph-events" in said, said
    won = tmp_path / "won.yaml"  # whichever was faster, the kernel must be servable
    won.write_text(yaml.safe_dump([{**row, "winner": "asm"}]))
    tritongemm.load(won)
    x = torch.randn(250, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    assert tritongemm.explain(x, w).startswith("exact: asm.tile")
    torch.testing.assert_close(tritongemm.mm(x, w), x @ w.T, rtol=2e-2, atol=0.5)
    status, said = run(*size[:-1], str(tmp_path / "torch.yaml"), "--libtype", "torch", "--compare")
    assert status == 0, said
    (row,) = yaml.safe_load((tmp_path / "torch.yaml").read_text())
    assert row["winner"] == row["backend"] == "torch" and row["error"] <= row["tolerance"]
    assert registry.available(Backend, "asm")
