"""Serves SGLang's linear layers of int4 that Marlin computes where a tuned row holds for a call, else by Marlin.

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
from tritongemm.integrations.process import guarded, plain
from tritongemm.integrations.process import make_hook as make_server_hook
from tritongemm.operations.four_bit_weights import PackedWeight, pack_awq, pack_compressed_tensors
from tritongemm.serving import server_calls

_PLACE: Final = "sglang.srt.layers.quantization"
# Classes of what computes a layer: of GPTQ, of AWQ and of compressed-tensors.
SCHEMES: Final = (
    f"{_PLACE}.gptq.schemes.gptq_marlin.GPTQMarlinLinearScheme",
    f"{_PLACE}.awq.schemes.awq_marlin.AWQMarlinLinearScheme",
    f"{_PLACE}.compressed_tensors.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16",
)
LOADING, CALL = "process_weights_after_loading", "apply_weights"  # methods of each


def hooks() -> Iterator[tuple[str, str, Callable[[], Callable[..., Any]]]]:
    """Yield for each method what it serves, its place, and what makes its hook."""
    for scheme in SCHEMES:
        for method, make in ((LOADING, make_hook_of_loading), (CALL, make_hook)):
            yield f"int4 layers ({scheme.rpartition('.')[2]}.{method})", f"{scheme}.{method}", make


def make_hook_of_loading() -> Callable[..., None]:
    """Return the hook that converts a layer's weight: ``hook(original, scheme, layer)``."""
    known: Callable[..., PackedWeight | str | None] = guarded("SGLang", "int4 layer", _convert)

    def convert(original: Callable[..., None], scheme: Any, layer: Any) -> None:
        int4_layers.keep(layer, known(scheme, layer))
        original(scheme, layer)

    return convert


def make_hook() -> Callable[..., Tensor]:
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

    return make_server_hook("SGLang", "int4 layer", read)


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
