"""Kernels whose assembly can't be edited, as where a version of Triton writes it otherwise, are slower but right."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.here import triton
from tests.gpu.test_numeric import usable
from tests.gpu.test_scales import SWAPPED
from tritongemm.backends.triton import assembly_edits, compiling
from tritongemm.backends.triton.assembly_edits import UnknownAssemblyError
from tritongemm.codegen.template_facts import exchanges_sums
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem, matrices
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family

CONFIGS = (
    Config("ws_tma", 64, 64, 128, 1, 2, 4, 6, (("ahead", 4),)),
    Config("ws_tma", 128, 128, 128, 2, 4, 8, 3),
    Config("ws_tma_swapped", 16, 64, 128, 1, 2, 4, 8, SWAPPED),
)


@pytest.mark.parametrize(("family", "dtype"), [("dense", "bf16"), ("a8w8", "int8"), ("a8w8_blockscale", "fp8e4m3fn")])
def test_splits_add_their_sums_through_memory(
    gpu: GpuEvaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    def refuse(assembly: str) -> str:
        raise UnknownAssemblyError("a new version")

    monkeypatch.setattr(assembly_edits, "edit", refuse)
    problem: Problem = registry.get(Family, family).problem(
        Problem(61, 528, 1040, *matrices(dtype, c="bf16", layout="TN"))
    )
    chosen = usable(problem, gpu.target, CONFIGS)
    if not chosen:
        pytest.skip("no kernels with warps that have roles on this target")
    for config in chosen:
        assert exchanges_sums(config)
        built, code, file = compiling.compile_job(triton().compile_job(config, problem, gpu.target))
        assert (built.status, built.launch["cluster"]) == ("ok", 1), built.reason
        (path := tmp_path / file).write_bytes(code)
        (trial,) = gpu.verify(problem, [replace(built, path=str(path), sha256=hashlib.sha256(code).hexdigest())])
        assert trial.status == "ok", f"{config.name}: {trial.reason}"
