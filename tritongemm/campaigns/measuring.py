"""What measuring needs of a machine: its GPUs, a fresh process on each whenever one is asked for, and compilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core import settings
from tritongemm.core.errors import TargetError
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins.contracts import Evaluator
from tritongemm.runtime.machine import Machine, count_devices, find_machine

_TIMEOUT_SECONDS = 60.0  # One candidate, or one compile, may take so long.

OpenEvaluator: TypeAlias = "Callable[[], Evaluator]"  # starts a fresh process on one device


@dataclass(frozen=True)
class MeasuringTools:
    """What measures.

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


@contextmanager
def open_tools(devices: Sequence[int], what: str, protocol: MeasureProtocol | None = None) -> Iterator[MeasuringTools]:
    """The tools on this machine, closed at the end.

    Args:
        devices: ordinals.
        what: what measures, for the error.
        protocol: how times are taken; None for the usual way.

    Raises:
        TargetError: there is no GPU.
    """
    if not devices or not count_devices():
        raise TargetError(
            f"{what} measures, and no GPU driver with a device was found here; copy the folder to a machine that has "
            "the GPU, and run the same command there"
        )
    machine, how = find_machine(None, ",".join(map(str, devices))), protocol or MeasureProtocol()
    openers = [
        partial(GpuEvaluator, machine.target, machine.vendor, device, how, _TIMEOUT_SECONDS)
        for device in machine.devices
    ]
    with closing(BuildPool(ArtifactCache(settings.cache_folder()), timeout=_TIMEOUT_SECONDS)) as pool:
        yield MeasuringTools(machine, openers, pool, how)
