"""benchmarks/library_load.py: its library has as many kernels as are asked for, no two of one binary."""

import importlib

import pytest

from tritongemm.build import prepare
from tritongemm.core.artifact import CompileJob
from tritongemm.search_spaces import loader


@pytest.mark.parametrize("arch", ["sm90", pytest.param("gfx942", marks=pytest.mark.heavy)])
def test_its_kernels_are_distinct(arch: str) -> None:
    script, target = importlib.import_module("library_load"), loader.load_target(arch)
    records = script.records(target, 200)
    jobs = [prepare.compile_job(record.problem, record.config, target) for record in records]
    assert len({job.digest for job in jobs if isinstance(job, CompileJob)}) == 200
    assert len({record.problem for record in records}) == 200
    assert {record.problem.kind for record in records} == {"one", "batched"}
    assert sum(record.problem.a.scaling is not None for record in records) >= 10
