"""Fine-grained fp8 layers of transformers, served: their activations are quantised and multiplied by our kernels."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tritongemm.core.errors import InputError
from tritongemm.serving import linear_fp8 as fp8_layer
from tritongemm.serving.scale_factors import GROUP, find_scalings

_HOME = "transformers.integrations.finegrained_fp8"
_CLASS = "FP8Linear"
SERVED = "ServedFP8Linear"


def is_fp8_layer(module: nn.Module) -> bool:
    """Whether a module is of transformers' class for fp8 linear layers, and of no class derived from it."""
    kind = type(module)
    return kind.__module__ == _HOME and kind.__qualname__ == _CLASS


def why_left(module: Any, weights: frozenset[tuple[int, int]]) -> str:
    """Why such a layer is not served; "" where it can be. Its factors are read once, for which the GPU is waited for.

    Args:
        module: the layer.
        weights: (N, K) of the weights with scales that have a row.
    """
    if "forward" in vars(module):
        return "another library replaced its forward"
    weight, scale = module.weight, module.weight_scale_inv
    if type(weight) is not nn.Parameter or weight.dtype not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        return f"its weight is {weight.dtype}"
    if module.activation_scheme != "dynamic":
        return f"its activations have a {module.activation_scheme} factor"
    n, k = weight.shape
    if (n, k) not in weights:
        return f"no row with scales for N={n}, K={k}"
    if not any(found.depth == GROUP for found in find_scalings(scale, n, k, "")):
        return f"its factors are {scale.dtype} {tuple(scale.shape)}, not float32 for {GROUP} x {GROUP}"
    if scale.device.type != "meta" and not bool(torch.isfinite(scale.detach()).all()):
        raise InputError(f"factors of a layer with N={n}, K={k} are NaN or infinite: load its weights before patching")
    return ""


@cache
def served_class() -> type[nn.Module]:
    """The class that `patch` gives such a layer; nothing else of the layer changes."""
    base = getattr(importlib.import_module(_HOME), _CLASS)

    def forward(self: Any, input: Tensor) -> Tensor:
        """The layer's result: by our kernels, or as transformers computes it where a gradient is wanted."""
        if torch.is_grad_enabled() and input.requires_grad:
            result: Tensor = base.forward(self, input)
            return result
        scale, bias = self.weight_scale_inv.detach(), self.bias
        added = None if bias is None else bias.detach().to(input.dtype)
        return fp8_layer.linear_fp8(input, self.weight.detach(), scale, added)

    made = type(SERVED, (base,), {"forward": forward, "__module__": __name__, "__doc__": base.__doc__})
    assert issubclass(made, nn.Module)
    return made


def __getattr__(name: str) -> Any:
    """The served class by its name, so that pickles of served layers find it."""
    if name != SERVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return served_class()
