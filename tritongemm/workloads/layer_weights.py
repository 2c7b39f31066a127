"""Models the weights of a model's linear layers, one for each module, as servers run them on one of `tp` GPUs.

Servers join what reads the same activations: q, k and v into one product, the MLP's gate and up into another. Columns
of the first product of a pair (qkv, gate_up) and rows of the second (o, down) are shared by the GPUs; a GPU has at
least one head of k and v, so where there are fewer of them than GPUs, several hold the same one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv

# Layers of one module that read one input, and the name of the one product that servers compute instead.
_JOINED: Final = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("query", "key", "value"): "qkv",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("w1", "w3"): "gate_up_proj",
    ("in_proj_qkv", "in_proj_z"): "in_proj_qkvz",
    ("in_proj_b", "in_proj_a"): "in_proj_ba",
}
# What models put before the path of a module in the language model.
OUTER_NAMES: Final = re.compile(r"^((thinker|model|language_model|text_model|decoder|transformer|backbone)\.)+")
_OTHER_INPUTS = ("cross", "encoder_attn", "EncDecAttention")  # Their q reads other activations than their k and v.
FUSED: Final = ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv")  # q, k and v as one layer of the model's own
KEYS_AND_VALUES: Final = ("k_proj", "v_proj", "key", "value", "wk", "wv")
# How servers cut a layer, by the last part of its name or the last two; a model's own plan counts for other names.
_COLUMNS: Final = {
    *(name for names in _JOINED for name in names if "_a_proj" not in name), *_JOINED.values(), *KEYS_AND_VALUES,
    *FUSED, "q_b_proj", "kv_b_proj", "in_proj", "dt_proj", "f_b_proj", "g_b_proj", "b_proj", "g_proj", "output_gate",
    "wq", "fc1", "c_fc", "dense_h_to_4h", "intermediate.dense", "input_linear", "lm_head",
}  # fmt: skip
_ROWS: Final = {
    "o_proj", "out_proj", "down_proj", "x_proj", "w2", "wo", "fc2", "c_proj", "dense_4h_to_h", "output_linear",
    "self_attn.dense", "self_attention.dense", "attention.dense", "output.dense",
}  # fmt: skip
_ON_EVERY_GPU: Final = {
    "gate", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj", "f_a_proj", "g_a_proj",
    "per_layer_input_gate", "per_layer_projection",
}  # fmt: skip
_PARTS_ON_EVERY_GPU: Final = {"router", "indexer", "compressor", "altup", "laurel"}


@dataclass(frozen=True)
class Columns:
    """Columns of a product that GPUs share."""

    n: int  # how many there are
    heads: int = 0  # parts that a GPU must have complete; 0 where any number of columns can be one GPU's
    copied: bool = False  # whether GPUs hold copies of heads where there are more GPUs


@dataclass(frozen=True)
class LayerWeight:
    """The weight of one linear layer, or of one in each of the experts of a layer."""

    name: str  # path of the module in the language model, such as `layers.3.self_attn.q_proj`
    columns: tuple[Columns, ...]  # of the result, those of joined layers one after another
    k: int  # columns of the activations
    bias: bool = False  # whether a bias is added
    # Parts of k that a GPU must have complete, where the GPUs share k; 0 where any number can be one GPU's.
    heads: int = 0
    groups: int = 1  # experts that have such a weight each; 1 for what every token passes
    chosen: int = 1  # experts that a token goes to
    cut: str = ""  # `columns`, `rows` or `none` by which the GPUs share it; "" where the name decides
    kept: bool = False  # whether it stays as it is in a model whose weights are quantised

    @property
    def n(self) -> int:
        """Columns of the result."""
        return sum(columns.n for columns in self.columns)


@dataclass(frozen=True)
class Weights:
    """The weights of a model's language model."""

    weights: tuple[LayerWeight, ...]
    left_out: tuple[str, ...] = ()


def join_weights(weights: Iterable[LayerWeight]) -> list[LayerWeight]:
    """Return the weights, with those that servers join as one; quantised ones are not joined with others."""
    named = {weight.name: weight for weight in weights}
    product_of: dict[str, LayerWeight] = {}
    for name in named:
        parent, _, last = name.rpartition(".")
        lasts = next((lasts for lasts in _JOINED if last in lasts), ())
        found = [named[key] for other in lasts if (key := f"{parent}.{other}") in named]
        alike = {(w.k, w.groups, w.chosen, w.kept) for w in found}
        if len(found) > 1 and len(alike) == 1 and not any(word in parent for word in _OTHER_INPUTS):
            columns = tuple(part for weight in found for part in weight.columns)
            product_of[name] = replace(
                found[0], name=f"{parent}.{_JOINED[lasts]}", columns=columns, bias=any(w.bias for w in found)
            )
    return list({one.name: one for one in (product_of.get(name, weight) for name, weight in named.items())}.values())


def share_weight(weight: LayerWeight, tp: int) -> tuple[int, int]:
    """Return N and K of a weight's product on one of `tp` GPUs."""
    cut = find_cut(weight)
    if cut == "rows":
        return weight.n, _share(weight, "rows", weight.k, weight.heads, tp)
    if cut == "columns":
        return sum(_share_columns(weight, part, tp) for part in weight.columns), weight.k
    return weight.n, weight.k


def find_cut(weight: LayerWeight) -> str:
    """Return how GPUs share a weight: by ``columns``, ``rows``, or ``none`` where each has all; "" where unknown."""
    path = weight.name.split(".")
    names = {path[-1], ".".join(path[-2:])}
    if names & _ON_EVERY_GPU or _PARTS_ON_EVERY_GPU & set(path):
        return "none"
    return "rows" if names & _ROWS else "columns" if names & _COLUMNS else weight.cut


def _share_columns(weight: LayerWeight, part: Columns, tp: int) -> int:
    if part.copied and part.heads and tp % part.heads == 0:
        return part.n // part.heads
    return _share(weight, "columns", part.n, part.heads, tp)


def _share(weight: LayerWeight, what: str, size: int, heads: int, tp: int) -> int:
    if weight.groups > 1 or weight.name == "lm_head":
        return cdiv(size, tp)
    if (heads or size) % tp:
        number = f"{heads} heads" if heads else f"{size} {what}"
        raise InputError(f"{weight.name} has {number}, which {tp} GPUs can't share; choose another --tp")
    return size // tp
