"""Fine-grained fp8 layers of transformers, served: their activations are quantised and multiplied by our kernels."""

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tritongemm.core.errors import InputError
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.operations.factors import find_scalings, spread
from tritongemm.serving import linear_fp8 as fp8_layer
from tritongemm.serving.linear_fp8 import losing_type

_HOME = "transformers.integrations.finegrained_fp8"
_CLASS = "FP8Linear"
_WEIGHTS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
SERVED = "ServedFP8Linear"
UNQUANTIZED = "weight_unquantized"  # a buffer that no state dict has


def is_fp8_layer(module: nn.Module) -> bool:
    """Return whether a module is of transformers' class for fp8 linear layers, and of no class derived from it."""
    kind = type(module)
    return kind.__module__ == _HOME and kind.__qualname__ == _CLASS


def why_left(module: Any, weights: frozenset[tuple[int, int]]) -> str:
    """Return why such a layer is not served; "" where it can be. Its factors are read once, waiting for the GPU."""
    if "forward" in vars(module):
        return "another library replaced its forward"
    weight, scale = module.weight, module.weight_scale_inv
    if type(weight) is not nn.Parameter or weight.dtype not in _WEIGHTS:
        return f"its weight is {weight.dtype}"
    if module.activation_scheme != "dynamic":
        return f"its activations have a {module.activation_scheme} factor"
    n, k = weight.shape
    if (n, k) not in weights:
        return f"no row with scales for N={n}, K={k}"
    if not any(found.depth == SCALED_BLOCK for found in find_scalings(scale, n, k)):
        return f"its factors are {scale.dtype} {tuple(scale.shape)}, not float32 for {SCALED_BLOCK} x {SCALED_BLOCK}"
    if scale.device.type != "meta" and not bool(torch.isfinite(scale.detach()).all()):
        raise InputError(f"factors of a layer with N={n}, K={k} are NaN or infinite: load its weights before patching")
    return ""


@cache
def served_class() -> type[nn.Module]:
    """Return the class that `patch` gives such a layer; nothing else of the layer changes."""
    base = getattr(importlib.import_module(_HOME), _CLASS)

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return the layer's result: by our kernels, or as transformers computes it where a gradient is wanted.

        It is transformers' too where weights were dequantised since, or types are changed to ones that we have not.
        """
        wanted = torch.is_grad_enabled() and input.requires_grad
        if wanted or input.dtype not in _INPUTS or not _is_as_patched(self):
            result: Tensor = base.forward(self, input)
            return result
        if not input.numel():
            return input.new_empty((*input.shape[:-1], self.weight.shape[0]))
        scale, bias, kept = self.weight_scale_inv.detach(), self.bias, self._buffers.get(UNQUANTIZED)
        added = None if bias is None else bias.detach().to(input.dtype)
        unquantized = kept if kept is not None and kept.dtype == input.dtype else None
        return fp8_layer.linear_fp8(input, self.weight.detach(), scale, added, None, unquantized)

    def load(self: Any, *args: Any, **options: Any) -> None:
        """Loads weights; one that was kept unquantised is of others, and given up."""
        forget_unquantized(self)
        base._load_from_state_dict(self, *args, **options)

    methods = {"forward": forward, "_load_from_state_dict": load}
    made = type(SERVED, (base,), {**methods, "__module__": __name__, "__doc__": base.__doc__})
    assert issubclass(made, nn.Module)
    return made


def _is_as_patched(module: Any) -> bool:
    return module.weight.dtype in _WEIGHTS and module.weight_scale_inv.dtype == torch.float32


def keep_unquantized(module: Any) -> None:
    """Keep a layer's weight without quantisation too, where rows say that it is the faster one at some M."""
    n, k = module.weight.shape
    dtype = losing_type(module.weight.get_device(), n, k)
    if dtype is None:
        return
    weight, scale = module.weight.detach(), module.weight_scale_inv.detach()
    scaling = next(found for found in find_scalings(scale, n, k) if found.depth == SCALED_BLOCK)
    unquantized = (weight.float() * spread(scale, scaling, n, k)).to(dtype)
    module.register_buffer(UNQUANTIZED, unquantized, persistent=False)


def forget_unquantized(module: nn.Module) -> None:
    """Drop a weight that was kept without quantisation."""
    if UNQUANTIZED in module._buffers:
        delattr(module, UNQUANTIZED)


def __getattr__(name: str) -> Any:
    """Return the served class by its name, so that pickles of served layers find it."""
    if name != SERVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return served_class()
