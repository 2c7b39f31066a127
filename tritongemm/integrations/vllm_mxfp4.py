"""Serves vLLM's mixtures of gpt-oss (mxfp4) where tuned rows hold for both products of a call, else by vLLM's kernels.

vLLM converts the experts' weights for Triton's or Marlin's kernels when a model is loaded. Before that they are
converted for their rows, and kept beside vLLM's, as long as half of the GPU's memory stays free.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.integrations import int4_layers
from tritongemm.integrations.process import attribute, guarded, plain, replace
from tritongemm.operations.mixture import MixtureOperands
from tritongemm.serving import server_calls
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.served_w4 import OF_EXPERTS, Converted, pack_experts

_METHOD: Final = "GptOssMxfp4MoEMethod"
_EXPERTS: Final = ("MarlinExperts", "OAITritonExperts", "OAITritonMxfp4ExpertsMonolithic")
_PREPARES: Final = ("MoEPrepareAndFinalizeNoDPEPModular", "MoEPrepareAndFinalizeNoDPEPMonolithic")
_KEPT: Final = "tritongemm_experts"  # attribute of what computes a layer: its weights
_GATE: Final = {"gemm1_clamp_limit": 7.0, "gemm1_alpha": 1.702, "gemm1_beta": 1.0}


def hook(mxfp4: Any, modular_kernel: Any) -> None:
    """Convert gpt-oss's experts before vLLM does, and serve them. A second call does nothing.

    Args:
        mxfp4: the module ``vllm.model_executor.layers.quantization.mxfp4``.
        modular_kernel: the module ``vllm.model_executor.layers.fused_moe.modular_kernel``.

    Raises:
        AttributeError: vLLM has not what is wrapped.
    """
    method = getattr(mxfp4, _METHOD)
    load = method.process_weights_after_loading
    if load.__module__ == __name__:
        return
    convert: Callable[..., Converted | str | None] = guarded("vLLM", "mixture of mxfp4", _convert)

    @wraps(load)
    def loaded(own: Any, layer: Any) -> None:
        found = convert(layer)
        load(own, layer)
        kernel = attribute(attribute(own, "moe_kernel"), "impl")
        if isinstance(found, Converted) and kernel is not None:
            for name, tensor in found.tensors.items():
                layer.register_buffer(name, tensor, persistent=False)
            setattr(kernel, _KEPT, (layer, attribute(layer, "w2_bias_of_checkpoint"), found.order))
        unknown = "" if attribute(kernel, _KEPT) else "of mxfp4 that is not as it is known"
        setattr(layer, int4_layers.LEFT, found if isinstance(found, str) else unknown)

    loaded.__module__ = __name__
    for name in ("FusedMoEKernelModularImpl", "FusedMoEKernelMonolithicImpl"):
        _serve(getattr(modular_kernel, name))
    method.process_weights_after_loading = loaded


def _serve(kind: Any) -> None:
    """Wrap the method of one of the classes that compute a layer."""

    def read(own: Any, kernel: Any, *arguments: Any, **named: Any) -> Any:
        operands = None if arguments or attribute(kernel, _KEPT) is None else _operands(kernel, named)
        if operands is None:
            return None
        logits = named.get("router_logits")

        def compute(given: MixtureOperands) -> Tensor:
            changed: dict[str, Tensor] = {"hidden_states": given.x}
            if logits is None:
                changed["topk_ids"] = given.topk_ids
            elif given is not operands:  # experts that were chosen for a race
                changed["router_logits"] = torch.zeros_like(logits).scatter_(1, given.topk_ids.long(), 1.0)
            result: Tensor = own(**changed)
            return result

        route = None if logits is None else partial(_route, logits, operands.topk_ids.shape[1])
        return partial(server_calls.mixture_or, operands, compute, 1.0, route)

    replace("vLLM", "mixture of mxfp4", {kind: "apply"}, read)


def _convert(layer: Any) -> Converted | str:
    """Return the experts' weights for their rows, or why they are not served."""
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    w1, w1_scale, w2, w2_scale = (plain(getattr(layer, name)).detach() for name in names)
    w1_bias, w2_bias = (plain(attribute(layer, name)) for name in ("w13_bias", "w2_bias"))
    needed = sum(one.nbytes for one in (w1, w1_scale, w2, w2_scale))
    if not int4_layers.has_room(w1, needed):
        return int4_layers.NO_ROOM
    try:
        found = pack_experts(default_dispatcher().packed_weights, (w1, w1_scale, w1_bias), (w2, w2_scale))
    except InputError as error:
        return f"of mxfp4 that is refused: {error}"
    if w2_bias is not None:  # which vLLM may pad and permute
        layer.register_buffer("w2_bias_of_checkpoint", w2_bias.clone(), persistent=False)
    return f"with {found}" if isinstance(found, str) else found


def _route(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the weights and ids of each token's experts, as gpt-oss chooses them."""
    values, ids = logits.float().topk(topk)
    return values.softmax(-1), ids.int()


def _operands(kernel: Any, named: dict[str, Any]) -> MixtureOperands | None:
    """Return what `fused_moe` would be given for a call; None where it does not compute this kind of mixture."""
    experts, x = kernel.fused_experts, named["hidden_states"]
    logits = named.get("router_logits")
    config = experts.quant_config
    if (
        type(experts).__name__ not in _EXPERTS
        or type(kernel.prepare_finalize).__name__ not in _PREPARES
        or named["activation"].value != "swigluoai"
        or named.get("expert_map") is not None
        or named.get("apply_router_weight_on_input")
        or attribute(experts, "_lora_context") is not None
        or any(attribute(config, name, usual) not in (None, usual) for name, usual in _GATE.items())
        or (logits is not None and not experts.renormalize)
    ):
        return None
    layer, w2_bias, order = attribute(kernel, _KEPT)
    w1, w1_scale, w1_bias, w2, w2_scale = (attribute(layer, name) for name in OF_EXPERTS)
    if x.dim() != 2 or x.shape[1] != 2 * w1.shape[2]:
        return None
    routing = (named["topk_weights"], named["topk_ids"]) if logits is None else _route(logits, experts.topk)
    return MixtureOperands(
        x, w1, w2, *routing, "clamped_swiglu", w1_scale, w2_scale, w1_bias=w1_bias, w2_bias=w2_bias,
        keep_activations=True, order=order,
    )  # fmt: skip
