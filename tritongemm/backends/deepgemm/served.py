"""Loads a product of DeepGEMM for operands at any addresses.

The package's kernel is launched directly where it can be captured (`hip_ext.launching.captured_launch`); elsewhere
the package is called, with tensors made at the addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tritongemm.backends._accepted import accepts
from tritongemm.backends._scales import coverage, has_shape
from tritongemm.backends.deepgemm import package
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.integers import cdiv
from tritongemm.core.operands import Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.launching import captured_launch


def load(record: Record, device_index: int, device: driver.Device) -> LoadedProduct | Support:
    """Return a record's product, or why it can't be called at any addresses."""
    if not (as_they_are := _reads_as_they_are(record.problem)):
        return as_they_are
    try:
        return LoadedProduct(record, device_index, device)
    except (TritonGemmError, RuntimeError, LookupError) as error:
        return Support(str(error).partition("\n")[0])


class LoadedProduct:
    """A product on a device, whose factors the package reads without a copy.

    A LookupError is raised where the package refuses the problem, a RuntimeError without memory for its operands.
    """

    def __init__(self, record: Record, device_index: int, device: driver.Device) -> None:
        self._problem, self._place = record.problem, _device(device_index)
        self._overlap = bool(record.config.option("overlap"))
        self._places = _places(record.problem)
        if not accepts(package.product(self._problem, self._own_tensors(), self._overlap)):
            raise LookupError(f"this version of deep_gemm refuses {self._problem.key}")
        self._kernels = self._capture(device)

    @property
    def captured(self) -> bool:
        """Whether its kernel is launched without the package."""
        return self._kernels is not None

    def bytes(self, buffer: str) -> int:
        """Return the bytes of a buffer that the runtime owns, which is 0: the package needs none."""
        return 0

    def prepare(self, device: driver.Device) -> PatchedLaunch:
        """Return a launch for one thread."""
        if self._kernels:
            return captured_launch.prepare_captured(device, self._kernels)
        addresses = dict.fromkeys(self._places, 0)
        return PatchedLaunch(
            {name: partial(addresses.__setitem__, name) for name in addresses}, partial(self._call, addresses)
        )

    def _own_tensors(self) -> dict[str, Tensor]:
        import torch

        return {
            name: torch.empty_strided(shape, strides, dtype=dtype, device=self._place)
            for name, (shape, strides, dtype) in self._places.items()
        }

    def _call(self, addresses: Mapping[str, int], stream: int) -> None:
        """Call the package with operands at addresses, on the stream of a handle."""
        tensors = {name: tensor_at(addresses[name], *where, self._place) for name, where in self._places.items()}
        with _on_stream(stream, self._place):
            package.product(self._problem, tensors, self._overlap)()

    def _capture(self, device: driver.Device) -> tuple[captured_launch.CapturedKernel, ...] | None:
        try:
            return captured_launch.capture_launches(device, tuple(self._places), self._call)
        except (TritonGemmError, RuntimeError):
            return None


def _reads_as_they_are(problem: Problem) -> Support:
    """Return whether the package reads a problem's factors without a copy."""
    if not coverage(problem):
        return SUPPORTED
    wanted = {
        "scale_a": (package.groups(problem), package.padded_rows(problem)),
        "scale_b": (cdiv(problem.n, SCALED_BLOCK), package.groups(problem)),
    }
    for name, shape in wanted.items():
        if not has_shape(problem, name, shape):
            have = problem.operands[name].shape
            return Support(f"DeepGEMM wants {name} as {list(shape)} in memory, not {list(have)}")
    return SUPPORTED


def _places(problem: Problem) -> dict[str, tuple[tuple[int, int], tuple[int, int], Any]]:
    """Return the shape, strides and type of each tensor that the package is given."""
    import torch

    m, n, k = problem.m, problem.n, problem.k
    types = {name: getattr(torch, spec.dtype.torch) for name, spec in problem.operands.items()}
    found = {
        "a": ((m, k), (k, 1) if problem.a.row_major else (1, m), types["a"]),
        "b": ((n, k), (1, n) if problem.b.row_major else (k, 1), types["b"]),
        "c": ((m, n), (n, 1), types["c"]),
    }
    if coverage(problem):
        groups = package.groups(problem)
        found["scale_a"] = ((m, groups), (1, package.padded_rows(problem)), torch.float32)
        found["scale_b"] = ((cdiv(n, SCALED_BLOCK), groups), (groups, 1), torch.float32)
    return found


def tensor_at(address: int, shape: tuple[int, int], strides: tuple[int, int], dtype: Any, place: Any) -> Tensor:
    """Return a tensor over memory that the caller owns."""
    import torch

    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    storage = torch._C._construct_storage_from_data_pointer(address, place, (last + 1) * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=place).set_(storage, 0, shape, strides)


def _device(index: int) -> Any:
    import torch

    return torch.device("cuda", index)


def _on_stream(stream: int, place: Any) -> Any:
    """Make a stream PyTorch's current one."""
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=place))
