"""Calls that torch.compile and torch.export trace as one operation, ``torch.ops.tritongemm.NAME``."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.operations.contract import Operation

_DEVICES = ("CUDA", "CPU")
computed: Final = SimpleNamespace()  # what computes each operation, by its name
# Operations live as long as this object. Kernels want the strides that they were traced with.
_OPERATIONS: Final = torch.library.Library("tritongemm", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))


def define_operation(
    schema: str,
    compute: Callable[..., Any],
    infer: Callable[..., Any],
    differentiable: Callable[..., Tensor] | None = None,
) -> Callable[..., Any]:
    """Make a call an operation of PyTorch, and one more that has gradients, as that costs each call some time.

    Args:
        schema: its name, arguments and results, as torch.library writes them.
        compute: what it does with tensors of a GPU or a CPU; it is looked up in `computed` at each call, so that a
            capture can stand in its place and see what compiled code asks for.
        infer: what it gives for tensors without contents: results of the right shapes and types.
        differentiable: the same result by PyTorch's operations, whose gradients are the operation's; None where it has
            none, or is not traced where one is wanted.

    Returns:
        What traces a call with these arguments: as the second operation where a gradient is wanted.
    """
    name = schema.partition("(")[0]
    setattr(computed, name, compute)

    def compute_now(*args: Any, **kwargs: Any) -> Any:
        return getattr(computed, name)(*args, **kwargs)

    def infer_together(*args: Any, **kwargs: Any) -> Any:
        _check_together(name, (*args, *kwargs.values()))
        return infer(*args, **kwargs)

    _define(schema, compute_now, infer_together)
    plain: Callable[..., Any] = getattr(torch.ops.tritongemm, name)
    if differentiable is None:
        return plain
    of_training = f"{name}_with_gradients"
    _define(schema.replace(name, of_training, 1), compute_now, infer_together)
    _define_gradients(schema, of_training, differentiable)
    other = getattr(torch.ops.tritongemm, of_training)

    def trace(*given: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in given)
        return other(*given) if wanted else plain(*given)

    return trace


def define(operation: Operation, compute: Callable[..., Any], has_gradients: bool = True) -> Callable[..., Any]:
    """Define an operation's operator, as `define_operation`."""

    def infer(*args: Any, **named: Any) -> Tensor:
        return operation.infer(operation.operands(*args, **named))

    def differentiable(*args: Any) -> Tensor:
        return operation.fallback(operation.check(operation.operands(*args)))

    return define_operation(operation.schema, compute, infer, differentiable if has_gradients else None)


def _define(schema: str, compute: Callable[..., Any], infer: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _OPERATIONS.define(schema, tags=_TAGS)
    for device in _DEVICES:
        _OPERATIONS.impl(name, compute, device)
    torch.library.register_fake(f"tritongemm::{name}", infer, lib=_OPERATIONS)


def _check_together(name: str, given: Sequence[Any]) -> None:
    """Refuse tensors of several devices, which a tracer would let pass: it never sees the checks of a call."""
    devices = {str(value.device): None for value in given if isinstance(value, Tensor)}
    if len(devices) > 1:
        raise InputError(f"{name}: the operands are on {' and '.join(devices)}; move them to one device")


def _define_gradients(schema: str, operation: str, differentiable: Callable[..., Tensor]) -> None:
    """Give an operation gradients: those of a product that PyTorch computes once more, in an operation of its own.

    Tracers can't look into that product, which asks its operands for values.
    """
    name, _, rest = schema.partition("(")
    arguments, of_gradients = rest.rpartition(")")[0], f"{name}_gradients"

    def compute(gradient: Tensor, wanted: Sequence[bool], *given: Any) -> list[Tensor]:
        leaves = [
            value.detach().requires_grad_(asked) if isinstance(value, Tensor) else value
            for value, asked in zip(given, wanted, strict=True)
        ]
        asked_for = [leaf for leaf, asked in zip(leaves, wanted, strict=True) if asked]
        with torch.enable_grad():
            result = differentiable(*leaves)
        given_back = torch.autograd.grad(result, asked_for, gradient, allow_unused=True) if result.requires_grad else ()
        found = [one for one in given_back if one is not None]
        if len(found) < len(asked_for):
            raise InputError(f"{name} has no gradient for an operand that wants one; call it under torch.no_grad()")
        return [one.clone(memory_format=torch.contiguous_format) for one in found]

    def infer(gradient: Tensor, wanted: Sequence[bool], *given: Any) -> list[Tensor]:
        return [value.new_empty(value.shape) for value, asked in zip(given, wanted, strict=True) if asked]

    def keep(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs))

    def differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        given = [other if saved is None else saved for saved, other in pairs]
        wanted = [bool(asked) for asked in ctx.needs_input_grad]
        found = iter(getattr(torch.ops.tritongemm, of_gradients)(gradient, wanted, *given))
        return tuple(next(found) if asked else None for asked in wanted)

    _define(f"{of_gradients}(Tensor gradient, bool[] wanted, {arguments}) -> Tensor[]", compute, infer)
    torch.library.register_autograd(f"tritongemm::{operation}", differentiate, setup_context=keep, lib=_OPERATIONS)
