"""Serves SGLang's fp8 layers, in blocks or with a factor per row, where a tuned row holds for a call, else SGLang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.integrations.process import LOG, attribute, make_layer_hook, plain, serves_blocks, serves_scaled
from tritongemm.integrations.process import make_hook as make_server_hook
from tritongemm.serving import server_calls
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.linear_fp8 import BlockOperands

_PLACE: Final = "sglang.srt.layers.quantization"
METHOD: Final = f"{_PLACE}.fp8.Fp8LinearMethod.apply"
SCHEME: Final = (
    f"{_PLACE}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8.apply_weights"
)
ROWS: Final = f"{_PLACE}.fp8_utils.fp8_scaled_mm"  # of CUTLASS; not there on AMD

Hook = Callable[..., Tensor]  # SGLang calls it around its own function: hook(function, its arguments)


def make_hook() -> Hook:
    """Return the hook of fp8 layers in blocks: ``hook(original, method, layer, x, bias)``.

    A layer that no row holds for is given to the method itself; so are activations that SGLang quantised before, with a
    layer before them, everything that torch.compile traces, and while results must not depend on the batch each layer
    without a row that states its order.
    """

    def read(own: Any, method: Any, layer: Any, x: Any, bias: Tensor | None = None) -> Any:
        if not (isinstance(x, Tensor) and method.block_quant and not method.use_mxfp8 and not method.use_marlin):
            return None
        return _product(own, _of_blocks(layer, layer.weight_scale_inv, x, bias))

    return make_layer_hook("SGLang", "fp8 layer", read)


def make_hook_of_scheme() -> Hook:
    """Return the hook of compressed-tensors' fp8 layers in blocks: ``hook(original, scheme, layer, x, bias)``."""

    def read(own: Any, scheme: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        if scheme.weight_block_size is None:
            return None
        return _product(own, _of_blocks(layer, layer.weight_scale, x, bias))

    return make_layer_hook("SGLang", "fp8 layer in blocks of compressed-tensors", read)


def make_hook_of_rows() -> Hook:
    """Return the hook of products with a factor per row of both: ``hook(original, a, b [K, N], of a, of b, …)``."""

    def read(
        own: Any,
        mat_a: Tensor,
        mat_b: Tensor,
        scales_a: Tensor,
        scales_b: Tensor,
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Any:
        k, n = mat_b.shape
        is_in_rows = mat_b.stride(0) == 1 and scales_a.numel() == mat_a.shape[0] and scales_b.numel() == n
        if not is_in_rows or not mat_a.is_cuda or not serves_scaled(n, k, _must_not_depend_on_the_batch()):
            return None
        operands = BlockOperands(mat_a, plain(mat_b).t(), plain(scales_b), scales_a, plain(bias), out_dtype)
        return _product(own, operands)

    return make_server_hook("SGLang", "fp8 layer with a factor per row", read)


def has_factors_of_rows(layer: Any) -> bool:
    """Return whether SGLang multiplies a layer's weight, which it holds transposed, with a factor per row."""
    weight, scale = attribute(layer, "weight"), attribute(layer, "weight_scale")
    return (
        isinstance(weight, Tensor)
        and isinstance(scale, Tensor)
        and weight.dim() == 2
        and weight.dtype == torch.float8_e4m3fn
        and weight.stride(0) == 1
        and scale.numel() == weight.shape[1]
    )


def _of_blocks(layer: Any, scale: Tensor, x: Tensor, bias: Tensor | None) -> BlockOperands | None:
    weight, scale = plain(layer.weight), plain(scale)
    invariant = _must_not_depend_on_the_batch()
    if not x.is_cuda or not serves_blocks(weight, scale, invariant):
        return None
    return BlockOperands(x, weight, scale, None, bias, x.dtype)


def _must_not_depend_on_the_batch() -> bool:
    from sglang.srt import batch_invariant_ops

    invariant: bool = batch_invariant_ops.is_batch_invariant_mode_enabled()
    default_dispatcher().want_invariant_rows(LOG, invariant)
    return invariant


def _product(own: Any, operands: BlockOperands | None) -> Any:
    if operands is None or torch.compiler.is_compiling():
        return None
    return partial(server_calls.product_or, operands, own)
