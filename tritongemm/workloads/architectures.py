"""Describes the commonest architectures without transformers, by class: biases, experts, attention.

Keys are those of a model's config.json. `known_weights` lists the weights that follow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tritongemm.workloads.model_config import ModelConfig


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of an architecture, by the names of its keys."""

    width: str  # of the hidden part of one
    router: str = "gate"  # name of the layer that chooses among them
    bias: bool = False  # whether that and the experts' products add biases
    # Width of the expert that all tokens pass, 0 without one.
    shared_width: Callable[[ModelConfig], int] = lambda config: 0
    shared: str = "shared_experts"  # name of that expert
    shared_gate: bool = False  # whether a layer weighs that expert's result
    # Whether a layer, by its number, has experts instead of a plain MLP.
    has_experts: Callable[[ModelConfig, int], bool] = lambda config, layer: True


@dataclass(frozen=True)
class Architecture:
    """The facts of an architecture. A bias is there always, never, or where the flag of that name says so."""

    qkv_bias: bool | str = False  # of q, k and v
    o_bias: bool | str = False  # of the product behind the attention
    mlp_bias: bool | str = False  # of the products of the MLP
    experts: Experts | None = None  # its mixture of experts, if it has one
    latent: bool = False  # whether its attention keeps k and v compressed (MLA)
    usual: Mapping[str, Any] = field(default_factory=dict)  # values of keys that its files leave out
    nested: str = ""  # model_type of a text_config that it may have


def _qwen_has_experts(config: ModelConfig, layer: int) -> bool:
    step = config.integer("decoder_sparse_step")
    return layer not in config.counts("mlp_only_layers") and (layer + 1) % step == 0


def _deepseek_has_experts(config: ModelConfig, layer: int) -> bool:
    return layer >= config.count("first_k_dense_replace") and layer % config.integer("moe_layer_freq") == 0


_LLAMA = Architecture("attention_bias", "attention_bias", "mlp_bias")
_QWEN2 = Architecture(qkv_bias=True)
_MISTRAL = Architecture(nested="mistral")
_GEMMA = Architecture("attention_bias", "attention_bias", usual={"head_dim": 256})
# Files of Gemma 3 that reads images leave out the defaults of the code's classes.
_GEMMA3 = Architecture(
    "attention_bias",
    "attention_bias",
    usual={"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208},
    nested="gemma3_text",
)
_QWEN_EXPERTS = {"decoder_sparse_step": 1}
_QWEN2_MOE = Architecture(
    qkv_bias="qkv_bias",
    experts=Experts(
        "moe_intermediate_size",
        shared_width=lambda config: config.count("shared_expert_intermediate_size"),
        shared="shared_expert",
        shared_gate=True,
        has_experts=_qwen_has_experts,
    ),
    usual={"qkv_bias": True, **_QWEN_EXPERTS},
)
_QWEN3_MOE = Architecture(
    "attention_bias", experts=Experts("moe_intermediate_size", has_experts=_qwen_has_experts), usual=_QWEN_EXPERTS
)
_DEEPSEEK = Architecture(
    "attention_bias",
    "attention_bias",
    experts=Experts(
        "moe_intermediate_size",
        shared_width=lambda config: config.count("n_shared_experts") * config.integer("moe_intermediate_size"),
        has_experts=_deepseek_has_experts,
    ),
    latent=True,
    usual={"moe_layer_freq": 1},
)
_MIXTRAL = Architecture(experts=Experts("intermediate_size"))
_GPT_OSS = Architecture(
    "attention_bias",
    "attention_bias",
    experts=Experts("intermediate_size", "router", bias=True),
    usual={"attention_bias": True, "head_dim": 64},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GemmaForCausalLM": _GEMMA,
    "GptOssForCausalLM": _GPT_OSS,
    "LlamaForCausalLM": _LLAMA,
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MIXTRAL,
    "Phi3ForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    "Qwen3ForCausalLM": Architecture("attention_bias", "attention_bias", usual={"head_dim": 128}),
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
}
