"""Lists what a language model multiplies: its linear layers and experts, as servers run them on one of `tp` GPUs."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tritongemm.core.errors import InputError
from tritongemm.core.values import MOST
from tritongemm.workloads import meta_model
from tritongemm.workloads.architectures import ARCHITECTURES, Architecture, Experts
from tritongemm.workloads.layer_weights import Columns, LayerWeight, Weights, find_cut, join_weights, share_weight
from tritongemm.workloads.model_config import CAPTURE, ModelConfig


def list_known_weights(config: ModelConfig, known: Architecture) -> Weights:
    """Return the weights of a model of a known architecture."""
    config = replace(config, usual=known.usual)
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


_LONGEST_NAME = 200  # of a class, in messages


@dataclass(frozen=True)
class ModelLayer:
    """One kind of linear layer: y [M, N] = x [M, K] @ w [N, K].T (+ bias [N]) for M tokens."""

    name: str  # of the modules, `*` for the number of the layer
    n: int  # columns of the result on one GPU
    k: int  # columns of the activations on one GPU
    bias: bool = False  # whether a bias is added
    groups: int = 1  # experts that have such a weight each; 1 for what every token passes
    chosen: int = 1  # experts that a token goes to
    kept: bool = False  # whether its weight stays as it is in a model whose weights are quantised


@dataclass(frozen=True)
class ModelLayers:
    """The linear layers of a model."""

    layers: dict[ModelLayer, int]  # what a token passes, and how often
    left_out: tuple[str, ...]  # other products, each with its sizes and the reason


def list_layers(config: ModelConfig, tp: int, is_kept: Callable[[str], bool]) -> ModelLayers:
    """Return the linear layers of a model on one of `tp` GPUs."""
    found = _read_weights(config)
    weights = join_weights(replace(each, kept=each.kept or is_kept(each.name)) for each in found.weights)
    layers, experts, uncut = Counter[ModelLayer](), Counter[ModelLayer](), dict[str, None]()
    for weight in weights:
        try:
            n, k = share_weight(weight, tp)
        except InputError as error:
            raise InputError(f"{config.path}: {error}") from None
        bias = weight.bias and weight.groups == 1  # those of experts are added between their products
        name = re.sub(r"\.\d+(?=\.|$)", ".*", weight.name)
        layer = ModelLayer(name, n, k, bias, weight.groups, weight.chosen, weight.kept)
        _check_size(config, layer)
        cut = find_cut(weight)
        if tp > 1 and not cut:
            uncut[layer.name] = None
        if weight.groups > 1 and not weight.chosen:
            experts[layer] += 1
            continue
        layers[layer] += 1
        if bias and tp > 1 and cut == "rows":  # results are added up, so only one GPU adds the bias
            layers[replace(layer, bias=False)] += 1
    left_out = _describe_experts(experts)
    if uncut:
        left_out.append(f"how servers share these layers is not known, so that they are listed as one GPU's: "
                        f"{', '.join(uncut)}")  # fmt: skip
    if any(layer.name.endswith(".kv_b_proj") for layer in layers):
        left_out.append("decoding multiplies by kv_b_proj's parts head by head, batched products that are not listed")
    if config.count("num_nextn_predict_layers"):
        left_out.append("the layers that predict further tokens (num_nextn_predict_layers) are not listed")
    if not layers:
        raise InputError(f"{config.path}: the model has no linear layers; {CAPTURE}")
    return ModelLayers(dict(layers), (*left_out, *found.left_out))


def _read_weights(config: ModelConfig) -> Weights:
    """Return the weights as transformers has them if it is installed and has the class, else as our table has them."""
    with_package = meta_model.has_transformers()
    if with_package and (class_ := meta_model.find_class(config)) is not None:
        return meta_model.read_meta_model(config, class_)
    known = next((ARCHITECTURES[name] for name in config.architectures if name in ARCHITECTURES), None)
    if known is not None:
        return list_known_weights(config, known)
    named = ", ".join(repr(name[:_LONGEST_NAME]) for name in config.architectures[:2]) or "none"
    advice = (
        "the installed transformers has no such class"
        if with_package
        else f"without the package transformers these are known: {', '.join(sorted(ARCHITECTURES))}; "
        "pip install 'tritongemm[models]' reads others"
    )
    raise InputError(f"{config.path}: architectures names {named}; {advice}; {CAPTURE}")


def _check_size(config: ModelConfig, layer: ModelLayer) -> None:
    for name, value in (("N", layer.n), ("K", layer.k)):
        if value > MOST:
            raise InputError(f"{config.path}: {layer.name} would have {name} = {value}, more than {MOST}")


def _describe_experts(experts: Mapping[ModelLayer, int]) -> list[str]:
    """Return a remark for the products of each kind of experts."""
    kinds: dict[tuple[str, int, int], list[str]] = {}
    for layer, count in experts.items():
        sizes = kinds.setdefault((layer.name.rpartition(".")[0], layer.groups, count), [])
        sizes.append(f"({layer.n}, {layer.k})")
    return [
        f"{name}: the {groups} experts of {count} layers are grouped products, (N, K) = {' and '.join(sizes)}, which "
        "are not listed, as the file does not say to how many a token goes"
        for (name, groups, count), sizes in kinds.items()
    ]
