"""Serves vLLM's linear layers of int4 (GPTQ, AWQ, compressed-tensors) and nvfp4 where a row holds, else by its kernel.

vLLM's kernels of mixed precision convert a checkpoint's weight to an order of their own when a model is loaded. Before
that it is converted for the layer's rows, and kept beside vLLM's: half a byte more for each number of such a layer. The
operators by which they multiply have a hook before them, which knows a layer by the address of vLLM's weight. What vLLM
compiles stays as it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.dtypes import INT4_ZERO
from tritongemm.integrations import int4_layers
from tritongemm.integrations.compiled import stand_before
from tritongemm.integrations.process import attribute, define_opaque, guarded, make_hook, plain
from tritongemm.operations.four_bit_weights import PackedWeight, pack_compressed_tensors
from tritongemm.operations.linear_w4 import FourBitOperands
from tritongemm.serving import server_calls

KERNELS: Final = ("MacheteLinearKernel", "MarlinLinearKernel", TRITON := "TritonW4A16LinearKernel")
NVFP4: Final = "MarlinNvFp4LinearKernel"
MACHETE, MARLIN = "_C::machete_mm", "_C::marlin_gemm"  # operators
SERVED: Final = "layer of four bits"
_OF_TRITON = "(Tensor a, Tensor b_q, Tensor scales, Tensor? qzeros, int group_size, int zp_bias) -> Tensor"
_PADDED: Final = "of four bits whose weight vLLM pads"


class _Converted(NamedTuple):
    """A layer's weight in its rows' order, and the bias as it was loaded."""

    layer: weakref.ref[Any]
    weight: Tensor
    scale: Tensor
    order: str
    bias: Tensor | None


class FourBitWeights:
    """The weights of layers that are served, by the address of that which vLLM's kernel reads."""

    def __init__(self) -> None:
        self._kept: dict[int, _Converted] = {}

    def convert_before(self, kind: Any) -> None:
        """Convert weights before one of vLLM's classes of kernels does; once."""
        convert = kind.process_weights_after_loading
        if convert.__module__ == __name__:
            return
        read_weight = _convert_nvfp4 if kind.__name__ == NVFP4 else _convert
        prepare: Callable[..., PackedWeight | str | None] = guarded("vLLM", SERVED, read_weight)

        @wraps(convert)
        def converted(kernel: Any, layer: Any) -> None:
            found = prepare(kernel, layer)
            int4_layers.keep(layer, found)
            convert(kernel, layer)
            if isinstance(found, PackedWeight):
                self._enlist(layer, plain(getattr(layer, attribute(kernel, "w_q_name", "weight"))))

        converted.__module__ = __name__
        kind.process_weights_after_loading = converted

    def _enlist(self, layer: Any, theirs: Tensor) -> None:
        """Keep what serves the products of vLLM's weight."""
        kept, at = self._kept, theirs.data_ptr()
        for former in [address for address, one in kept.items() if one.layer() is layer]:
            del kept[former]
        names = (int4_layers.WEIGHT, int4_layers.SCALE, int4_layers.ORDER, int4_layers.BIAS)
        weight, scale, order, bias = (attribute(layer, name) for name in names)
        if theirs.nbytes != weight.nbytes:
            int4_layers.keep(layer, _PADDED)
            return
        kept[at] = _Converted(weakref.ref(layer), weight, scale, order, bias)
        weakref.finalize(layer, kept.pop, at, None)

    def find(self, own: Any, a: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], Tensor] | None:
        """Return what computes a product of activations [M, K] and a weight of vLLM's; None where vLLM does."""
        kept = self._kept.get(plain(weight).data_ptr())
        if kept is None or a.dtype != kept.scale.dtype or (bias is not None and kept.bias is None):
            return None
        added = None if bias is None else kept.bias
        return partial(server_calls.four_bits_or, FourBitOperands(a, *kept[1:4], added), own)


def hook(linear: Any) -> None:
    """Serve vLLM's kernels of mixed precision, and Marlin's of nvfp4, by tuned ones. A second call does nothing.

    Args:
        linear: the module ``vllm.model_executor.kernels.linear``.

    Raises:
        AttributeError: vLLM has no such kernels or operators.
    """
    weights = FourBitWeights()

    def read_machete(own: Any, a: Tensor, weight: Tensor, *_: Any) -> Any:
        return weights.find(own, a, weight, None)

    def read_marlin(own: Any, a: Tensor, _: None, weight: Tensor, bias: Tensor | None, *__: Any) -> Any:
        return weights.find(own, a, weight, bias)

    listed = dict.fromkeys(kind for kinds in linear._POSSIBLE_KERNELS.values() for kind in kinds)
    of_nvfp4 = dict.fromkeys(kind for kinds in linear._POSSIBLE_NVFP4_KERNELS.values() for kind in kinds)
    own = [kind for kind in (*listed, *of_nvfp4) if kind.__name__ in (*KERNELS, NVFP4)]
    before_machete, before_marlin = (make_hook("vLLM", SERVED, read) for read in (read_machete, read_marlin))
    found = [stand_before(MACHETE, before_machete, (0, 1)), stand_before(MARLIN, before_marlin, (0, 2))]
    for kind in (kind for kind in own if kind.__name__ == TRITON):
        found.append(_name_tritons(sys.modules[kind.__module__], before_machete))
    if not any(found):
        raise AttributeError(f"no kernel of mixed precision is one of {', '.join(KERNELS)}")
    for kind in own:
        weights.convert_before(kind)


def _name_tritons(module: Any, hook: Callable[..., Tensor]) -> bool:
    """Have an operator stand for the function by which vLLM's Triton kernel multiplies, which has none; return True."""
    own = module.triton_w4a16_gemm
    if isinstance(own, torch._ops.OpOverloadPacket):
        return True

    def infer(a: Tensor, b_q: Tensor, scales: Tensor, *_: Any) -> Tensor:
        return a.new_empty((a.shape[0], scales.shape[1]))

    module.triton_w4a16_gemm = define_opaque("vllm_w4_triton", _OF_TRITON, partial(hook, own), infer)
    return True


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
