"""SGLang's general plug-in: a table of TRITONGEMM_CONFIG serves its linear layers, plain or fp8 in blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tritongemm.integrations import sglang_fp8
from tritongemm.integrations.process import OpaqueOperation, serves_weight, speak_through, start_serving
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import TunedCalls

TARGET = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"


def register() -> None:
    """Make SGLang ask us before it applies its linear layers; the entry point. A second call does nothing.

    SGLang applies the hook when all plug-ins have registered theirs. Without TRITONGEMM_CONFIG nothing is imported or
    changed.
    """
    if not start_serving():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    speak_through("sglang")
    if any(hook.__module__ == __name__ for _, hook, *_ in HookRegistry._hooks.get(TARGET, ())):
        return
    HookRegistry.register(TARGET, make_hook(), HookType.AROUND)
    if default_dispatcher().scaled_weights:
        HookRegistry.register(sglang_fp8.TARGET, sglang_fp8.make_hook(), HookType.AROUND)


def make_hook() -> Callable[..., Tensor]:
    """Return the function that SGLang calls around its own method: ``hook(original, method, layer, x, bias)``.

    A layer that no row holds for is given to the method itself; so is everything while SGLang computes in a way that
    must not depend on the batch.
    """
    from sglang.srt import batch_invariant_ops

    calls = TunedCalls(default_dispatcher(), _apply_method)
    operation = OpaqueOperation("sglang_linear", calls)

    def serve_apply(
        original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        weight = layer.weight
        if not serves_weight(weight) or not x.is_cuda or batch_invariant_ops.is_batch_invariant_mode_enabled():
            return original(method, layer, x, bias)
        if torch.compiler.is_compiling():
            result: Tensor = operation.call(x, weight, bias)
            return result
        call = calls.find(x, weight, bias)
        return original(method, layer, x, bias) if call is None else call(x, weight, bias, None)

    return serve_apply


def _apply_method(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Apply SGLang's own method in our operation; it needs only the layer's weight."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    method: Any = UnquantizedLinearMethod
    result: Tensor = method.apply.__wrapped__(method(), SimpleNamespace(weight=w), x, bias)
    return result
