"""Serves vLLM's fp8 layers where a tuned row holds for a call, and else by the kernel that vLLM chose.

Its kernels multiply by operators of PyTorch, which have a hook before them. What vLLM quantises, and how, and what it
compiles, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.integrations.compiled import stand_before
from tritongemm.integrations.process import make_hook, plain, serves_scaled
from tritongemm.serving import server_calls
from tritongemm.serving.linear_fp8 import BlockOperands

SERVED: Final = "fp8 layer"
ROWS_KERNEL: Final = "CutlassFP8ScaledMMLinearKernel"


def _cutlass(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None = None
) -> BlockOperands:
    """Return the operands of a product whose weight is transposed, as are its factors of blocks."""
    in_blocks = a_scales.dim() == 2 and a_scales.shape[1] > 1
    return BlockOperands(a, b.t(), b_scales.t() if in_blocks else b_scales, a_scales, bias, out.dtype, out)


def _deep_gemm(
    q_input: Tensor, input_scale: Tensor, weight: Tensor, weight_scale: Tensor, output: Tensor, use_e8m0: bool
) -> BlockOperands:
    return BlockOperands(q_input, weight, weight_scale, input_scale, None, output.dtype, output)


def _triton(
    qx: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, blocks: list[int], output_dtype: torch.dtype
) -> BlockOperands:
    return BlockOperands(qx, weight, weight_scale, x_scale, None, output_dtype)


def _aiter(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, output_dtype: torch.dtype = torch.float16
) -> BlockOperands:
    return BlockOperands(a, b, scale_b, scale_a, None, output_dtype)


def _flashinfer(x: Tensor, weight: Tensor, weight_scale: Tensor, *_: Any) -> BlockOperands:
    return BlockOperands(x, weight, weight_scale)  # It quantises bfloat16 itself.


# What reads the arguments of each, and the places of the activations and of the weight among them.
OPERATORS: Final[dict[str, tuple[Callable[..., BlockOperands], tuple[int, int]]]] = {
    "_C::cutlass_scaled_mm": (_cutlass, (1, 2)),
    "vllm::fp8_gemm_nt_op": (_deep_gemm, (0, 2)),
    "vllm::w8a8_triton_block_scaled_mm_func": (_triton, (0, 1)),
    "vllm::flashinfer_fp8_blockscale_gemm": (_flashinfer, (0, 1)),
    "vllm::dynamic_flashinfer_deepgemm_blockscale_gemm": (_flashinfer, (0, 1)),
    "vllm::rocm_aiter_gemm_a8w8_blockscale": (_aiter, (0, 1)),
    "vllm::rocm_aiter_triton_gemm_a8w8_blockscale": (_aiter, (0, 1)),
}


def hook(invariant: bool = False) -> None:
    """Put hooks before vLLM's operators of fp8. A second call does nothing.

    Args:
        invariant: whether a row must have the same bits at every M.

    Raises:
        AttributeError: vLLM has no such operators.
    """
    from vllm.model_executor.kernels import linear  # noqa: F401 (which defines them)

    def read(find: Callable[..., BlockOperands], own: Any, *given: Any) -> Any:
        operands = find(*given)
        n, k = operands.weight.shape
        if not serves_scaled(n, k, invariant):
            return None
        if not type(operands.weight) is type(operands.weight_scale) is Tensor or operands.bias is not None:
            weight, scale, bias = plain(operands.weight), plain(operands.weight_scale), plain(operands.bias)
            operands = operands._replace(weight=weight, weight_scale=scale, bias=bias)
        return partial(_multiply, operands, own)

    found = [
        stand_before(name, make_hook("vLLM", SERVED, partial(read, find)), places)
        for name, (find, places) in OPERATORS.items()
    ]
    if not any(found):
        raise AttributeError(f"there is no operator {' or '.join(OPERATORS)}")


def _multiply(operands: BlockOperands, own: Callable[[], Any]) -> Tensor | None:
    """Return what the operator does: the product, or nothing where that has its memory."""
    result, out = server_calls.product_or(operands, own), operands.out
    if out is None:
        return result
    if result is not None and result is not out:  # PyTorch's
        out.copy_(result)
    return None
