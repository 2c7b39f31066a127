"""Sibling linear layers that read one input, computed as one product: the first that is called computes all.

Their weights are views of one tensor. In each thread a group knows the last input that one of its layers was given, by
the identity of the tensor object and the version that PyTorch counts at each change in place. A layer that is given
that very tensor takes its columns of what was computed; one that is given another is computed by itself. All layers
must have read one input before anything is computed for the others, so that layers that merely have such names cost
nothing more.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.operations.served_problems import layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving.api import mm
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.workloads.sibling_layers import find_siblings, saved_seconds

_DTYPES: Final = (torch.bfloat16, torch.float16)  # float32 has a precision that may change from call to call
_ALIGNED_BYTES: Final = 256  # as PyTorch's allocator gives memory, so that libraries choose the same algorithms
_PLAIN: Final = (Tensor, nn.Parameter)
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_grad = torch.is_grad_enabled
_autocast = torch.is_autocast_enabled
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_forward = torch.autograd.forward_ad


def _no_input() -> None:
    return None


class _Turn:
    """What one thread does with one input of a group."""

    __slots__ = ("agreed", "input", "result", "stream", "version", "waiting")

    def __init__(self) -> None:
        self.input: Callable[[], Any] = _no_input
        self.version, self.stream = 0, 0
        self.waiting = 0  # a bit for each layer that was not given the input yet
        self.result: Tensor | None = None  # kept for these
        self.agreed = False  # whether all layers were given one input before


class _Turns(threading.local):
    """The turn of each thread."""

    def __init__(self) -> None:
        self.own = _Turn()


class JoinedLayers:
    """Layers that read one input, and the one product that computes them."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._parameters = [layer._parameters for layer in layers]  # not the layers, which refer to this
        self._widths = [layer.out_features for layer in layers]
        self._starts = [sum(self._widths[:place]) for place in range(len(layers))]
        self._problems = _problems(layers)
        self._all = (1 << len(layers)) - 1
        self._turns = _Turns()
        self._pays_at: dict[int, bool] = {}
        self._decided_with: object = None  # The dispatcher replaces its calls when records are added.
        names = ("weight",) if layers[0].bias is None else ("weight", "bias")
        with torch.inference_mode(False), torch.no_grad():
            joined = {name: self._join(name) for name in names}
        self.weight, self.bias = joined["weight"], joined.get("bias")
        self._index, self._k, self._dtype = self.weight.get_device(), layers[0].in_features, self.weight.dtype
        # Of each parameter: its layer, its name, its address and size.
        self._parts = [(p, name, p[name].data_ptr(), p[name].numel()) for p in self._parameters for name in names]
        self._has_bias = "bias" in joined

    def _join(self, name: str) -> Tensor:
        joined = torch.cat([parameters[name].data for parameters in self._parameters])
        for parameters, part in zip(self._parameters, joined.split(self._widths), strict=True):
            parameters[name].data = part
        return joined

    def separate(self) -> None:
        """Give each layer memory of its own with its values; one that was given other memory keeps it."""
        with torch.inference_mode(False), torch.no_grad():
            for part in self._parts:
                if _is_part(*part):
                    parameters, name = part[:2]
                    parameters[name].data = parameters[name].data.clone()

    def take(self, place: int, x: Tensor) -> Tensor | None:
        """Return a layer's result, as columns of the joined one; None where the layer is to be computed by itself."""
        if _grad() or _modes() or _autocast() or _tracing() is not None or _forward._current_level >= 0:
            return None
        turn, bit = self._turns.own, 1 << place
        if not (turn.waiting & bit and turn.input() is x and turn.version == x._version):
            return self._begin(turn, place, x)
        turn.waiting ^= bit
        result = turn.result
        if not turn.waiting:
            turn.result, turn.agreed = None, True
        if result is None or turn.stream != _stream(self._index):
            return None
        return result.narrow(-1, self._starts[place], self._widths[place])

    def _begin(self, turn: _Turn, place: int, x: Tensor) -> Tensor | None:
        """Return what the first layer that is given an input does."""
        if turn.result is not None:  # computed for layers that were then given something else
            turn.result, turn.agreed = None, False
        turn.waiting = 0
        if type(x) not in _PLAIN or x.is_inference() or x.dtype is not self._dtype or not self._pays(x):
            return None
        turn.input, turn.version, turn.stream = weakref.ref(x), x._version, _stream(self._index)
        turn.waiting = self._all ^ (1 << place)
        if not (turn.agreed and self._is_complete()):
            return None
        turn.result = mm(x, self.weight, self.bias)
        return turn.result.narrow(-1, self._starts[place], self._widths[place])

    def _is_complete(self) -> bool:
        """Return whether all weights and biases still are the parts that they were made."""
        for part in self._parts:
            if not _is_part(*part):
                return False
        return self._has_bias or all(parameters.get("bias") is None for parameters in self._parameters)

    def _pays(self, x: Tensor) -> bool:
        """Return whether the joined product is the faster one at the rows of x."""
        dispatcher = default_dispatcher()
        calls = dispatcher.calls
        if self._decided_with is not calls:
            self._pays_at, self._decided_with = {}, calls
        shape = x.shape
        if x.get_device() != self._index or len(shape) < 2 or shape[-1] != self._k:
            return False
        decided, m = self._pays_at, x.numel() // self._k
        pays = decided.get(m)
        if pays is None:
            device = dispatcher.device_kernels(self._index)
            if device is None or not m:  # a graph is captured, before kernels were loaded
                return False
            pays = decided[m] = _pays_at(device, self._problems, m)
        return pays


def _is_part(parameters: Mapping[str, Any], name: str, address: int, numel: int) -> bool:
    """Return whether a layer's parameter still is the part of a joined one that it was made."""
    p: Any = parameters.get(name)
    if type(p) is not nn.Parameter:
        return False
    return bool(p.data_ptr() == address and p.numel() == numel and p.is_contiguous())


class JoinedPart:
    """A layer's place in its group. Copies and pickles of the layer have none: they are computed by themselves."""

    __slots__ = ("_place", "group")

    def __init__(self, group: JoinedLayers, place: int) -> None:
        self.group, self._place = group, place

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_input, ()

    def take(self, x: Tensor) -> Tensor | None:
        """Return the layer's result, or None where it is to be computed by itself."""
        return self.group.take(self._place, x)


def find_joinable(model: nn.Module, layers: Mapping[str, nn.Linear]) -> list[tuple[str, ...]]:
    """Return the groups of a model's layers that tuned tables say are faster as one product, at some M at least.

    What shares memory with anything else in the model is left.
    """
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    owners = Counter(_memory(tensor) for _, tensor in tensors)
    groups = {names: [layers[name] for name in names] for names in find_siblings(layers)}
    return [names for names, group in groups.items() if _may_join(group, owners) and _pays_anywhere(group)]


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it is no plain tensor."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in _PLAIN and tensor.layout == torch.strided else 0


def _may_join(layers: Sequence[nn.Linear], owners: Mapping[int, int]) -> bool:
    first = layers[0].weight
    return all(
        _is_own(w, owners)
        and (w.dtype, w.device, w.shape[1]) == (first.dtype, first.device, first.shape[1])
        and w.dtype in _DTYPES
        and (b is None) == (layers[0].bias is None)
        and (b is None or (_is_own(b, owners) and b.dtype == w.dtype and b.device == w.device))
        for w, b in ((layer.weight, layer.bias) for layer in layers)
    )


def _is_own(parameter: Tensor, owners: Mapping[int, int]) -> bool:
    """Return whether memory is one parameter's alone, and a part of a joined one would be aligned as well."""
    address = _memory(parameter)
    return (
        address != 0
        and owners[address] == 1
        and parameter.is_contiguous()
        and not parameter.is_inference()
        and parameter.numel() * parameter.element_size() % _ALIGNED_BYTES == 0
        and parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    )


def _problems(layers: Sequence[nn.Linear]) -> tuple[Problem, ...]:
    """Return the joined product and that of each layer, with an M of 1."""
    dtype, bias = DTYPE_NAMES[layers[0].weight.dtype], "none" if layers[0].bias is None else "n"
    widths = [layer.out_features for layer in layers]
    k = layers[0].in_features
    return tuple(layer_problem((1, n, k), (dtype, dtype, dtype), bias) for n in (sum(widths), *widths))


def _pays_anywhere(layers: Sequence[nn.Linear]) -> bool:
    device = default_dispatcher().device_kernels(layers[0].weight.get_device())
    if device is None:
        return False
    problems = _problems(layers)
    rows = device.records.near_rows(problems[0], device.device.arch, device.device.compute_units)
    return any(_pays_at(device, problems, row.record.problem.m) for row in rows)


def _pays_at(device: DeviceKernels, problems: Iterable[Problem], m: int) -> bool:
    """Return whether the joined product, the first one, is faster at an M by its row and those of the layers.

    Where rows must be invariant, all must also add up in one order, as other M may be computed apart.
    """
    at_m = [replace(problem, m=m) for problem in problems]
    rows = [row for row in map(device.find_record, at_m) if not isinstance(row, Support)]
    seconds = [known for row in rows if (known := device.served_seconds(row)) is not None]
    if len(seconds) < len(at_m) or (default_dispatcher().wants_invariant_rows and len({r.order for r in rows}) > 1):
        return False
    return saved_seconds(at_m[0], seconds[0], seconds[1:]) > 0
