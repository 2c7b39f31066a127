"""What the GPU tests share: this machine's GPU, a cache of their own, and the folder is skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.runtime import machine
from tritongemm.runtime.machine import Machine


@pytest.fixture(scope="session")
def gpu_machine() -> Machine:
    found = machine.find_machine(None)
    if not found.devices:
        pytest.skip("no GPU")
    return found


@pytest.fixture(scope="session")
def gpu_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of compiled kernels for the whole run."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def gpu(gpu_machine: Machine) -> Iterator[GpuEvaluator]:
    """The first device, with little rotation and few launches: these tests are about right and wrong."""
    protocol = MeasureProtocol(rotating_mb=0, iters=20, warmup=1)
    one = GpuEvaluator(gpu_machine.target, gpu_machine.vendor, gpu_machine.devices[0], protocol, timeout_s=60.0)
    yield one
    one.close()


@pytest.fixture(scope="module")
def compiler(gpu_cache: Path) -> Iterator[BuildPool]:
    one = BuildPool(ArtifactCache(gpu_cache))
    yield one
    one.close()
