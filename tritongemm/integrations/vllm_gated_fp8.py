"""vLLM's MLPs of fp8 layers in blocks whose gate, up, SiLU and the quantisation of the result are one operation.

The blocks of 128 rows of gate and of up then alternate in place, with their factors as they are. At an M without a row,
or where two steps win a race, the operation is the layer's product, by a tuned kernel or vLLM's, and one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from tritongemm.core.epilogues import rows_of_factors
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.core.support import Support
from tritongemm.integrations.process import attribute, define_opaque, is_in_blocks, plain
from tritongemm.operations.linear_act import LINEAR_ACT, ActivatedOperands, interleave_gate_up, parts
from tritongemm.serving import server_calls
from tritongemm.serving.added_operations import activate_in_blocks, linear_act
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.fused_layers import has_fused_rows

_ACT: Final = "silu_mul"
_METHOD: Final = "Fp8LinearMethod"
_KERNEL: Final = "CutlassFp8BlockScaledMMKernel"  # which takes factors in the order of M
_GATED: Final = "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int kernel) -> Tensor"
_DOWN: Final = "(Tensor made, Tensor like, Tensor b, Tensor scale_b, int kernel) -> Tensor"


def is_gated(mlp: Any) -> bool:
    """Return whether both layers of an MLP are of fp8 in blocks of 128 x 128, and quantised as the operation does."""
    layers = [mlp._modules.get(name) for name in ("gate_up_proj", "down_proj")]
    for layer in layers:
        method = attribute(layer, "quant_method")
        kernel = attribute(method, "fp8_linear")
        if type(method).__name__ != _METHOD or type(kernel).__name__ != _KERNEL:
            return False
        weight, factors = layer.weight, attribute(layer, "weight_scale_inv")
        if attribute(layer, "bias") is not None or factors is None or not is_in_blocks(plain(weight), plain(factors)):
            return False
    sizes = layers[0].output_sizes
    alike = len(sizes) == 2 and sizes[0] == sizes[1] and not len(layers[0].weight) % (2 * SCALED_BLOCK)
    as_is = all(attribute(one.quant_method.fp8_linear.config, "out_dtype") is torch.bfloat16 for one in layers)
    return alike and as_is and attribute(layers[1], "input_is_parallel", False) and layers[0].weight.is_contiguous()


def has_rows(mlp: Any) -> bool:
    """Return whether a kernel won a row of such a weight."""
    weight, factors = plain(mlp.gate_up_proj.weight), plain(mlp.gate_up_proj.weight_scale_inv)
    if weight.shape not in default_dispatcher().gated_weights:
        return False
    x, of_x = weight[:1], weight.new_empty((factors.shape[1], 1), dtype=torch.float32).T
    asked = ActivatedOperands(x, weight, f"{_ACT}_block", None, weight.dtype, of_x, factors)
    read = LINEAR_ACT.read(LINEAR_ACT.check(asked))
    return not isinstance(read, Support) and any(has_fused_rows(p, weight.get_device()) for p in read.problems)


def interleave(layer: Any) -> None:
    """Have blocks of gate and of up alternate in place."""
    with torch.no_grad():
        for name, run in (("weight", SCALED_BLOCK), ("weight_scale_inv", 1)):
            given = plain(getattr(layer, name))
            bits = given.view(torch.uint8) if given.dtype.itemsize == 1 else given
            gate, up = bits.chunk(2)
            bits.copy_(interleave_gate_up(gate, up, run))


def make_one(mlps: Sequence[Any], counts: bool) -> None:
    """Have MLPs call the operation, and a second one for the product of what it returns.

    Args:
        mlps: those of `is_gated`.
        counts: whether a capture is to see it; weights are as they were then.
    """
    if not mlps:
        return
    kernels: list[Any] = []
    first = define_opaque("vllm_gated_blocks", _GATED, partial(_compute, kernels, counts), _infer)
    second = define_opaque("vllm_down_blocks", _DOWN, partial(_multiply, kernels), _infer_product)
    for mlp in mlps:
        for layer, operation, apply in (
            (mlp.gate_up_proj, first, _apply_first),
            (mlp.down_proj, second, _apply_second),
        ):
            method, kind = layer.quant_method, cast("Any", type(layer.quant_method))
            names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "apply": apply}
            changed: Any = object.__new__(type(kind.__name__, (kind,), names))
            vars(changed).update(vars(method), operation=operation, number=len(kernels))
            kernels.append(method.fp8_linear)
            layer.quant_method = changed
        mlp.act_fn = nn.Identity()


def _apply_first(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Return SiLU(gate) * up in fp8 with its factors behind, x in fp8, which has as many rows, and their shape."""
    kernel = self.fp8_linear
    q, factors = kernel.quant_fp8(x.view(-1, x.shape[-1]), None, None, use_triton=kernel.use_triton)
    return self.operation(q, layer.weight, factors, layer.weight_scale_inv, self.number), q, x.shape[:-1]


def _apply_second(self: Any, layer: Any, x: Any, bias: Tensor | None = None) -> Tensor:
    """Return the product of what `_apply_first` returned."""
    made, like, rows = x
    product: Tensor = self.operation(made, like, layer.weight, layer.weight_scale_inv, self.number)
    return product.view(*rows, product.shape[-1])


def _compute(
    kernels: Sequence[Any], counts: bool, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kernel: int
) -> Tensor:
    operands = ActivatedOperands(a, b, f"{_ACT}_block", None, a.dtype, scale_a, scale_b)

    def compute_two() -> Tensor:
        product = kernels[kernel].apply_block_scaled_mm(A=a, B=b, As=scale_a, Bs=scale_b)
        return activate_in_blocks(product, "silu", a.dtype, 0 if counts else SCALED_BLOCK)

    if counts:
        made = compute_two()  # whose product is counted too
        return server_calls.gated_or(operands, lambda: made)
    return server_calls.gated_or(operands, compute_two, partial(linear_act, *operands))


def _infer(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kernel: int) -> Tensor:
    return a.new_empty((a.shape[0] + rows_of_factors(a.shape[0]), b.shape[0] // 2))


def _multiply(kernels: Sequence[Any], made: Tensor, like: Tensor, b: Tensor, scale_b: Tensor, kernel: int) -> Tensor:
    q, factors = parts(made, like.shape[0])
    own = kernels[kernel]
    product: Tensor = own.apply_block_scaled_mm(A=q, B=b, As=factors.T, Bs=scale_b)
    return product.to(own.config.out_dtype)


def _infer_product(made: Tensor, like: Tensor, b: Tensor, scale_b: Tensor, kernel: int) -> Tensor:
    return made.new_empty((like.shape[0], b.shape[0]), dtype=torch.bfloat16)
