"""The names by which AITER's users call a dense product: `gemm_a16w16` and `tgemm.mm`, served by `tritongemm.mm`.

``from tritongemm.integrations.aiter import tgemm`` takes the place of ``from aiter.tuned_gemm import tgemm``. The files
of AITER_CONFIG_GEMM_BF16 are read as AITER reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import tritongemm
from tritongemm.core.errors import InputError
from tritongemm.integrations.aiter_batches import (
    batched_gemm_a8w8,
    batched_gemm_a8w8_CK,
    batched_gemm_bf16,
    batched_gemm_bf16_CK,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "TunedGemm", "batched_gemm_a8w8", "batched_gemm_a8w8_CK", "batched_gemm_bf16", "batched_gemm_bf16_CK",
    "gemm_a16w16", "tgemm",
]  # fmt: skip


def gemm_a16w16(
    A: Tensor,
    B: Tensor,
    bias: Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_c: Tensor | None = None,
) -> Tensor:
    """A @ B.T (+ bias), as `tritongemm.mm` computes it.

    Args:
        A: [..., K] activations.
        B: [N, K], a linear layer's weight.
        bias: [N] or None.
        otype: dtype of the result; A's by default.
        scale_a: None; scaled products are not served.
        scale_b: None.
        scale_c: None.

    Raises:
        InputError: a scale is given; or as `tritongemm.mm` says.
    """
    scales = {"scale_a": scale_a, "scale_b": scale_b, "scale_c": scale_c}
    if given := [name for name, scale in scales.items() if scale is not None]:
        raise InputError(f"{', '.join(given)}: scaled products are not served yet; call AITER's own function for them")
    return tritongemm.mm(A, B, bias, otype)


class TunedGemm:
    """AITER's object of that name."""

    def mm(
        self,
        inp: Tensor,
        weights: Tensor,
        bias: Tensor | None = None,
        otype: torch.dtype | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        scale_c: Tensor | None = None,
    ) -> Tensor:
        """The result of `gemm_a16w16` for the same arguments."""
        return gemm_a16w16(inp, weights, bias, otype, scale_a, scale_b, scale_c)


tgemm: Final = TunedGemm()
