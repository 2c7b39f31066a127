"""Lists the weights of models of known architectures, from the values of their config.json alone."""

from __future__ import annotations

from collections.abc import Iterator

from tritongemm.core.errors import InputError
from tritongemm.workloads.architectures import Architecture, Experts
from tritongemm.workloads.layer_weights import Columns, LayerWeight, Weights
from tritongemm.workloads.model_config import CAPTURE, ModelConfig


def list_known_weights(config: ModelConfig, known: Architecture) -> Weights:
    """Return the weights of a model of a known architecture.

    Raises:
        InputError: a value is missing or wrong, or a key that changes shapes has no use in this architecture.
    """
    config = config.with_usual(known.usual)
    if (kind := config.nested_type) and kind not in known.nested:
        raise InputError(
            f"{config.path}: text_config is of model_type {kind!r}, which is not known of this class; {CAPTURE}"
        )
    attention = _latent_attention if known.latent else _grouped_attention
    experts, number = known.experts, config.experts(known.experts is not None)
    weights = list[LayerWeight]()
    for layer in range(config.layers):
        name = f"layers.{layer}"
        weights += attention(config, known, f"{name}.self_attn")
        if experts and number and experts.has_experts(config, layer):
            weights += _sparse_mlp(config, experts, number, f"{name}.mlp")
        else:
            bias = _bias(config, known.mlp_bias)
            weights += _mlp(config, f"{name}.mlp", config.integer("intermediate_size"), bias)
    weights.append(
        LayerWeight("lm_head", (Columns(config.integer("vocab_size")),), config.integer("hidden_size"), kept=True)
    )
    config.require_used(set())
    return Weights(tuple(weights), tuple(config.describe_other_parts()))


def _bias(config: ModelConfig, given: bool | str) -> bool:
    return config.flag(given) if isinstance(given, str) else given


def _head_dim(config: ModelConfig, heads: int) -> int:
    """Return the columns of one head: the file's own number, else the width of the model divided by its heads."""
    if config.has("head_dim"):
        return config.integer("head_dim")
    hidden = config.integer("hidden_size")
    if hidden % heads:
        raise InputError(f"{config.path}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    return hidden // heads


def _grouped_attention(config: ModelConfig, known: Architecture, name: str) -> Iterator[LayerWeight]:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    width = _head_dim(config, heads)
    of_keys = config.integer("num_key_value_heads") if config.has("num_key_value_heads") else heads
    bias, shared = _bias(config, known.qkv_bias), Columns(of_keys * width, of_keys, copied=True)
    yield LayerWeight(f"{name}.q_proj", (Columns(heads * width, heads),), hidden, bias)
    yield LayerWeight(f"{name}.k_proj", (shared,), hidden, bias)
    yield LayerWeight(f"{name}.v_proj", (shared,), hidden, bias)
    yield LayerWeight(f"{name}.o_proj", (Columns(hidden),), heads * width, _bias(config, known.o_bias), heads)


def _latent_attention(config: ModelConfig, known: Architecture, name: str) -> Iterator[LayerWeight]:
    """Yield the weights of attention whose q, k and v are made from compressed ones, which every GPU computes."""
    hidden, rank, heads = (config.integer(key) for key in ("hidden_size", "kv_lora_rank", "num_attention_heads"))
    plain, rotated, value = (config.integer(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    bias, q = _bias(config, known.qkv_bias), (Columns(heads * (plain + rotated), heads),)
    if config.has("q_lora_rank"):
        q_rank = config.integer("q_lora_rank")
        yield LayerWeight(f"{name}.q_a_proj", (Columns(q_rank),), hidden, bias)
        yield LayerWeight(f"{name}.q_b_proj", q, q_rank)
    else:
        yield LayerWeight(f"{name}.q_proj", q, hidden)
    yield LayerWeight(f"{name}.kv_a_proj_with_mqa", (Columns(rank + rotated),), hidden, bias)
    yield LayerWeight(f"{name}.kv_b_proj", (Columns(heads * (plain + value), heads),), rank)
    yield LayerWeight(f"{name}.o_proj", (Columns(hidden),), heads * value, _bias(config, known.o_bias), heads)


def _mlp(config: ModelConfig, name: str, width: int, bias: bool = False) -> Iterator[LayerWeight]:
    """Yield the weights of a gated MLP with a hidden part of `width` columns."""
    hidden = config.integer("hidden_size")
    yield LayerWeight(f"{name}.gate_proj", (Columns(width),), hidden, bias)
    yield LayerWeight(f"{name}.up_proj", (Columns(width),), hidden, bias)
    yield LayerWeight(f"{name}.down_proj", (Columns(hidden),), width, bias)


def _sparse_mlp(config: ModelConfig, experts: Experts, number: int, name: str) -> Iterator[LayerWeight]:
    """Yield the router, the expert that every token passes, and the gated MLPs of the others."""
    hidden, width = config.integer("hidden_size"), config.integer(experts.width)
    chosen = config.count("num_experts_per_tok")
    yield LayerWeight(f"{name}.{experts.router}", (Columns(number),), hidden, experts.bias, kept=True)
    if shared := experts.shared_width(config):
        yield from _mlp(config, f"{name}.{experts.shared}", shared)
        if experts.shared_gate:
            yield LayerWeight(f"{name}.{experts.shared}_gate", (Columns(1),), hidden, kept=True)
    for each in _mlp(config, f"{name}.experts", width, experts.bias):
        yield LayerWeight(each.name, each.columns, each.k, each.bias, 0, number, chosen)
