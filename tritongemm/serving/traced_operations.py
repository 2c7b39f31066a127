"""Calls that torch.compile and torch.export trace as one operation, ``torch.ops.tritongemm.NAME``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

_DEVICES = ("CUDA", "CPU")
# Operations live as long as this object. Kernels want the strides that they were traced with.
_OPERATIONS: Final = torch.library.Library("tritongemm", "FRAGMENT")
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


def define_operation(schema: str, compute: Callable[..., Any], infer: Callable[..., Any]) -> None:
    """Make a call an operation of PyTorch.

    Args:
        schema: its name, arguments and results, as torch.library writes them.
        compute: what it does with tensors of a GPU or a CPU: a function of a module, which is looked up there at each
            call, so that a capture can stand in its place and see what compiled code asks for.
        infer: what it gives for tensors without contents: results of the right shapes and types.
    """
    name, place, attribute = schema.partition("(")[0], sys.modules[compute.__module__], compute.__name__

    def compute_now(*args: Any, **kwargs: Any) -> Any:
        return getattr(place, attribute)(*args, **kwargs)

    _OPERATIONS.define(schema, tags=_TAGS)
    for device in _DEVICES:
        _OPERATIONS.impl(name, compute_now, device)
    torch.library.register_fake(f"tritongemm::{name}", infer, lib=_OPERATIONS)
