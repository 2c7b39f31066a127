"""The public function `fused_moe`, which computes a layer of experts with two grouped products."""

from __future__ import annotations

import torch
from torch import Tensor

from tritongemm.build.expert_kernels import ACTIVATIONS, MX_MODES, powers_of
from tritongemm.core.errors import InputError
from tritongemm.core.scaling import SCALED_BLOCK, granularity
from tritongemm.operations.checks import (
    SCALED_RESULTS,
    check_fit,
    check_tensors,
    check_unmapped,
    check_values,
    is_wrapped,
    wants_gradient,
)
from tritongemm.operations.factors import EXPONENTS, of_groups
from tritongemm.operations.grouped import GroupedOperands, check_factors
from tritongemm.operations.microscaling import FORMATS, packed
from tritongemm.serving import moe_torch
from tritongemm.serving.api import default_dispatcher
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.grouped_api import run
from tritongemm.serving.moe_kernels import MixtureSteps, MoeKernels
from tritongemm.serving.traced_operations import define_operation


def fused_moe(  # noqa: PLR0913 (what a mixture has)
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    *,
    scale_layout: str = "",
) -> Tensor:
    """Compute a mixture-of-experts layer: each token's weighted sum over its experts of w2 @ (activation(gate) * up).

    w1 gives gate and up. For inference. Tokens are sorted by expert on the GPU without synchronising, so the call can
    be captured in a graph. The two products are those of `grouped_mm`, with tuned kernels where a record has them. With
    fp8, int8 or fp4 weights the gathered tokens and the activated values are quantised to the weights' type, with
    factors of the same granularity: per row, per 128 elements along K (fp8), or a power of two per 32 (fp8, fp4).

    Args:
        x: [tokens, hidden] of bfloat16 or float16, or float32 on a CPU.
        w1: [experts, 2 * inner, hidden]: the gate's rows, then those of up. For fp4 bytes with two numbers each along
            K.
        w2: [experts, hidden, inner], likewise.
        topk_weights: [tokens, k], the routing weights.
        topk_ids: int32 or int64 [tokens, k], the expert ids; an id out of range, e.g. of an expert on another rank,
            contributes nothing.
        activation: ``silu`` or ``gelu``.
        w1_scale: None; float32 [experts, 2 * inner], for fp8 and int8, or [experts, 2 * inner / 128, hidden / 128], for
            fp8; or powers of two (e8m0) [experts, 2 * inner, hidden / 32], for OCP's fp8 and fp4.
        w2_scale: None; float32 [experts, hidden], or [experts, hidden / 128, inner / 128]; or e8m0 [experts, hidden,
            inner / 32].
        scale_layout: "" for powers of two in rows, or a plug-in of numerics/scale_layouts that gives the layout of each
            expert's factors, padded.

    Returns:
        [tokens, hidden] of x's type, ordered on the current stream.

    Raises:
        InputError: shapes, types or devices that do not fit together.
        DriverError: the driver refused a launch.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        result: Tensor = _trace(x, w1, w2, topk_weights, topk_ids, activation, w1_scale, w2_scale, scale_layout)
        return result
    return _operation(x, w1, w2, topk_weights, topk_ids, activation, w1_scale, w2_scale, scale_layout)


def _operation(  # noqa: PLR0913
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    w1_scale: Tensor | None,
    w2_scale: Tensor | None,
    scale_layout: str = "",
) -> Tensor:
    _check(x, w1, w2, topk_weights, topk_ids, activation)
    mode = _mode(x, w1, w2, w1_scale, w2_scale, scale_layout)
    if not x.shape[0]:
        return x.new_empty(x.shape)
    if x.is_cuda and torch.cuda.current_device() != x.get_device():
        with torch.cuda.device(x.get_device()):
            return _operation(x, w1, w2, topk_weights, topk_ids, activation, w1_scale, w2_scale, scale_layout)
    dispatcher = default_dispatcher()
    factors = (w1_scale, w2_scale) if w1_scale is not None and w2_scale is not None else ()
    steps = steps_for(dispatcher, x, w1, w2, topk_weights, *factors)
    x, weights = x if x.stride(1) == 1 else x.contiguous(), topk_weights.contiguous()
    order, place, ends = steps.sort(topk_ids.contiguous(), w1.shape[0])
    rows, of_rows = steps.gather(x, order, topk_ids.shape[1], mode, w1.dtype)
    h = run(dispatcher, GroupedOperands(rows, w1.mT, ends, of_rows, w1_scale, x.dtype, scale_layout))
    inner, of_inner = steps.activate(h, activation, mode, w2.dtype)
    y = run(dispatcher, GroupedOperands(inner, w2.mT, ends, of_inner, w2_scale, x.dtype, scale_layout))
    return steps.combine(y, place, ends, weights, x.dtype)


def steps_for(dispatcher: Dispatcher, x: Tensor, *others: Tensor) -> MixtureSteps:
    """Select who computes the steps between the products: kernels on a GPU, PyTorch if a gradient is needed."""
    if wants_gradient(x, *others) or any(map(is_wrapped, (x, *others))):
        return moe_torch
    device = dispatcher.device(x.get_device()) if x.is_cuda else None
    return moe_torch if device is None else MoeKernels(device, dispatcher.calls.table)


def _check(x: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str) -> None:
    """Refuse what does not belong together.

    Raises:
        TypeError: an argument is no tensor.
        InputError: names the argument and what it must be.
    """
    operands = {"x": x, "w1": w1, "w2": w2, "topk_weights": topk_weights, "topk_ids": topk_ids}
    check_tensors(operands)
    check_unmapped("fused_moe", operands)
    if activation not in ACTIVATIONS:
        raise InputError(f"activation is {activation!r}; there are: {', '.join(ACTIVATIONS)}")
    if x.dtype not in SCALED_RESULTS:
        raise InputError(f"x must be bfloat16 or float16, or float32 on a CPU, not {x.dtype}")
    _check_extents(x, w1, w2)
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x.shape[0]:
        shapes = f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}"
        raise InputError(f"{shapes} must be [{x.shape[0]}, experts of a token]")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"topk_ids must be int32 or int64, not {topk_ids.dtype}")
    if not topk_weights.dtype.is_floating_point:
        raise InputError(f"topk_weights must be floats, not {topk_weights.dtype}")
    if not w1.numel():
        raise InputError(f"w1 {tuple(w1.shape)} is empty: there is nothing to multiply by")
    if not topk_ids.shape[1]:
        raise InputError(f"a token can't go to {topk_ids.shape[1]} of {w1.shape[0]} experts")


def _check_extents(x: Tensor, w1: Tensor, w2: Tensor) -> None:
    """Refuse tokens and weights whose shapes do not belong together.

    Raises:
        InputError: names the argument and what it must be.
    """
    each = packed(w1)
    fit = x.dim() == 2 and w1.dim() == w2.dim() == 3 and x.shape[1] == w1.shape[2] * each
    halves = ", of fp4 with two numbers a byte along K" if each > 1 else ""
    wanted = f"[tokens, hidden], [experts, 2 * inner, hidden] and [experts, hidden, inner]{halves}"
    check_fit(fit, wanted, x=x, w1=w1, w2=w2)
    (experts, both, _), hidden = w1.shape, x.shape[1]
    if both % (2 * each) or tuple(w2.shape) != (experts, hidden, both // 2 // each):
        right = experts, hidden, both // 2 // each
        raise InputError(f"w1 {tuple(w1.shape)} wants a w2 {right}, not {tuple(w2.shape)}")


def _mode(
    x: Tensor, w1: Tensor, w2: Tensor, w1_scale: Tensor | None, w2_scale: Tensor | None, scale_layout: str
) -> str:
    """How rows are quantised: ``row``, ``block``, one of `MX_MODES`, or "" for not at all.

    Raises:
        InputError: weights and factors that do not belong together.
    """
    if w1.dtype != w2.dtype or (w1_scale is None) != (w2_scale is None):
        raise InputError("w1 and w2 must be of one type, both with scale factors or both without")
    if w1_scale is not None:
        check_tensors({"x": x, "w1_scale": w1_scale, "w2_scale": w2_scale})
    if scale_layout and (w1_scale is None or w1_scale.dtype not in EXPONENTS):
        raise InputError(f"scale_layout is {scale_layout!r}; it is of factors that are powers of two (e8m0)")
    if w1_scale is None or w2_scale is None:
        if w1.dtype != x.dtype:
            raise InputError(f"x is {x.dtype}, w1 is {w1.dtype}: without scale factors they are of one type")
        return ""
    powers = w1_scale.dtype in EXPONENTS
    if powers:
        _check_powers(w1, scale_layout)
    else:
        _check_floats(w1, w1_scale)
    scaling = of_groups(w1_scale, scale_layout)
    mode = granularity(scaling)
    if mode == "block" and (w1.shape[2] % SCALED_BLOCK or w2.shape[2] % SCALED_BLOCK):
        extents = f"hidden {w1.shape[2]} and inner {w2.shape[2]}"
        raise InputError(f"{extents} must be multiples of {SCALED_BLOCK}, a block's depth")
    for name, scale, w in (("w1_scale", w1_scale, w1), ("w2_scale", w2_scale, w2)):
        experts, rows, depth = w.shape
        assert scaling[1] is not None
        check_factors(name, scale, scaling[1], (experts,), (rows, depth * packed(w)))
    check_values(w1_scale=w1_scale, w2_scale=w2_scale)
    return mode


def _check_floats(w1: Tensor, w1_scale: Tensor) -> None:
    """Refuse weights that have no factors in float32, and factors of blocks where there are those of rows alone.

    Raises:
        InputError: says which there are.
    """
    if w1.dtype != torch.int8 and (w1.element_size() != 1 or not w1.dtype.is_floating_point):
        raise InputError(f"w1_scale is for weights of fp8 or int8, not {w1.dtype}")
    if w1.dtype == torch.int8 and w1_scale.dim() != 2:
        shape = tuple(w1_scale.shape)
        raise InputError(f"w1_scale is {shape}; of int8 weights it is of rows, float32 {tuple(w1.shape[:2])}")


def _check_powers(w1: Tensor, scale_layout: str) -> None:
    """Refuse weights that have no powers of two along K, and orders of them that no kernel writes.

    Raises:
        InputError: says which there are.
    """
    known = [powers_of(mode).layout for mode in MX_MODES]
    if (scale_layout or "rows") not in known:
        raise InputError(f"scale_layout is {scale_layout!r}; powers of two of experts are stored in {', '.join(known)}")
    if w1.dtype not in FORMATS:
        raise InputError(f"w1_scale is of powers of two, for OCP's fp8 and fp4, not {w1.dtype}")


def _fake(  # noqa: PLR0913
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    w1_scale: Tensor | None,
    w2_scale: Tensor | None,
    scale_layout: str = "",
) -> Tensor:
    _check_extents(x, w1, w2)
    return x.new_empty((x.shape[0], w2.shape[1]))


_trace = define_operation(
    "fused_moe(Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation, Tensor? w1_scale, "
    "Tensor? w2_scale, str scale_layout='') -> Tensor",
    _operation,
    _fake,
    _operation,
)
