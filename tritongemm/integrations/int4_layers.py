"""What layers of int4 of both servers keep beside their own weight: the weight in the order that rows read."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.integrations.process import attribute
from tritongemm.operations.four_bit_weights import PackedWeight
from tritongemm.operations.linear_w4 import ACTIVATIONS, FourBitOperands
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.served_w4 import choose

LEFT: Final = "tritongemm_w4_left"  # attribute of a layer: why it is not served
ORDER: Final = "tritongemm_w4_order"  # attribute of a layer: that of its weight
WEIGHT, SCALE, BIAS = KEPT = ("tritongemm_w4_weight", "tritongemm_w4_scale", "tritongemm_w4_bias")  # its buffers


NO_ROOM: Final = "of four bits that would leave less than half of the GPU's memory"


def has_room(weight: Tensor, needed: int) -> bool:
    """Return whether half of a weight's GPU stays free where `needed` bytes more are kept on it."""
    if not weight.is_cuda:
        return True
    free, total = torch.cuda.mem_get_info(weight.get_device())
    return bool(2 * (free - needed) >= total)


def find(
    sizes: tuple[int, int], dtype: torch.dtype, pack: Callable[[torch.dtype, str], PackedWeight]
) -> PackedWeight | str:
    """Return a layer's weight as its rows read it, or why it is not served, behind the number of such layers.

    Args:
        sizes: its N and K.
        dtype: of its activations.
        pack: converts the weight for activations of a type and in an order.
    """
    if dtype not in ACTIVATIONS:
        return f"of int4 with activations of {dtype}"
    try:
        packed = choose(default_dispatcher().packed_weights, sizes, dtype, pack)
    except InputError as error:
        return f"of int4 that is refused: {error}"
    if isinstance(packed, str):
        return f"with {packed}"
    if not has_room(packed.weight, 0):
        return NO_ROOM
    if packed.scale.dtype != dtype:
        return f"with no row of int4 for N={sizes[0]}, K={sizes[1]} in {dtype}"
    return packed


def keep(layer: Any, found: PackedWeight | str | None) -> None:
    """Keep a weight in buffers that no state dict has, or why there is none; for graphs in the memory of a former one.

    None is of a layer that is not as it is known.
    """
    setattr(layer, LEFT, found if isinstance(found, str) else "" if found else "of int4 that is not as it is known")
    if not isinstance(found, PackedWeight):
        for name in KEPT:  # of a weight before this one
            vars(layer).get("_buffers", {}).pop(name, None)
        return
    for name, tensor in ((WEIGHT, found.weight), (SCALE, found.scale), (BIAS, attribute(layer, "bias"))):
        kept = attribute(layer, name)
        if tensor is None or not isinstance(kept, Tensor) or kept.shape != tensor.shape or kept.device != tensor.device:
            # Marlin permutes a bias in place.
            layer.register_buffer(name, None if tensor is None else tensor.detach().clone(), persistent=False)
        else:
            kept.copy_(tensor)
    setattr(layer, ORDER, found.order)


def operands(layer: Any, x: Tensor, bias: Tensor | None) -> FourBitOperands | None:
    """Return what `linear_w4` is given for a layer's call, with the bias as it was loaded; None where it is not served.

    `bias` is the layer's own or None.
    """
    weight, scale = attribute(layer, WEIGHT), attribute(layer, SCALE)
    if weight is None or x.dtype != scale.dtype or (bias is not None and bias is not layer.bias):
        return None
    return FourBitOperands(x, weight, scale, attribute(layer, ORDER), None if bias is None else attribute(layer, BIAS))
