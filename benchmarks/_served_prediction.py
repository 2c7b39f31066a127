"""What the rows of tuned results say that a step of `served_model.py` saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from _common import gpu_seconds

import tritongemm
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.hip_ext import machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving import served_layers
from tritongemm.serving.record_table import RecordTable
from tritongemm.workloads.sibling_layers import saved_seconds

_FAMILY = "a8w8_blockscale"
_REPLAYS = 10


def predict_saved(
    model: Any, plain: Any, shape: tuple[int, int], records: Sequence[Record], joined: Sequence[tuple[str, ...]]
) -> float:
    """Seconds of a step that the rows of a model's linear layers and experts say are saved.

    Args:
        model: the served model.
        plain: the bf16 one that it is compared with; the same, or the one that an fp8 model was made of.
        shape: sequences and tokens of each, the last of which alone comes to the LM head.
        records: the tuned ones.
        joined: groups of layers that are computed together where that is faster.
    """
    (batch, tokens), rows = shape, RecordTable(records)
    m, here = batch * tokens, machine.find_machine(None).target

    def find(problem: Problem) -> Record | None:
        found = rows.find(problem, here.name, here.compute_units)
        return found if isinstance(found, Record) else None

    def of_linear(layers: Sequence[Any], last: int) -> Record | None:
        n, k, bias = sum(w.out_features for w in layers), layers[0].in_features, layers[0].bias
        return find(Problem(last, n, k, *matrices("bf16", layout="TN"), bias=_bias(bias)))

    saved = 0.0
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    fp8: dict[tuple[int, int, str], list[Any]] = {}
    for name, layer in linear.items():
        if isinstance(layer, served_layers.ServedFP8Linear):
            of_same = fp8.setdefault((*layer.weight.shape, _bias(layer.bias)), [])
            of_same.append(plain.get_submodule(name))
        elif layer.weight.element_size() > 1:
            record = of_linear([layer], batch if name == "lm_head" else m)
            saved += record.library_seconds - record.served_seconds if record and record.library_seconds else 0.0
    for (n, k, bias), twins in fp8.items():
        record = find(_fp8_problem(m, n, k, bias=bias))
        if record is not None:
            theirs = _layers_seconds(tuple(layer.weight for layer in twins), m)
            saved += theirs - len(twins) * (record.served_seconds + quantise_seconds(m, k))
    for group in joined:
        layers = [linear[name] for name in group]
        found = [record for part in (layers, *([layer] for layer in layers)) if (record := of_linear(part, m))]
        if len(found) == len(layers) + 1:
            seconds = [record.served_seconds for record in found]
            saved += saved_seconds(replace(found[0].problem, m=m), seconds[0], seconds[1:])

    def nearest(problem: Problem) -> Record | None:
        return next((row.record for row in rows.near_rows(problem, here.name, here.compute_units)), None)

    return saved + _saved_by_experts(model, plain, m, nearest)


def _saved_by_experts(model: Any, plain: Any, m: int, find: Callable[[Problem], Record | None]) -> float:
    """Seconds of a step that the rows of grouped products say are saved; what is around them is not predicted."""
    saved, chosen = 0.0, getattr(model.config, "num_experts_per_tok", 0)
    mixtures: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, served_layers.ServedExperts):
            for part in ("gate_up_proj", "down_proj"):
                pair = getattr(module, part), getattr(plain.get_submodule(name), part)
                mixtures.setdefault(tuple(pair[0].shape), []).append(pair)
    for (groups, n, k), pairs in mixtures.items():
        is_fp8 = pairs[0][0].element_size() == 1
        problem = (
            _fp8_problem(m * chosen, n, k, groups=Groups(groups))
            if is_fp8
            else Problem(m * chosen, n, k, *matrices("bf16", layout="TN"), groups=Groups(groups))
        )
        record = find(problem)
        if record is None:
            continue
        ratio = min(1.0, m * chosen / record.problem.m) if not record.serves(m * chosen) else 1.0
        theirs = _experts_seconds(tuple(theirs for _, theirs in pairs), m * chosen)
        saved += theirs - len(pairs) * record.served_seconds * ratio
    return saved


def _fp8_problem(m: int, n: int, k: int, **changes: Any) -> Problem:
    family = registry.get(Family, _FAMILY)
    made: Problem = family.problem(Problem(m, n, k, *matrices("fp8e4m3fn", c="bf16", layout="TN"), **changes))
    return made


def _bias(bias: object) -> str:
    return "none" if bias is None else "n"


def alone_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of some calls one after another, in a graph by themselves."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return gpu_seconds(graph.replay, _REPLAYS) / _REPLAYS


@cache
def quantise_seconds(m: int, k: int) -> float:
    """Seconds in which activations [M, K] are quantised in blocks, from a warm cache, as a layer before leaves them."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    call = partial(tritongemm.quantize, x, "block", layout="groups")
    return alone_seconds([call] * 8) / 8


@cache
def _layers_seconds(weights: tuple[torch.Tensor, ...], m: int) -> float:
    """Seconds of PyTorch's product with each of these weights [N, K], which are cold where there are many."""
    x = torch.randn(m, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
    return alone_seconds([partial(torch.nn.functional.linear, x, w.detach()) for w in weights])


@cache
def _experts_seconds(weights: tuple[torch.Tensor, ...], rows: int) -> float:
    """Seconds of PyTorch's grouped product with each of these weights [experts, N, K], of rows spread evenly."""
    experts, _, k = weights[0].shape
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    ends = (torch.arange(1, experts + 1, device="cuda") * rows // experts).int()
    return alone_seconds([partial(torch._grouped_mm, x, w.detach().mT, ends) for w in weights])
