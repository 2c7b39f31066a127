"""Serves SGLang's linear layers of int4 and nvfp4 on Marlin where a tuned row holds for a call, else by Marlin.

Before SGLang converts a checkpoint's weight to Marlin's order it is converted for the layer's rows, and kept beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.dtypes import INT4_ZERO
from tritongemm.integrations import int4_layers
from tritongemm.integrations.process import attribute, guarded, make_layer_hook, plain
from tritongemm.operations.four_bit_weights import PackedWeight, pack_awq, pack_compressed_tensors
from tritongemm.serving import server_calls

_PLACE: Final = "sglang.srt.layers.quantization"
LOADING: Final = "process_weights_after_loading"
SERVED: Final = "layer of four bits"


def hooks() -> Iterator[tuple[str, str, Callable[[], Callable[..., Any]]]]:
    """Yield for each method what it serves, its place, and what makes its hook."""
    for scheme, (call, read) in SCHEMES.items():
        for method, make in ((LOADING, partial(_make_hook_of_loading, read)), (call, _make_hook)):
            yield f"layers of four bits ({scheme.rpartition('.')[2]}.{method})", f"{_PLACE}.{scheme}.{method}", make


def _make_hook_of_loading(read: Callable[..., PackedWeight | str]) -> Callable[..., None]:
    """Return the hook that converts a layer's weight: ``hook(original, scheme, layer)``."""
    known: Callable[..., PackedWeight | str | None] = guarded("SGLang", SERVED, read)

    def convert(original: Callable[..., None], scheme: Any, layer: Any) -> None:
        int4_layers.keep(layer, known(scheme, layer))
        original(scheme, layer)

    return convert


def _make_hook() -> Callable[..., Tensor]:
    """Return the hook of a layer's product: ``hook(original, scheme, layer, x, bias)``.

    Everything that torch.compile traces is given to the scheme itself, and all while results must not depend on the
    batch.
    """
    from sglang.srt import batch_invariant_ops

    def read(own: Any, scheme: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        if torch.compiler.is_compiling() or batch_invariant_ops.is_batch_invariant_mode_enabled():
            return None
        operands = int4_layers.operands(layer, x, bias)
        return None if operands is None else partial(server_calls.four_bits_or, operands, own)

    return make_layer_hook("SGLang", SERVED, read)


def _convert(scheme: Any, layer: Any) -> PackedWeight | str:
    """Return a layer's weight for its rows, or why it is not served."""
    if type(scheme).__name__.startswith("AWQ"):
        weight, scales, zeros = (plain(one).detach() for one in (layer.qweight, layer.scales, layer.qzeros))
        sizes = scales.shape[1], weight.shape[0]
        number, has_zeros, reordered = scheme.quant_config.quant_type, True, False
    else:
        of_gptq = type(scheme).__name__.startswith("GPTQ")
        config = (scheme.kernel if of_gptq else scheme).kernel_config
        (k, n), number = config.partition_weight_shape, config.weight_type
        sizes, has_zeros, reordered = (n, k), config.zero_points, config.has_g_idx
        names = ("qweight", "scales") if of_gptq else ("weight_packed", "weight_scale")
        weight, scales = (plain(getattr(layer, name)).detach() for name in names)
        weight, scales = (weight.t(), scales.t()) if of_gptq else (weight, scales)
        zeros = plain(layer.weight_zero_point).detach() if has_zeros else None
    if reordered:
        return "of int4 with desc_act"
    if number.size_bits != 4 or number.has_bias() == has_zeros or (number.has_bias() and number.bias != INT4_ZERO):
        return f"of {number} {'with' if has_zeros else 'without'} zero points"

    def pack(dtype: torch.dtype, order: str) -> PackedWeight:
        if type(scheme).__name__.startswith("AWQ"):
            return pack_awq(weight, scales, zeros, dtype=dtype, order=order)
        return pack_compressed_tensors(weight, scales, zeros, dtype=dtype, order=order)

    return int4_layers.find(sizes, scales.dtype, pack)


def _convert_nvfp4(method: Any, layer: Any) -> PackedWeight | str:
    """Return the same of a layer of nvfp4 whose factor of all is modelopt's."""
    from sglang.srt.layers.quantization import modelopt_quant

    if type(method).__name__ == _NATIVE and not modelopt_quant.get_fp4_gemm_runner_backend().is_marlin():
        return "of nvfp4 that other kernels than Marlin's compute"
    if attribute(method.quant_config, "is_awq"):
        return "of nvfp4 with factors for columns of activations"
    second = plain(layer.weight_scale_2).detach().max().float()
    return int4_layers.find_nvfp4(layer.params_dtype, layer.weight, layer.weight_scale, second)


_NATIVE: Final = "ModelOptFp4LinearMethod"
# Of each class of what computes a layer: the method that does, and what converts its weight.
SCHEMES: Final[dict[str, tuple[str, Callable[..., PackedWeight | str]]]] = {
    "gptq.schemes.gptq_marlin.GPTQMarlinLinearScheme": ("apply_weights", _convert),
    "awq.schemes.awq_marlin.AWQMarlinLinearScheme": ("apply_weights", _convert),
    "compressed_tensors.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16": ("apply_weights", _convert),
    f"modelopt_quant.{_NATIVE}": ("apply", _convert_nvfp4),
    "modelopt_quant.ModelOptNvFp4A16LinearMethod": ("apply", _convert_nvfp4),
}
