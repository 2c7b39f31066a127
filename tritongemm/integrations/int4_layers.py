"""What layers of four bits of both servers keep beside their own weight: the weight in the order that rows read."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.integrations.process import attribute, captures, plain
from tritongemm.operations.four_bit_weights import PackedWeight, pack_awq, pack_nvfp4
from tritongemm.operations.linear_w4 import ACTIVATIONS, FourBitOperands
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.served_w4 import OF_EXPERTS, Converted, choose, choose_fp4, pack_experts, pack_int4_experts
from tritongemm.system import settings

LEFT: Final = "tritongemm_w4_left"  # attribute of a layer: why it is not served
ORDER: Final = "tritongemm_w4_order"  # attribute of a layer: that of its weight
WEIGHT, SCALE, BIAS = KEPT = ("tritongemm_w4_weight", "tritongemm_w4_scale", "tritongemm_w4_bias")  # its buffers
BIAS_2: Final = "w2_bias_of_checkpoint"  # buffer of a mixture, as a server may pad and permute its own


NO_ROOM: Final = "of four bits for which too little memory would stay free (TRITONGEMM_FREE)"


def has_room(weight: Tensor, needed: int) -> bool:
    """Return whether enough of a weight's GPU stays free where `needed` bytes more are kept on it."""
    if not weight.is_cuda:
        return True
    free, total = torch.cuda.mem_get_info(weight.get_device())
    return bool(free - needed >= settings.free_share() * total)


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


def find_nvfp4(dtype: torch.dtype, *stored: Any) -> PackedWeight | str:
    """Return the same of a layer of nvfp4, of a weight, its factors and the factor of all, which they are times.

    `dtype` is of its activations, which stay as they are.
    """
    if dtype != torch.bfloat16:
        return f"of nvfp4 with activations of {dtype}"
    given = [plain(one).detach() for one in stored]
    try:
        packed = choose_fp4(default_dispatcher().packed_weights, partial(pack_nvfp4, *given), "weight_16")
    except InputError as error:
        return f"of nvfp4 that is refused: {error}"
    if isinstance(packed, str):
        return f"with {packed}"
    return packed if has_room(packed.weight, 0) else NO_ROOM


def keep(layer: Any, found: PackedWeight | str | None) -> None:
    """Keep a weight in buffers that no state dict has, or why there is none; for graphs in the memory of a former one.

    None is of a layer that is not as it is known.
    """
    setattr(
        layer, LEFT, found if isinstance(found, str) else "" if found else "of four bits that is not as it is known"
    )
    if not isinstance(found, PackedWeight):
        for name in KEPT:  # of a weight before this one
            _keep(layer, name, None)
        return
    bias = attribute(layer, "bias")  # which Marlin permutes in place
    for name, tensor in ((WEIGHT, found.weight), (SCALE, found.scale), (BIAS, bias)):
        _keep(layer, name, tensor.detach().clone() if tensor is bias and tensor is not None else tensor)
    setattr(layer, ORDER, found.order)


def find_experts(
    layer: Any, pack: Callable[..., PackedWeight], names: tuple[str, ...], group: int, **more: Any
) -> Converted | str:
    """Return the weights of a layer's experts as their rows read them, or why they are not served.

    Args:
        layer: has parameters ``w13_`` (gate, then up) and ``w2_`` of these names, a weight, its factors and perhaps
            zero points.
        pack: converts them.
        names: of the parameters.
        group: the length along K that a factor is for, -1 for a column.
        more: arguments of `pack`.
    """
    given = [[plain(getattr(layer, f"{of}_{name}")).detach() for name in names] for of in ("w13", "w2")]
    if any(attribute(layer, f"{of}_bias") is not None for of in ("w13", "w2")):
        return "of int4 with biases"
    if not has_room(given[0][0], sum(weight.nbytes for weight, *_ in given)):
        return NO_ROOM
    packs = [partial(pack, *tensors, **more) for tensors in given]
    try:
        found = pack_int4_experts(default_dispatcher().packed_weights, packs, group)
    except InputError as error:
        return f"of int4 that is refused: {error}"
    return f"with {found}" if isinstance(found, str) else found


def find_awq_experts(scheme: Any, layer: Any) -> Converted | str:
    """Return the same of AWQ's experts, of which `scheme` has the description that both servers read."""
    config = scheme.quant_config
    if not config.zero_point:
        return "of AWQ without zero points"
    return find_experts(layer, pack_awq, ("qweight", "scales", "qzeros"), config.group_size)


def find_mxfp4_experts(layer: Any, biases: tuple[str, str]) -> Converted | str:
    """Return the same of gpt-oss's experts, whose rows of gate and up alternate; the second bias is kept as `BIAS_2`.

    Args:
        layer: has parameters ``w13_`` and ``w2_`` of the names ``weight`` and ``weight_scale``.
        biases: names of its two biases, which it may lack.
    """
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    w1, w1_scale, w2, w2_scale = (plain(getattr(layer, name)).detach() for name in names)
    w1_bias, w2_bias = (plain(attribute(layer, name)) for name in biases)
    if not has_room(w1, sum(one.nbytes for one in (w1, w1_scale, w2, w2_scale))):
        return NO_ROOM
    try:
        found = pack_experts(default_dispatcher().packed_weights, (w1, w1_scale, w1_bias), (w2, w2_scale))
    except InputError as error:
        return f"of mxfp4 that is refused: {error}"
    if w2_bias is not None:
        layer.register_buffer(BIAS_2, w2_bias.detach().clone(), persistent=False)
    return f"with {found}" if isinstance(found, str) else found


def place_routing(x: Tensor, topk: int, route: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return memory for the weights and ids of tokens' experts; what `route` returns where a capture counts them."""
    sizes = x.shape[0], topk
    return route() if captures() else (x.new_empty(sizes, dtype=torch.float32), x.new_empty(sizes, dtype=torch.int32))


def keep_experts(layer: Any, found: Converted | str | None) -> None:
    """Keep the weights of experts, or why there are none, as `keep` does."""
    setattr(
        layer, LEFT, found if isinstance(found, str) else "" if found else "of four bits that is not as it is known"
    )
    setattr(layer, ORDER, found.order if isinstance(found, Converted) else None)
    tensors = found.tensors if isinstance(found, Converted) else {}
    for name in OF_EXPERTS:
        _keep(layer, name, tensors.get(name))


def _keep(layer: Any, name: str, tensor: Tensor | None) -> None:
    """Keep a tensor in the memory of a former one, which graphs read, where that is alike."""
    if tensor is None:
        vars(layer).get("_buffers", {}).pop(name, None)
        return
    kept = attribute(layer, name)
    if not isinstance(kept, Tensor) or kept.shape != tensor.shape or kept.device != tensor.device:
        layer.register_buffer(name, tensor, persistent=False)
    else:
        kept.copy_(tensor)


def operands(layer: Any, x: Tensor, bias: Tensor | None) -> FourBitOperands | None:
    """Return what `linear_w4` is given for a layer's call, with the bias as it was loaded; None where it is not served.

    `bias` is the layer's own or None.
    """
    weight, scale = attribute(layer, WEIGHT), attribute(layer, SCALE)
    if weight is None or x.dtype != scale.dtype or (bias is not None and bias is not layer.bias):
        return None
    return FourBitOperands(x, weight, scale, attribute(layer, ORDER), None if bias is None else attribute(layer, BIAS))
