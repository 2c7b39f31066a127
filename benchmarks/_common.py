"""What the benchmarks share: the checkout on Python's path, and a size's operands and a GPU as the tuner uses them.

A benchmark imports it before anything of tritongemm, so that it runs from any folder and without an install.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
sys.path[:0] = [folder for folder in (str(BENCHMARKS), str(ROOT)) if folder not in sys.path]

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tritongemm.core.problem import Problem
    from tritongemm.hip_ext.machine import Machine
    from tritongemm.measure.gpu_evaluator import GpuEvaluator
    from tritongemm.measure.operand_sets import OperandSets

CANDIDATE_LIMIT_S = 60.0  # Seconds that the process of `open_gpu` waits for one candidate.


def command_environment(**more: str) -> dict[str, str]:
    """The environment of a command that imports this checkout, and what PYTHONPATH has already."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def make_operands(problem: Problem, here: Machine, stream: int) -> OperandSets:
    """The operands of a problem on the machine's first GPU, in copies, as the tuner's races have them.

    Args:
        problem: whose operands are made.
        here: the machine, with at least one GPU.
        stream: handle of the stream that all work runs on; PyTorch's current one.
    """
    from tritongemm.core.protocol import MeasureProtocol
    from tritongemm.hip_ext.driver import driver
    from tritongemm.measure.jobs import MeasureSetup
    from tritongemm.measure.operand_sets import OperandSets

    index = here.devices[0]
    setup = MeasureSetup(problem, here.target, MeasureProtocol(), here.vendor, index)
    return OperandSets(setup, driver.open_driver(here.vendor).device(index), stream)


def read_numbers(text: str) -> list[int]:
    """The whole numbers of an argument, which have commas between them."""
    return [int(word) for word in text.split(",") if word]


def read_shapes(text: str) -> list[tuple[int, ...]]:
    """The shapes of an argument, such as ``4096x7168,7168x2048``."""
    return [tuple(map(int, word.split("x"))) for word in text.split(",")]


def gpu_seconds(queue: Callable[[], object], times: int = 1) -> float:
    """Seconds that the GPU needs for `count` calls on the current stream, one after another."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        queue()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def time_calls(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds that one of these calls takes on the current stream, after one that warms up; at least 1."""
    import torch

    def call_each() -> None:
        for call in calls:
            call()

    calls[0]()
    torch.cuda.synchronize()
    return max(1.0, 1e6 * gpu_seconds(call_each) / len(calls))


def open_gpu(here: Machine) -> GpuEvaluator:
    """The machine's first GPU as the tuner uses it, by the tuner's own protocol; the caller closes it."""
    from tritongemm.core.protocol import MeasureProtocol
    from tritongemm.measure.gpu_evaluator import GpuEvaluator

    return GpuEvaluator(here.target, here.vendor, here.devices[0], MeasureProtocol(), CANDIDATE_LIMIT_S)
