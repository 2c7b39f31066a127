"""Serves SGLang's fp8 layers in blocks where a tuned row holds for a call, and else by SGLang's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritongemm.integrations.process import LOG, guarded, plain, serves_blocks
from tritongemm.serving import server_calls
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.layer_choice import BlockOperands

TARGET = "sglang.srt.layers.quantization.fp8.Fp8LinearMethod.apply"


def make_hook() -> Callable[..., Tensor]:
    """Return the function that SGLang calls around its own method: ``hook(original, method, layer, x, bias)``.

    A layer that no row holds for is given to the method itself; so are activations that SGLang quantised before, with a
    layer before them, everything that torch.compile traces, and while results must not depend on the batch each layer
    without a row that states its order.
    """
    from sglang.srt import batch_invariant_ops

    def read(method: Any, layer: Any, x: Any, bias: Tensor | None = None) -> BlockOperands | None:
        if not (isinstance(x, Tensor) and method.block_quant and not method.use_mxfp8 and not method.use_marlin):
            return None
        weight, scale = plain(layer.weight), plain(layer.weight_scale_inv)
        invariant = batch_invariant_ops.is_batch_invariant_mode_enabled()
        default_dispatcher().want_invariant_rows(LOG, invariant)
        if not x.is_cuda or not serves_blocks(weight, scale, invariant):
            return None
        return BlockOperands(x, weight, scale, None, bias, x.dtype)

    known = guarded("SGLang", "fp8 layers", read)

    def serve_apply(original: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
        operands = None if torch.compiler.is_compiling() else known(*given, **named)
        if operands is None:
            return original(*given, **named)
        return server_calls.product_or(operands, lambda: original(*given, **named))

    return serve_apply
