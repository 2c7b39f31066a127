"""The public function `grouped_mm`, and the custom operator that torch.compile and torch.export trace for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.support import Support
from tritongemm.serving.api import default_dispatcher
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.grouped_call import MISALIGNED_BITS, GroupedCall
from tritongemm.serving.grouped_fallback import grouped
from tritongemm.serving.grouped_operands import GroupedOperands, as_kernels_read, check, check_extents, problem_of
from tritongemm.serving.operand_checks import check_encodings_on, check_values, is_wrapped, wants_gradient
from tritongemm.serving.torch_fallback import output_dtype
from tritongemm.serving.traced_operations import define_operation

_MOST_CALLS = 8192  # Shapes kept for one thread; sequences of any length must not fill the memory.
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
    if out_dtype is None:
        plain = scale_a is None and torch.overrides.is_tensor_like(a)
        out_dtype = output_dtype(a, None) if plain else torch.bfloat16
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
        ready, lasting = _resolve(dispatcher, operands)
        if lasting:
            if len(table) >= _MOST_CALLS:
                table.clear()
            table[key] = ready
    return ready(operands)


def _resolve(dispatcher: Dispatcher, operands: GroupedOperands) -> tuple[Callable[[GroupedOperands], Tensor], bool]:
    """What serves calls like this one, and whether that will be so the next time."""
    problem = problem_of(operands)
    if isinstance(problem, Support) or not operands.a.is_cuda or _wants_gradient(operands):
        return _checked, not _wants_gradient(operands)
    device = dispatcher.device(operands.a.get_device())
    if device is None:
        return _checked, False
    check_encodings_on(operands.a, operands.b, operands.scale_a, device)
    found = device.find_near(problem)
    if isinstance(found, Support):
        return _checked, True
    shape = (*operands.a.shape[:-1], operands.b.shape[2])
    call = GroupedCall(found.kernel, device.device, shape, operands.out_dtype)

    def serve(operands: GroupedOperands) -> Tensor:
        tensors = as_kernels_read(operands)
        if any(tensor.data_ptr() & MISALIGNED_BITS for tensor in tensors.values()) or _wants_gradient(operands):
            return grouped(operands)
        return call(tensors)

    return serve, True


def _checked(operands: GroupedOperands) -> Tensor:
    """PyTorch's product; on a CPU the numbers are looked at each time."""
    check(operands)
    return grouped(operands)


def _wants_gradient(operands: GroupedOperands) -> bool:
    return wants_gradient(*operands.tensors.values())


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
