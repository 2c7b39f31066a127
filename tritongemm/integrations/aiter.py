"""Provides AITER's functions for products and a mixture of experts, computed by `tritongemm`.

``from tritongemm.integrations.aiter import tgemm`` takes the place of ``from aiter.tuned_gemm import tgemm``. The files
of AITER_CONFIG_GEMM_BF16 are read as AITER reads them.
"""

from typing import Any, Final

import torch
from torch import Tensor

import tritongemm
from tritongemm.core.errors import InputError
from tritongemm.integrations.aiter_scaled import (
    SHUFFLED,
    gemm_a4w4,
    gemm_a8w8,
    gemm_a8w8_blockscale,
    gemm_a8w8_blockscale_bpreshuffle,
    gemm_a8w8_bpreshuffle,
    gemm_a8w8_CK,
    is_shuffled,
    require_plain,
    require_tensors,
)
from tritongemm.operations.checks import check_tensors

_NOTHING: Final = (0, -1, "separated")  # values of AITER's further arguments that ask for nothing
_ACTIVATIONS: Final = {0: "silu", 1: "gelu"}  # AITER's ActivationType
_READ: Final = 11  # arguments that AITER's `fused_moe` has before these
_FURTHER: Final = (
    "a1_scale", "a2_scale", "block_size_M", "num_local_tokens", "moe_sorting_dispatch_policy", "dtype", "hidden_pad",
    "intermediate_pad", "bias1", "bias2",
)  # fmt: skip
_HOW: Final = ("block_size_M", "moe_sorting_dispatch_policy", "splitk")  # arguments that choose how its kernels run

__all__ = [
    "TunedGemm",
    "batched_gemm_a8w8",
    "batched_gemm_a8w8_CK",
    "batched_gemm_a8w8_blockscale",
    "batched_gemm_bf16",
    "batched_gemm_bf16_CK",
    "fused_moe",
    "gemm_a4w4",
    "gemm_a8w8",
    "gemm_a8w8_CK",
    "gemm_a8w8_blockscale",
    "gemm_a8w8_blockscale_bpreshuffle",
    "gemm_a8w8_bpreshuffle",
    "gemm_a16w16",
    "tgemm",
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
    """Return a @ B.T (+ bias), as `tritongemm.mm` computes it, or `tritongemm.scaled_mm` where there are scales.

    Args:
        A: [..., K] activations.
        B: [N, K], a linear layer's weight.
        bias: [N] or None.
        otype: dtype of the result; A's by default, bfloat16 of a product with scales.
        scale_a: factors of A, as of `tritongemm.scaled_mm`; None for one of 1 where scale_b is given.
        scale_b: factors of B, the same.
        scale_c: None; results are not scaled.

    Raises:
        InputError: scale_c is given, or a weight that AITER shuffled has no scales; or as `tritongemm.mm` or
            `scaled_mm` says.
    """
    if scale_c is not None:
        raise InputError("scale_c: results are not scaled; call AITER's own function for it")
    if scale_a is None and scale_b is None:
        require_plain(B=B)
        return tritongemm.mm(A, B, bias, otype)
    check_tensors({"A": A, "B": B})
    one = torch.ones(1, device=A.device)
    of_a, of_b = (one if scale is None else scale for scale in (scale_a, scale_b))
    order = SHUFFLED if is_shuffled(B) else "plain"
    return tritongemm.scaled_mm(A, B, of_a, of_b, bias, otype or torch.bfloat16, order_b=order)


class TunedGemm:
    """AITER's object of the same name."""

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
        """Return the result of `gemm_a16w16` for the same arguments."""
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
    *further: Any,
    **others: Any,
) -> Tensor:
    """Return the experts of a mixture, as `tritongemm.fused_moe` computes them.

    Args:
        hidden_states: [tokens, hidden].
        w1: [experts, 2 * inner, hidden], not shuffled.
        w2: [experts, hidden, inner], not shuffled.
        topk_weight: [tokens, k].
        topk_ids: [tokens, k].
        expert_mask: None; ids of experts that are elsewhere count nothing anyway.
        activation: AITER's ActivationType, ``Silu`` or ``Gelu``, its name, or its number, 0 or 1.
        quant_type: not read; the shapes of the factors say it.
        doweight_stage1: False; weights are applied to what the second product gives.
        w1_scale: of w1; see `tritongemm.fused_moe`. AITER's [experts, rows, 1] are known too, and one
            factor for each expert, [experts], [experts, 1] or [experts, 1, 1].
        w2_scale: of w2.
        further: AITER's further arguments in its order.
        others: the same by name, where they ask for nothing; those that say how its kernels run are not read.

    Raises:
        TypeError: more arguments than AITER has; or as `tritongemm.fused_moe` says.
        InputError: an argument that is not served; or as `tritongemm.fused_moe` says.
    """
    if len(further) > len(_FURTHER):
        raise TypeError(f"{len(further) + _READ} arguments are given; AITER's fused_moe has {len(_FURTHER) + _READ}")
    others |= dict(zip(_FURTHER, further, strict=False))
    if expert_mask is not None or doweight_stage1:
        raise InputError("expert_mask and doweight_stage1 are not served; call AITER's own fused_moe for them")
    if "dtype" in others:
        require_tensors(hidden_states=hidden_states)
    for name, value in others.items():
        says_nothing = value is None or (isinstance(value, (int, str)) and value in _NOTHING)
        if not says_nothing and name not in _HOW and not (name == "dtype" and value == hidden_states.dtype):
            raise InputError(f"{name} is not served; call AITER's own fused_moe for it")
    require_plain(w1=w1, w2=w2)
    of_w1, of_w2 = _of_experts((w1_scale, w1), (w2_scale, w2))
    return tritongemm.fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, _name(activation), of_w1, of_w2)


def _name(activation: Any) -> str:
    """Return the name in `tritongemm.fused_moe` of an activation given as AITER's object, name or number."""
    if isinstance(activation, int):  # its custom operation takes numbers, and members of an IntEnum are some
        return _ACTIVATIONS.get(int(activation), str(activation))
    return str(activation).rpartition(".")[2].lower()


def _of_experts(*given: tuple[Tensor | None, Tensor]) -> list[Tensor | None]:
    """Return factors of weights as `tritongemm.fused_moe` takes them, of AITER's [experts, rows, 1] or one number."""
    are_tensors = all(isinstance(part, torch.Tensor) and part.dim() for pair in given for part in pair)
    if not are_tensors or any(w.dim() != 3 for _, w in given):  # which `tritongemm.fused_moe` refuses by name
        return [scale for scale, _ in given]
    pairs = [(scale, w) for scale, w in given if scale is not None]
    if all(scale.numel() == scale.shape[0] == w.shape[0] for scale, w in pairs):
        return [scale.reshape(-1, 1).expand(-1, w.shape[1]) for scale, w in pairs]
    return [_of_rows(scale, w) for scale, w in pairs]


def _of_rows(scale: Tensor, w: Tensor) -> Tensor:
    of_rows = scale.dim() == 3 and scale.shape[2] == 1 and scale.shape[1] == w.shape[1] > 1
    return scale.squeeze(2) if of_rows and scale.dtype.itemsize > 1 else scale  # powers of two along K stay


def _turned(WQ: Tensor, name: str = "WQ") -> Tensor:
    """Return the weights [B, N, K], or their factors along K, with K before N."""
    require_tensors(**{name: WQ})
    require_plain(**{name: WQ})
    if WQ.dim() != 3:
        raise InputError(f"{name} is {tuple(WQ.shape)}; it is [B, N, K]")
    return WQ.transpose(1, 2)


def batched_gemm_bf16(XQ: Tensor, WQ: Tensor, out: Tensor, bias: Tensor | None = None, splitK: int = 0) -> Tensor:
    """Compute XQ @ WQ.T (+ bias) for each product of a batch, written to `out` [B, M, N], as `tritongemm.bmm` does."""
    require_tensors(out=out)
    return tritongemm.bmm(XQ, _turned(WQ), bias, out.dtype, out=out)


def batched_gemm_bf16_CK(
    XQ: Tensor, WQ: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, splitK: int | None = None
) -> Tensor:
    """Return the result of `batched_gemm_bf16` in new memory, of XQ's dtype where none is named."""
    return tritongemm.bmm(XQ, _turned(WQ), bias, dtype)


def batched_gemm_a8w8(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, out: Tensor, bias: Tensor | None = None, splitK: int = 0
) -> Tensor:
    """Compute (XQ @ WQ.T) * x_scale * w_scale (+ bias) for a batch of fp8 or int8, written to `out`.

    Factors are float32 for each row, x_scale [B, M, 1] and w_scale [B, 1, N].
    """
    require_tensors(out=out)
    return tritongemm.scaled_bmm(XQ, _turned(WQ), x_scale, w_scale, bias, out.dtype, out=out)


def batched_gemm_a8w8_CK(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    splitK: int | None = None,
) -> Tensor:
    """Return the result of `batched_gemm_a8w8` in new memory, of bfloat16 where no dtype is named."""
    return tritongemm.scaled_bmm(XQ, _turned(WQ), x_scale, w_scale, bias, dtype or torch.bfloat16)


def batched_gemm_a8w8_blockscale(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, Y: Tensor) -> Tensor:
    """Compute XQ @ WQ.T for each product of a batch of fp8 with factors along K, written to `Y`.

    Factors are float32 for each 128 elements along K of a row, and for each 128 x 128 of a weight.
    """
    require_tensors(Y=Y)
    of_w = _turned(w_scale, "w_scale")
    return tritongemm.scaled_bmm(XQ, _turned(WQ), x_scale, of_w, None, Y.dtype, out=Y)
