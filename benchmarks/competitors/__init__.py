"""Competitors of side_by_side.py, one file each.

A file defines

    NOTE                            one line on what it runs, for the output
    prepare(setting) -> Ready       tunes it for one size and says what to call

An exception that `prepare` or its calls raise is that competitor's refusal of the size; the others go on. A file whose
name starts with an underscore is shared by several.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import _common  # noqa: F401 (it puts the checkout on the path)

from tritongemm.core.problem import Problem
from tritongemm.core.target import Target

if TYPE_CHECKING:
    from competitors._tuned import Tuned
    from tritongemm.measure.operand_sets import OperandSets

BASELINE = "torch"
NAMES = (BASELINE, "inductor", "tunableop", "autotune", "ours", "ours_triton")


class Refused(Exception):
    """A competitor can't run a size; the text is the reason."""


@dataclass(frozen=True)
class Setting:
    """What a competitor is prepared for.

    Attributes:
        problem, target: the size and the GPU.
        bench: the operands, in copies that do not fit the cache together; `bench.stream` is torch's current stream.
        folder: a place of the run's own.
        autotune_configs: most configs `triton.autotune` is given.
        tuned: our own results.
        entered: competitors that are ready for this size.
    """

    problem: Problem
    target: Target
    bench: OperandSets
    folder: Path
    autotune_configs: int
    tuned: Tuned
    entered: tuple[str, ...]


@dataclass(frozen=True)
class Ready:
    """A competitor made ready for a size.

    Attributes:
        calls: one for each copy of the operands; a call fills that copy's C, or returns a tensor of its own.
        seconds: of tuning; None where there was none.
        detail: what else to write down, JSON values only.
        scope: context its calls run and are captured in.
        release: gives back what it holds.
        same: competitor whose call this is; it is not timed again, and `calls` is empty.
    """

    calls: list[Callable[[], object]] = field(default_factory=list)
    seconds: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    release: Callable[[], None] = lambda: None
    same: str = ""


def load(name: str) -> ModuleType:
    """The file of one competitor."""
    return importlib.import_module(f"competitors.{name}")
