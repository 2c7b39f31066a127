"""Serves vLLM's linear layers of int4 (GPTQ, AWQ, compressed-tensors) and nvfp4 where a row holds, else by its kernel.

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

from tritongemm.core.dtypes import INT4_ZERO
from tritongemm.integrations import int4_layers
from tritongemm.integrations.process import attribute, define_opaque, guarded, is_hooked, plain, replace
from tritongemm.operations.four_bit_weights import PackedWeight, pack_compressed_tensors
from tritongemm.operations.linear_w4 import FourBitOperands
from tritongemm.serving import server_calls

KERNELS: Final = ("MacheteLinearKernel", "MarlinLinearKernel", "TritonW4A16LinearKernel")
NVFP4: Final = "MarlinNvFp4LinearKernel"
_NUMBER: Final = "tritongemm_w4_kernel"  # attribute of a layer: the number of what computes it without a row
_WORKSPACE: Final = "workspace"  # of a Marlin kernel or its layer, whose launches must not share it
_OF_NVFP4: Final = ("weight", "weight_scale", "weight_global_scale", _WORKSPACE)  # attributes of a layer
_SIZES: Final = ("output_size_per_partition", "input_size_per_partition")  # of a layer of nvfp4
SERVED: Final = "layer of four bits"
_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor scale, str order, Tensor? bias, Tensor? own_bias, Tensor[] own, int kernel) "
    "-> Tensor"
)

ServerMethod = Callable[..., Tensor]  # of a kernel, a layer, x and a bias


class FourBitKernels:
    """vLLM's kernels that are served by tuned ones, and the operation that torch.compile traces instead.

    A number selects the kernel that computes what no row holds for: its layer's tensors are operands, so that equal
    layers have equal graphs.
    """

    def __init__(self) -> None:
        self._kernels: list[tuple[Any, ServerMethod, dict[str, Any], tuple[str, ...]]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.operation = define_opaque("vllm_w4_linear", _SCHEMA, self._compute, _infer)

    def hook(self, kind: Any) -> None:
        """Wrap the methods of one of vLLM's classes of kernels, and convert weights before it does."""
        convert = kind.process_weights_after_loading
        original = kind.apply_weights
        read_weight = _convert_nvfp4 if kind.__name__ == NVFP4 else _convert
        prepare: Callable[..., PackedWeight | str | None] = guarded("vLLM", SERVED, read_weight)

        @wraps(convert)
        def converted(kernel: Any, layer: Any) -> None:
            found = prepare(kernel, layer)
            int4_layers.keep(layer, found)
            convert(kernel, layer)
            if isinstance(found, PackedWeight):
                setattr(layer, _NUMBER, self._enlist(kernel, original, layer))

        def read(own: Any, kernel: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
            operands = int4_layers.operands(layer, x, bias)
            if operands is None:
                return None
            if torch.compiler.is_compiling():
                number = attribute(layer, _NUMBER)
                *_, names = self._kernels[number]
                tensors = [_tensor(kernel, layer, name) for name in names]
                return partial(self.operation, *operands[:5], bias, tensors, number)
            return partial(server_calls.four_bits_or, operands, own)

        replace("vLLM", SERVED, {kind: "apply_weights"}, read)
        kind.process_weights_after_loading = converted

    def _enlist(self, kernel: Any, original: ServerMethod, layer: Any) -> int:
        """Return the number of a kernel; layers with one of the same class and configuration share it."""
        names = ("w_q_name", "w_s_name", "w_zp_name", "w_gidx_name")
        of_layer = (*filter(None, (attribute(kernel, name) for name in names)), "g_idx_sort_indices", _WORKSPACE)
        of_layer = _OF_NVFP4 if type(kernel).__name__ == NVFP4 else of_layer
        tensors = tuple(name for name in of_layer if isinstance(_tensor(kernel, layer, name), Tensor))
        facts = {"g_idx_sort_indices": None, "input_global_scale": None}
        facts |= {name: attribute(layer, name) for name in _SIZES}
        known = type(kernel), original, repr(kernel.config), tensors, *facts.values()
        if known not in self._numbers:
            self._numbers[known] = len(self._kernels)
            self._kernels.append((kernel, original, facts, tensors))
        return self._numbers[known]

    def _compute(
        self, x: Tensor, weight: Tensor, scale: Tensor, order: str, bias: Tensor | None, own_bias: Tensor | None,
        own: list[Tensor], kernel: int,
    ) -> Tensor:  # fmt: skip
        def otherwise() -> Tensor:
            of_layer, original, facts, names = self._kernels[kernel]
            tensors = dict(zip(names, own, strict=True))
            if _WORKSPACE in tensors and attribute(of_layer, _WORKSPACE) is not None:
                of_layer = copy.copy(of_layer)
                of_layer.workspace = tensors[_WORKSPACE]
            return original(of_layer, SimpleNamespace(**facts | tensors), x, own_bias)

        operands = FourBitOperands(x, weight, scale, order, bias)
        return server_calls.four_bits_or(operands, otherwise).contiguous()


def _infer(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _tensor(kernel: Any, layer: Any, name: str) -> Any:
    """Return a tensor of a layer, or one of its kernel's."""
    found = attribute(layer, name)
    return attribute(kernel, name) if found is None else found


def _convert(kernel: Any, layer: Any) -> PackedWeight | str:
    """Return a layer's weight for its rows, or why it is not served."""
    config = kernel.config
    number, (k, n) = config.weight_type, config.partition_weight_shape
    zero = number.bias if number.has_bias() else INT4_ZERO
    if type(kernel).__name__ not in KERNELS:
        return f"of {type(kernel).__name__}"
    if number.size_bits != 4 or number.is_floating_point() or number.is_signed() or zero != INT4_ZERO:
        return f"of {number}"
    if config.has_g_idx:
        return "of int4 with desc_act"
    if config.zero_points == number.has_bias():
        return f"of {number} {'with' if config.zero_points else 'without'} zero points"
    weight, scale, zeros, _ = kernel._get_weight_params(layer)

    def pack(dtype: torch.dtype, order: str) -> PackedWeight:
        of_zeros = _by_columns(zeros) if config.zero_points else None
        return pack_compressed_tensors(_by_columns(weight), _by_columns(scale), of_zeros, dtype=dtype, order=order)

    return int4_layers.find((n, k), config.act_type, pack)


def _convert_nvfp4(kernel: Any, layer: Any) -> PackedWeight | str:
    return int4_layers.find_nvfp4(layer.params_dtype, layer.weight, layer.weight_scale, layer.weight_global_scale)


def _by_columns(parameter: Any) -> Tensor:
    """Return a parameter with N in front, whichever way a checkpoint has it."""
    tensor: Tensor = plain(parameter).detach()
    return tensor if parameter.output_dim == 0 else tensor.t()


def hook(linear: Any) -> None:
    """Serve vLLM's kernels of mixed precision, and Marlin's of nvfp4, by tuned ones. A second call does nothing.

    Args:
        linear: the module ``vllm.model_executor.kernels.linear``.

    Raises:
        AttributeError: vLLM has no such kernels.
    """
    listed = dict.fromkeys(kind for kinds in linear._POSSIBLE_KERNELS.values() for kind in kinds)
    own = [kind for kind in listed if kind.__name__ in KERNELS]
    if not own:
        raise AttributeError(f"no kernel of mixed precision is one of {', '.join(KERNELS)}")
    if any(is_hooked(kind.apply_weights) for kind in own):
        return
    kernels = FourBitKernels()
    of_nvfp4 = dict.fromkeys(kind for kinds in linear._POSSIBLE_NVFP4_KERNELS.values() for kind in kinds)
    for kind in (*own, *(kind for kind in of_nvfp4 if kind.__name__ == NVFP4)):
        kernels.hook(kind)
