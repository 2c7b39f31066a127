"""Counters of calls of a layer: a function that stands in PyTorch's place, counts what it knows, and calls PyTorch.

What a call costs is one look-up by the weight's identity and the number of x's elements. Neither a shape nor a dtype is
read: the weight has them. `session` forgets all weights every few seconds, so that one that was given other memory is
read again.
"""

import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from tritongemm.core.errors import OutputError
from tritongemm.system.temporary_folder import TemporaryFolder

_SOURCE = Path(__file__).with_name("counter.c")
_MODULE = "tritongemm_counter"
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 30.0  # of a file that takes a third of one


class Counter(Protocol):
    """Counts calls by their weight and the size of x."""

    function: Callable[..., Tensor]

    def slot(self) -> int:
        """Add a count that begins at 0; its number."""

    def read(self, slot: int) -> int:
        """Return the number of calls that a count has."""

    def learn(self, weight: int, elements: int, has_bias: bool, slot: int) -> None:
        """Count calls in a slot from now on, by the weight's identity, which lives until forgotten, and what x has."""

    def forget(self, weight: int) -> None:
        """Count no more calls of a weight."""

    def clear(self) -> None:
        """Count no more calls of any weight."""


def make_counter(layer: Callable[..., Tensor], first: Callable[..., Tensor]) -> Counter:
    """Return a counter of a layer's calls: in C, or in Python without a compiler or Python's headers."""
    native = _compiled()
    if native is None:
        return PythonCounter(layer, first)
    counter: Counter = native.Counter(layer, first, Tensor.numel)
    return counter


@cache
def _compiled() -> ModuleType | None:
    """Return the module of counter.c, compiled in every process, which takes less than checking who made a file."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return None
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(_SOURCE)]
    try:
        with TemporaryFolder() as folder:
            built = folder / f"{_MODULE}.so"
            subprocess.run([*command, "-o", str(built)], check=True, capture_output=True, timeout=_COMPILE_SECONDS)
            loader = ExtensionFileLoader(_MODULE, str(built))
            module = module_from_spec(ModuleSpec(_MODULE, loader, origin=str(built)))
            loader.exec_module(module)
            return module
    except (OSError, ImportError, OutputError, subprocess.SubprocessError):  # e.g. nothing may be run from /tmp
        return None


class PythonCounter:
    """A counter where there is no compiler; a call costs what a function of Python does."""

    def __init__(self, layer: Callable[..., Tensor], first: Callable[..., Tensor]) -> None:
        self._counts: list[list[int]] = []
        self._plain: dict[int, dict[int, list[int]]] = {}
        self._biased: dict[int, dict[int, list[int]]] = {}
        self.function = self._make_function(layer, first)

    def _make_function(self, layer: Callable[..., Tensor], first: Callable[..., Tensor]) -> Callable[..., Tensor]:
        plain, biased = self._plain, self._biased

        def linear(*args: Any, **named: Any) -> Tensor:
            try:
                x, weight, bias = args if len(args) == 3 else (*args, None)
                (plain if bias is None else biased)[id(weight)][x.numel()][0] += 1
            except (KeyError, TypeError, ValueError, AttributeError):  # also of symbolic numbers, and other arguments
                return first(*args, **named)
            return layer(*args, **named)

        return linear

    def slot(self) -> int:
        """Add a count that begins at 0; its number."""
        self._counts.append([0])
        return len(self._counts) - 1

    def read(self, slot: int) -> int:
        """Return the number of calls that a count has."""
        return self._counts[slot][0]

    def learn(self, weight: int, elements: int, has_bias: bool, slot: int) -> None:
        """Count calls from now on."""
        by_weight = self._biased if has_bias else self._plain
        by_weight.setdefault(weight, {})[elements] = self._counts[slot]

    def forget(self, weight: int) -> None:
        """Count no more calls of a weight."""
        self._plain.pop(weight, None)
        self._biased.pop(weight, None)

    def clear(self) -> None:
        """Count no more calls of any weight."""
        self._plain.clear()
        self._biased.clear()
