"""Serves vLLM's mixtures of experts where tuned rows hold for both products of a call, else by vLLM's own kernels."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from tritongemm.integrations.process import attribute, factors_of_experts, is_hooked, plain, replace
from tritongemm.operations.mixture import MixtureOperands
from tritongemm.serving import server_calls

SERVED: Final = "mixture of experts"
# Classes of experts that read weights as a checkpoint has them; others shuffle them, or have up before gate.
EXPERTS: Final = ("TritonExperts", "TritonOrDeepGemmExperts", "TritonOrCutlassExperts")
_PREPARES: Final = "MoEPrepareAndFinalizeNoDPEPModular"  # without tokens of other ranks
_GATES: Final = ("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta", "w1_bias", "w2_bias")  # change what a mixture does

_ARGUMENTS: Final = frozenset(
    {
        *("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map"),
        *("apply_router_weight_on_input", "shared_experts", "shared_experts_input"),
    }
)


def hook() -> None:
    """Serve mixtures before vLLM's own kernels do. A second call does nothing.

    Raises:
        AttributeError: vLLM has not what a hook is put before.
    """
    from vllm.model_executor.layers.fused_moe import modular_kernel

    def read(own: Any, kernel: Any, *arguments: Any, **named: Any) -> Any:
        operands = None if arguments else _operands(kernel, named)
        if operands is None:
            return None
        return lambda: server_calls.mixture_or(
            operands, lambda given: own(hidden_states=given.x, topk_ids=given.topk_ids)
        )

    kind = modular_kernel.FusedMoEKernelModularImpl
    if not is_hooked(kind.apply):
        replace("vLLM", SERVED, {kind: "apply"}, read)


def _operands(kernel: Any, named: dict[str, Any]) -> MixtureOperands | None:
    """Return what `fused_moe` would be given for a call; None where it does not compute this kind of mixture.

    Shared experts are computed by others where tokens stay on their rank.

    Raises:
        TypeError: there are arguments of another version, which may change what a mixture does.
    """
    if unknown := named.keys() - _ARGUMENTS:
        raise TypeError(f"a mixture has the argument {min(unknown)}")
    experts = kernel.fused_experts
    if type(experts).__name__ not in EXPERTS or type(kernel.prepare_finalize).__name__ != _PREPARES:
        return None  # whose weights may be no tensors
    x, w1, w2 = named["hidden_states"], plain(named["w1"]), plain(named["w2"])
    config, routing = experts.quant_config, (named["topk_weights"], named["topk_ids"])
    scales: tuple[Tensor | None, Tensor | None] = config.w1_scale, config.w2_scale
    if scales == (None, None):
        is_known = config.quant_dtype is None and w1.dtype == w2.dtype == x.dtype
    else:
        in_rows = config.per_act_token_quant
        scales = factors_of_experts(w1, scales[0], in_rows), factors_of_experts(w2, scales[1], in_rows)
        is_known = all(one is None for one in (config.a1_scale, config.a2_scale))
        is_known &= all(one is not None for one in scales)
    if (
        not is_known
        or named["activation"].value != "silu"
        or named.get("expert_map") is not None
        or named.get("apply_router_weight_on_input")
        or attribute(experts, "_lora_context") is not None
        or any(attribute(config, name) is not None for name in _GATES)
        or not (w1.is_contiguous() and w2.is_contiguous())
    ):
        return None
    return MixtureOperands(x, w1, w2, *routing, "silu", *scales)
