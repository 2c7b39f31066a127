"""Functions for operations that have none in this package: those of files that were added to `operations`."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tritongemm.operations.contract import Operation, ProductOperation, every
from tritongemm.operations.torch_products import float32_precision
from tritongemm.serving import dispatcher as engine
from tritongemm.serving.traced_operations import define

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_FLOAT32 = torch.float32
_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_dispatch_stack
_grad = torch.is_grad_enabled


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
    operands = operation.operands

    def compute(*args: Any, **named: Any) -> Tensor:
        return _run(operation, operands(*args, **named))

    trace = define(operation, compute)

    def call(*args: Any, **named: Any) -> Tensor:
        given = operands(*args, **named)
        if _compiling() or _modes():
            result: Tensor = trace(*given)
            return result
        wanted = _grad()
        for one in given:
            if type(one) in _PLAIN:
                if wanted and one.requires_grad:
                    break
            elif isinstance(one, Tensor):
                break
        else:
            return _run(operation, given)
        return operation.make_fallback(operation.check(given))(*given)

    call.__name__ = call.__qualname__ = operation.name
    call.__doc__ = type(operation).__doc__
    return call


def _run(operation: ProductOperation, given: Any) -> Tensor:
    """Return the result for plain tensors that want no gradient."""
    key: list[Any] = [operation.name]
    try:
        for one in given:
            if type(one) in _PLAIN:
                dtype = one.dtype
                key += (one.shape, one.stride(), dtype, one.get_device())
                if dtype is _FLOAT32:
                    key.append(float32_precision())
            else:
                key.append(one)
    except RuntimeError:  # sparse tensors have no strides, nested ones no shape
        operation.check(given)
        raise
    of_call = tuple(key)
    call = engine.default.calls.table.get(of_call) or engine.default.resolve(operation, of_call, given)
    return call(*given)
