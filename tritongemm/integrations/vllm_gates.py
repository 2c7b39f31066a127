"""vLLM's MLPs whose gate, up and activation are one operation, `linear_act`, where a table has rows for their weight.

The weight's rows of gate and of up then alternate in place. Where no row holds for an M, the operation is the tuned
product and one kernel. A layer whose weight is loaded anew refuses that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tritongemm.integrations.process import attribute, define_opaque, guarded, plain
from tritongemm.operations.linear_act import ActivatedOperands, apply_epilogue, interleave_gate_up
from tritongemm.operations.served_problems import layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving import server_calls
from tritongemm.serving.added_operations import linear_act
from tritongemm.serving.fused_layers import has_fused_rows

_GELU: Final = {"none": "gelu_mul", "tanh": "gelu_tanh_mul"}
_TYPES: Final = (torch.bfloat16, torch.float16)


def serve(model: nn.Module) -> int:
    """Make gate, up and activation of a loaded model's MLPs one operation where rows are faster; return how many."""
    known = guarded("vLLM", "gated MLP", lambda mlp: _is_gated(mlp) and _has_rows(mlp))
    served = [mlp for mlp in model.modules() if known(mlp)]
    owners = Counter(weight.data_ptr() for weight in model.parameters()) if served else Counter[int]()
    served = [mlp for mlp in served if owners[mlp.gate_up_proj.weight.data_ptr()] == 1]
    for mlp in served:
        with torch.no_grad():
            weight = plain(mlp.gate_up_proj.weight)
            weight.copy_(interleave_gate_up(*weight.chunk(2)))
        mlp.gate_up_proj.weight.weight_loader = _refuse
    _make_one(served, lambda x, w, act: linear_act(x, w, act))
    return len(served)


def count(model: nn.Module) -> None:
    """Have a capture see gate, up and activation of a model's MLPs as one operation, and their product beside it."""
    _make_one(list(filter(guarded("vLLM", "gated MLP", _is_gated), model.modules())), _compute_counted)


def _compute_counted(x: Tensor, w: Tensor, act: str) -> Tensor:
    made = functional.linear(x, w)
    run = made.shape[-1] // 2
    return server_calls.activated_or(ActivatedOperands(x, w, act), lambda: apply_epilogue(act, made, run))


def _make_one(mlps: Sequence[Any], compute: Callable[[Tensor, Tensor, str], Tensor]) -> None:
    schema = "(Tensor x, Tensor w, str act) -> Tensor"
    operation = define_opaque("vllm_gated_linear", schema, compute, _infer) if mlps else None
    for mlp in mlps:
        layer = mlp.gate_up_proj
        kind: Any = type(layer.quant_method)
        method: Any = object.__new__(_gated(kind))
        own = attribute(layer.quant_method, "__dict__", {})
        vars(method).update(own, operation=operation, act=_act_of(mlp.act_fn))
        layer.quant_method, mlp.act_fn = method, nn.Identity()


def _infer(x: Tensor, w: Tensor, act: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0] // 2))


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("gate and up alternate in this weight, as tuned kernels read it: start vLLM anew to load others")


class _Gated:
    """A layer's method, whose result is activated."""

    operation: Any
    act: str

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return act(gate) * up."""
        result: Tensor = self.operation(x, layer.weight, self.act)
        return result


@cache
def _gated(base: Any) -> Any:
    return type(base.__name__, (_Gated, base), {"__doc__": base.__doc__, "__module__": base.__module__})


def _act_of(module: Any) -> str:
    """Return the epilogue that does what one of vLLM's modules does with gate and up; "" of others."""
    name = type(module).__name__
    if name == "GeluAndMul":
        return _GELU.get(attribute(module, "approximate"), "")
    return "silu_mul" if name == "SiluAndMul" else ""


def _is_gated(mlp: Any) -> bool:
    """Return whether a module computes down(act(gate) * up) of a plain layer: it is asked with numbers."""
    layer, act = (mlp._modules.get(name) for name in ("gate_up_proj", "act_fn"))
    if not _act_of(act) or type(attribute(layer, "quant_method")).__name__ != "UnquantizedLinearMethod":
        return False
    sizes, weight = attribute(layer, "output_sizes", ()), attribute(layer, "weight")
    if len(sizes) != 2 or sizes[0] != sizes[1] or attribute(layer, "bias") is not None or weight.dtype not in _TYPES:
        return False
    if not weight.is_contiguous() or any("forward" in vars(one) or one._forward_hooks for one in (mlp, layer, act)):
        return False
    asked = SimpleNamespace(
        gate_up_proj=lambda x: (x + 1.0, None), act_fn=lambda x: x * 3.0, down_proj=lambda x: (x - 7.0, None)
    )
    try:
        return bool(type(mlp).forward(asked, 11.0) == 12.0 * 3.0 - 7.0)
    except Exception:  # it computes something else
        return False


def _has_rows(mlp: Any) -> bool:
    weight = mlp.gate_up_proj.weight
    (n, k), dtype = weight.shape, DTYPE_NAMES[weight.dtype]
    problem = replace(layer_problem((1, n, k), (dtype, dtype, dtype), "none"), epilogue=_act_of(mlp.act_fn))
    return n % 16 == 0 and has_fused_rows(problem, weight.get_device())
