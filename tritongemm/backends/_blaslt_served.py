"""One algorithm of the vendor's library made ready for a linear layer's operands, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tritongemm.backends import blaslt
from tritongemm.bound import Bound
from tritongemm.config import Config
from tritongemm.hip_ext.blaslt import Algorithm
from tritongemm.hip_ext.blaslt_plan import Plan
from tritongemm.problem import Problem

_ALIGN = 16  # bytes that addresses are multiples of
_ANYWHERE = 1 << 20  # a bias is moved before it is used


class Solution:
    """A tuned algorithm of the library.

    Args:
        problem: x [M, K] and w [N, K] dense, a bias along N or none.
        config: as stored.
        device: ordinal of the current device.

    Raises:
        LookupError: this version of the library has it not; says so.

    Attributes:
        workspace: bytes it needs.
    """

    def __init__(self, problem: Problem, config: Config, device: int) -> None:
        self._problem, self._device = problem, device
        self._fast = bool(config.option("fast"))
        found = blaslt.resolve(config, problem, blaslt.version())
        if found is None:
            raise LookupError(f"{blaslt.identity(config).name} is not in this version of the library")
        self._config = found
        plan, algorithm = self._made()
        self._algorithm = algorithm
        self.workspace = algorithm.workspace
        self._shared = None if problem.bias != "none" else plan

    def _made(self) -> tuple[Plan, Algorithm]:
        problem, library = self._problem, blaslt.library()
        leads = (problem.k, problem.k, problem.n)
        matmul = blaslt.described(problem, leads, (0, 0, 0), _ALIGN, library.table.vendor)
        matmul = replace(matmul, fast=self._fast)
        if problem.bias == "n":
            matmul = replace(matmul, bias=_ANYWHERE, bias_dtype=problem.bias_dtype.name)
        plan = Plan(library, matmul, self._device, blaslt.WORKSPACE_BYTES, blaslt.REQUESTED[library.table.vendor])
        algorithm = blaslt.find(plan, self._config, blaslt.version())
        if algorithm is None:
            raise LookupError(f"{self._config.name} is not offered for {problem.key}")
        return plan, algorithm

    def bind(self) -> Bound:
        """A launch for one thread: a bias lies in the descriptor, which threads must not share then."""
        plan, algorithm = (self._shared, self._algorithm) if self._shared is not None else self._made()
        call, at = plan.caller(algorithm), dict.fromkeys(("a", "b", "c", "workspace"), 0)
        # An eight-bit C has no addend of its own type.
        added = plan.matmul.c.dtype == plan.matmul.d.dtype

        def put(name: str) -> Callable[[int], None]:
            return lambda address: at.__setitem__(name, address)

        def launch(stream: int) -> None:
            c = at["c"]
            call(at["b"], at["a"], c if added else 0, c, at["workspace"], stream)

        places: Mapping[str, Any] = {name: put(name) for name in at}
        if self._problem.bias == "n":
            places = {**places, "bias": plan.move_bias}
        return Bound(places, launch)
