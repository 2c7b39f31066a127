"""Opens what measuring needs of a machine: its GPUs, a new process on each on demand, and compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from tritongemm.build.pool import BuildPool
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.plugins.contracts import Evaluator
from tritongemm.runtime.machine import Machine

OpenEvaluator: TypeAlias = "Callable[[], Evaluator]"  # starts a new process on one device


@dataclass(frozen=True)
class MeasuringTools:
    """The tools that measure.

    Attributes:
        machine: with at least one GPU.
        openers: one for each device.
        pool: compiles kernels that the cache lacks.
        protocol: how times are taken.
    """

    machine: Machine
    openers: Sequence[OpenEvaluator]
    pool: BuildPool
    protocol: MeasureProtocol


# Calls the function with the tools, or raises a TargetError where there is no GPU; closes them at the end.
OpenTools: TypeAlias = "Callable[[str], AbstractContextManager[MeasuringTools]]"
