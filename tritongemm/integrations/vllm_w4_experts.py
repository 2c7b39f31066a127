"""Serves vLLM's mixtures with weights of four bits where tuned rows hold for both products of a call, else by vLLM's
kernels: gpt-oss's (mxfp4), and those of int4 that Marlin computes (GPTQ, AWQ, compressed-tensors).

vLLM converts the experts' weights for its kernels when a model is loaded. Before that they are converted for their
rows, and kept beside vLLM's, as long as enough of the GPU's memory stays free.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tritongemm.integrations import int4_layers
from tritongemm.integrations.process import attribute, guarded, replace
from tritongemm.operations.four_bit_weights import pack_gptq
from tritongemm.operations.mixture import MixtureOperands
from tritongemm.serving import server_calls
from tritongemm.serving.served_w4 import OF_EXPERTS, Converted

SERVED: Final = "mixture of four bits"
_PLACE: Final = "vllm.model_executor.layers.quantization"
_ROUTER: Final = "vllm.model_executor.layers.fused_moe.router.fused_topk_router"
_EXPERTS: Final = ("MarlinExperts", "OAITritonExperts", "OAITritonMxfp4ExpertsMonolithic")
_PREPARES: Final = ("MoEPrepareAndFinalizeNoDPEPModular", "MoEPrepareAndFinalizeNoDPEPMonolithic")
_KEPT: Final = "tritongemm_experts"  # attribute of what computes a layer: its weights
_GATE: Final = {"gemm1_clamp_limit": 7.0, "gemm1_alpha": 1.702, "gemm1_beta": 1.0}
_INTERLEAVED: Final = "swigluoai"
_OURS: Final = {_INTERLEAVED: "clamped_swiglu", "silu": "silu"}  # of vLLM's activations


class _Kept(NamedTuple):
    """The layer that has a mixture's converted weights as its buffers, their order, and its activation."""

    layer: Any
    order: str
    activation: str


def hook(name: str) -> None:
    """Convert experts before vLLM does, and serve them. A second call does nothing.

    Args:
        name: one of `METHODS`, the class of what loads and computes a layer.

    Raises:
        AttributeError, ImportError: vLLM has not what is wrapped.
    """
    from vllm.model_executor.layers.fused_moe import modular_kernel

    method = getattr(importlib.import_module(f"{_PLACE}.{METHODS[name][0]}"), name)
    load = method.process_weights_after_loading
    if load.__module__ == __name__:
        return
    convert: Callable[..., Converted | str | None] = guarded("vLLM", SERVED, METHODS[name][1])

    @wraps(load)
    def loaded(own: Any, layer: Any) -> None:
        found = convert(own, layer)
        load(own, layer)
        kernel = attribute(attribute(own, "moe_kernel"), "impl")
        int4_layers.keep_experts(layer, None if kernel is None and isinstance(found, Converted) else found)
        if isinstance(found, Converted) and kernel is not None:
            setattr(kernel, _KEPT, _Kept(layer, found.order, METHODS[name][2]))

    loaded.__module__ = __name__
    for kind in ("FusedMoEKernelModularImpl", "FusedMoEKernelMonolithicImpl"):
        _serve(getattr(modular_kernel, kind))
    method.process_weights_after_loading = loaded


def _serve(kind: Any) -> None:
    """Put a hook before the method of one of the classes that compute a layer, once."""

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

    if _KEPT not in vars(kind):
        setattr(kind, _KEPT, None)
        replace("vLLM", SERVED, {kind: "apply"}, read)


def _convert_mxfp4(method: Any, layer: Any) -> Converted | str:
    return int4_layers.find_mxfp4_experts(layer, ("w13_bias", "w2_bias"))


def _convert_int4(read: Callable[[Any, Any], Converted | str], method: Any, layer: Any) -> Converted | str:
    """Return the same of experts of int4, which `read` converts."""
    name: str = method.experts_cls.__name__
    return read(method, layer) if name in _EXPERTS else f"of {name}"


def _read_compressed(method: Any, layer: Any) -> Converted | str:
    if method.num_bits != 4 or method.actorder == "group":
        return f"of int{method.num_bits}{' with actorder' if method.actorder else ''}"
    names = ("weight_packed", "weight_scale", *(() if method.symmetric else ("weight_zero_point",)))
    return int4_layers.find_experts(layer, pack_gptq, names, method.group_size, checkpoint_format="gptq_v2")


def _read_gptq(method: Any, layer: Any) -> Converted | str:
    config = method.quant_config
    if config.quant_type.size_bits != 4 or config.desc_act:
        return f"of int{config.quant_type.size_bits}{' with desc_act' if config.desc_act else ''}"
    return int4_layers.find_experts(layer, pack_gptq, ("qweight", "scales"), config.group_size)


# Of classes of what loads a layer: their module, what converts its weights, and its activation by vLLM's name.
METHODS: Final[dict[str, tuple[str, Callable[..., Any], str]]] = {
    "GptOssMxfp4MoEMethod": ("mxfp4", _convert_mxfp4, _INTERLEAVED),
    "CompressedTensorsWNA16MarlinMoEMethod": (
        "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin",
        partial(_convert_int4, _read_compressed),
        "silu",
    ),
    "AutoGPTQMoEMethod": ("auto_gptq", partial(_convert_int4, _read_gptq), "silu"),
    "AutoAWQMoEMethod": ("auto_awq", partial(_convert_int4, int4_layers.find_awq_experts), "silu"),
}


@cache
def _router() -> Any:
    """Return vLLM's function that chooses experts by one kernel; None of a version that has it elsewhere."""
    try:
        return importlib.import_module(_ROUTER).fused_topk
    except (ImportError, AttributeError):
        return None


def _route(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the weights and ids of each token's experts, as gpt-oss chooses them: by PyTorch it takes 13 us more."""
    if logits.is_cuda and (choose := _router()) is not None:
        weights, ids, *_ = choose(logits, logits, topk, renormalize=True)
        return weights, ids
    values, ids = logits.float().topk(topk)
    return values.softmax(-1), ids.int()


def _operands(kernel: Any, named: dict[str, Any]) -> MixtureOperands | None:
    """Return what `fused_moe` would be given for a call; None where it does not compute this kind of mixture."""
    experts, x = kernel.fused_experts, named["hidden_states"]
    layer, order, activation = attribute(kernel, _KEPT)
    logits = named.get("router_logits")
    config, gate = experts.quant_config, _GATE if activation == _INTERLEAVED else dict.fromkeys(_GATE)
    if (
        type(experts).__name__ not in _EXPERTS
        or type(kernel.prepare_finalize).__name__ not in _PREPARES
        or named["activation"].value != activation
        or named.get("expert_map") is not None
        or named.get("apply_router_weight_on_input")
        or attribute(experts, "_lora_context") is not None
        or any(attribute(config, name, usual) not in (None, usual) for name, usual in gate.items())
        or (logits is not None and not experts.renormalize)
    ):
        return None
    w1, w1_scale, w1_bias, w2, w2_scale = (attribute(layer, name) for name in OF_EXPERTS)
    if x.dim() != 2 or x.shape[1] != 2 * w1.shape[2] or (w1_scale.is_floating_point() and w1_scale.dtype != x.dtype):
        return None
    if logits is None:
        routing = named["topk_weights"], named["topk_ids"]
    else:
        routing = int4_layers.place_routing(x, experts.topk, partial(_route, logits, experts.topk))
    return MixtureOperands(
        x, w1, w2, *routing, _OURS[activation], w1_scale, w2_scale, w1_bias=w1_bias,
        w2_bias=attribute(layer, int4_layers.BIAS_2), keep_activations=True, order=order,
    )  # fmt: skip
