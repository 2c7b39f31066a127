"""The names by which AITER's users call a dense product and a mixture of experts, served by `tritongemm`.

``from tritongemm.integrations.aiter import tgemm`` takes the place of ``from aiter.tuned_gemm import tgemm``. The files
of AITER_CONFIG_GEMM_BF16 are read as AITER reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import tritongemm
from tritongemm.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


def fused_moe(  # noqa: PLR0913 (AITER's own arguments)
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: Any = "silu",
    quant_type: Any = None,
    doweight_stage1: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
) -> Tensor:
    """The experts of a mixture, as `tritongemm.fused_moe` computes them.

    Args:
        hidden_states: [tokens, hidden].
        w1: [experts, 2 * inner, hidden], not shuffled.
        w2: [experts, hidden, inner], not shuffled.
        topk_weight: [tokens, k].
        topk_ids: [tokens, k].
        expert_mask: None; ids of experts that are elsewhere count nothing anyway.
        activation: AITER's ActivationType, ``Silu`` or ``Gelu``, or its name.
        quant_type: not read; the shapes of the factors tell it.
        doweight_stage1: False; weights are applied to what the second product gives.
        w1_scale: of w1; see `tritongemm.fused_moe`.
        w2_scale: of w2.

    Raises:
        InputError: an argument that is not served; or as `tritongemm.fused_moe` says.
    """
    if expert_mask is not None or doweight_stage1:
        raise InputError("expert_mask and doweight_stage1 are not served; call AITER's own fused_moe for them")
    name = str(activation).rpartition(".")[2].lower()
    return tritongemm.fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, name, w1_scale, w2_scale)
