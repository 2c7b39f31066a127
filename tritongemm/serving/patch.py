"""The public function `patch`, which makes a model's linear layers call tuned kernels until it is undone."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tritongemm.core.record import Record
from tritongemm.operations.served_problems import is_layer
from tritongemm.serving import packed_linear, served_layers, served_w4
from tritongemm.serving.api import load, mm
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.fused_layers import serve_gates, serve_residuals
from tritongemm.serving.joined_layers import JoinedLayers, JoinedPart, find_joinable
from tritongemm.serving.served_layers import ServedExperts, ServedFP8Linear, ServedModule, served_class

_compiling = torch.compiler.is_compiling
_TRANSPOSED = "Conv1D"  # GPT-2's linear layer in transformers, x @ weight with a weight [K, N]
_Kind: TypeAlias = "type[nn.Module] | served_w4.Converted"  # the class that a layer is given, or its converted weight


class ServedLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that is computed by `tritongemm.mm`.

    `patch` creates it by changing the class of an ``nn.Linear`` and nothing else: parameters, buffers, hooks, names and
    the state dict stay, and copies and pickles are served too.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer with a tuned kernel if there is a row for it, else with PyTorch."""
        return mm(input, self.weight, self.bias)


class JoinedLinear(ServedLinear):
    """A linear layer that is computed as one product with other layers of the same input, where that is faster.

    Copies and pickles of it are computed by themselves.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's columns of the joined product, or compute the layer as `ServedLinear` does."""
        part = None if _compiling() else self._part
        result = None if part is None else part.take(input)
        return mm(input, self.weight, self.bias) if result is None else result


class Patch:
    """The changes that `patch` made to a model.

    Attributes:
        patched: names of the layers that are served.
        left: names of the linear layers that were not changed, with the reasons.
        joined: names of the layers that are computed together, group by group.
        gated: names of the MLPs whose gate, up and activation are one kernel.
        summed: names of the decoder layers whose output or down projection adds the residual.
    """

    def __init__(
        self,
        layers: Mapping[str, tuple[nn.Module, type[nn.Module]]],
        left: Mapping[str, str],
        joined_in: nn.Module | None = None,
        invariant: bool = False,
    ) -> None:
        if invariant:
            default_dispatcher().want_invariant_rows(self)
        linear = {name: module for name, (module, _) in layers.items() if isinstance(module, ServedLinear)}
        self._layers, self.left = dict(layers), dict(left)
        self._groups = {} if joined_in is None else _join_layers(joined_in, linear)
        experts = ServedExperts | served_w4.ServedGptOssExperts
        mixtures = any(issubclass(type(layer), experts) for layer, _ in layers.values())
        self._kinds = "linear layers and mixtures of experts" if mixtures else "linear layers"
        fused_in = None if invariant else joined_in
        gated = {} if fused_in is None else serve_gates(fused_in)
        summed = {} if fused_in is None else serve_residuals(fused_in, linear)
        self._fused = [*gated.values(), *summed.values()]
        self.patched, self.joined = tuple(layers), tuple(self._groups)
        self.gated, self.summed = tuple(gated), tuple(summed)

    def undo(self) -> None:
        """Make PyTorch compute these layers again, with weights in separate memory; a second call does nothing.

        What another `patch` of the model changed stays as it is.
        Graphs captured with joined layers can't be replayed after it, as their weights move.
        """
        for layer, former in self._still_served():
            layer.__class__ = former
            for name in ("_part", "_gated", "_summed", "_sums"):
                layer.__dict__.pop(name, None)
            served_layers.forget_unquantized(layer)
            served_w4.forget(layer)
        for group in self._groups.values():
            group.separate()
        default_dispatcher().want_invariant_rows(self, False)
        self._layers, self._groups, self._fused = {}, {}, []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make PyTorch compute these layers inside a ``with``; joined weights stay in place, so graphs remain valid."""
        served = [(layer, type(layer), former) for layer, former in self._still_served()]
        for layer, _, former in served:
            layer.__class__ = former
            packed_linear.give_back(layer)
        try:
            yield
        finally:
            for layer, kind, _ in served:
                packed_linear.take(layer)
                layer.__class__ = kind

    def _still_served(self) -> list[tuple[nn.Module, type[nn.Module]]]:
        """Return the layers whose class was not changed since, with the classes that they had."""
        every = (*self._layers.values(), *self._fused)
        return [(layer, former) for layer, former in every if _is_served(type(layer))]

    def __str__(self) -> str:
        idle = Counter(filter(None, map(_why_idle, (layer for layer, _ in self._layers.values()))))
        reasons = Counter(self.left.values())
        groups = Counter(", ".join(name.rpartition(".")[2] for name in names) for names in self.joined)
        remarks = "".join(f"; {count} group{'s'[: count > 1]} of {names} joined" for names, count in groups.items())
        remarks += f"; {len(self.gated)} of gate and up fused with their activation" if self.gated else ""
        remarks += f"; {len(self.summed)} decoder layers add residuals in their products" if self.summed else ""
        remarks += "".join(f"; {count} patched, but {reason}" for reason, count in idle.most_common())
        remarks += "".join(f"; {count} left: {reason}" for reason, count in reasons.most_common())
        total = len(self.patched) + len(self.left)
        return f"{len(self._layers) - idle.total()} of {total} {self._kinds} are served{remarks}"


def patch(
    model: nn.Module,
    source: str | os.PathLike[str] | Iterable[Record] | None = None,
    join: bool = True,
    keep_unquantized: bool = False,
    invariant: bool = False,
) -> Patch:
    """Make tuned kernels compute those of a model's linear layers and experts for whose N and K there is a tuned row.

    Served are:

    - modules that are exactly an ``nn.Linear``, with a plain parameter as weight;
    - the fine-grained fp8 layers of transformers (``FP8Linear`` with factors per 128 x 128), by `linear_fp8`, where
      there are rows with scales;
    - int4 layers of gptqmodel, AutoAWQ and compressed-tensors, by `linear_w4`, and gpt-oss's experts of mxfp4, by
      `fused_moe`; their weight is then held twice;
    - the experts that transformers holds in two parameters of a layer, in bf16, fp16 or such fp8, by `fused_moe`, if
      both of their grouped products have a row.

    Layers of other classes (other quantised layers, adapters around a layer) and layers whose
    ``forward`` another library replaced are not changed; a plain layer inside an adapter is served. Layers that an
    earlier call serves are left to it, as ``served already``: each call's `undo` undoes its own changes alone. Under
    torch.compile each layer is one opaque operator that looks M up at run time, so that one graph serves every M.
    Gradients are computed by PyTorch and transformers.

    Layers that read the same input, such as q_proj, k_proj and v_proj of one module, are computed as one product at
    those M where the tuned rows say that this is faster. Their weights become views of one tensor, so graphs captured
    before can't be replayed; the parameters stay the same objects. MLPs that compute down(act(gate(x)) * up(x)) have
    gate, up and activation computed by `linear_act` at those M where a tuned row says that this is faster; the weight
    of gate and up is then held twice. Decoder layers such as LlamaDecoderLayer, which add their input to what attention
    and MLP return, have o_proj and down_proj add it (`linear_add`) at those M where a tuned row says so. What
    torch.compile traces keeps its steps.

    Args:
        model: its modules are changed in place.
        source: tuned records as `tritongemm.load` takes them; by default those loaded before, or else those that
            TRITONGEMM_CONFIG names, or else the shipped tables.
        join: whether layers with the same input are computed together.
        keep_unquantized: whether fp8 layers keep their weight also in bf16 (or fp16), in total three times the memory,
            if loaded rows say that at some M the unquantised product takes less time than quantisation and fp8 product.
            The rows of each M then decide. The copy has the values of the fp8 weight and its factors at this call.
        invariant: whether a row of a product must have the same bits at every M, in the entire process until `undo`:
            rows of tables serve that state their order of additions, and kernels of ours in their order, or without
            rows in that of an unsplit K, at all other M. All plain linear layers are served then, with rows or without.

    Returns:
        What was served and what was not, with `undo`; printed, it is one line of counts.

    Raises:
        InputError: the file can't be read, or holds no tuned result; or an fp8 layer's factors are NaN or infinite.
        TypeError: the model is no module, or the source neither a path nor records.

    Examples:
        >>> print(tritongemm.patch(torch.nn.Sequential(torch.nn.Linear(256, 32)), []))
        0 of 1 linear layers are served; 1 left: no row for N=32, K=256
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if source is None:
        default_dispatcher().add_configured(or_shipped=True)
    else:
        load(source)
    dispatcher = default_dispatcher()
    served: dict[str, tuple[nn.Module, type[nn.Module]]] = {}
    left: dict[str, str] = {}
    found: dict[str, _Kind] = {}
    for name, module in model.named_modules():
        made = _find_kind(module, dispatcher, invariant)
        if isinstance(made, str):
            left[name] = made
        elif made is not None:
            served[name], found[name] = (module, type(module)), made
    for name, (module, _) in served.items():  # Nothing has changed where a layer was refused.
        made = found.pop(name)
        if isinstance(made, served_w4.Converted):
            served_w4.serve(module, made)
        else:
            module.__class__ = made
        if keep_unquantized and isinstance(module, ServedFP8Linear):
            served_layers.keep_unquantized(module)
    return Patch(served, left, model if join else None, invariant)


def _find_kind(
    module: nn.Module, dispatcher: Dispatcher, invariant: bool
) -> type[nn.Module] | served_w4.Converted | str | None:
    """Return the class that a layer is given, or its weight of four bits, or why it is not served; None of no layer."""
    former: Any = type(module)
    if isinstance(module, ServedExperts | served_w4.ServedFourBits):
        return "served already"
    if served_w4.is_four_bit_layer(module):
        return served_w4.convert(module, dispatcher.packed_weights)
    if served_layers.is_fp8_layer(module):
        left = served_layers.why_fp8_left(module, dispatcher.scaled_weights)
        return left or served_class(ServedFP8Linear, former)
    if served_layers.is_mixture(module):
        left = served_layers.why_mixture_left(module, dispatcher.expert_weights)
        return left or served_class(ServedExperts, former)
    if isinstance(module, nn.Linear) or "Linear" in former.__name__ or former.__name__ == _TRANSPOSED:
        return _why_left(module, dispatcher, invariant) or ServedLinear
    return None


def _join_layers(model: nn.Module, served: Mapping[str, ServedLinear]) -> dict[tuple[str, ...], JoinedLayers]:
    """Join a model's layers, one group at a time, as each needs memory until its former weights are given back."""
    groups: dict[tuple[str, ...], JoinedLayers] = {}
    for names in find_joinable(model, served):
        groups[names] = JoinedLayers([served[name] for name in names])
        for place, name in enumerate(names):
            served[name].__class__ = JoinedLinear
            served[name]._part = JoinedPart(groups[names], place)
    if any(group.weight.is_cuda for group in groups.values()):
        torch.cuda.empty_cache()  # the former weights are pieces that joined ones do not fit into
    return groups


def _why_idle(layer: nn.Module) -> str:
    """Return why no row serves a patched layer where it is now, behind the number of such layers; "" where one does."""
    weight = getattr(layer, served_w4.WEIGHT, None)
    weight = next(layer.parameters()) if weight is None else weight
    if weight.is_cuda and (default_dispatcher().wants_invariant_rows or not isinstance(layer, ServedLinear)):
        return ""  # invariant kernels serve plain layers without a row
    n, k = weight.shape[:2]

    def holds(record: Record) -> bool:
        p = record.problem
        return is_layer(p) and (p.n, p.k) == (n, k)

    return default_dispatcher().why_layer_is_idle(holds, weight.get_device())


def _is_served(kind: type[nn.Module]) -> bool:
    return issubclass(kind, ServedLinear | ServedModule)


def _why_left(module: nn.Module, dispatcher: Dispatcher, invariant: bool) -> str:
    """Return why a module that computes a linear layer is not served; "" where it can be."""
    kind = type(module)
    if _is_served(kind):
        return "served already"
    if kind is not nn.Linear:
        instead = ", which tritongemm.serve serves by rows with a row-major B" if kind.__name__ == _TRANSPOSED else ""
        return f"of class {kind.__module__}.{kind.__qualname__}{instead}"
    if "forward" in vars(module):
        if packed_linear.is_of_compressed_tensors(module.forward):
            late = "compressed-tensors decompressed it at a call: patch the model before its first"
            return late if module.weight.dtype.itemsize > 1 else f"compressed-tensors has it in {module.weight.dtype}"
        return "another library replaced its forward"
    if type(module.weight) is not nn.Parameter or type(module.weight.data) is not torch.Tensor:
        return f"its weight is a {type(module.weight.data).__name__}"
    n, k = module.weight.shape
    if invariant or (n, k) in dispatcher.layer_weights:
        return ""
    other = (
        ", but one with a row-major B or a column-major A (tune with -col_b)" if (n, k) in dispatcher.weights else ""
    )
    return f"no row for N={n}, K={k}{other}"
