"""A model whose linear layers are served by tuned kernels, until that is undone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tritongemm.core.record import Record
from tritongemm.serving import served_fp8
from tritongemm.serving.api import default_dispatcher, load, mm


class ServedLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that is computed by `tritongemm.mm`.

    `patch` makes it of an ``nn.Linear`` by giving the module this class, and nothing else of the module changes: its
    parameters, buffers, hooks, names and state dict stay, and copies and pickles of it are served too.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The layer's result, by a tuned kernel where there is a row for it, else by PyTorch."""
        return mm(input, self.weight, self.bias)


class Patch:
    """What `patch` did to a model.

    Attributes:
        patched: names of the layers that are served.
        left: names of the linear layers that were left as they are, and why.

    Args:
        layers: the layers that are served, by their names, with the classes that they had.
        left: see above.
    """

    def __init__(self, layers: Mapping[str, tuple[nn.Module, type[nn.Module]]], left: Mapping[str, str]) -> None:
        self._layers, self.left = dict(layers), dict(left)
        self.patched = tuple(layers)

    def undo(self) -> None:
        """Have PyTorch compute these layers again. A second time it does nothing."""
        for layer, former in self._layers.values():
            if issubclass(type(layer), former):
                layer.__class__ = former
        self._layers = {}

    def __str__(self) -> str:
        reasons = Counter(self.left.values())
        told = "".join(f"; {count} left: {reason}" for reason, count in reasons.most_common())
        return f"{len(self.patched)} of {len(self.patched) + len(self.left)} linear layers are served{told}"


def patch(model: nn.Module, source: str | os.PathLike[str] | Iterable[Record] | None = None) -> Patch:
    """Have tuned kernels serve a model's linear layers: those whose N and K a tuned row has.

    Only modules that are an ``nn.Linear`` itself, with a plain parameter as weight, are served, and the fine-grained
    fp8 layers of transformers (``FP8Linear`` with factors for 128 x 128) by rows with scales: `linear_fp8` quantises
    their activations. Layers of other classes (other quantised ones, adapters around a layer) and layers whose
    ``forward`` another library replaced are left as they are; a plain layer inside an adapter is served. Under
    torch.compile each layer is one opaque operation, in which M is looked up when it runs, so that one graph serves
    every M. Gradients are PyTorch's, and transformers' own.

    Args:
        model: its modules are changed in place.
        source: tuned records as `tritongemm.load` takes them; by default those loaded before, or else
            those that TRITONGEMM_CONFIG names.

    Returns:
        What was served and what was left, with `undo`; printed, it is one line of counts.

    Raises:
        InputError: the file can't be read, or holds no tuned result; or an fp8 layer's factors are no numbers.
        TypeError: the source is neither a path nor records.
    """
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
    return Patch(served, left)


def _why_left(module: nn.Module, weights: frozenset[tuple[int, int]]) -> str:
    """Why a module that computes a linear layer is not served; "" where it can be."""
    kind = type(module)
    if kind is ServedLinear or kind.__name__ == served_fp8.SERVED:
        return "served already"
    if kind is not nn.Linear:
        return f"of class {kind.__module__}.{kind.__qualname__}"
    if "forward" in vars(module):
        return "another library replaced its forward"
    if type(module.weight) is not nn.Parameter or type(module.weight.data) is not torch.Tensor:
        return f"its weight is a {type(module.weight.data).__name__}"
    n, k = module.weight.shape
    return "" if (n, k) in weights else f"no row for N={n}, K={k}"
