"""What a transformer multiplies: the linear layers of each known architecture, as servers run them on one of `tp` GPUs.

Servers join what reads the same activations: q, k and v into one product, the MLP's gate and up into another. Columns
of the first product of a pair (qkv, gate_up) and rows of the second (o, down) are shared by the GPUs; a GPU has at
least one head of k and v, so where there are fewer of them than GPUs, several hold the same one.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass

from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv
from tritongemm.core.values import MOST
from tritongemm.workloads.architectures import ARCHITECTURES, Architecture, Experts
from tritongemm.workloads.model_config import ModelConfig


@dataclass(frozen=True)
class ModelLayer:
    """One kind of linear layer: y [M, N] = x [M, K] @ w [N, K].T (+ bias [N]) for M tokens.

    Attributes:
        name: of the modules, ``*`` for the number of the layer.
        n: columns of the result on one GPU.
        k: columns of the activations on one GPU.
        count: how many of them a token passes.
        bias: whether a bias is added.
        groups: experts that have such a weight each; 1 for what every token passes.
        chosen: experts that a token goes to.
        quantised: whether its weight is, in a model whose weights are.
    """

    name: str
    n: int
    k: int
    count: int
    bias: bool = False
    groups: int = 1
    chosen: int = 1
    quantised: bool = True


@dataclass(frozen=True)
class ModelLayers:
    """The linear layers of a model.

    Attributes:
        layers: what every token passes.
        left_out: products that are none of these, each with its sizes and the reason.
    """

    layers: tuple[ModelLayer, ...]
    left_out: tuple[str, ...]


def list_layers(config: ModelConfig, tp: int) -> ModelLayers:
    """The linear layers of a model on one of `tp` GPUs.

    Raises:
        InputError: its architecture is not known, a value is missing or wrong, or so many GPUs can't share it.
    """
    known = _find_architecture(config)
    config = config.with_usual(known.usual)
    layers, left_out = list[ModelLayer](), list[str]()
    sparse = _sparse_layers(config, known)
    attention = _latent_attention if known.latent else _grouped_attention
    layers += attention(config, known, tp)
    if dense := config.layers - sparse:
        layers += _mlp(config, "mlp", config.whole("intermediate_size"), dense, tp, _bias(config, known.mlp_bias))
    if sparse and known.experts:
        layers += _around_experts(config, known.experts, sparse, tp)
        if known.experts.listed and config.has(known.experts.chosen):
            layers += _experts(config, known.experts, sparse, tp)
        else:
            left_out.append(_describe_experts(config, known.experts, sparse, tp))
    if known.latent:
        left_out.append("decoding multiplies by kv_b_proj's parts head by head, batched products that are not listed")
    if config.count("num_nextn_predict_layers"):
        left_out.append("the layers that predict further tokens (num_nextn_predict_layers) are not listed")
    left_out += [f"the {part} part of the model is not listed" for part in config.other_parts]
    vocabulary = cdiv(config.whole("vocab_size"), tp)
    layers.append(ModelLayer("lm_head", vocabulary, config.whole("hidden_size"), 1, quantised=False))
    for layer in layers:
        _check_size(config, layer)
    return ModelLayers(tuple(layers), tuple(left_out))


def _find_architecture(config: ModelConfig) -> Architecture:
    found = [ARCHITECTURES[name] for name in config.architectures if name in ARCHITECTURES]
    if not found:
        named = ", ".join(map(reprlib.repr, config.architectures[:5])) or "none"
        known = ", ".join(sorted(ARCHITECTURES))
        raise InputError(f"{config.path}: architectures names {named}; the sizes of these are known: {known}")
    return found[0]


def _check_size(config: ModelConfig, layer: ModelLayer) -> None:
    for name, value in (("N", layer.n), ("K", layer.k)):
        if value > MOST:
            raise InputError(f"{config.path}: {layer.name} would have {name} = {value}, more than {MOST}")


def _bias(config: ModelConfig, given: bool | str) -> bool:
    return config.flag(given) if isinstance(given, str) else given


def _head_dim(config: ModelConfig, heads: int) -> int:
    """Columns of one head; the file's own number goes before the width of the model divided by its heads."""
    if config.has("head_dim"):
        return config.whole("head_dim")
    hidden = config.whole("hidden_size")
    if hidden % heads:
        raise InputError(f"{config.path}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    return hidden // heads


def _grouped_attention(config: ModelConfig, known: Architecture, tp: int) -> Iterator[ModelLayer]:
    hidden, heads, count = config.whole("hidden_size"), config.whole("num_attention_heads"), config.layers
    width = _head_dim(config, heads)
    kv_heads = config.whole("num_key_value_heads") if config.has("num_key_value_heads") else heads
    own = config.divide("num_attention_heads", heads, tp)
    # Where there are no more heads of k and v than GPUs, each has one, or a copy of one.
    kv_heads = config.divide("num_key_value_heads", kv_heads, tp) if tp % kv_heads else 1
    qkv_bias, o_bias = _bias(config, known.qkv_bias), _bias(config, known.o_bias)
    yield ModelLayer("layers.*.self_attn.qkv_proj", (own + 2 * kv_heads) * width, hidden, count, qkv_bias)
    yield from _shared_rows("layers.*.self_attn.o_proj", hidden, own * width, count, o_bias, tp)


def _latent_attention(config: ModelConfig, known: Architecture, tp: int) -> Iterator[ModelLayer]:
    """Attention whose q, k and v are made from compressed ones, which every GPU computes whole."""
    hidden, count, rank = config.whole("hidden_size"), config.layers, config.whole("kv_lora_rank")
    own = config.share("num_attention_heads", tp)
    plain, rotated, value = (config.whole(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    bias, attention = _bias(config, known.qkv_bias), "layers.*.self_attn"
    if config.has("q_lora_rank"):
        q_rank = config.whole("q_lora_rank")
        yield ModelLayer(f"{attention}.fused_qkv_a_proj", q_rank + rank + rotated, hidden, count, bias)
        yield ModelLayer(f"{attention}.q_b_proj", own * (plain + rotated), q_rank, count)
    else:
        yield ModelLayer(f"{attention}.q_proj", own * (plain + rotated), hidden, count)
        yield ModelLayer(f"{attention}.kv_a_proj_with_mqa", rank + rotated, hidden, count, bias)
    yield ModelLayer(f"{attention}.kv_b_proj", own * (plain + value), rank, count)
    yield from _shared_rows(f"{attention}.o_proj", hidden, own * value, count, _bias(config, known.o_bias), tp)


def _mlp(config: ModelConfig, name: str, width: int, count: int, tp: int, bias: bool = False) -> Iterator[ModelLayer]:
    """The products of a gated MLP whose hidden part has so many columns."""
    hidden, own = config.whole("hidden_size"), config.divide(f"the width of {name}", width, tp)
    yield ModelLayer(f"layers.*.{name}.gate_up_proj", 2 * own, hidden, count, bias)
    yield from _shared_rows(f"layers.*.{name}.down_proj", hidden, own, count, bias, tp)


def _shared_rows(name: str, n: int, k: int, count: int, bias: bool, tp: int) -> Iterator[ModelLayer]:
    """A product whose K the GPUs share: their results are added up, so one GPU alone adds the bias."""
    yield ModelLayer(name, n, k, count, bias)
    if bias and tp > 1:
        yield ModelLayer(name, n, k, count)


def _sparse_layers(config: ModelConfig, known: Architecture) -> int:
    """How many layers have experts."""
    experts = known.experts
    if experts is None or not config.count(experts.number):
        return 0
    return sum(experts.has_experts(config, layer) for layer in range(config.layers))


def _around_experts(config: ModelConfig, experts: Experts, count: int, tp: int) -> Iterator[ModelLayer]:
    """What every token passes in a layer with experts."""
    hidden = config.whole("hidden_size")
    yield ModelLayer(f"layers.*.{experts.router}", config.whole(experts.number), hidden, count, experts.router_bias,
                     quantised=False)  # fmt: skip
    if width := experts.shared_width(config):
        yield from _mlp(config, experts.shared, width, count, tp)
        if experts.shared_gate:
            yield ModelLayer(f"layers.*.{experts.shared}_gate", 1, hidden, count, quantised=False)


def _experts(config: ModelConfig, experts: Experts, count: int, tp: int) -> Iterator[ModelLayer]:
    """The gated MLPs of the experts, each of which has a share of the rows of all tokens."""
    hidden, number, chosen = (config.whole(key) for key in ("hidden_size", experts.number, experts.chosen))
    own, name = cdiv(config.whole(experts.width), tp), f"layers.*.{experts.listed}"
    yield ModelLayer(f"{name}.gate_up_proj", 2 * own, hidden, count, groups=number, chosen=chosen)
    yield ModelLayer(f"{name}.down_proj", hidden, own, count, groups=number, chosen=chosen)


def _describe_experts(config: ModelConfig, experts: Experts, count: int, tp: int) -> str:
    hidden, number = config.whole("hidden_size"), config.whole(experts.number)
    own = cdiv(config.whole(experts.width), tp)
    return (
        f"the {number} experts of {count} layers are grouped products, (N, K) = ({2 * own}, {hidden}) and "
        f"({hidden}, {own}), which are not listed"
    )
