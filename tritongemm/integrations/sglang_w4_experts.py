"""Serves SGLang's experts of int4 on Marlin where tuned rows hold for both products of a call, else by Marlin.

Before SGLang converts a checkpoint's weights to Marlin's order they are converted for their rows, and kept beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.integrations import int4_layers, process, sglang_moe
from tritongemm.integrations.process import attribute
from tritongemm.operations.four_bit_weights import pack_awq, pack_gptq
from tritongemm.operations.mixture import MixtureOperands
from tritongemm.serving import server_calls
from tritongemm.serving.served_w4 import OF_EXPERTS, Converted

_PLACE: Final = "sglang.srt.layers.quantization"
SERVED: Final = "mixture of int4"
LOADING, CALL = "process_weights_after_loading", "apply_weights"  # methods of each scheme


def hooks() -> Iterator[tuple[str, str, Callable[[], Callable[..., Any]]]]:
    """Yield for each method what it serves, its place, and what makes its hook."""
    for scheme, read in SCHEMES.items():
        for method, make in ((LOADING, partial(_make_hook_of_loading, read)), (CALL, _make_hook)):
            yield f"mixtures of int4 ({scheme.rpartition('.')[2]}.{method})", f"{_PLACE}.{scheme}.{method}", make


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
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    def read(own: Any, scheme: Any, layer: Any, dispatch_output: Any) -> Any:
        order = attribute(layer, int4_layers.ORDER)
        passed_by = torch.compiler.is_compiling() or batch_invariant_ops.is_batch_invariant_mode_enabled()
        if order is None or passed_by or attribute(layer, "moe_ep_size", 1) != 1:
            return None
        config, routed, x = layer.moe_runner_config, dispatch_output.topk_output, dispatch_output.hidden_states
        w1, w1_scale, _, w2, w2_scale = (attribute(layer, name) for name in OF_EXPERTS)
        if not sglang_moe.is_plain(config) or attribute(routed, "topk_weights") is None or x.dtype != w1_scale.dtype:
            return None
        operands = MixtureOperands(
            x, w1, w2, routed.topk_weights, routed.topk_ids, "silu", w1_scale, w2_scale, keep_activations=True,
            order=order,
        )  # fmt: skip

        def compute(given: MixtureOperands) -> Tensor:
            changed = {"hidden_states": given.x, "topk_output": routed._replace(topk_ids=given.topk_ids)}
            result: Tensor = own.func(scheme, layer, dispatch_output._replace(**changed)).hidden_states
            return result

        factor = attribute(config, sglang_moe.FACTOR) or 1.0
        return lambda: StandardCombineInput(server_calls.mixture_or(operands, compute, factor))

    return process.make_hook("SGLang", SERVED, read)


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


def _read_awq(scheme: Any, layer: Any) -> Converted | str:
    if not scheme.quant_config.zero_point:
        return "of AWQ without zero points"
    return int4_layers.find_experts(layer, pack_awq, ("qweight", "scales", "qzeros"), scheme.quant_config.group_size)


SCHEMES: Final[dict[str, Callable[..., Converted | str]]] = {
    "compressed_tensors.schemes.compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE": _read_compressed,
    "gptq.schemes.gptq_moe.GPTQMarlinMoEScheme": _read_gptq,
    "awq.schemes.awq_moe.AWQMoEScheme": _read_awq,
}
