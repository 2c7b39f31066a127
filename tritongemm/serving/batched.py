"""The public functions `bmm` and `scaled_bmm`, and the operators that torch.compile and torch.export trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.launch import StridePlaces
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.serving import CallSignature, LoadedKernel, Resolution
from tritongemm.core.support import Support
from tritongemm.operations.batched import (
    BatchOperands,
    BatchProduct,
    Strides,
    check_extents,
    check_out,
    check_shapes,
    read_batch,
    torch_bmm,
)
from tritongemm.operations.checks import check_eight_bits, check_encodings_on, check_tensors, is_wrapped
from tritongemm.operations.factors import why_none
from tritongemm.operations.torch_products import float32_precision, output_dtype
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ScaleLayout
from tritongemm.runtime.loaded_kernels import TunedKernel
from tritongemm.serving.api import default_dispatcher
from tritongemm.serving.batched_call import BatchedCall
from tritongemm.serving.calls import keep
from tritongemm.serving.dispatcher import CallAnswers, Dispatcher
from tritongemm.serving.traced_operations import define_operation

_NO_TENSORS = ("out_dtype", "scale_layout")
_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_compiling = torch.compiler.is_compiling
_grad = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_forward = torch.autograd.forward_ad


def bmm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a @ b (+ bias) for each product of a batch, with the tuned kernel for this size, else with PyTorch.

    For inference, as `mm`. A tuned kernel needs contiguous rows or columns in each matrix; the stride between products
    is arbitrary: views such as ``x.view(M, B, K).transpose(0, 1)`` are read in place. An operand that is expanded over
    the batch (a stride of 0) is shared by all products.

    Args:
        a: [B, M, K].
        b: [B, K, N], e.g. the transposed view of weights [B, N, K].
        bias: [N], [B, N] or [B, 1, N], or None.
        out_dtype: a's by default; float16 for fp8 and int32 for int8 operands.
        out: where the result is written; new memory by default.

    Returns:
        [B, M, N], ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes that do not fit together; at first use, if TRITONGEMM_CONFIG names a file that can't be read.
        DriverError: the driver refused a launch.
    """
    return _call(BatchOperands(a, b, bias, out_dtype, out=out))


def scaled_bmm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    scale_layout: str = "",
) -> Tensor:
    """Compute (a * scale_a) @ (b * scale_b) (+ bias) for each product of a batch of fp8, int8 or fp4, as `bmm`.

    Factors along K are read in place: those of each product must be contiguous, row-major or with K as the slower
    dimension, as their strides say; the stride between products is arbitrary, and 0 if they share factors.

    Args:
        a: [B, M, K]; for fp4 bytes [B, M, K / 2], two numbers each.
        b: [B, K, N], e.g. the transposed view of weights [B, N, K]; scale_b is transposed with it.
        scale_a: a float32 factor per row of a, [B, M] or [B, M, 1], or per 128 elements along K of a row, [B, M, K /
            128]; or a power of two (e8m0) per 32, [B, M, K / 32].
        scale_b: a float32 factor per column of b, [B, N] or [B, 1, N], or per 128 elements along K, for 128 columns [B,
            K / 128, N / 128] or for each [B, K / 128, N]; or a power of two per 32, [B, K / 32, N].
        bias: as for `bmm`.
        out_dtype: bfloat16, float16 or float32.
        out: as for `bmm`.
        scale_layout: "" if the strides of a product's factors give their layout, or a plug-in of numerics/scale_layouts
            that gives it, b's transposed as b is.

    Raises:
        TypeError, InputError, DriverError: as `bmm`.
    """
    if scale_a is None or scale_b is None:
        raise TypeError("scale_a and scale_b must be tensors, and go together")
    return _call(BatchOperands(a, b, bias, out_dtype, scale_a, scale_b, scale_layout, out))


def explain_bmm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_layout: str = "",
) -> str:
    """Say which kernel computes `bmm` or `scaled_bmm` of these operands, and why, as `tritongemm.explain` does.

    Raises:
        TypeError, InputError: as `bmm`.
    """
    if scale_a is not None and out_dtype is None:
        out_dtype = torch.bfloat16
    operands = _checked(BatchOperands(a, b, bias, out_dtype, scale_a, scale_b, scale_layout))
    return str(_Resolver(default_dispatcher(), operands).answers)


def _call(operands: BatchOperands) -> Tensor:
    if _compiling():
        return _traced(operands)
    tensors = _tensors(operands)
    casts = operands.scale_a is None and _autocast()  # which leaves eight bits as they are
    in_a_mode = _modes() or casts or _tracing() is not None or _forward._current_level >= 0
    plain = all(type(t) in _PLAIN and not is_wrapped(t) and not (t.requires_grad and _grad()) for t in tensors)
    if plain and not in_a_mode:
        return run(default_dispatcher(), operands)
    operands = _checked(operands)
    wants_gradient = _grad() and any(t.requires_grad for t in tensors)
    if _modes() and not wants_gradient and _tracing() is None:
        return _traced(operands)  # make_fx, fake tensors and the like see one operation
    return torch_bmm(operands)


def run(dispatcher: Dispatcher, operands: BatchOperands) -> Tensor:
    """Compute the product of plain tensors that need no gradient.

    Raises:
        InputError: as `bmm`.
    """
    a, b, bias, out_dtype, scale_a, scale_b, layout, out = operands
    places = a.get_device(), b.get_device()
    try:
        key: tuple[Any, ...] = (a.shape, a.stride(), b.shape, b.stride(), a.dtype, b.dtype, places, out_dtype, layout)
        key += (float32_precision(),) if a.dtype is torch.float32 else ()
        for name, t in (("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b), ("out", out)):
            if t is not None:
                key += (name, t.shape, t.stride(), t.dtype, t.get_device())
    except RuntimeError:  # sparse tensors have no strides
        _checked(operands)
        raise
    call = dispatcher.calls.table.get(key)
    if call is None or not a.is_cuda:
        _checked(operands)
    if call is None:
        call = _resolve(dispatcher, key, operands)
    return call(operands)


def _resolve(dispatcher: Dispatcher, key: tuple[Any, ...], operands: BatchOperands) -> Callable[..., Tensor]:
    """What serves calls of a key, kept in the thread's table for the next one."""
    dense = check_shapes(operands)
    found = _Resolver(dispatcher, dense)
    ready: Callable[..., Tensor] = _torch_bmm
    device = found.answers.device
    if found.kernel is not None and device is not None:
        shape = (operands.a.shape[0], operands.a.shape[1], operands.b.shape[2])
        try:
            call = BatchedCall(found.kernel, device.device, shape, output_dtype(operands.a, operands.out_dtype))
            ready = call if _shares_memory(operands, dense) else partial(_call_dense, call)
        except (TritonGemmError, LookupError):
            if found.answers.resolution.kind == "exact":
                raise
    if found.answers.resolution.lasting:
        keep(dispatcher.calls.table, key, ready)
    return ready


def _torch_bmm(operands: BatchOperands) -> Tensor:
    return torch_bmm(check_shapes(operands))


def _call_dense(call: BatchedCall, operands: BatchOperands) -> Tensor:
    return call(check_shapes(operands))


def _shares_memory(operands: BatchOperands, dense: BatchOperands) -> bool:
    """Whether none of a call's vectors had to be copied to be dense."""
    addresses = [[t.data_ptr() for t in given if t is not None] for given in map(_vectors, (operands, dense))]
    return addresses[0] == addresses[1]


def _vectors(operands: BatchOperands) -> tuple[Tensor | None, ...]:
    return operands.bias, operands.scale_a, operands.scale_b


class _Resolver:
    """Who serves a call.

    Args:
        dispatcher: has the records and the loaded kernels.
        operands: the call's, checked.

    Attributes:
        answers: of the sources of kernels.
        kernel: a record's, or that of PyTorch that it names, on operands that lie as the call's do; None where PyTorch
            computes.
    """

    def __init__(self, dispatcher: Dispatcher, operands: BatchOperands) -> None:
        self.kernel: LoadedKernel | None = None
        a = operands.a
        product = read_batch(operands) if a.is_cuda else Support(f"a is on {a.device}; tuned kernels run on a GPU")
        if isinstance(product, Support):
            self.answers = CallAnswers.pytorch(product.reason)
            return
        precision = float32_precision() if operands.a.dtype is torch.float32 else "fp32"
        readings = [CallSignature(problem, precision) for problem in product.readings()]
        if not readings and product.scalings is not None:
            self.answers = CallAnswers.pytorch(why_none(product.problem, *product.scalings))
            return
        self.answers = dispatcher.answer(readings, operands.a.get_device())
        kernel, device = self.answers.resolution.kernel, self.answers.device
        if device is not None and 1 in (operands.a.element_size(), operands.b.element_size()):
            check_encodings_on(operands.a, operands.b, operands.scale_a, device.target)
        if kernel is None or device is None:
            return
        record = self.answers.resolution.record
        if record is None:
            return
        moved = _moved(kernel, record, product)
        if isinstance(moved, Support):
            refusal = Resolution("fallback", f"{product.problem.key}: {moved}")
            self.answers = replace(self.answers, resolution=refusal)
        else:
            self.kernel = moved


def _moved(kernel: LoadedKernel, record: Record, product: BatchProduct) -> LoadedKernel | Support:
    """A record's kernel, which is bound to the call's M, on operands that lie as the call's do."""
    problem = record.problem.at(product.problem.m)
    strides: dict[str, Strides] = product.moved(problem)
    if not strides:
        return kernel
    if not isinstance(kernel, TunedKernel):
        return Support(f"{record.winner} reads dense operands alone; {', '.join(strides)} lie otherwise")
    places = kernel.strides or _stride_places(record, problem)
    launch = places if isinstance(places, Support) else places.move(kernel.launch, strides)
    return launch if isinstance(launch, Support) else replace(kernel, launch=launch)


def _stride_places(record: Record, problem: Problem) -> StridePlaces | Support:
    """Where launches of a record's kernel have the strides of operands, asked of its backend."""
    from tritongemm.plugins.contracts import KernelBackend
    from tritongemm.serving import winners

    backend = winners.find_winner(record)
    if isinstance(backend, Support):
        return backend  # a machine that serves a library may lack what the backend needs
    if not isinstance(backend, KernelBackend):
        return Support(f"{record.winner} reads dense operands alone")
    return backend.stride_places(record.config, problem)


def _tensors(operands: BatchOperands) -> list[Any]:
    a, b, bias, _, scale_a, scale_b, _, out = operands
    return [a, b, *(t for t in (bias, scale_a, scale_b, out) if t is not None)]


def _checked(operands: BatchOperands) -> BatchOperands:
    """The operands with their vectors flat.

    Raises:
        TypeError: one is no tensor.
        InputError: shapes, layouts or devices that do not belong together.
    """
    named = operands._asdict()
    check_tensors({n: t for n, t in named.items() if n in ("a", "b") or (n not in _NO_TENSORS and t is not None)})
    if operands.scale_a is not None and operands.dtypes != ("fp4e2m1", "fp4e2m1"):
        check_eight_bits(operands.a, operands.b, operands.out_dtype)
    if operands.scale_layout:
        registry.get(ScaleLayout, operands.scale_layout)
    return check_shapes(operands)


def _traced(operands: BatchOperands) -> Tensor:
    """The call as torch.compile and torch.export trace it; the operation gives new memory, which is copied to `out`."""
    *given, out = operands
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(operands))
    if operands.scale_a is None and (wants_gradient or torch.is_autocast_enabled("cuda")):
        return torch_bmm(check_shapes(operands))
    result: Tensor = _trace(*given)
    if out is None:
        return result
    check_out(operands)
    return out.copy_(result)


def _operation(*given: Any, **named: Any) -> Tensor:
    return run(default_dispatcher(), BatchOperands(*given, **named)).contiguous()


def _differentiable(*given: Any) -> Tensor:
    return torch_bmm(check_shapes(BatchOperands(*given)))


def _fake(*given: Any, **named: Any) -> Tensor:
    operands = BatchOperands(*given, **named)
    a, b = operands.a, operands.b
    check_extents(a, b)
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=output_dtype(a, operands.out_dtype))


_trace = define_operation(
    "bmm(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None, Tensor? scale_a=None, "
    "Tensor? scale_b=None, str scale_layout='') -> Tensor",
    _operation,
    _fake,
    _differentiable,
)
