"""Serves SGLang's experts of int4 on Marlin, and gpt-oss's of mxfp4 on OpenAI's Triton kernels, where tuned rows hold
for both products of a call, else by those.

Before SGLang converts a checkpoint's weights to their order they are converted for their rows, and kept beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.integrations import int4_layers, process, sglang_moe
from tritongemm.integrations.process import attribute
from tritongemm.operations.four_bit_weights import pack_gptq
from tritongemm.operations.mixture import MixtureOperands
from tritongemm.serving import server_calls
from tritongemm.serving.served_w4 import OF_EXPERTS, Converted

_PLACE: Final = "sglang.srt.layers.quantization"
SERVED: Final = "mixture of four bits"
LOADING: Final = "process_weights_after_loading"  # method of each scheme
_CLAMPED: Final = {"activation": "silu", "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}  # of gpt-oss
_OTHER_MIXTURES: Final = ("no_combine", "apply_router_weight_on_input", "swiglu_limit", sglang_moe.FACTOR)


def hooks() -> Iterator[tuple[str, str, Callable[[], Callable[..., Any]]]]:
    """Yield for each method what it serves, its place, and what makes its hook."""
    for scheme, (call, read) in SCHEMES.items():
        for method, make in ((LOADING, partial(_make_hook_of_loading, read)), (call, _make_hook)):
            yield f"mixtures of four bits ({scheme.rpartition('.')[2]}.{method})", f"{_PLACE}.{scheme}.{method}", make


def _make_hook_of_loading(read: Callable[..., Any]) -> Callable[..., None]:
    """Return the hook that converts a layer's weights: ``hook(original, scheme, layer)``."""

    def read_once(scheme: Any, layer: Any) -> Any:
        return attribute(layer, "is_marlin_converted") is True or read(scheme, layer)

    known: Callable[..., Any] = process.guarded("SGLang", SERVED, read_once)

    def convert(original: Callable[..., None], scheme: Any, layer: Any) -> None:
        if (found := known(scheme, layer)) is not True:
            int4_layers.keep_experts(layer, found)
        original(scheme, layer)

    return convert


def _make_hook() -> Callable[..., Any]:
    """Return the hook of a layer's call: ``hook(original, scheme, layer, dispatch_output)``.

    Everything that torch.compile traces is given to the scheme itself, and all while results must not depend on the
    batch.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    def read(own: Any, scheme: Any, layer: Any, dispatch_output: Any) -> Any:
        order = attribute(layer, int4_layers.ORDER)
        passed_by = torch.compiler.is_compiling() or batch_invariant_ops.is_batch_invariant_mode_enabled()
        if order is None or passed_by or attribute(layer, "moe_ep_size", 1) != 1:
            return None
        config, routed, x = layer.moe_runner_config, dispatch_output.topk_output, dispatch_output.hidden_states
        w1, w1_scale, w1_bias, w2, w2_scale = (attribute(layer, name) for name in OF_EXPERTS)
        of_int4, is_sorted = w1_scale.is_floating_point(), attribute(routed, "routing_data") is not None
        is_known = sglang_moe.is_plain(config) if of_int4 else _is_clamped(config)
        if (
            not is_known
            or of_int4 == is_sorted
            or (of_int4 and (attribute(routed, "topk_weights") is None or x.dtype != w1_scale.dtype))
            or x.shape[-1] != 2 * w1.shape[2]  # padded
        ):
            return None
        route = partial(_unsort, routed) if is_sorted else None
        if route is None:
            routing = routed.topk_weights, routed.topk_ids
        else:
            routing = int4_layers.place_routing(x, routed.routing_data.n_expts_act, route)
        operands = MixtureOperands(
            x, w1, w2, *routing, "silu" if of_int4 else "clamped_swiglu", w1_scale, w2_scale, w1_bias=w1_bias,
            w2_bias=attribute(layer, int4_layers.BIAS_2), keep_activations=True, order=order,
        )  # fmt: skip
        of_race = dict[int, Any]()  # what a race's tokens are sent to, which is sorted once

        def sort(ids: Tensor) -> Any:
            logits = torch.zeros(len(ids), w1.shape[0], dtype=x.dtype, device=x.device)
            return type(routed)(*topk.routing(logits.scatter_(1, ids.long(), 1.0), ids.shape[1]))

        def compute(given: MixtureOperands) -> Tensor:
            sent = routed if is_sorted else routed._replace(topk_ids=given.topk_ids)
            if is_sorted and given is not operands:
                sent = of_race.get(id(given)) or of_race.setdefault(id(given), sort(given.topk_ids))
            changed = {"hidden_states": given.x, "topk_output": sent}
            result: Tensor = own.func(scheme, layer, dispatch_output._replace(**changed)).hidden_states
            return result

        factor = attribute(config, sglang_moe.FACTOR) or 1.0
        return lambda: StandardCombineInput(server_calls.mixture_or(operands, compute, factor, route))

    return process.make_layer_hook("SGLang", SERVED, read, "hidden_states")


def _is_clamped(config: Any) -> bool:
    """Return whether a mixture is gated as gpt-oss's, with nothing else done to its values."""
    usual = all(attribute(config, name) == value for name, value in _CLAMPED.items())
    return usual and not any(attribute(config, name) for name in _OTHER_MIXTURES)


def _unsort(routed: Any) -> tuple[Tensor, Tensor]:
    """Return the weights and ids of each token's experts, which Triton's kernels have in the order of the experts."""
    data, places = routed.routing_data, routed.gather_indx.dst_indx
    ends = data.expt_hist.cumsum(0)
    ids = torch.searchsorted(ends, torch.arange(len(places), device=ends.device), right=True, out_int32=True)
    return tuple(one[places].view(-1, data.n_expts_act) for one in (data.gate_scal.float(), ids))


def _read_mxfp4(method: Any, layer: Any) -> Converted | str:
    """Return the experts' weights for their rows, or why they are not served."""
    if not method.use_triton_kernels:
        return "of mxfp4 on other kernels than OpenAI's"
    return int4_layers.find_mxfp4_experts(layer, ("w13_weight_bias", "w2_weight_bias"))


def _read_compressed(scheme: Any, layer: Any) -> Converted | str:
    """Return the experts' weights for their rows, or why they are not served."""
    if scheme.num_bits != 4 or scheme.actorder == "group" or not scheme.sym:
        return f"of int{scheme.num_bits} with {'actorder' if scheme.actorder else 'zero points'}"
    return int4_layers.find_experts(layer, pack_gptq, ("weight_packed", "weight_scale"), scheme.group_size)


def _read_gptq(scheme: Any, layer: Any) -> Converted | str:
    config = scheme.quant_config
    if config.weight_bits != 4 or config.desc_act:
        return f"of int{config.weight_bits}{' with desc_act' if config.desc_act else ''}"
    return int4_layers.find_experts(layer, pack_gptq, ("qweight", "scales"), config.group_size)


# Of each class of what computes a layer: the method that does, and what converts its weights.
SCHEMES: Final[dict[str, tuple[str, Callable[..., Converted | str]]]] = {
    "compressed_tensors.schemes.compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE": (
        "apply_weights", _read_compressed,
    ),
    "gptq.schemes.gptq_moe.GPTQMarlinMoEScheme": ("apply_weights", _read_gptq),
    "awq.schemes.awq_moe.AWQMoEScheme": ("apply_weights", int4_layers.find_awq_experts),
    "mxfp4.Mxfp4MoEMethod": ("apply", _read_mxfp4),
}  # fmt: skip
