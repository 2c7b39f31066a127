"""Subclasses of tensors that compute PyTorch's functions themselves, as those of quantised weights do.

Such a class finds what it computes in a table whose keys are PyTorch's functions. One that was made while the hooks
stood has the hooks as its keys, an older one PyTorch's own functions, and each is asked for what it has.
"""

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any
from weakref import WeakSet

from torch import Tensor


class Overriding:
    """Reports classes that were made while the hooks stood from older ones."""

    def __init__(self) -> None:
        self._before = WeakSet(_subclasses(Tensor))

    def choose(
        self, args: Sequence[Any], hook: Callable[..., Any], original: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        """Return the function of a class among the arguments; None where none computes functions itself."""
        kinds = [kind for kind in map(type, args) if issubclass(kind, Tensor) and _computes(kind)]
        if not kinds:
            return None
        return original if all(kind in self._before for kind in kinds) else hook


def _computes(kind: Any) -> bool:
    """Return whether a class has a function of its own; a parameter has switched it off."""
    method = kind.__torch_function__
    return isinstance(method, MethodType) and method.__func__ is not Tensor.__torch_function__.__func__


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)
