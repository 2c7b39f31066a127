"""Mixtures of experts of transformers, served: their tokens go through `fused_moe`; nothing else of them changes."""

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.helper_kernel import ACTIVATIONS
from tritongemm.core.scaling import GRANULARITIES, NO_SCALES, SCALED_BLOCK
from tritongemm.operations.factors import find_scalings, products_with
from tritongemm.operations.served_problems import ExpertWeights
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving import mixtures

_FP8 = "transformers.integrations.finegrained_fp8"
_ACTIVATIONS: Final = {"SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu"}  # by transformers' classes
_USUAL: Final = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
                 "has_post_expert_norm": False}  # fmt: skip
_GATES: Final = ("swiglu_alpha", "limit", "gate_softcap")  # of its fp8 experts, which change what a gate does


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module is a class of transformers that holds all experts of a layer in two parameters."""
    kind = type(module)
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return kind.__module__.startswith("transformers.") and all(w is not None and w.dim() == 3 for w in weights)


def why_left(module: Any, known: frozenset[ExpertWeights]) -> str:
    """Return why the experts of a layer are not served; "" where they can be."""
    if "forward" in vars(module):
        return "another library replaced its forward"
    for name, usual in _USUAL.items():
        if getattr(module, name, usual) != usual:
            return f"its {name} is {getattr(module, name)}"
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


class ServedExperts(nn.Module):  # type: ignore[misc]
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

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return the copies and pickles are served too: their class is made again of the one that the module had."""
        return _restore, (type(self).__mro__[2],), self.__dict__


def _is_cast(x: Tensor) -> bool:
    """Return whether autocast would change the types."""
    return bool(torch.is_autocast_enabled(x.device.type))


def _restore(base: type[nn.Module]) -> nn.Module:
    kind: Any = served_class(base)
    made: nn.Module = kind.__new__(kind)
    return made


def served_class(base: Any) -> type[nn.Module]:
    """Return the class that `patch` gives the experts of a layer of a class."""
    made: type[nn.Module] = _make_class(base)
    return made


@cache
def _make_class(base: Any) -> Any:
    return type(f"Served{base.__name__}", (ServedExperts, base), {"__doc__": base.__doc__})
