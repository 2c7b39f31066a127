"""Functions for operations that have none in this package: those of files that were added to `operations`."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tritongemm.operations.checks import wants_gradient
from tritongemm.operations.contract import Operation, ProductOperation, every
from tritongemm.operations.torch_products import float32_precision
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.traced_operations import define

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


@cache
def function_of(name: str) -> Callable[..., Tensor]:
    """Return the function of an operation, whose file has its name.

    Raises:
        AttributeError: the file holds none, or one that computes several products.
    """
    operation = next((one for one in every() if one.name == name), None)
    if not isinstance(operation, ProductOperation):
        raise AttributeError(f"{Operation.package}.{name} holds no operation {name} that one kernel computes")
    return make_function(operation)


def make_function(operation: ProductOperation) -> Callable[..., Tensor]:
    """Return the function that computes an operation by a tuned kernel, else as it does itself."""

    def compute(*args: Any, **named: Any) -> Tensor:
        return _run(operation, operation.operands(*args, **named))

    trace = define(operation, compute)

    def call(*args: Any, **named: Any) -> Tensor:
        given = operation.operands(*args, **named)
        tensors = [one for one in given if isinstance(one, Tensor)]
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            result: Tensor = trace(*given)
            return result
        if all(type(one) in _PLAIN for one in tensors) and not wants_gradient(*tensors):
            return _run(operation, given)
        return operation.make_fallback(operation.check(given))(*given)

    call.__name__ = call.__qualname__ = operation.name
    call.__doc__ = type(operation).__doc__
    return call


def _run(operation: ProductOperation, given: Any) -> Tensor:
    """Return the result for plain tensors that want no gradient."""
    key: tuple[Any, ...] = operation.name, float32_precision()
    for one in given:
        key += (one.shape, one.stride(), one.dtype, one.get_device()) if isinstance(one, Tensor) else (one,)
    dispatcher = default_dispatcher()
    call = dispatcher.calls.table.get(key) or dispatcher.resolve(operation, key, given)
    return call(*given)
