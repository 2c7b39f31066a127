"""A model whose linear layers are served by tuned kernels, until that is undone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tritongemm.core.record import Record
from tritongemm.serving import served_experts, served_fp8
from tritongemm.serving.api import default_dispatcher, load, mm
from tritongemm.serving.joined_layers import JoinedLayers, JoinedPart, find_joinable

_compiling = torch.compiler.is_compiling


class ServedLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that is computed by `tritongemm.mm`.

    `patch` makes it of an ``nn.Linear`` by giving the module this class, and nothing else of the module changes: its
    parameters, buffers, hooks, names and state dict stay, and copies and pickles of it are served too.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The layer's result, by a tuned kernel where there is a row for it, else by PyTorch."""
        return mm(input, self.weight, self.bias)


class JoinedLinear(ServedLinear):
    """A linear layer that is computed together with others of the same input, where that is faster.

    Copies and pickles of it are served by themselves.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The layer's result: columns of the joined one, or as `ServedLinear` computes it."""
        part = None if _compiling() else self._part
        result = None if part is None else part.take(input)
        return mm(input, self.weight, self.bias) if result is None else result


class Patch:
    """What `patch` did to a model.

    Attributes:
        patched: names of the layers that are served.
        left: names of the linear layers that were left as they are, and why.
        joined: names of the layers that are computed together, group by group.

    Args:
        layers: the layers that are served, by their names, with the classes that they had.
        left: see above.
        groups: the joined layers, by the names of their group.
    """

    def __init__(
        self,
        layers: Mapping[str, tuple[nn.Module, type[nn.Module]]],
        left: Mapping[str, str],
        groups: Mapping[tuple[str, ...], JoinedLayers],
    ) -> None:
        self._layers, self.left, self._groups = dict(layers), dict(left), dict(groups)
        mixtures = any(issubclass(type(layer), served_experts.ServedExperts) for layer, _ in layers.values())
        self._kinds = "linear layers and mixtures of experts" if mixtures else "linear layers"
        self.patched, self.joined = tuple(layers), tuple(groups)

    def undo(self) -> None:
        """Have PyTorch compute these layers again, each with memory of its own. A second time it does nothing.

        Graphs that were captured with joined layers are of no use after that, as their weights move.
        """
        for layer, former in self._still_served():
            layer.__class__ = former
            layer.__dict__.pop("_part", None)
            served_fp8.forget_unquantized(layer)
        for group in self._groups.values():
            group.separate()
        self._layers, self._groups = {}, {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have PyTorch compute these layers meanwhile. Joined weights stay where they are, and graphs valid."""
        served = [(layer, type(layer), former) for layer, former in self._still_served()]
        for layer, _, former in served:
            layer.__class__ = former
        try:
            yield
        finally:
            for layer, kind, _ in served:
                layer.__class__ = kind

    def _still_served(self) -> list[tuple[nn.Module, type[nn.Module]]]:
        """The layers whose class nobody else has changed since, with the classes that they had."""
        return [(layer, former) for layer, former in self._layers.values() if _is_served(type(layer))]

    def __str__(self) -> str:
        reasons = Counter(self.left.values())
        groups = Counter(", ".join(name.rpartition(".")[2] for name in names) for names in self.joined)
        told = "".join(f"; {count} group{'s'[: count > 1]} of {names} joined" for names, count in groups.items())
        told += "".join(f"; {count} left: {reason}" for reason, count in reasons.most_common())
        return f"{len(self.patched)} of {len(self.patched) + len(self.left)} {self._kinds} are served{told}"


def patch(
    model: nn.Module,
    source: str | os.PathLike[str] | Iterable[Record] | None = None,
    join: bool = True,
    keep_unquantized: bool = False,
) -> Patch:
    """Have tuned kernels serve a model's linear layers and experts: those whose N and K a tuned row has.

    Only modules that are an ``nn.Linear`` itself, with a plain parameter as weight, are served, and the fine-grained
    fp8 layers of transformers (``FP8Linear`` with factors for 128 x 128) by rows with scales: `linear_fp8` quantises
    their activations. The experts that transformers holds in two parameters of a layer, in bf16, fp16 or such fp8, go
    through `fused_moe` where both of their grouped products have a row. Layers of other classes (other quantised ones,
    adapters around a layer) and layers whose ``forward`` another library replaced are left as they are; a plain layer
    inside an adapter is served. Under torch.compile each layer is one opaque operation, in which M is looked up when it
    runs, so that one graph serves every M. Gradients are PyTorch's, and transformers' own.

    Layers that read one input, such as q_proj, k_proj and v_proj of one module, are computed as one product at those M
    where the tuned rows say that this is faster. Their weights become views of one tensor, so that graphs captured
    before are of no use; the parameters stay the same objects.

    Args:
        model: its modules are changed in place.
        source: tuned records as `tritongemm.load` takes them; by default those loaded before, or else
            those that TRITONGEMM_CONFIG names.
        join: whether layers of one input are computed together.
        keep_unquantized: whether fp8 layers keep their weight in bf16 (or fp16) beside fp8, three times the memory,
            where loaded rows say that at some M it takes less time than fp8 with the quantisation before it. The rows
            of each M then decide. Such a weight is of the values that fp8 and factors have when this is called.

    Returns:
        What was served and what was left, with `undo`; printed, it is one line of counts.

    Raises:
        InputError: the file can't be read, or holds no tuned result; or an fp8 layer's factors are no numbers.
        TypeError: the model is no module, or the source neither a path nor records.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if source is None:
        default_dispatcher().add_configured()
    else:
        load(source)
    dispatcher = default_dispatcher()
    served: dict[str, tuple[nn.Module, type[nn.Module]]] = {}
    left: dict[str, str] = {}
    kinds: dict[str, type[nn.Module]] = {}
    for name, module in model.named_modules():
        former = type(module)
        if served_fp8.is_fp8_layer(module):
            reason, kind = served_fp8.why_left(module, dispatcher.scaled_weights), served_fp8.served_class()
        elif served_experts.is_mixture(module):
            reason = served_experts.why_left(module, dispatcher.expert_weights)
            kind = served_experts.served_class(former)
        elif isinstance(module, served_experts.ServedExperts):
            reason, kind = "served already", former
        elif isinstance(module, nn.Linear) or "Linear" in former.__name__:
            reason, kind = _why_left(module, dispatcher.weights), ServedLinear
        else:
            continue
        if reason:
            left[name] = reason
        else:
            served[name] = module, former
            kinds[name] = kind
    for name, (module, _) in served.items():  # Nothing has changed where a layer was refused.
        module.__class__ = kinds[name]
        if keep_unquantized and kinds[name].__name__ == served_fp8.SERVED:
            served_fp8.keep_unquantized(module, dispatcher.device_kernels(module.weight.get_device()))
    linear = {name: module for name, (module, _) in served.items() if isinstance(module, ServedLinear)}
    return Patch(served, left, _join_layers(model, linear) if join else {})


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


def _is_served(kind: type[nn.Module]) -> bool:
    return issubclass(kind, ServedLinear | served_experts.ServedExperts) or kind.__name__ == served_fp8.SERVED


def _why_left(module: nn.Module, weights: frozenset[tuple[int, int]]) -> str:
    """Why a module that computes a linear layer is not served; "" where it can be."""
    kind = type(module)
    if _is_served(kind):
        return "served already"
    if kind is not nn.Linear:
        return f"of class {kind.__module__}.{kind.__qualname__}"
    if "forward" in vars(module):
        return "another library replaced its forward"
    if type(module.weight) is not nn.Parameter or type(module.weight.data) is not torch.Tensor:
        return f"its weight is a {type(module.weight.data).__name__}"
    n, k = module.weight.shape
    return "" if (n, k) in weights else f"no row for N={n}, K={k}"
