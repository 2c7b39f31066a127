"""Serves vLLM's linear layers of int4 (GPTQ, AWQ, compressed-tensors) where a tuned row holds, else by vLLM's kernel.

vLLM's kernels of mixed precision convert a checkpoint's weight to an order of their own when a model is loaded. Before
that it is converted for the layer's rows, and kept beside vLLM's: half a byte more for each number of such a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.integrations.process import attribute, define_opaque, guarded, keep_weights, plain, require_parameters
from tritongemm.operations.four_bit_weights import PackedWeight, pack_compressed_tensors
from tritongemm.operations.linear_w4 import ACTIVATIONS, FourBitOperands
from tritongemm.serving import server_calls
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.served_w4 import choose

KERNELS: Final = ("MacheteLinearKernel", "MarlinLinearKernel", "TritonW4A16LinearKernel")
KEPT: Final = ("tritongemm_w4_weight", "tritongemm_w4_scale", "tritongemm_w4_bias")  # buffers of a layer
LEFT: Final = "tritongemm_w4_left"  # attribute of a layer: why it is not served
_ORDER, _NUMBER = "tritongemm_w4_order", "tritongemm_w4_kernel"  # of the weight; of what computes without a row
_WORKSPACE: Final = "workspace"  # of a Marlin kernel, whose launches must not share it
_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor scale, str order, Tensor? bias, Tensor? own_bias, Tensor[] own, int kernel) "
    "-> Tensor"
)
_SYMMETRIC = 8  # what is subtracted from the bits of a weight without zero points

ServerMethod = Callable[..., Tensor]  # of a kernel, a layer, x and a bias


class Int4Kernels:
    """vLLM's kernels that are served by tuned ones, and the operation that torch.compile traces instead.

    A number selects the kernel that computes what no row holds for: its layer's tensors are operands, so that equal
    layers have equal graphs.
    """

    def __init__(self) -> None:
        self._kernels: list[tuple[Any, ServerMethod, tuple[str, ...]]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.operation = define_opaque("vllm_w4_linear", _SCHEMA, self._compute, _infer)

    def hook(self, kind: Any) -> None:
        """Wrap the methods of one of vLLM's classes of kernels, and convert weights before it does."""
        convert = kind.process_weights_after_loading
        original = kind.apply_weights
        prepare = guarded("vLLM", "int4 layer", _convert)

        @wraps(convert)
        def converted(kernel: Any, layer: Any) -> None:
            found = prepare(kernel, layer)
            convert(kernel, layer)
            setattr(layer, LEFT, found if isinstance(found, str) else "")
            if isinstance(found, tuple):
                packed, bias = found
                keep_weights(layer, dict(zip(KEPT, (packed.weight, packed.scale, bias), strict=True)))
                setattr(layer, _ORDER, packed.order)
                setattr(layer, _NUMBER, self._enlist(kernel, original, layer))

        @wraps(original)
        def served(kernel: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            number, weight = attribute(layer, _NUMBER), attribute(layer, KEPT[0])
            if number is None or x.dtype != kernel.config.act_type or (bias is not None and bias is not layer.bias):
                return original(kernel, layer, x, bias)
            names = self._kernels[number][2]
            scale, unpermuted = attribute(layer, KEPT[1]), None if bias is None else attribute(layer, KEPT[2])
            if torch.compiler.is_compiling():
                own = [attribute(kernel if name == _WORKSPACE else layer, name) for name in names]
                order = attribute(layer, _ORDER)
                result: Tensor = self.operation(x, weight, scale, order, unpermuted, bias, own, number)
                return result
            operands = FourBitOperands(x, weight, scale, attribute(layer, _ORDER), unpermuted)
            return server_calls.four_bits_or(operands, partial(original, kernel, layer, x, bias))

        require_parameters(original, served)
        served.__module__ = __name__
        kind.process_weights_after_loading, kind.apply_weights = converted, served

    def _enlist(self, kernel: Any, original: ServerMethod, layer: Any) -> int:
        """Return the number of a kernel; layers with one of the same class and configuration share it."""
        names = ("w_q_name", "w_s_name", "w_zp_name", "w_gidx_name")
        of_layer = (*filter(None, (attribute(kernel, name) for name in names)), "g_idx_sort_indices")
        tensors = tuple(name for name in of_layer if isinstance(attribute(layer, name), Tensor))
        tensors += (_WORKSPACE,) * isinstance(attribute(kernel, _WORKSPACE), Tensor)
        known = type(kernel), original, repr(kernel.config), tensors
        if known not in self._numbers:
            self._numbers[known] = len(self._kernels)
            self._kernels.append((kernel, original, tensors))
        return self._numbers[known]

    def _compute(
        self, x: Tensor, weight: Tensor, scale: Tensor, order: str, bias: Tensor | None, own_bias: Tensor | None,
        own: list[Tensor], kernel: int,
    ) -> Tensor:  # fmt: skip
        def otherwise() -> Tensor:
            enlisted, original, names = self._kernels[kernel]
            tensors = dict(zip(names, own, strict=True))
            of_layer = copy.copy(enlisted)
            if _WORKSPACE in tensors:
                of_layer.workspace = tensors.pop(_WORKSPACE)
            layer = SimpleNamespace(**{"g_idx_sort_indices": None, "input_global_scale": None, **tensors})
            return original(of_layer, layer, x, own_bias)

        operands = FourBitOperands(x, weight, scale, order, bias)
        return server_calls.four_bits_or(operands, otherwise).contiguous()


def _infer(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _convert(kernel: Any, layer: Any) -> tuple[PackedWeight, Tensor | None] | str:
    """Return a layer's weight for its rows, with a copy of its bias, which Marlin permutes; or why there is none."""
    config, dispatcher = kernel.config, default_dispatcher()
    number, (k, n) = config.weight_type, config.partition_weight_shape
    zero = number.bias if number.has_bias() else _SYMMETRIC
    if type(kernel).__name__ not in KERNELS:
        return f"of {type(kernel).__name__}"
    if config.act_type not in ACTIVATIONS:
        return f"of int4 with activations of {config.act_type}"
    if number.size_bits != 4 or number.is_floating_point() or number.is_signed() or zero != _SYMMETRIC:
        return f"of {number}"
    if config.has_g_idx:
        return "of int4 with desc_act"
    if config.zero_points == number.has_bias():
        return f"of {number} {'with' if config.zero_points else 'without'} zero points"
    weight, scale, zeros, _ = kernel._get_weight_params(layer)

    def pack(dtype: torch.dtype, order: str) -> PackedWeight:
        by_columns = [_by_columns(one) for one in (weight, scale)]
        of_zeros = _by_columns(zeros) if config.zero_points else None
        return pack_compressed_tensors(*by_columns, of_zeros, dtype=dtype, order=order)

    try:
        packed = choose(dispatcher.packed_weights, (n, k), config.act_type, pack)
    except InputError as error:
        return f"of int4 that is refused: {error}"
    if isinstance(packed, str):
        return f"with {packed}"
    if packed.scale.dtype != config.act_type:
        return f"with no row of int4 for N={n}, K={k} in {config.act_type}"
    bias = attribute(layer, "bias")
    return packed, None if bias is None else bias.detach().clone()


def _by_columns(parameter: Any) -> Tensor:
    """Return a parameter with N in front, whichever way a checkpoint has it."""
    tensor: Tensor = plain(parameter).detach()
    return tensor if parameter.output_dim == 0 else tensor.t()


def hook(linear: Any) -> None:
    """Serve vLLM's kernels of mixed precision by tuned ones. A second call does nothing.

    Args:
        linear: the module ``vllm.model_executor.kernels.linear``.

    Raises:
        AttributeError: vLLM has no such kernels.
    """
    listed = dict.fromkeys(kind for kinds in linear._POSSIBLE_KERNELS.values() for kind in kinds)
    own = [kind for kind in listed if kind.__name__ in KERNELS]
    if not own:
        raise AttributeError(f"no kernel of mixed precision is one of {', '.join(KERNELS)}")
    if any(kind.apply_weights.__module__ == __name__ for kind in own):
        return
    kernels = Int4Kernels()
    for kind in own:
        kernels.hook(kind)
