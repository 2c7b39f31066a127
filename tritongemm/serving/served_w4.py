"""Layers of other libraries with weights of four bits, converted once, that `linear_w4` or `fused_moe` computes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tritongemm.core.errors import InputError
from tritongemm.core.problem import PLAIN, Operand, Problem
from tritongemm.core.scaling import GRANULARITIES, MX_DEPTH
from tritongemm.numerics.computable_families import in_fastest_order
from tritongemm.operations.four_bit_weights import (
    PackedWeight,
    depth_of,
    pack_awq,
    pack_compressed_tensors,
    pack_gptq,
    pack_marlin,
    pack_mxfp4,
    pack_nvfp4,
)
from tritongemm.operations.linear_w4 import ACTIVATIONS, dequantize, read_weight
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving import added_operations, mixtures, packed_linear
from tritongemm.serving.served_layers import ServedModule, served_class
from tritongemm.workloads.capturing import session

_Rows: TypeAlias = "Mapping[tuple[Any, ...], int]"  # how many have a weight's extents and B

WEIGHT, SCALE = "w4_weight", "w4_scale"  # buffers that no state dict has
_ROUTED: Final = ["hidden_states", "top_k_index", "top_k_weights"]
OF_EXPERTS: Final = ("w4_gate_up", "w4_gate_up_scale", "w4_gate_up_bias", "w4_down", "w4_down_scale")
_GPTQ, _AWQ, _MARLIN, _COMPRESSED, _EXPERTS = "GPTQ", "AWQ", "Marlin", "compressed-tensors", "mxfp4"
# Classes that keep a checkpoint's own order or Marlin's; others that shuffle weights for their kernels are left.
_FORMATS: Final = {
    "gptqmodel": {
        **dict.fromkeys(("TorchQuantLinear", "TorchLinear", "TritonV2QuantLinear", "TritonV2Linear"), _GPTQ),
        **dict.fromkeys(("AwqTorchQuantLinear", "AwqTorchLinear", "AwqGEMMQuantLinear", "AwqGEMMLinear"), _AWQ),
        "AwqGEMMTritonLinear": _AWQ,
        **dict.fromkeys(("MarlinQuantLinear", "MarlinLinear", "AwqMarlinQuantLinear", "AwqMarlinLinear"), _MARLIN),
    },
    "awq": {"WQLinear_GEMM": _AWQ},
    "auto_round_extension.triton": {"QuantLinear": _GPTQ},
    "compressed_tensors": {"CompressedLinear": _COMPRESSED},  # before its version 0.15
    "transformers": {"Mxfp4GptOssExperts": _EXPERTS},
}
_TENSORS: Final = {
    **dict.fromkeys((_GPTQ, _AWQ, _MARLIN), ("qweight", "scales")), _COMPRESSED: ("weight_packed", "weight_scale")
}  # fmt: skip
# What says that a quantiser sorted K, and the group of each number along it.
_SORTED: Final = {_GPTQ: ("desc_act", "g_idx"), _MARLIN: ("desc_act", ""), _COMPRESSED: ("actorder", "weight_g_idx")}
_OF_FP4: Final = {"weight_16": "nvfp4", "weight_mx": "mxfp4"}
_USUAL: Final = {"bits": 4, "w_bit": 4, "adapter": None, "alpha": 1.702, "limit": 7.0}


class Converted(NamedTuple):
    """What a served layer keeps beside its own weight: tensors by the names of their buffers, and their order."""

    tensors: Mapping[str, Tensor]
    order: str


def is_four_bit_layer(module: nn.Module) -> bool:
    """Return whether a module is of a class whose weights may have four bits."""
    return bool(_format(module))


def _format(module: nn.Module) -> str:
    kind = type(module)
    if kind is nn.Linear and "weight_packed" in module._parameters:
        return _COMPRESSED
    home = kind.__module__.split(".")
    return (_FORMATS.get(home[0]) or _FORMATS.get(".".join(home[:2]), {})).get(kind.__name__, "")


def convert(module: Any, rows: _Rows) -> Converted | str:
    """Return a layer's weight as its rows read it, or why it is not served.

    `rows` counts the rows of each N, K and B, of experts with their number in front. While a capture is under way a
    layer needs none: what it multiplies is written.
    """
    if "forward" in vars(module) and not packed_linear.is_of_compressed_tensors(module.forward):
        return "another library replaced its forward"
    for name, usual in _USUAL.items():
        if getattr(module, name, usual) != usual:
            return f"its {name} is {getattr(module, name)}"
    try:
        if _format(module) == _EXPERTS:
            return _convert_experts(module, rows)
        packed = _convert_layer(module, rows)
    except InputError as error:
        return str(error)
    return packed if isinstance(packed, str) else Converted({WEIGHT: packed.weight, SCALE: packed.scale}, packed.order)


def _convert_layer(module: Any, rows: _Rows) -> PackedWeight | str:
    format_, scheme = _format(module), vars(module).get("quantization_scheme")
    if scheme is not None and scheme.input_activations is not None:
        return "its activations are quantised too"
    if (bits := _given(_given(scheme, "weights"), "num_bits")) not in (None, 4):
        return f"its weight has {bits} bits"
    weight, scale, second = (_given(module, name) for name in (*_TENSORS[format_], "weight_global_scale"))
    if isinstance(second, Tensor):
        return _convert_nvfp4(module, (weight, scale, second), rows)
    if isinstance(scale, Tensor) and scale.dtype == torch.uint8 == weight.dtype:  # exponents, and pairs of fp4
        return choose_fp4(
            rows, partial(pack_mxfp4, weight.detach().unflatten(-1, (-1, 16)), scale.detach()), "weight_mx"
        )
    if not isinstance(weight, Tensor) or not isinstance(scale, Tensor) or weight.dim() != 2 or scale.dim() != 2:
        return "its weight is not packed in int32 with factors for groups"
    if why := _order_unsaid(module, format_):
        return why
    rows_, columns = weight.shape
    of_format = {_GPTQ: (columns, rows_ * 8), _AWQ: (columns * 8, rows_), _MARLIN: (columns // 2, rows_ * 16)}
    n, k = of_format.get(format_, (rows_, columns * 8))
    if format_ == _MARLIN and (module.in_features != k or module.bias is not None):
        return "its bias is in Marlin's order" if module.in_features == k else "its weight is not in Marlin's order yet"
    own = scale.dtype if scale.dtype in ACTIVATIONS else torch.bfloat16
    return choose(rows, (n, k), own, lambda dtype, order: _pack(module, format_, dtype, order))


def _order_unsaid(module: Any, format_: str) -> str:
    """Return why a layer's numbers along K are in no known order: a quantiser sorted them, and no index says how."""
    option, name = _SORTED.get(format_, ("", ""))
    owner = module if format_ in (_GPTQ, _MARLIN) else _given(vars(module).get("quantization_scheme"), "weights")
    index = _given(module, name)
    says = isinstance(index, Tensor) and bool((index >= 0).any())
    if says or _given(owner, option) not in (True, "group", "dynamic"):
        return ""
    return f"its K is sorted ({option})" + f", and no {name} says how" * bool(name)


def _given(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _convert_nvfp4(module: Any, stored: tuple[Any, Any, Tensor], rows: _Rows) -> PackedWeight | str:
    given = [one.detach() if isinstance(one, Tensor) else one for one in stored]
    return choose_fp4(rows, partial(pack_nvfp4, *given, checkpoint_format=_COMPRESSED), "weight_16")


def choose_fp4(rows: _Rows, pack: Callable[..., PackedWeight], granularity: str) -> PackedWeight | str:
    """Return a weight of fp4, which is packed in an order, as `choose` does one of int4."""
    packed = pack()
    n, k = packed.weight.shape[0], 2 * packed.weight.shape[1]
    _, scaling = GRANULARITIES[granularity]
    orders = Counter({b.order: count for (*sizes, b), count in rows.items() if (*sizes, b.scaling) == (n, k, scaling)})
    if not orders and not session.is_running():
        return f"no row of {_OF_FP4[granularity]} for N={n}, K={k}"
    if orders:
        ((order, _),) = orders.most_common(1)
    else:
        order = _captured_order((n, k), Operand("fp4e2m1", row_major=False, scaling=scaling), packed.weight)
    return packed if order == PLAIN else pack(order=order)


def choose(
    rows: _Rows, sizes: tuple[int, int], own: torch.dtype, pack: Callable[[torch.dtype, str], PackedWeight]
) -> PackedWeight | str:
    """Return a weight of int4 as most of its rows read it, or why none does.

    Args:
        rows: as of `convert`.
        sizes: N and K.
        own: the type of activations that the layer's factors are for.
        pack: converts the weight for activations of a type and in an order.

    Raises:
        InputError: the weight can't be converted.
    """
    n, k = sizes
    of_size = {b: count for (*extents, b), count in rows.items() if (*extents, b.dtype) == (n, k, "int4")}
    if not of_size and not session.is_running():
        return f"no row of int4 for N={n}, K={k}"
    packed = pack(own, PLAIN)
    stored = read_weight(packed.weight, packed.scale, own, PLAIN)
    made: Any = stored.scaling
    any_type = made._replace(dtype="")
    fitting = {b: count for b, count in of_size.items() if b.scaling and b.scaling._replace(dtype="") == any_type}
    if not fitting:
        zeros = " and zero points" if made.zeros else ""
        if not session.is_running():
            return f"no row of int4 for N={n}, K={k} with groups of {made.depth}{zeros}"
        order = _captured_order(sizes, stored, packed.weight)
        return packed if order == PLAIN else pack(own, order)
    of_type = {b: count for b, count in fitting.items() if b.scaling == made}
    ((chosen, _),) = Counter(of_type or fitting).most_common(1)
    dtype = next(dtype for dtype in ACTIVATIONS if chosen.scaling and DTYPE_NAMES[dtype] == chosen.scaling.dtype)
    return packed if chosen == stored else pack(dtype, chosen.order)


def _arch(weight: Tensor) -> str:
    """Return the name of a weight's architecture; "" of a CPU, and of AMD's GPUs, of which no order is known."""
    known = weight.is_cuda and torch.version.hip is None
    return "sm{}{}".format(*torch.cuda.get_device_capability(weight.get_device())) if known else ""


def _convert_experts(module: Any, rows: _Rows) -> Converted | str:
    """Return gpt-oss's experts with the rows of the gate before those of up, which alternate in the layer's own."""
    found = list(signature(type(module).forward).parameters)[1:]
    if found != _ROUTED:
        return f"its forward takes {', '.join(found)}; of transformers 5.24 on it takes {', '.join(_ROUTED)}"
    try:
        (w1, w1_scale), (w2, w2_scale) = (_unswizzled(module, name) for name in ("gate_up_proj", "down_proj"))
    except AttributeError as error:
        return f"its weights are not as OpenAI's triton_kernels keeps them: {error}"
    return pack_experts(rows, (w1, w1_scale, module.gate_up_proj_bias.detach()), (w2, w2_scale))


def pack_experts(
    rows: _Rows, gate_up: tuple[Tensor, Tensor, Tensor | None], down: tuple[Tensor, Tensor]
) -> Converted | str:
    """Return gpt-oss's experts as most of their rows read them, or why none does.

    Args:
        rows: as of `convert`.
        gate_up: bytes [experts, 2 * inner, hidden / 2] whose rows of gate and of up alternate, powers of two, a bias.
        down: bytes [experts, hidden, inner / 2] and powers of two.

    Raises:
        InputError: the weights can't be converted.
    """
    _, powers = GRANULARITIES["weight_mx"]
    b = Operand("fp4e2m1", row_major=False, scaling=powers)
    order = common_order(rows, [(w, b) for w in (gate_up[0], down[0])])
    if order is None:
        return _without_rows("mxfp4", gate_up[0], down[0])
    first = [None if each is None else torch.cat((each[:, ::2], each[:, 1::2]), 1) for each in gate_up]
    packed = [
        pack_mxfp4(w.unflatten(-1, (-1, MX_DEPTH // 2)), scale, order=order)
        for w, scale in (first[:2], down)
        if w is not None and scale is not None
    ]
    return _experts(packed, first[2])


def pack_int4_experts(rows: _Rows, packs: Sequence[Callable[..., PackedWeight]], group: int) -> Converted | str:
    """Return experts of int4 as most of their rows read them, or why none does.

    Args:
        rows: as of `convert`.
        packs: convert gate and up, and down, in an order, for activations of the type that their factors have.
        group: the length along K that a checkpoint's factor is for, -1 for a column.

    Raises:
        InputError: the weights can't be converted.
    """
    packed = [pack() for pack in packs]
    for one in packed:
        k = 2 * one.weight.shape[2]
        if depth_of(group if group > 0 else k) != k // one.scale.shape[1]:
            raise InputError(f"its factors are not for groups of {group}")
    order = common_order(
        rows, [(one.weight, read_weight(one.weight[0], one.scale[0], one.scale.dtype, PLAIN)) for one in packed]
    )
    if order is None:
        return _without_rows("int4", *(one.weight for one in packed))
    return _experts(packed if order == PLAIN else [pack(order=order) for pack in packs], None)


def _experts(packed: Sequence[PackedWeight], bias: Tensor | None) -> Converted:
    tensors = *packed[0][:2], bias, *packed[1][:2]
    named = {name: one for name, one in zip(OF_EXPERTS, tensors, strict=True) if one is not None}
    return Converted(named, packed[0].order)


def _without_rows(kind: str, *weights: Tensor) -> str:
    sizes = " and ".join(f"N={w.shape[1]}, K={2 * w.shape[2]}" for w in weights)
    return f"no rows of one order for {weights[0].shape[0]} experts of {kind} of {sizes}"


def common_order(rows: _Rows, weights: Sequence[tuple[Tensor, Operand]]) -> str | None:
    """Return the order in which most rows read both weights of experts, bytes [experts, N, K / 2], as B of these types.

    Without such rows it is None, or while a capture is under way the fastest that is known.
    """
    found: list[Counter[str]] = [
        Counter({b.order: n for (*extents, b), n in rows.items()
                 if (*extents, b._replace(order=PLAIN)) == (*w.shape[:2], 2 * w.shape[2], of)})
        for w, of in weights
    ]  # fmt: skip
    if most := (found[0] & found[1]).most_common(1):
        ((order, _),) = most
        return order
    if not session.is_running():
        return None
    orders = {_captured_order((w.shape[1], 2 * w.shape[2]), of, w) for w, of in weights}
    return orders.pop() if len(orders) == 1 else PLAIN


def _captured_order(sizes: tuple[int, int], b: Operand, weight: Tensor) -> str:
    """Return the order in which kernels of a weight's GPU read it, of this N and K, the fastest, as far as is known."""
    a = Operand("fp16" if b.scaling and b.scaling.dtype == "fp16" else "bf16")
    return in_fastest_order(Problem(1, *sizes, a, b, a), _arch(weight)).b.order


def _unswizzled(module: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return a weight [experts, N, K / 2] and its powers of two [experts, N, K / 32] as a checkpoint has them."""
    stored = getattr(module, name), getattr(module, f"{name}_precision_config").weight_scale
    weight, scale = (one.storage.layout.unswizzle_data(one.storage.data).mT.contiguous() for one in stored)
    return weight, scale


def _pack(module: Any, format_: str, dtype: torch.dtype, order: str) -> PackedWeight:
    with torch.no_grad():
        if format_ == _AWQ:
            return pack_awq(module.qweight, module.scales, module.qzeros, dtype=dtype, order=order)
        if format_ == _GPTQ:
            stored = _stored_zeros(module)
            given = module.qweight, module.scales, module.qzeros, _given(module, "g_idx")
            return pack_gptq(*given, checkpoint_format=stored, dtype=dtype, order=order)
        if format_ == _MARLIN:
            zeros = module.qzeros if module.qzeros.numel() else None
            return pack_marlin(module.qweight.detach(), module.scales.detach(), zeros, dtype=dtype, order=order)
        more = (_given(module, name) for name in ("weight_zero_point", "weight_g_idx"))
        given = module.weight_packed.detach(), module.weight_scale.detach(), *more
        return pack_compressed_tensors(*given, dtype=dtype, order=order)


def _stored_zeros(module: Any) -> str:
    """Return the format of a layer's zero points: "gptq" where they are less 1, else "gptq_v2"."""
    home = type(module).__module__
    second = not home.endswith("_zp") if home.startswith("auto_round") else module.qzero_format() == 2
    return "gptq_v2" if second else "gptq"


class ServedFourBits(ServedModule):
    """A layer with a weight of four bits that tuned kernels compute."""


class ServedInt4Linear(ServedFourBits):
    """A linear layer that is computed by `linear_w4`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result, which its library computes for activations of another type than its rows'."""
        own = self.w4_scale.dtype if self.w4_scale.dtype in ACTIVATIONS else torch.bfloat16
        if input.dtype != own:
            if not packed_linear.is_taken(self):
                result: Tensor = super().forward(input)
                return result
            weight = dequantize(self.w4_weight, self.w4_scale, self.w4_order, own)
            return nn.functional.linear(input, weight, self.bias)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return added_operations.linear_w4(input, self.w4_weight, self.w4_scale, self.w4_order, bias)


class ServedGptOssExperts(ServedFourBits):
    """gpt-oss's experts of mxfp4, computed by `fused_moe`."""

    # The layer before them then gives them each token's experts and routing weights, not its package's own routing.
    _is_hooked = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, which transformers computes for a gradient."""
        x = hidden_states
        wants_gradient = torch.is_grad_enabled() and x.requires_grad
        if wants_gradient or x.dtype not in ACTIVATIONS or torch.is_autocast_enabled(x.device.type):
            result: Tensor = super().forward(x, top_k_index, top_k_weights)
            return result
        w1, w1_scale, w1_bias, w2, w2_scale = (getattr(self, name) for name in OF_EXPERTS)
        return mixtures.fused_moe(
            x, w1, w2, top_k_weights.detach(), top_k_index, "clamped_swiglu", w1_scale, w2_scale, w1_bias=w1_bias,
            w2_bias=self.down_proj_bias.detach(), keep_activations=True, order=self.w4_order,
        )  # fmt: skip


def serve(module: Any, converted: Converted) -> None:
    """Have a layer be computed by tuned kernels; its own weight stays, for `forget` and for state dicts."""
    kind: Any = type(module)
    served = ServedGptOssExperts if _format(module) == _EXPERTS else ServedInt4Linear
    packed_linear.take(module)
    module.__class__ = served_class(served, kind)
    for name, tensor in converted.tensors.items():
        module.register_buffer(name, tensor, persistent=False)
    module.w4_order = converted.order


def forget(module: nn.Module) -> None:
    """Drop the converted weight of a layer that is not served any more."""
    for name in (WEIGHT, SCALE, *OF_EXPERTS, "w4_order"):
        if hasattr(module, name):
            delattr(module, name)
    packed_linear.give_back(module)
