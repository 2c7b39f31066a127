"""Layers of other libraries with weights of four bits, served: converted once, they are computed by `linear_w4`."""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from tritongemm.core.errors import InputError
from tritongemm.core.problem import PLAIN, Operand
from tritongemm.operations.four_bit_weights import PackedWeight, pack_awq, pack_compressed_tensors, pack_gptq
from tritongemm.operations.linear_w4 import ACTIVATIONS, read_weight
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving import added_operations
from tritongemm.workloads.capturing import session

WEIGHT, SCALE = "w4_weight", "w4_scale"  # buffers that no state dict has
_GPTQ, _AWQ, _COMPRESSED, _EXPERTS = "GPTQ", "AWQ", "compressed-tensors", "mxfp4"
# Classes that keep a checkpoint's own order; those that shuffle weights for kernels of their own are left.
_FORMATS: Final = {
    "gptqmodel": {
        **dict.fromkeys(("TorchQuantLinear", "TorchLinear", "TritonV2QuantLinear", "TritonV2Linear"), _GPTQ),
        **dict.fromkeys(("AwqTorchQuantLinear", "AwqTorchLinear", "AwqGEMMQuantLinear", "AwqGEMMLinear"), _AWQ),
    },
    "awq": {"WQLinear_GEMM": _AWQ},
    "compressed_tensors": {"CompressedLinear": _COMPRESSED},
    "transformers": {"Mxfp4GptOssExperts": _EXPERTS},
}
_TENSORS: Final = {_GPTQ: ("qweight", "scales"), _AWQ: ("qweight", "scales"),
                   _COMPRESSED: ("weight_packed", "weight_scale")}  # fmt: skip
_USUAL: Final = {"bits": 4, "w_bit": 4, "adapter": None}


def is_four_bit_layer(module: nn.Module) -> bool:
    """Return whether a module is of a class whose weights may have four bits."""
    return bool(_format(type(module)))


def _format(kind: type[nn.Module]) -> str:
    return _FORMATS.get(kind.__module__.partition(".")[0], {}).get(kind.__name__, "")


def convert(module: Any, rows: Mapping[tuple[int, int, Operand], int]) -> PackedWeight | str:
    """Return a layer's weight as its rows read it, or why it is not served.

    `rows` counts the rows of each N, K and B. While a capture is under way a layer needs none: what it multiplies is
    written.
    """
    format_ = _format(type(module))
    if format_ == _EXPERTS:
        return "experts of mxfp4 have no kernel"
    if "forward" in vars(module):
        return "another library replaced its forward"
    for name, usual in _USUAL.items():
        if getattr(module, name, usual) != usual:
            return f"its {name} is {getattr(module, name)}"
    weight, scale = (getattr(module, name, None) for name in _TENSORS[format_])
    if not isinstance(weight, Tensor) or not isinstance(scale, Tensor) or weight.dim() != 2 or scale.dim() != 2:
        return "its weight is not packed in int32 with factors for groups"
    rows_, columns = weight.shape
    n, k = {_GPTQ: (columns, rows_ * 8), _AWQ: (columns * 8, rows_)}.get(format_, (rows_, columns * 8))
    of_size = {b: count for (*extents, b), count in rows.items() if (*extents, b.dtype) == (n, k, "int4")}
    if not of_size and not session.is_running():
        return f"no row of int4 for N={n}, K={k}"
    own = scale.dtype if scale.dtype in ACTIVATIONS else torch.bfloat16
    try:
        packed = _pack(module, format_, own, PLAIN)
        stored = read_weight(packed.weight, packed.scale, own, PLAIN)
        made: Any = stored.scaling
        any_type = made._replace(dtype="")
        fitting = {b: count for b, count in of_size.items() if b.scaling and b.scaling._replace(dtype="") == any_type}
        if not fitting:
            zeros = " and zero points" if made.zeros else ""
            none = f"no row of int4 for N={n}, K={k} with groups of {made.depth}{zeros}"
            return packed if session.is_running() else none
        of_type = {b: count for b, count in fitting.items() if b.scaling == made}
        ((chosen, _),) = Counter(of_type or fitting).most_common(1)
        dtype = next(dtype for dtype in ACTIVATIONS if chosen.scaling and DTYPE_NAMES[dtype] == chosen.scaling.dtype)
        return packed if chosen == stored else _pack(module, format_, dtype, chosen.order)
    except InputError as error:
        return str(error)


def _pack(module: Any, format_: str, dtype: torch.dtype, order: str) -> PackedWeight:
    with torch.no_grad():
        if format_ == _AWQ:
            return pack_awq(module.qweight, module.scales, module.qzeros, dtype=dtype, order=order)
        if format_ == _GPTQ:
            stored = "gptq_v2" if module.qzero_format() == 2 else "gptq"
            given = module.qweight, module.scales, module.qzeros, module.g_idx
            return pack_gptq(*given, checkpoint_format=stored, dtype=dtype, order=order)
        more = (getattr(module, name, None) for name in ("weight_zero_point", "weight_g_idx"))
        given = module.weight_packed.detach(), module.weight_scale.detach(), *more
        return pack_compressed_tensors(*given, dtype=dtype, order=order)


class ServedFourBits(nn.Module):  # type: ignore[misc]
    """A layer that is computed by `linear_w4`; `patch` makes it of a module by giving it a class of this."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's result, which its library computes for activations of another type than its rows'."""
        if input.dtype != self.w4_scale.dtype:
            result: Tensor = super().forward(input)
            return result
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return added_operations.linear_w4(input, self.w4_weight, self.w4_scale, self.w4_order, bias)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return what makes copies and pickles, which are served too, of the class that the module had."""
        return _restore, (type(self).__mro__[2],), self.__dict__


def serve(module: Any, packed: PackedWeight) -> None:
    """Have a layer be computed by `linear_w4`; its own weight stays, for `forget` and for state dicts."""
    kind: Any = type(module)
    module.__class__ = served_class(kind)
    module.register_buffer(WEIGHT, packed.weight, persistent=False)
    module.register_buffer(SCALE, packed.scale, persistent=False)
    module.w4_order = packed.order


def forget(module: nn.Module) -> None:
    """Drop the converted weight of a layer that is not served any more."""
    for name in (WEIGHT, SCALE, "w4_order"):
        if hasattr(module, name):
            delattr(module, name)


def _restore(base: Any) -> nn.Module:
    kind: Any = served_class(base)
    made: nn.Module = kind.__new__(kind)
    return made


@cache
def served_class(base: Any) -> Any:
    """Return the class that `patch` gives a layer of a class."""
    return type(f"Served{base.__name__}", (ServedFourBits, base), {"__doc__": base.__doc__})
