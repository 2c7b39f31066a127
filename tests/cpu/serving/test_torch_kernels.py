import ctypes
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.linear_layers import StandInDriver, problem, run_on_cpu, stand_in_device
from tests.support.nouns import Operand, apart
from tritongemm.backends.blaslt import algorithms as blaslt
from tritongemm.backends.blaslt import served_algorithm
from tritongemm.hip_ext.blaslt import library as blaslt_library
from tritongemm.hip_ext.blaslt import tables as blaslt_tables
from tritongemm.serving import stored_kernels
from tritongemm.serving.launching import FastCall
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.serving.stored_kernels import TorchKernels

MATMUL = torch.backends.cuda.matmul


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(
        served_algorithm, "WORKSPACE_BYTES", {("sm90", release, torch.version.cuda or ""): {"none": 4096, "n": 64}}
    )
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_known_problems_and_what_pytorch_computes_by_itself(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3), "sm90") == 4096
    assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3, "n", "fp16"), "sm90") == 64
    assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3), "gfx942") is None
    assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3, dtype="fp32"), "sm90") == 4096
    assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3, dtype="int8"), "sm90") is None
    assert served_algorithm.torch_workspace_bytes(replace(problem(1, 2, 3), c=Operand("fp32")), "sm90") is None
    assert served_algorithm.torch_workspace_bytes(problem(2, 1, 3), "sm90") == 4096
    for other in (problem(2, 1, 3, "n"), problem(1, 1, 3), problem(2, 3, 1), problem(2, 3, 1, "n")):
        assert served_algorithm.torch_workspace_bytes(other, "sm90") is None
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3), "sm90") is None


SETTINGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "environment": lambda patch: patch.setenv("CUBLASLT_WORKSPACE_SIZE", "64"),
    "deterministic": lambda patch: patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True),
    "TunableOp": lambda patch: patch.setattr(torch.cuda.tunable, "is_enabled", lambda: True),
    "library": lambda patch: patch.setattr(
        torch.backends.cuda, "preferred_blas_library", lambda: torch._C._BlasBackend.Cublaslt
    ),
    "half the units": lambda patch: patch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 66),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_changes_pytorchs_choice(known: None, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    SETTINGS[setting](monkeypatch)
    assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3), "sm90") is None


@apart(
    ("allow_bf16_reduced_precision_reduction", False),
    ("allow_fp16_reduced_precision_reduction", False),
    ("allow_fp16_accumulation", True),
)
def test_a_precision_that_changes_pytorchs_choice(name: str, value: bool, /, known: None) -> None:
    before = getattr(MATMUL, name)
    try:
        setattr(MATMUL, name, value)
        assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3), "sm90") is None
    finally:
        setattr(MATMUL, name, before)
    assert served_algorithm.torch_workspace_bytes(problem(1, 2, 3), "sm90") == 4096


@dataclass
class Gpu:
    driver: StandInDriver
    device: ServingDevice
    library: blaslt_library.Library


@pytest.fixture
def gpu(known: None, monkeypatch: pytest.MonkeyPatch, blaslt_libraries: Path, tmp_path: Path) -> Gpu:
    made = shutil.copy(blaslt_libraries / "nvidia.so", tmp_path / "blaslt.so")
    library = blaslt_library.Library(blaslt_tables.TABLES["nvidia"], ctypes.CDLL(str(made)))
    monkeypatch.setattr(blaslt, "library", lambda: library)
    monkeypatch.setattr(blaslt, "vendor", lambda: "nvidia")
    run_on_cpu(monkeypatch)
    driver = StandInDriver()
    return Gpu(driver, stand_in_device(driver_device=driver), library)


@pytest.mark.parametrize("bias", ["none", "n"])
def test_it_computes_and_is_asked_for_once(gpu: Gpu, bias: str) -> None:
    found = TorchKernels(gpu.device)
    solution = found.find(problem(4, 8, 16, bias, "fp32"), "fp32")
    assert solution is not None and found.find(problem(4, 8, 16, bias, "fp32"), "fp32") is solution
    need = solution.bytes("workspace")
    assert need <= {"none": 4096, "n": 64}[bias] and (gpu.device.workspaces is not None) == bool(need)
    call = FastCall(solution, gpu.device, (4, 8), torch.float32)
    x, w, added = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8) if bias == "n" else None
    torch.testing.assert_close(call(x, w, added, None), torch.nn.functional.linear(x, w, added))


def test_float32_is_asked_for_in_each_precision(gpu: Gpu) -> None:
    found, float32 = TorchKernels(gpu.device), problem(4, 8, 16, dtype="fp32")
    kept = [found.find(float32, compute) for compute in ("fp32", "tf32", "fp32", "tf32")]
    assert kept[:2] == kept[2:] and kept[0] is not kept[1]
    for solution, number in zip(kept, (68, 77), strict=False):
        assert solution is not None
        call = FastCall(solution, gpu.device, (4, 8), torch.float32)
        call(torch.randn(4, 16), torch.randn(8, 16), None, None)
        assert ctypes.c_int.in_dll(gpu.library._library, "fake_compute").value == number


def test_the_workspace_grows_to_what_pytorch_gives(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    found = TorchKernels(gpu.device)
    heavy = SimpleNamespace(bytes=lambda buffer: 100)
    monkeypatch.setattr("tritongemm.backends.blaslt.served_algorithm.load_first_choice", lambda *_: heavy)
    assert found.find(problem(4, 8, 16, dtype="fp32"), "fp32") is heavy
    grown = gpu.device.workspaces
    assert grown is not None and grown.workspace_bytes == 4096
    found.find(problem(5, 8, 16, dtype="fp32"), "fp32")
    assert gpu.device.workspaces is grown


def test_without_memory_or_an_algorithm_pytorch_is_called(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    ctypes.c_int.in_dll(gpu.library._library, "fake_none").value = 1
    assert TorchKernels(gpu.device).find(problem(4, 8, 16, dtype="fp32"), "fp32") is None
    found = TorchKernels(gpu.device)
    heavy = SimpleNamespace(bytes=lambda buffer: 100)
    monkeypatch.setattr("tritongemm.backends.blaslt.served_algorithm.load_first_choice", lambda *_: heavy)
    gpu.driver.full = True
    assert found.find(problem(4, 8, 16, dtype="fp32"), "fp32") is None and gpu.device.workspaces is None


def test_a_capture_does_not_ask(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    found = TorchKernels(gpu.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert found.find(problem(4, 8, 16, dtype="fp32"), "fp32") is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    known = found.find(problem(4, 8, 16, dtype="fp32"), "fp32")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert known is not None and found.find(problem(4, 8, 16, dtype="fp32"), "fp32") is known


def test_it_forgets_rather_than_fill_the_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_kernels, "_MOST_KERNELS", 2)
    found = TorchKernels(gpu.device)
    for m in range(1, 8):
        found.find(problem(m, 8, 16, dtype="fp32"), "fp32")
    assert len(found._kernels) <= 2
