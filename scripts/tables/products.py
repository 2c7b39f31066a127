"""Lists the products of the models that are served most, in the order in which tables are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import GRANULARITIES, PADDED_ROWS
from tritongemm.formats import make_problem
from tritongemm.workloads.architectures import ARCHITECTURES
from tritongemm.workloads.layer_weights import LayerWeight, find_cut, join_weights, share_weight
from tritongemm.workloads.m_spans import drop_small
from tritongemm.workloads.model_config import ModelConfig
from tritongemm.workloads.model_layers import list_known_weights

LIST = Path(__file__).with_name("models.yaml")
MOST_TOKENS = 8192  # that a server multiplies in one step
MOST_SEQUENCES = 512  # of a step; the output layer multiplies one token of each

_GATE_AND_UP = "gate_up_proj"
_ACTS = {"silu": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}  # epilogues of models' activations
_TYPES = {
    "bf16": Defaults.of("bf16", layout="TN"),
    # Factors as DeepGEMM's callers store them; those of our own `quantize` are stored as a row reads them. CUTLASS's
    # are dense: they are copied where M is no multiple of 4, which costs most where M is least.
    "fp8": Defaults.of("fp8", c="bf16", layout="TN", family="a8w8_blockscale", scales="block_tma"),
}


@dataclass(frozen=True)
class Product:
    """A product whose table is made.

    Attributes:
        problem: with an M of 1.
        high: the largest M of its table.
        layers: the layers that compute it, such as ``Llama 3 8B, TP 1: qkv_proj``.
    """

    problem: Problem
    high: int
    layers: tuple[str, ...]


def list_products(path: Path = LIST) -> list[Product]:
    """Return each product once, the most served first."""
    text = yaml.safe_load(path.read_text(encoding="utf-8"))
    found: dict[Problem, Product] = {}
    for entry in text["order"]:
        for row in _rows(entry, text["models"][entry["model"]]):
            on = f"{entry['model']}, TP {entry['tp']}"
            high = MOST_SEQUENCES if row.callers == ("lm_head",) else MOST_TOKENS
            _add(found, Product(row.problem, high, tuple(f"{on}: {name}" for name in row.callers)))
            if _GATE_AND_UP in row.callers and row.problem.family == "dense":
                act = _ACTS[text["models"][entry["model"]].get("hidden_activation", "silu")]
                gated = replace(row.problem, epilogue=act)
                _add(found, Product(gated, high, (f"{on}: {_GATE_AND_UP} with {act}",)))
            if row.problem.a.scaling is not None:
                dense = row.problem.scaled(GRANULARITIES["block"])
                named = tuple(f"{on}: {name} with dense factors" for name in row.callers)
                _add(found, Product(dense, PADDED_ROWS - 1, named))
    return list(found.values())


def _add(found: dict[Problem, Product], product: Product) -> None:
    """Add a product, or its layers to those of the same one."""
    known = found.setdefault(product.problem, product)
    layers = dict.fromkeys((*known.layers, *product.layers))
    found[product.problem] = replace(known, high=max(known.high, product.high), layers=tuple(layers))


def list_models(path: Path = LIST) -> Iterator[tuple[str, dict[Problem, float]]]:
    """Yield each model as servers run it on one of its GPUs: a name, and how often a token passes each product."""
    text = yaml.safe_load(path.read_text(encoding="utf-8"))
    for entry in text["order"]:
        if not entry.get("apart"):
            rows = _rows(entry, text["models"][entry["model"]])
            yield f"{entry['model']}, {entry['type']}, TP {entry['tp']}", {row.problem: row.count for row in rows}


def _rows(entry: Mapping[str, Any], values: Mapping[str, Any]) -> list[FormatRow]:
    """Return the products of one model on one of its GPUs that take a share of the time worth tuning."""
    config = ModelConfig(Path(entry["model"]), values, values, {})
    weights = list_known_weights(config, ARCHITECTURES[values["architectures"][0]]).weights
    rows: dict[Problem, FormatRow] = {}
    for weight in weights if entry.get("apart") else join_weights(weights):
        for row in _rows_of(weight, entry):
            known = rows.get(row.problem)
            callers = dict.fromkeys((*(known.callers if known else ()), *row.callers))
            count = row.count + (known.count if known else 0)
            rows[row.problem] = replace(row, count=count, callers=tuple(callers))
    kept, _ = drop_small(list(rows.values()))
    return [row for row in kept if row.problem.groups is None]


def _rows_of(weight: LayerWeight, entry: Mapping[str, Any]) -> Iterator[FormatRow]:
    n, k = share_weight(weight, entry["tp"])
    defaults = _TYPES["bf16" if weight.kept else entry["type"]]
    added_once = entry["tp"] > 1 and find_cut(weight) == "rows"  # by one GPU, where results are added up
    for bias in ("n", "none") if weight.bias and added_once else ("n" if weight.bias else "none",):
        given = {"groups": weight.groups, "bias": bias}
        problem = make_problem(defaults, weight.chosen if weight.groups > 1 else 1, n, k, given)
        yield FormatRow(problem, callers=(weight.name.rpartition(".")[2],))
