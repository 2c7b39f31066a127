"""Serves vLLM's fp8 layers where a tuned row holds for a call, and else by the kernel that vLLM chose.

Each of its kernels for layers in blocks has a method for the product alone, of activations that it quantised before or
takes as they are, which has a hook before it. What vLLM quantises, and how, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from tritongemm.integrations.process import (
    attribute,
    define_opaque,
    guarded,
    is_hooked,
    plain,
    replace,
    serves_blocks,
    serves_scaled,
)
from tritongemm.serving import server_calls
from tritongemm.serving.linear_fp8 import BlockOperands

SERVED, SERVED_ROWS = "fp8 layer in blocks", "fp8 layer with a factor per row or tensor"
ROWS_KERNEL = "CutlassFP8ScaledMMLinearKernel"
_METHOD = "apply_block_scaled_mm"
_NUMBERS = "tritongemm_numbers"  # attribute of a kernel: its number, by the class whose method is called
_SCHEMA = "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int kernel) -> Tensor"
_ROWS_SCHEMA = "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype) -> Tensor"

ServerMethod = Callable[..., Tensor]  # of a kernel, A [M, K], B [N, K] and their factors


class BlockKernels:
    """vLLM's kernels that are served by tuned ones, and the operation that torch.compile traces instead.

    A number selects the kernel that computes what no row holds for. Kernels of one class and type of
    result are alike.

    Args:
        invariant: whether a row must have the same bits at every M.
    """

    def __init__(self, invariant: bool) -> None:
        self._invariant = invariant
        self._kernels: list[tuple[Any, ServerMethod]] = []
        self._numbers: dict[tuple[type, ServerMethod, torch.dtype], int] = {}
        self.operation = define_opaque("vllm_fp8_block", _SCHEMA, self._compute, self._infer)

    def hook(self, kind: Any) -> None:
        """Wrap the method of one of vLLM's classes of kernels, and enlist its objects when they are created.

        A tracer sees what was known before it began, so that they can't be enlisted by their first call.
        """
        original, make = vars(kind)[_METHOD], kind.__init__
        enlist = guarded("vLLM", SERVED, self._enlist)

        @wraps(make)
        def enlisted(kernel: Any, *arguments: Any, **named: Any) -> None:
            make(kernel, *arguments, **named)
            numbers = vars(kernel).setdefault(_NUMBERS, {})
            numbers[kind.__qualname__] = enlist(kernel, original)

        def read(own: Any, kernel: Any, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Any:
            B, Bs, number = plain(B), plain(Bs), attribute(kernel, _NUMBERS, {}).get(kind.__qualname__)
            if number is None or not serves_blocks(B, Bs, self._invariant):
                return None
            if torch.compiler.is_compiling():
                return partial(self.operation, A, B, As, Bs, number)
            return partial(_serve, kernel, original, A, B, As, Bs)

        replace("vLLM", SERVED, {kind: _METHOD}, read)
        kind.__init__ = enlisted

    def _enlist(self, kernel: Any, original: ServerMethod) -> int:
        known = type(kernel), original, kernel.config.out_dtype
        if known not in self._numbers:
            self._numbers[known] = len(self._kernels)
            self._kernels.append((kernel, original))
        return self._numbers[known]

    def _compute(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kernel: int) -> Tensor:
        own, original = self._kernels[kernel]
        return _serve(own, original, a, b, scale_a, scale_b).contiguous()

    def _infer(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kernel: int) -> Tensor:
        own, _ = self._kernels[kernel]
        return a.new_empty((a.shape[0], b.shape[0]), dtype=own.config.out_dtype)


def _serve(kernel: Any, original: ServerMethod, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return the product by a tuned kernel, or by the server's own."""
    given = scale_a if a.dtype == b.dtype else None  # Others quantise bfloat16 themselves, and pass no factors.
    operands = BlockOperands(a, b, scale_b, given, None, kernel.config.out_dtype)
    return server_calls.product_or(operands, lambda: original(kernel, a, b, scale_a, scale_b))


def hook(invariant: bool = False) -> None:
    """Serve vLLM's kernels by tuned ones. A second call does nothing.

    Args:
        invariant: whether a row must have the same bits at every M.

    Raises:
        AttributeError: vLLM has no such kernels.
    """
    from vllm.model_executor.kernels import linear

    listed = dict.fromkeys(kind for kinds in linear._POSSIBLE_FP8_BLOCK_KERNELS.values() for kind in kinds)
    own = [kind for kind in listed if _METHOD in vars(kind)]
    if not own:
        raise AttributeError(f"no kernel of fp8 in blocks has {_METHOD}")
    if any(is_hooked(vars(kind)[_METHOD]) for kind in own):
        return
    kernels = BlockKernels(invariant)
    for kind in own:
        kernels.hook(kind)


def hook_rows(invariant: bool = False) -> None:
    """Serve the kernel that vLLM chooses for layers with a factor per row or per tensor, as `hook`."""
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass

    kind, own_product = getattr(cutlass, ROWS_KERNEL), cutlass.ops.cutlass_scaled_mm
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

    operation = define_opaque("vllm_fp8_rows", _ROWS_SCHEMA, multiply, infer)

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

    replace("vLLM", SERVED_ROWS, {kind: "apply_scaled_mm"}, read)
