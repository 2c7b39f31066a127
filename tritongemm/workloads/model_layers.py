"""Lists what a language model multiplies: its linear layers and experts, as servers run them on one of `tp` GPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tritongemm.core.errors import InputError
from tritongemm.core.values import MOST
from tritongemm.workloads import meta_model
from tritongemm.workloads.architectures import ARCHITECTURES
from tritongemm.workloads.known_weights import list_known_weights
from tritongemm.workloads.layer_weights import Weights, find_cut, join_weights, share_weight
from tritongemm.workloads.model_config import CAPTURE, ModelConfig

_LONGEST_NAME = 200  # of a class, in messages


@dataclass(frozen=True)
class ModelLayer:
    """One kind of linear layer: y [M, N] = x [M, K] @ w [N, K].T (+ bias [N]) for M tokens.

    Attributes:
        name: of the modules, ``*`` for the number of the layer.
        n: columns of the result on one GPU.
        k: columns of the activations on one GPU.
        bias: whether a bias is added.
        groups: experts that have such a weight each; 1 for what every token passes.
        chosen: experts that a token goes to.
        kept: whether its weight stays as it is in a model whose weights are quantised.
    """

    name: str
    n: int
    k: int
    bias: bool = False
    groups: int = 1
    chosen: int = 1
    kept: bool = False


@dataclass(frozen=True)
class ModelLayers:
    """The linear layers of a model.

    Attributes:
        layers: what a token passes, and how often.
        left_out: other products, each with its sizes and the reason.
    """

    layers: dict[ModelLayer, int]
    left_out: tuple[str, ...]


def list_layers(config: ModelConfig, tp: int, is_kept: Callable[[str], bool]) -> ModelLayers:
    """Return the linear layers of a model on one of `tp` GPUs.

    Args:
        config: of the model.
        tp: GPUs that share each layer.
        is_kept: whether the weight of a module, by its path in the language model, is not quantised.

    Raises:
        InputError: its architecture is not known, a value is missing or wrong, or `tp` GPUs can't share it.
    """
    found = _read_weights(config)
    weights = join_weights(replace(each, kept=each.kept or is_kept(each.name)) for each in found.weights)
    layers, experts, uncut = Counter[ModelLayer](), Counter[ModelLayer](), dict[str, None]()
    for weight in weights:
        try:
            n, k = share_weight(weight, tp)
        except InputError as error:
            raise InputError(f"{config.path}: {error}") from None
        layer = ModelLayer(_generic(weight.name), n, k, weight.bias, weight.groups, weight.chosen, weight.kept)
        _check_size(config, layer)
        cut = find_cut(weight)
        if tp > 1 and not cut:
            uncut[layer.name] = None
        if weight.groups > 1 and (weight.bias or not weight.chosen):
            experts[layer] += 1
            continue
        layers[layer] += 1
        if weight.bias and tp > 1 and cut == "rows":  # results are added up, so only one GPU adds the bias
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


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check_size(config: ModelConfig, layer: ModelLayer) -> None:
    for name, value in (("N", layer.n), ("K", layer.k)):
        if value > MOST:
            raise InputError(f"{config.path}: {layer.name} would have {name} = {value}, more than {MOST}")


def _describe_experts(experts: Mapping[ModelLayer, int]) -> list[str]:
    """Return a remark for the products of each kind of experts."""
    kinds: dict[tuple[str, int, int, bool], list[str]] = {}
    for layer, count in experts.items():
        sizes = kinds.setdefault((layer.name.rpartition(".")[0], layer.groups, count, layer.bias), [])
        sizes.append(f"({layer.n}, {layer.k})")
    return [
        f"{name}: the {groups} experts of {count} layers are grouped products, (N, K) = {' and '.join(sizes)}, which "
        f"are not listed, as {'they add biases' if bias else 'the file does not say to how many a token goes'}"
        for (name, groups, count, bias), sizes in kinds.items()
    ]
