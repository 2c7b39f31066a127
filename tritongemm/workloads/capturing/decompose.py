"""Which products a call of PyTorch becomes: it is run once more on tensors without memory, and watched."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tritongemm.workloads.capturing.product import BASIC, Product, of_aten, of_nothing, of_own, without_memory

OWN = "tritongemm."  # what the names of our own calls begin with; they are read, and not run again


class _Watching(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the products among the basic operations that are run under it."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation, self.products, self.seen = operation, list[Product](), False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or PyTorch would import its compiler for it, which takes seconds: `decompose` skips one that is there."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep it if it is a product."""
        name = func._schema.name.removeprefix("aten::")
        if name in BASIC:
            self.seen = True
            product = of_aten(self.operation, name, args, kwargs or {})
            self.products += [product] if product else []
        return func(*args, **(kwargs or {}))


def decompose(operation: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Product]:
    """Return the products that a call becomes.

    Returns:
        One or more; none where an operand is empty, or nothing but numbers are multiplied one by one.
    """
    if operation.startswith(OWN):
        return of_own(operation, args, kwargs)
    watching = _Watching(operation)
    given = (args, {k: v for k, v in kwargs.items() if k != "out"})
    operands = tree_map_only(Tensor, without_memory, given)
    follow = torch.compiler.disable(_follow) if "torch._dynamo" in sys.modules else _follow
    try:
        follow(watching, function, *operands)
    except Exception as error:  # it went well on the program's own tensors, so that only the watching failed
        if not watching.seen:
            return [of_nothing(operation, f"a call that can't be followed: {type(error).__name__}")]
    return watching.products


def _follow(watching: _Watching, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Run a function while its operations are watched."""
    with torch.no_grad(), watching:
        function(*args, **kwargs)
