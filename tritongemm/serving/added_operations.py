"""Functions of operations that one kernel computes: `linear_w4`, `linear_act`, and those of added files."""

from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.epilogues import GATED, IN_BLOCKS, RESIDUAL, RUN, activation_of, rows_of_factors
from tritongemm.core.helper_kernel import ACTIVATIONS
from tritongemm.core.problem import PLAIN
from tritongemm.hip_ext.launching import native_calls
from tritongemm.operations.checks import PLAIN_TYPES, wants_more
from tritongemm.operations.contract import Operation, ProductOperation, ReadyCall, every
from tritongemm.operations.linear_act import ActivatedLayer, ActivatedOperands, parts, quantised_operands
from tritongemm.operations.linear_w4 import FOUR_BIT_LAYER
from tritongemm.operations.torch_products import DTYPE_NAMES, float32_precision
from tritongemm.serving import dispatcher as engine
from tritongemm.serving.calls import CallKey
from tritongemm.serving.mixtures import steps_for
from tritongemm.serving.products import serve_calls
from tritongemm.serving.traced_operations import define

_FLOAT32 = torch.float32
_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_dispatch_stack


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
    find, run, serve = serve_calls(operation, partial(key_of, operation.name))
    trace = define(operation, lambda *args, **named: serve(*operands(*args, **named)))

    def call(*args: Any, **named: Any) -> Tensor:
        given = operands(*args, **named)
        if _compiling() or _modes():
            result: Tensor = trace(*given)
            return result
        served: Tensor | None = native_calls.serve(find, engine.default.calls.compiled, *given)
        if served is not None:
            return served
        if wants_more(*(one for one in given if isinstance(one, Tensor))):
            return operation.make_fallback(operation.check(given))(*given)
        return run(*given)

    call.__name__ = call.__qualname__ = operation.name
    call.__doc__ = type(operation).__doc__
    return call


def key_of(*given: Any) -> CallKey:
    """Return the key of a call; float32 has PyTorch's precision in it."""
    key: list[Any] = []
    for one in given:
        if type(one) in PLAIN_TYPES:
            dtype = one.dtype
            key += (one.shape, one.stride(), dtype, one.get_device())
            if dtype is _FLOAT32:
                key.append(float32_precision())
        else:
            key.append(one)
    return tuple(key)


def linear_w4(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    order: str = PLAIN,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_x: Tensor | None = None,
) -> Tensor:
    """Compute x @ (weight * scale).T (+ bias) with the tuned kernel for this size, else with PyTorch.

    The weight is int4, whose bits are the number plus 8, with a factor for each 32, 64 or 128 numbers along K, and
    zero points if they have some, or fp4 (e2m1) with a power of two for each 32 (mxfp4) or a factor for each 16
    (nvfp4). `pack_gptq`, `pack_awq`, `pack_compressed_tensors`, `pack_mxfp4` and `pack_nvfp4` convert checkpoints'
    weights: ``linear_w4(x, *packed, bias=bias)``. PyTorch dequantises the weight at each call.

    Args:
        x: [..., K] of bfloat16 or float16, contiguous for tuned kernels; with `scale_x` of fp8 or int8.
        weight: bytes [N, K / 2], each of two numbers, the earlier one in the low half, or as `order` says.
        scale: [K / 32, N], [K / 64, N] or [K / 128, N] in x's type of int4, or [K / 128, 2, N] with the zero points,
            less 8, of each group behind its factors; of fp4 e8m0 [N, K / 32] or bfloat16 [K / 16, N].
        order: memory layout of the weight: ``plain``, or a plug-in of numerics/weight_layouts, e.g. ``halves_128``.
        bias: [N] or None.
        out_dtype: x's by default, bfloat16 with `scale_x`; bfloat16, float16 or float32.
        scale_x: None; float32 for each row of x, or of fp8 [..., K / 128] as of `quantize`; e8m0 [..., K / 32] beside
            fp4. Factors of int4 are in bfloat16 then.

    Returns:
        [..., N], contiguous, ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes, dtypes or devices that do not fit together.
        DriverError: the driver refused a launch.

    Examples:
        >>> weight = torch.randint(0, 256, (32, 128), dtype=torch.uint8)
        >>> tritongemm.linear_w4(torch.randn(4, 256).half(), weight, torch.ones(2, 32).half()).shape
        torch.Size([4, 32])
    """
    return _call(x, weight, scale, order, bias, out_dtype, scale_x)


def linear_act(
    x: Tensor,
    w: Tensor,
    act: str,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Tensor:
    """Compute act(x @ w.T + bias) with the tuned kernel for this size, else with PyTorch in two steps.

    With ``silu_mul``, ``gelu_mul`` and ``gelu_tanh_mul`` w holds gate and up, whose rows alternate by 8 as
    `interleave_gate_up` writes them, and the result is act(gate) * up: SwiGLU and GeGLU without the round trip of the
    product through memory. Tune such sizes with ``--epilogue``.

    Args:
        x: [..., K], contiguous for tuned kernels.
        w: [N, K], contiguous for tuned kernels.
        act: ``silu``, ``gelu``, ``gelu_tanh``, ``relu``, or one of gate and up.
        bias: [N] or None.
        out_dtype: x's by default, bfloat16 beside scale factors; a type of floats.
        scale_a: None, or factors of an x of fp8 or int8, as for `scaled_mm`.
        scale_b: None, or factors of w, interleaved as its rows are.

    Returns:
        [..., N], or of gate and up [..., N / 2], contiguous, ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes, dtypes or devices that do not fit together, or no such activation.
        DriverError: the driver refused a launch.

    Examples:
        >>> w = tritongemm.interleave_gate_up(torch.randn(32, 64), torch.randn(32, 64))
        >>> tritongemm.linear_act(torch.randn(4, 64), w, "silu_mul").shape
        torch.Size([4, 32])
    """
    return _call_act(x, w, act, bias, out_dtype, scale_a, scale_b)


def linear_add(
    x: Tensor,
    w: Tensor,
    residual: Tensor,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Tensor:
    """Compute x @ w.T + residual with the tuned kernel for this size, else with the tuned product and an addition.

    Tune such sizes with ``--epilogue add``.

    Args:
        x: as for `linear_act`.
        w: as for `linear_act`.
        residual: [..., N] of the result's type, contiguous for tuned kernels; it is not changed.
        out_dtype: as for `linear_act`.
        scale_a: as for `linear_act`.
        scale_b: as for `linear_act`.

    Returns:
        [..., N], contiguous, ordered on the current stream.

    Raises:
        TypeError, InputError, DriverError: as `linear_act`.

    Examples:
        >>> tritongemm.linear_add(torch.randn(4, 64), torch.randn(32, 64), torch.ones(4, 32)).shape
        torch.Size([4, 32])
    """
    return _call_act(x, w, RESIDUAL, residual, out_dtype, scale_a, scale_b)


def linear_act_quantize(
    x: Tensor,
    w: Tensor,
    act: str = "",
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `linear_act`, or without an activation `mm`, in fp8 with a factor for each 128 columns of a row.

    What is computed is quantised before it is stored, as the next product takes it; tune such sizes with
    ``--epilogue silu_mul_block`` and the like, or ``block``.

    Args:
        x: as for `linear_act`.
        w: as for `linear_act`; the result has a multiple of 128 columns.
        act: as for `linear_act`; "" for none.
        bias: as for `linear_act`.
        dtype: of the result, of eight bits.
        scale_a: as for `linear_act`.
        scale_b: as for `linear_act`.

    Returns:
        q [..., N] and its factors, float32 [M, N / 128] that are stored [N / 128, M]: ``scaled_mm(q, w2, factors, …)``.

    Raises:
        TypeError, InputError, DriverError: as `linear_act`.

    Examples:
        >>> q, factors = tritongemm.linear_act_quantize(torch.randn(4, 64), torch.randn(256, 64), "silu")
        >>> q.shape, factors.shape
        (torch.Size([4, 256]), torch.Size([4, 2]))
    """
    made = _call_act(*quantised_operands(x, w, act, bias, dtype, scale_a, scale_b))
    rows, factors = parts(made, prod(x.shape[:-1]))
    return rows.view(*x.shape[:-1], rows.shape[-1]), factors.T


class _ServedActivation(ActivatedLayer):
    """`linear_act`, whose product is also tuned where no row has the activation beside it, and followed by a kernel."""

    def make_fallback(self, checked: ActivatedOperands) -> ReadyCall:
        """Return what computes gate and up, or a sum, without factors on a GPU in two steps, else what PyTorch does."""
        act = checked.act.removesuffix("_block")
        plain = checked.scale_a is None and act in GATED and checked.result_type in DTYPE_NAMES
        if checked.act == RESIDUAL and checked.scale_a is None and checked.x.is_cuda:
            return _multiply_and_add
        if plain and checked.x.is_cuda and activation_of(checked.act) in ACTIVATIONS and checked.rows:
            return _multiply_and_activate
        return super().make_fallback(checked)


def _multiply_and_add(x: Tensor, w: Tensor, act: str, residual: Tensor, *others: Any) -> Tensor:
    return engine.default.run(x, w, None, others[0]).add_(residual)


def _multiply_and_activate(x: Tensor, w: Tensor, act: str, bias: Tensor | None, *others: Any) -> Tensor:
    in_blocks, activation = act in IN_BLOCKS, activation_of(act)
    made = engine.default.run(x, w, bias, None if in_blocks else others[0])
    rows = made.flatten(0, -2)
    with torch.cuda.device(x.get_device()):
        steps = steps_for(made)
        if not in_blocks:
            return steps.activate(rows, activation, "", made.dtype, run=RUN)[0].view(*made.shape[:-1], -1)
        m = len(rows)
        result = made.new_empty((m + rows_of_factors(m), made.shape[-1] // 2), dtype=others[0])
        q, factors = parts(result, m)
        done, of_done = steps.activate(rows, activation, "block", others[0], run=RUN, into=(q, factors))
        if done is not q and of_done is not None:
            q.copy_(done)
            factors.copy_(of_done.T)
    return result


_call = make_function(FOUR_BIT_LAYER)
_call_act = make_function(_ServedActivation())
