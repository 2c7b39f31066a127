"""Layers of transformers, served: mixtures of experts by `fused_moe`, fine-grained fp8 layers by `linear_fp8`."""

from collections.abc import Container
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.helper_kernel import ACTIVATIONS
from tritongemm.core.scaling import GRANULARITIES, NO_SCALES, SCALED_BLOCK
from tritongemm.operations.factors import find_scalings, products_with, spread
from tritongemm.operations.served_problems import ExpertWeights
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving import linear_fp8, mixtures

_FP8 = "transformers.integrations.finegrained_fp8"
_ACTIVATIONS: Final = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu"}  # by transformers' classes
# What transformers' experts say of themselves: the value that is served, and what another one means.
_USUAL: Final = {
    "has_gate": (True, "its experts have no gate"),
    "has_bias": (False, "its experts have biases"),
    "is_transposed": (False, "the weights of its experts are transposed"),
    "is_concatenated": (True, "gate and up of its experts alternate"),
    "has_post_expert_norm": (False, "a norm follows its experts"),
}
_GATES: Final = ("swiglu_alpha", "limit", "gate_softcap")  # of its fp8 experts, which change what a gate does


class ServedModule(nn.Module):  # type: ignore[misc]
    """A module that `patch` serves: its class derives from one of this file's kind and from the class that it had.

    Copies and pickles are served too.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return what makes the module again for a copy or a pickle: the two classes and its attributes."""
        return _restore, type(self).__bases__, self.__dict__


@cache
def served_class(served: Any, base: Any) -> Any:
    """Return the class that `patch` gives a module of a class."""
    return type(f"Served{base.__name__.removeprefix('Served')}", (served, base), {"__doc__": base.__doc__})


def _restore(served: Any, base: Any) -> nn.Module:
    kind = served_class(served, base)
    made: nn.Module = kind.__new__(kind)
    return made


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module is a class of transformers that holds all experts of a layer in two parameters."""
    kind = type(module)
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return kind.__module__.startswith("transformers.") and all(w is not None and w.dim() == 3 for w in weights)


def why_mixture_left(module: Any, known: frozenset[ExpertWeights]) -> str:
    """Return why the experts of a layer are not served; "" where they can be."""
    if "forward" in vars(module):
        return "another library replaced its forward"
    for name, (usual, otherwise) in _USUAL.items():
        if getattr(module, name, usual) != usual:
            return otherwise
    if type(module.act_fn).__name__ not in _ACTIVATIONS or not _has_plain_gate(module):
        return f"its gate is none of {', '.join(ACTIVATIONS)}"
    w1, w2 = module.gate_up_proj, module.down_proj
    if w1.dtype not in DTYPE_NAMES or w1.dtype != w2.dtype or not (w1.is_contiguous() and w2.is_contiguous()):
        return f"its weights are {w1.dtype} and {w2.dtype}"
    # Classes that say nothing of themselves may have them the other way round, or more experts than weights for them.
    experts, hidden, inner = w2.shape
    if tuple(w1.shape) != (experts, 2 * inner, hidden):
        return f"its weights are {tuple(w1.shape)} and {tuple(w2.shape)}, not [experts, 2 * inner, hidden] and back"
    name = DTYPE_NAMES[w1.dtype]
    if DTYPES[name].is_fp8 and not _is_in_blocks(module):
        return f"its factors are not dynamic, float32 and for {SCALED_BLOCK} x {SCALED_BLOCK}"
    products = products_with(name, GRANULARITIES["block"] if DTYPES[name].is_fp8 else NO_SCALES)
    families = {problem.family for problem in products}
    for w in (w1, w2):
        experts, n, k = w.shape
        if not any(ExpertWeights(experts, n, k, name, family) in known for family in families):
            return f"no row for {experts} experts of N={n}, K={k}, {name}"
    return ""


def _has_plain_gate(module: Any) -> bool:
    """Return whether a class multiplies the activation of the gate by the rest, as all do that define nothing else."""
    gates = (vars(kind).get("_apply_gate") for kind in type(module).__mro__)
    gate = next(filter(None, gates), None)
    if gate is None or gate.__module__ == "transformers.integrations.moe":
        return True
    return gate.__module__ == _FP8 and all(getattr(module, name, None) is None for name in _GATES)


def _is_in_blocks(module: Any) -> bool:
    if vars(module).get("activation_scheme") != "dynamic":
        return False
    pairs = ((module.gate_up_proj, module.gate_up_proj_scale_inv), (module.down_proj, module.down_proj_scale_inv))
    return all(
        not (w.shape[1] % SCALED_BLOCK or w.shape[2] % SCALED_BLOCK)
        and (scale.dim(), scale.shape[0]) == (3, w.shape[0])
        and GRANULARITIES["block"][1] in find_scalings(scale[0], w.shape[1], w.shape[2])
        for w, scale in pairs
    )


class ServedExperts(ServedModule):
    """The experts of a layer, computed by `fused_moe`; `patch` makes it of a module by giving it a class of this."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts: by tuned kernels, or as transformers does for a gradient."""
        w1, w2 = self.gate_up_proj, self.down_proj
        trained = hidden_states.requires_grad or (w1.element_size() > 1 and w1.requires_grad)
        if (torch.is_grad_enabled() and trained) or hidden_states.dim() != 2 or _is_cast(hidden_states):
            result: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return result
        scales = [getattr(self, f"{name}_scale_inv", None) for name in ("gate_up_proj", "down_proj")]
        return mixtures.fused_moe(
            hidden_states, w1.detach(), w2.detach(), top_k_weights.detach(), top_k_index,
            _ACTIVATIONS[type(self.act_fn).__name__], *(None if scale is None else scale.detach() for scale in scales),
        )  # fmt: skip


def _is_cast(x: Tensor) -> bool:
    """Return whether autocast would change the types."""
    return bool(torch.is_autocast_enabled(x.device.type))


_WEIGHTS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
UNQUANTIZED = "weight_unquantized"  # a buffer that no state dict has


def is_fp8_layer(module: nn.Module) -> bool:
    """Return whether a module is of transformers' class for fp8 linear layers, and of no class derived from it."""
    kind = type(module)
    return kind.__module__ == _FP8 and kind.__qualname__ == "FP8Linear"


def why_fp8_left(module: Any, weights: Container[tuple[int, int]]) -> str:
    """Return why an fp8 layer is not served; "" where it can be. Its factors are read once, waiting for the GPU."""
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


class ServedFP8Linear(ServedModule):
    """A fine-grained fp8 layer, computed by `linear_fp8`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result: by our kernels, or as transformers computes it where a gradient is wanted.

        It is transformers' too where weights were dequantised since, or types are changed to ones that we have not.
        """
        wanted = torch.is_grad_enabled() and input.requires_grad
        if wanted or input.dtype not in _INPUTS or not _is_as_patched(self):
            result: Tensor = super().forward(input)
            return result
        if not input.numel():
            return input.new_empty((*input.shape[:-1], self.weight.shape[0]))
        scale, bias, kept = self.weight_scale_inv.detach(), self.bias, self._buffers.get(UNQUANTIZED)
        added = None if bias is None else bias.detach().to(input.dtype)
        unquantized = kept if kept is not None and kept.dtype == input.dtype else None
        return linear_fp8.linear_fp8(input, self.weight.detach(), scale, added, None, unquantized)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        """Load weights; one that was kept unquantised is of others, and given up."""
        forget_unquantized(self)
        super()._load_from_state_dict(*args, **options)


def _is_as_patched(module: Any) -> bool:
    return module.weight.dtype in _WEIGHTS and module.weight_scale_inv.dtype == torch.float32


def keep_unquantized(module: Any) -> None:
    """Keep a layer's weight without quantisation too, where rows say that it is the faster one at some M."""
    n, k = module.weight.shape
    dtype = linear_fp8.losing_type(module.weight.get_device(), n, k)
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
