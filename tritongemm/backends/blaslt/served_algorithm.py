"""One algorithm of the vendor's library made ready for a linear layer's operands, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritongemm.backends.blaslt import backend as blaslt
from tritongemm.core.config import Config
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.hip_ext.blaslt.matmul import PreparedMatmul
from tritongemm.hip_ext.blaslt.types import Algorithm
from tritongemm.runtime import captured_launch
from tritongemm.runtime.captured_launch import CapturedKernel
from tritongemm.runtime.patched_launch import PatchedLaunch

if TYPE_CHECKING:
    from tritongemm.hip_ext.driver import driver

_ALIGN = 16  # bytes that addresses are multiples of
_ANYWHERE = 1 << 20  # a bias is moved before it is used


class ServedAlgorithm:
    """An algorithm of the library; `tuned` and `first` make it.

    Args:
        problem: x [M, K] and w [N, K] dense, a bias along N or none.
        device: the current one.
        make: a plan for it, with the algorithm.

    Raises:
        LookupError: from `make`.
    """

    def __init__(
        self, problem: Problem, device: driver.Device, make: Callable[[], tuple[PreparedMatmul, Algorithm]]
    ) -> None:
        self._problem, self._make = problem, make
        self._made = make()
        self._kernels = self._learn(device)

    @property
    def learned(self) -> bool:
        """Whether its kernels are launched without the library."""
        return self._kernels is not None

    def bytes(self, buffer: str) -> int:
        """Bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return self._made[1].workspace if buffer == "workspace" else 0

    def bind(self, device: driver.Device) -> PatchedLaunch:
        """A launch for one thread, on the device that the plan was made for."""
        if self._kernels:
            return captured_launch.bind(device, self._kernels)
        # A bias lies in the descriptor, which threads must not share then.
        return self._call(*(self._made if self._problem.bias == "none" else self._make()))

    def _learn(self, device: driver.Device) -> tuple[CapturedKernel, ...] | None:
        """The kernels that the library would launch, where that can be told."""
        bound = self._call(*self._made)

        def queue(addresses: Mapping[str, int], stream: int) -> None:
            for name, address in addresses.items():
                bound.put(name)(address)
            bound.launch(stream)

        try:
            return captured_launch.capture_launches(device, tuple(bound.places), queue)
        except TritonGemmError:
            return None

    def _call(self, plan: PreparedMatmul, algorithm: Algorithm) -> PatchedLaunch:
        call = plan.moving(algorithm)
        places = {"a": call.put("b"), "b": call.put("a"), "c": call.put("d"), "workspace": call.put("workspace")}
        # An eight-bit C has no addend of its own type.
        if plan.matmul.c.dtype == plan.matmul.d.dtype:
            addend, result = call.put("c"), call.put("d")

            def put_c(address: int) -> None:
                addend(address)
                result(address)

            places["c"] = put_c
        if self._problem.bias == "n":
            places["bias"] = plan.move_bias
        return PatchedLaunch(places, call.launch)


def tuned_algorithm(problem: Problem, config: Config, index: int, device: driver.Device) -> ServedAlgorithm:
    """The algorithm that a record names.

    Args:
        problem: see `Solution`.
        config: as stored.
        index, device: the current device.

    Raises:
        LookupError: this version of the library has it not; says so.
    """
    found = blaslt.resolve(config, problem, blaslt.version())
    if found is None:
        raise LookupError(f"{blaslt.identity(config).name} is not in this version of the library")
    vendor = blaslt.library().table.vendor

    def make() -> tuple[PreparedMatmul, Algorithm]:
        fast = bool(config.option("fast"))
        plan = _plan(problem, index, blaslt.WORKSPACE_BYTES, blaslt.REQUESTED[vendor], fast=fast)
        algorithm = blaslt.find(plan, found, blaslt.version())
        if algorithm is None:
            raise LookupError(f"{found.name} is not offered for {problem.key}")
        return plan, algorithm

    return ServedAlgorithm(problem, device, make)


def torch_default(problem: Problem, compute: str, workspace: int, index: int, device: driver.Device) -> ServedAlgorithm:
    """The library's first choice.

    Args:
        problem: see `Solution`.
        compute: compute type.
        workspace: most bytes it may need.
        index, device: the current device.

    Raises:
        LookupError: there is none.
    """

    def make() -> tuple[PreparedMatmul, Algorithm]:
        plan = _plan(problem, index, workspace, 1, compute=compute)
        for algorithm in plan.heuristics(workspace):
            return plan, algorithm
        raise LookupError(f"nothing is offered for {problem.key}")

    return ServedAlgorithm(problem, device, make)


def _plan(problem: Problem, index: int, workspace: int, requested: int, **changes: Any) -> PreparedMatmul:
    library = blaslt.library()
    leads = (problem.k, problem.k, problem.n)
    matmul = replace(blaslt.to_matmul(problem, leads, (0, 0, 0), _ALIGN, library.table.vendor), **changes)
    if problem.bias == "n":
        matmul = replace(matmul, bias=_ANYWHERE, bias_dtype=problem.bias_dtype.name)
    return PreparedMatmul(library, matmul, index, workspace, requested)
