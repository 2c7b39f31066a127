"""The public function `grouped_mm`, and the custom operator that torch.compile and torch.export trace for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.serving import CallSignature
from tritongemm.core.support import Support
from tritongemm.operations.checks import check_encodings_on, check_values, is_wrapped, wants_gradient
from tritongemm.operations.grouped import GroupedOperands, check, check_extents, grouped, problem_of
from tritongemm.operations.torch_products import output_dtype
from tritongemm.serving.api import default_dispatcher
from tritongemm.serving.calls import keep
from tritongemm.serving.dispatcher import CallAnswers, Dispatcher
from tritongemm.serving.grouped_call import GroupedCall
from tritongemm.serving.traced_operations import define_operation

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scale_layout: str = "",
) -> Tensor:
    """Multiply each group's rows of a by the group's own matrix of b, with a tuned kernel, else with PyTorch.

    For inference. The number of rows of each group is read on the GPU without synchronising, so the call can be
    captured in a graph. Group ends that do not add up are detected on the CPU only; on a GPU no row beyond a's is
    accessed.

    Args:
        a: [M, K], the rows of the groups one after another; or [groups, rows, K]. For fp4 bytes with two numbers each,
            along K of a and b.
        b: [groups, K, N], as ``torch._grouped_mm`` takes it: pass weights [groups, N, K] as their ``mT``.
        offs: int32 [groups]: the end row of each group; for a [groups, rows, K] the number of rows of each group.
        scale_a: None; float32 [M] (one factor per row), or [M, K / 128] (per 128 elements along K of a row); for a
            [groups, rows, K] with the groups first. Or a power of two (e8m0) per 32, [M, K / 32].
        scale_b: None; float32 [groups, N], or [groups, N / 128, K / 128]; or e8m0 [groups, N, K / 32].
        out_dtype: by default bfloat16 with scale factors, else that of `mm`.
        scale_layout: "" for powers of two in rows, or a plug-in of numerics/scale_layouts that gives their layout: a's
            factors of all rows together, padded, and b's of each group.

    Returns:
        [M, N] or [groups, rows, N], contiguous, ordered on the current stream. Rows that belong to no group are
            undefined.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes, types or devices that do not fit together.
        DriverError: the driver refused a launch.
    """
    out_dtype = _result_type(a, scale_a, out_dtype)
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        result: Tensor = _trace(a, b, offs, scale_a, scale_b, out_dtype, scale_layout)
        return result
    return _run_checked(GroupedOperands(a, b, offs, scale_a, scale_b, out_dtype, scale_layout))


def _run_checked(operands: GroupedOperands) -> Tensor:
    """As `grouped_mm`, after a look at the caller's factors, which is for a CPU alone."""
    if operands.scale_a is not None and operands.scale_b is not None:
        check_values(scale_a=operands.scale_a, scale_b=operands.scale_b)
    return run(default_dispatcher(), operands)


def run(dispatcher: Dispatcher, operands: GroupedOperands) -> Tensor:
    """Compute `grouped_mm` with a dispatcher's records, without checking the values of the scale factors."""
    given = operands.tensors
    if any(type(tensor) not in _PLAIN or is_wrapped(tensor) for tensor in given.values()):
        check(operands)
        return grouped(operands)
    try:
        key: tuple[Any, ...] = (
            "grouped_mm",
            operands.out_dtype,
            operands.scale_layout,
            *((t.shape, t.stride(), t.dtype, t.device) for t in given.values()),
        )
    except RuntimeError:  # sparse tensors have no strides
        check(operands)
        raise
    table: dict[Any, Any] = dispatcher.calls.table
    ready: Callable[[GroupedOperands], Tensor] | None = table.get(key)
    if ready is None:
        check(operands)
        ready = _resolve(dispatcher, key, operands)
    return ready(operands)


def _resolve(
    dispatcher: Dispatcher, key: tuple[Any, ...], operands: GroupedOperands
) -> Callable[[GroupedOperands], Tensor]:
    """What serves calls of a key, kept in the thread's table for the next one."""
    answers = ask(dispatcher, operands)
    resolution, device = answers.resolution, answers.device
    ready: Callable[[GroupedOperands], Tensor] = _checked
    if resolution.kernel is not None and device is not None:
        shape = (*operands.a.shape[:-1], operands.b.shape[2])
        try:
            ready = GroupedCall(resolution.kernel, device.device, shape, operands.out_dtype)
        except (TritonGemmError, LookupError):
            if resolution.kind == "exact":
                raise
    if resolution.lasting:
        keep(dispatcher.calls.table, key, ready)
    return ready


def ask(dispatcher: Dispatcher, operands: GroupedOperands) -> CallAnswers:
    """Who serves a call, and why.

    Raises:
        InputError: an fp8 encoding that this GPU does not read.
    """
    problem = problem_of(operands)
    if isinstance(problem, Support):
        return CallAnswers.pytorch(problem.reason)
    if not operands.a.is_cuda:
        return CallAnswers.pytorch(f"a is on {operands.a.device}; tuned kernels run on a GPU")
    if wants_gradient(*operands.tensors.values()):
        return CallAnswers.pytorch("an operand wants a gradient", lasting=False)
    index = operands.a.get_device()
    device = dispatcher.device(index)
    if device is not None and 1 in (operands.a.element_size(), operands.b.element_size()):
        check_encodings_on(operands.a, operands.b, operands.scale_a, device.target)
    return dispatcher.answer([CallSignature(problem)], index)


def explain_grouped(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scale_layout: str = "",
) -> str:
    """Say which kernel computes `grouped_mm` of these operands, and why, as `tritongemm.explain` does.

    Raises:
        TypeError, InputError: as `grouped_mm`.
    """
    operands = GroupedOperands(a, b, offs, scale_a, scale_b, _result_type(a, scale_a, out_dtype), scale_layout)
    check(operands)
    return str(ask(default_dispatcher(), operands))


def _result_type(a: Tensor, scale_a: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return output_dtype(a, None) if scale_a is None and torch.overrides.is_tensor_like(a) else torch.bfloat16


def _checked(operands: GroupedOperands) -> Tensor:
    """PyTorch's product; on a CPU the numbers are looked at each time."""
    check(operands)
    return grouped(operands)


def _operation(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype,
    scale_layout: str = "",
) -> Tensor:
    return _run_checked(GroupedOperands(a, b, offs, scale_a, scale_b, out_dtype, scale_layout))


def _differentiable(*given: Any, **named: Any) -> Tensor:
    return grouped(GroupedOperands(*given, **named))


def _fake(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype,
    scale_layout: str = "",
) -> Tensor:
    check_extents(a, b)
    return a.new_empty((*a.shape[:-1], b.shape[2]), dtype=out_dtype)


_trace = define_operation(
    "grouped_mm(Tensor a, Tensor b, Tensor offs, Tensor? scale_a, Tensor? scale_b, ScalarType out_dtype, "
    "str scale_layout='') -> Tensor",
    _operation,
    _fake,
    _differentiable,
)
