"""Serves vLLM's fp8 layers with a factor per row or per tensor where a tuned row holds for a call, else by CUTLASS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritongemm.integrations.process import attribute, define_opaque, is_hooked, plain, replace, serves_scaled
from tritongemm.serving import server_calls
from tritongemm.serving.linear_fp8 import BlockOperands

SERVED = "fp8 layer with a factor per row or tensor"
KERNEL = "CutlassFP8ScaledMMLinearKernel"
_SCHEMA = "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor"


def hook(invariant: bool = False) -> None:
    """Serve the kernel that vLLM chooses for such layers. A second call does nothing.

    Args:
        invariant: whether a row must have the same bits at every M.

    Raises:
        AttributeError: vLLM has not what a hook is put before.
    """
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass

    kind, own_product = getattr(cutlass, KERNEL), cutlass.ops.cutlass_scaled_mm
    if is_hooked(kind.apply_scaled_mm):
        return

    def multiply(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        def compute() -> Tensor:
            result: Tensor = own_product(a, b.t(), out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, bias=bias)
            return result

        return server_calls.product_or(BlockOperands(a, b, scale_b, scale_a, bias, out_dtype), compute)

    def infer(a: Tensor, b: Tensor, _: Tensor, __: Tensor, ___: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)

    operation = define_opaque("vllm_fp8_rows", _SCHEMA, multiply, infer)

    def read(  # noqa: PLR0913 (vLLM's own arguments)
        own: Any,
        kernel: Any,
        *,
        A: Tensor,
        B: Tensor,
        out_dtype: torch.dtype,
        As: Tensor,
        Bs: Tensor,
        bias: Tensor | None,
        output_shape: list[int],
    ) -> Any:
        b, scale_b, (k, n) = plain(B), plain(Bs), B.shape
        is_padded = attribute(kernel, "logical_output_size") != n or A.shape[1] != k
        if is_padded or b.stride(0) != 1 or not serves_scaled(n, k, invariant):
            return None
        call = operation if torch.compiler.is_compiling() else multiply
        return lambda: call(A, b.t(), As, scale_b, plain(bias), out_dtype).view(*output_shape)

    replace("vLLM", SERVED, {kind: "apply_scaled_mm"}, read)
