import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.nouns import ArtifactCache, BuildPool, Dispatcher, Machine, MeasureProtocol, Patch
from tritongemm.hip_ext import machine
from tritongemm.measure.gpu_evaluator import GpuEvaluator


@pytest.fixture(scope="session")
def gpu_machine() -> Machine:
    found = machine.find_machine(None)
    if not found.devices:
        pytest.skip("no GPU")
    return found


@pytest.fixture(scope="session", autouse=True)
def gpu_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache of compiled kernels for the entire run, for processes that it starts too, and never the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("compiled")
        patch.setenv("TRITONGEMM_CACHE", str(folder))
        yield folder


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def dispatcher(monkeypatch: Patch, inference: None) -> Dispatcher:
    unloaded = Dispatcher()
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", unloaded)
    return unloaded


@pytest.fixture(autouse=True)
def share_of_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests of several pytest processes share the GPU, but one marked ``alone``, which takes all of its memory."""
    folder = tmp_path_factory.getbasetemp().parent
    with (folder / "gpu.lock").open("w") as held, (folder / "gpu.turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # so that the one that waits to be alone comes next
        fcntl.flock(held, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield


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
