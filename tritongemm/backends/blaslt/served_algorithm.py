"""Loads an algorithm of the vendor's library for the operands of a linear layer at any addresses.

It is one that won a record, or the one that PyTorch itself would launch, where PyTorch's request to the library is
known: PyTorch queries the library at every call, and takes its first proposal within PyTorch's workspace. Queried once
with the same workspace, the library proposes the same kernel; `tests/gpu/test_direct.py` compares the launches.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from tritongemm.backends.blaslt import algorithms as blaslt
from tritongemm.backends.blaslt import scale_modes
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.core.support import Support
from tritongemm.hip_ext.blaslt.matmul import PreparedMatmul
from tritongemm.hip_ext.blaslt.tables import Algorithm
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.launching import captured_launch
from tritongemm.hip_ext.launching.captured_launch import CapturedKernel
from tritongemm.hip_ext.launching.patched_launch import call_all

_ALIGNMENT_BYTES = 16  # what the addresses of operands are multiples of
# Bytes of PyTorch's workspace by bias, for each architecture, version of torch and version of CUDA on which the
# library, given these, was seen to launch the kernels that PyTorch launches.
WORKSPACE_BYTES = {("sm90", "2.11", "13.0"): {"none": 32 << 20, "n": 1 << 20}}
_DTYPES = ("bf16", "fp16", "fp32")
# Environment variables that begin so change what PyTorch asks for.
_VARIABLES = ("CUBLAS", "TORCH_BLAS", "TORCH_CUBLAS", "DISABLE_ADDMM_CUDA_LT")


class LoadedAlgorithm:
    """An algorithm of the library on a device.

    If the kernels that it launches can be captured, they are launched without the library. x [M, K] and w [N, K] are
    contiguous; `plan` prepares the product and picks the algorithm, or raises a LookupError.
    """

    def __init__(
        self, problem: Problem, device: driver.Device, plan: Callable[[], tuple[PreparedMatmul, Algorithm]]
    ) -> None:
        self._problem, self._plan = problem, plan
        self._planned = plan()
        self._kernels = self._capture(device)

    @property
    def captured(self) -> bool:
        """Whether its kernels are launched without the library."""
        return self._kernels is not None

    def bytes(self, buffer: str) -> int:
        """Return the bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return self._planned[1].workspace if buffer == "workspace" else 0

    def prepare(self, device: driver.Device) -> PatchedLaunch:
        """Prepare a launch for one thread, on the device that the algorithm was loaded on."""
        if self._kernels:
            return captured_launch.prepare_captured(device, self._kernels)
        # The descriptor holds a bias and scales; threads must not share it then.
        shared = self._problem.bias == "none" and self._problem.a.scaling is None
        return self._library_call(*(self._planned if shared else self._plan()))

    def _capture(self, device: driver.Device) -> tuple[CapturedKernel, ...] | None:
        """Return the kernels that the library would launch, where they can be captured."""
        call = self._library_call(*self._planned)

        def queue(addresses: Mapping[str, int], stream: int) -> None:
            for name, address in addresses.items():
                call.set_address(name)(address)
            call.launch(stream)

        try:
            return captured_launch.capture_launches(device, tuple(call.setters), queue)
        except TritonGemmError:
            return None

    def _library_call(self, plan: PreparedMatmul, algorithm: Algorithm) -> PatchedLaunch:
        """Return a call of the library. Its A is our B and its B our A, as it computes C transposed."""
        call = plan.moving(algorithm)
        setters = {"a": call.put("b"), "b": call.put("a"), "c": call.put("d"), "workspace": call.put("workspace")}
        # An eight-bit C has no addend of its own type.
        if plan.matmul.c.dtype == plan.matmul.d.dtype:
            setters["c"] = call_all((call.put("c"), call.put("d")))
        if self._problem.bias == "n":
            setters["bias"] = plan.move_bias
        if self._problem.a.scaling is not None:
            setters |= {"scale_a": partial(plan.move_scale, "b"), "scale_b": partial(plan.move_scale, "a")}
        return PatchedLaunch(setters, call.launch)


def load_tuned(record: Record, device_index: int, device: driver.Device) -> LoadedAlgorithm | Support:
    """Load the algorithm that won a record, or say why it can't be called here."""
    problem = record.problem
    if problem.batch > 1 and problem.extras:
        return Support("the library adds no bias to a batch, and scales none")
    if not (as_they_are := scale_modes.reads_as_they_are(problem)):
        return as_they_are
    try:
        config = blaslt.resolve(record.config, problem, blaslt.version())
        if config is None:
            return Support(f"{blaslt.identity(record.config).name} is not in this version of the library")
        return LoadedAlgorithm(problem, device, partial(_plan_config, problem, config, device_index))
    except (TritonGemmError, LookupError) as error:
        return Support(str(error))


def _plan_config(problem: Problem, config: Config, device_index: int) -> tuple[PreparedMatmul, Algorithm]:
    """Return the product of a problem's operands prepared, with the algorithm that a config names."""
    fast, requested = bool(config.option("fast")), blaslt.REQUESTED[blaslt.library().table.vendor]
    prepared = _prepare(problem, device_index, blaslt.WORKSPACE_BYTES, requested, fast=fast)
    algorithm = blaslt.find(prepared, config, blaslt.version())
    if algorithm is None:
        raise LookupError(f"{config.name} is not offered for {problem.key}")
    return prepared, algorithm


def load_first_choice(
    problem: Problem, precision: str, workspace_bytes: int, device_index: int, device: driver.Device
) -> LoadedAlgorithm:
    """Load the algorithm that the library itself proposes first, of at most `workspace_bytes`; a LookupError if none.

    float32 is multiplied as `precision` says, ``fp32`` or ``tf32``.
    """

    def plan() -> tuple[PreparedMatmul, Algorithm]:
        prepared = _prepare(problem, device_index, workspace_bytes, 1, compute=precision)
        for algorithm in prepared.heuristics(workspace_bytes):
            return prepared, algorithm
        raise LookupError(f"nothing is offered for {problem.key}")

    return LoadedAlgorithm(problem, device, plan)


def _prepare(
    problem: Problem, device_index: int, workspace_bytes: int, requested: int, **changes: Any
) -> PreparedMatmul:
    """Return the product of dense operands prepared, with `changes` to the fields of `Matmul`."""
    library = blaslt.library()
    apart = [prod(spec.shape) if spec.batch else 0 for spec in list(problem.operands.values())[:3]]
    matmul = blaslt.to_matmul(problem, problem.leads, apart, _ALIGNMENT_BYTES, library.table.vendor)
    scaled = blaslt.with_scales(matmul, problem)
    if scaled is None:
        raise LookupError(f"the library has no such scales as those of {problem.key}")
    matmul = replace(scaled, **changes)
    if problem.bias == "n":
        matmul = replace(matmul, bias=blaslt.ANY_ADDRESS, bias_dtype=problem.bias_dtype.name)
    return PreparedMatmul(library, matmul, device_index, workspace_bytes, requested)


def load_torch_default(
    problem: Problem, precision: str, device_index: int, device: driver.Device
) -> tuple[LoadedAlgorithm, int] | None:
    """Return the kernel that PyTorch itself would launch, and its bytes of workspace there; None if that is not known.

    The problem is of x [M, K] and w [N, K]; float32 is multiplied as `precision` says, ``fp32`` or ``tf32``.
    """
    workspace_bytes = torch_workspace_bytes(problem, device.arch)
    if workspace_bytes is None:
        return None
    try:
        kernel = load_first_choice(problem, precision, workspace_bytes, device_index, device)
    except (TritonGemmError, LookupError):
        return None
    return kernel, workspace_bytes


def torch_workspace_bytes(problem: Problem, arch: str) -> int | None:
    """Return the bytes of workspace that PyTorch, as it is set, gives the library; None if its kernel isn't known."""
    import torch

    release = ".".join(torch.__version__.split(".")[:2])
    known = WORKSPACE_BYTES.get((arch, release, torch.version.cuda or ""))
    dtypes = {problem.a.dtype, problem.b.dtype, problem.c.dtype}
    if known is None or len(dtypes) > 1 or problem.a.dtype not in _DTYPES or _changes_choice():
        return None
    # For these PyTorch calls another library, or none, or places a single number in memory differently.
    if problem.k == 1 or (problem.n == 1 and (problem.m == 1 or problem.bias == "n")):
        return None
    return known[problem.bias]


def _changes_choice() -> bool:
    """Return whether a setting changes PyTorch's choice."""
    import torch

    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    return (
        any(name.startswith(_VARIABLES) for name in os.environ)
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.tunable.is_enabled()
        or library not in (torch._C._BlasBackend.Default, torch._C._BlasBackend.Cublas)
        or matmul.allow_fp16_accumulation
        or not matmul.allow_bf16_reduced_precision_reduction
        or not matmul.allow_fp16_reduced_precision_reduction
        or torch._C._get_sm_carveout_experimental() is not None
    )
