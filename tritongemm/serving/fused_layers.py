"""Layers of transformers that compute more than a product in one kernel, at those M where a row says it is faster.

Gate and up of an MLP with their activation are one kernel; output and down projections add the residual behind them.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritongemm.core.epilogues import RESIDUAL
from tritongemm.core.problem import Problem
from tritongemm.operations.linear_act import interleave_gate_up
from tritongemm.operations.served_problems import layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving.added_operations import linear_act, linear_add
from tritongemm.serving.api import mm
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.served_layers import ServedModule, served_class

_DTYPES: Final = (torch.bfloat16, torch.float16)  # float32 has a precision that may change from call to call
_PLAIN: Final = (Tensor, nn.Parameter)
_grad = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_forward = torch.autograd.forward_ad
_compiling = torch.compiler.is_compiling
# What `linear_act` calls the activations of gates, by the names of transformers' classes.
_GATES: Final = {"SiLU": "silu_mul", "SiLUActivation": "silu_mul", "GELUActivation": "gelu_mul",
                 "GELUTanh": "gelu_tanh_mul", "PytorchGELUTanh": "gelu_tanh_mul"}  # fmt: skip


_COLLECTING: Final = "transformers.utils.output_capturing"  # its hooks stay after a call that asked for hidden states


class FusedRows:
    """The rows of a product with an epilogue on a GPU: at which M a kernel won them and can be launched."""

    def __init__(self, layers: Iterable[nn.Linear], epilogue: str) -> None:
        first, *_ = layers = tuple(layers)
        dtype, bias = DTYPE_NAMES[first.weight.dtype], "none" if first.bias is None else "n"
        sizes = 1, sum(layer.out_features for layer in layers), first.in_features
        self.problem = replace(layer_problem(sizes, (dtype, dtype, dtype), bias), epilogue=epilogue)
        self._index = first.weight.get_device()
        self._won_at, self._decided_with = dict[int, bool](), object()

    def are_of(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Return whether a row holds for activations beside a weight of a type."""
        k = self.problem.k
        return type(x) in _PLAIN and x.dtype is dtype and x.shape[-1] == k and self.won_at(x.numel() // k)

    def won_at(self, m: int) -> bool:
        """Return whether a row holds at an M; none does where rows must be invariant."""
        dispatcher = default_dispatcher()
        if self._decided_with is not dispatcher.calls:
            self._won_at, self._decided_with = {}, dispatcher.calls
        if m not in self._won_at:
            device = dispatcher.device_kernels(self._index)
            if device is None or not m:  # a graph is captured, before kernels were loaded
                return False
            won = not dispatcher.wants_invariant_rows and device.has_kernel(replace(self.problem, m=m))
            self._won_at[m] = won
        return self._won_at[m]


def has_fused_rows(problem: Problem, index: int) -> bool:
    """Return whether kernels of a GPU won rows for a problem at some M, and can be launched."""
    device = default_dispatcher().device_kernels(index)
    if device is None:
        return False
    rows = device.records.near_rows(problem, device.device.arch, device.device.compute_units)
    return any(device.has_kernel(row.record.problem) for row in rows)


def _does_more() -> bool:
    """Return whether PyTorch must compute by itself now, as for a gradient or under autocast."""
    return _grad() or _modes() or _autocast() or _tracing() is not None or _forward._current_level >= 0


class _Beside:
    """What a served module has beside its own attributes; copies and pickles have none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class GatedLayers(_Beside):
    """Gate and up of an MLP as one weight, which is held beside theirs."""

    def __init__(self, mlp: Any) -> None:
        layers = mlp.gate_proj, mlp.up_proj
        self._parameters, self._act = [layer._parameters for layer in layers], _GATES[type(mlp.act_fn).__name__]
        self._rows, self._made_of = FusedRows(layers, self._act), self._versions()
        with torch.inference_mode(False), torch.no_grad():
            self.weight = interleave_gate_up(*(layer.weight.data for layer in layers))
            biased = mlp.gate_proj.bias is not None
            self.bias = interleave_gate_up(*(layer.bias.data for layer in layers)) if biased else None

    def _versions(self) -> list[tuple[int, int]]:
        every = [p for parameters in self._parameters for p in parameters.values() if p is not None]
        return [(p.data_ptr(), p._version) for p in every]

    def take(self, x: Tensor) -> Tensor | None:
        """Return activation(gate) * up; None where the two steps are faster, or another weight was given to a layer."""
        if _does_more() or not self._rows.are_of(x, self.weight.dtype) or self._versions() != self._made_of:
            return None
        return linear_act(x, self.weight, self._act, self.bias)


class ServedMlp(ServedModule):
    """An MLP whose gate, up and activation are one kernel where a row says so; `patch` gives it a class of this."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the MLP does, in one step less where that is faster."""
        gated = None if _compiling() else self._gated
        inner = None if gated is None else gated.take(x)
        result: Tensor = super().forward(x) if inner is None else self.down_proj(inner)
        return result


def serve_gates(model: nn.Module) -> dict[str, tuple[nn.Module, type[nn.Module]]]:
    """Give MLPs for which `linear_act` has rows a class that calls it; return them with their former classes."""
    served: dict[str, tuple[nn.Module, type[nn.Module]]] = {}
    for name, module in model.named_modules():
        if _is_gated(module) and _has_gated_rows(module):
            former: Any = type(module)
            served[name] = module, former
            module._gated, module.__class__ = GatedLayers(module), served_class(ServedMlp, former)
    return served


class _Probe:
    """A module without layers, on which a class's forward is tried with numbers."""

    gradient_checkpointing, training, forward = False, False, None  # which layers of transformers look at


def _answers(module: Any, given: float, **parts: Callable[..., Any]) -> Any:
    """Return the result of a class's forward for a number, with other parts; None where it fails."""
    asked = _Probe()
    vars(asked).update(parts)
    try:
        return type(module).forward(asked, given)
    except Exception:  # it computes something else
        return None


def _collects(hook: Any) -> bool:
    return isinstance(hook, FunctionType) and hook.__module__ == _COLLECTING


def _is_as_built(*modules: Any) -> bool:
    """Return whether modules have no forward of another library, and no hooks but those that collect outputs."""
    return not any(
        "forward" in vars(one) or one._forward_pre_hooks or not all(map(_collects, one._forward_hooks.values()))
        for one in modules
    )


def _is_gated(module: Any) -> bool:
    """Return whether a module computes down(act(gate(x)) * up(x)) of plain linear layers: it is asked with numbers."""
    layers = [module._modules.get(name) for name in ("gate_proj", "up_proj")]
    plain = all(isinstance(layer, nn.Linear) and "weight" in layer._parameters for layer in layers)
    if isinstance(module, ServedMlp) or not plain:
        return False
    if type(module._modules.get("act_fn")).__name__ not in _GATES or "forward" in vars(module):
        return False
    parts = {"gate_proj": lambda x: x + 1.0, "act_fn": lambda x: x * 3.0, "up_proj": lambda x: x + 5.0}
    asked = _answers(module, 11.0, **parts, down_proj=lambda x: x - 7.0)
    return _is_as_built(*layers) and bool(asked == 12.0 * 3.0 * 16.0 - 7.0)


def _has_gated_rows(mlp: Any) -> bool:
    layers = mlp.gate_proj, mlp.up_proj
    weights = [layer.weight for layer in layers]
    alike = weights[0].shape == weights[1].shape and weights[0].dtype == weights[1].dtype
    if not alike or not all(map(_is_plain, weights)):
        return False
    rows = FusedRows(layers, _GATES[type(mlp.act_fn).__name__])
    return has_fused_rows(rows.problem, weights[0].get_device())


def _is_plain(weight: Tensor) -> bool:
    return type(weight) in _PLAIN and not weight.is_inference() and weight.dtype in _DTYPES


class _Sums(threading.local):
    """The layers whose products this thread adds to a residual now."""

    layers: tuple["SummedLayer", ...] = ()


_sums: Final = _Sums()


class SummedLayer(_Beside):
    """A linear layer whose product waits for the residual behind it, where a row says that one kernel is faster."""

    def __init__(self, layer: nn.Linear) -> None:
        self._parameters, self.rows = layer._parameters, FusedRows([layer], RESIDUAL)

    def take(self, x: Tensor) -> Any:
        """Return the product, which is computed later; None where it is to be computed now."""
        weight = self._parameters["weight"]
        if self not in _sums.layers or weight is None or not self.rows.are_of(x, weight.dtype):
            return None
        return WaitingProduct(x, weight)


class WaitingProduct:
    """A product of a linear layer that is computed together with the sum of it and a residual.

    Every other use computes it first, so that it is as good as its tensor.
    """

    def __init__(self, x: Tensor, w: Tensor) -> None:
        self._x, self._w = x, w
        self._computed: Tensor | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a function of PyTorch that has waiting products among its arguments."""
        if function in (Tensor.add, torch.add) and len(args) == 2 and not kwargs:
            product, other = args if isinstance(args[0], cls) else args[::-1]
            return product + other
        return function(*tree_map(_value, args), **tree_map(_value, kwargs or {}))

    def __add__(self, other: Any) -> Any:
        """Return the sum with a residual, in one kernel; with anything else as PyTorch does."""
        shape = (*self._x.shape[:-1], self._w.shape[0])
        fits = type(other) in _PLAIN and other.shape == shape and other.dtype is self._w.dtype
        if self._computed is None and fits and other.device == self._w.device and other.is_contiguous():
            return linear_add(self._x, self._w, other)
        return other + _value(self)

    __radd__ = __add__

    def __getattr__(self, name: str) -> Any:
        return getattr(_value(self), name)


def _value(one: Any) -> Any:
    """Return the tensor of a product that waited, and everything else as it is."""
    if not isinstance(one, WaitingProduct):
        return one
    if one._computed is None:
        one._computed = mm(one._x, one._w)
    return one._computed


def _pass_on(name: str) -> Callable[..., Any]:
    return lambda one, *given: getattr(_value(one), name)(*map(_value, given))


for _name in ("mul", "rmul", "sub", "rsub", "truediv", "matmul", "neg", "getitem", "len", "iter"):
    setattr(WaitingProduct, f"__{_name}__", _pass_on(f"__{_name}__"))


class SummedLinear(ServedModule):
    """A served linear layer of a `ServedDecoderLayer`, which adds the residual to its product."""

    def forward(self, input: Tensor) -> Any:
        """Return the layer's product, or what computes it together with the sum."""
        summed = None if _compiling() else self._summed
        waiting = None if summed is None else summed.take(input)
        return super().forward(input) if waiting is None else waiting


class _DecoderSums(_Beside):
    """The layers of a decoder layer that add its residuals, and the modules between them and the sums."""

    def __init__(self, layers: Mapping[nn.Module, SummedLayer], between: Iterable[nn.Module]) -> None:
        self.layers, self.between = tuple(layers.values()), (*layers, *between)


class ServedDecoderLayer(ServedModule):
    """A decoder layer whose residuals are added by output and down projections; `patch` gives it a class of this."""

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return what the layer does, with fewer kernels where that is faster."""
        sums = None if _compiling() or _does_more() else self._sums
        if sums is None or not _is_as_built(*sums.between):
            return super().forward(*given, **named)
        outer, _sums.layers = _sums.layers, sums.layers
        try:
            return super().forward(*given, **named)
        finally:
            _sums.layers = outer


def serve_residuals(model: nn.Module, linear: Mapping[str, nn.Linear]) -> dict[str, tuple[nn.Module, type[nn.Module]]]:
    """Have served layers with such rows add the residuals of decoder layers; return these with their former classes."""
    plain = set(linear.values())
    served: dict[str, tuple[nn.Module, type[nn.Module]]] = {}
    for name, module in model.named_modules():
        parts = [module._modules.get(part) for part in ("self_attn", "mlp")] if _adds_residuals(module) else []
        last = [part and part._modules.get(out) for part, out in zip(parts, ("o_proj", "down_proj"), strict=False)]
        found = {layer: SummedLayer(layer) for layer in last if layer in plain and _may_sum(layer)}
        if not found or not _is_as_built(*parts, *found):
            continue
        for layer, summed in found.items():
            former: Any = type(layer)
            layer._summed, layer.__class__ = summed, served_class(SummedLinear, former)
        former = type(module)
        served[name] = module, former
        module._sums, module.__class__ = _DecoderSums(found, parts), served_class(ServedDecoderLayer, former)
    return served


def _adds_residuals(module: Any) -> bool:
    """Return whether a class adds its input to what attention returns, and the sum to the MLP's: asked with numbers."""
    if "forward" in vars(module) or not {"self_attn", "mlp"} <= module._modules.keys():
        return False
    asked = _answers(
        module, 11.0, input_layernorm=lambda x: x + 1.0, post_attention_layernorm=lambda x: x + 5.0,
        self_attn=lambda hidden_states, *_, **__: (hidden_states * 3.0, None), mlp=lambda x: x * 7.0,
    )  # fmt: skip
    first = asked[0] if isinstance(asked, tuple) and asked else asked
    return bool(first == (after := 11.0 + 12.0 * 3.0) + (after + 5.0) * 7.0)


def _may_sum(layer: Any) -> bool:
    """Return whether a linear layer has rows that add a residual."""
    if layer.bias is not None or not _is_plain(layer.weight) or not layer.weight.is_contiguous():
        return False
    return has_fused_rows(FusedRows([layer], RESIDUAL).problem, layer.weight.get_device())
