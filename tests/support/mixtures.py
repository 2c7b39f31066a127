"""A mixture of experts of OCP MX, and the same in float64 of its dequantised operands."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import tritongemm
from tritongemm.core.scaling import powers_of
from tritongemm.operations.factors import spread
from tritongemm.operations.scaled import numbers

FP8, FP4, SHUFFLED = torch.float8_e4m3fn, torch.uint8, "e8m0_32x8"
TOKENS, TOPK, EXPERTS, HIDDEN, INNER = 5, 2, 3, 106, 74  # no multiples of a group


def dequantised(q: Tensor, powers: Tensor, layout: str, k: int) -> Tensor:
    """Numbers [rows, K] times their powers of two, in float64."""
    scaling = powers_of("mx_shuffled" if layout else "mx")
    return numbers(q).double() * spread(powers, scaling, q.shape[0], k).double()


@dataclass(frozen=True)
class Mixture:
    """Arguments of a call; the weights have outliers along K, so that a misplaced power is no small error.

    Attributes:
        x, weights, ids: tokens, and the experts that they go to.
        w, scales: quantised weights of both products, and their powers of two.
        dtype: of the weights.
        layout: of the powers.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    w: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    dtype: torch.dtype
    layout: str

    @classmethod
    def make(cls, dtype: torch.dtype, layout: str, seed: int = 0) -> "Mixture":
        """A random one; one token has an id of 64 bits that is no expert, whatever its lower half says."""
        torch.manual_seed(seed)
        ids = torch.randint(-1, EXPERTS + 1, (TOKENS, TOPK))
        ids[0] = torch.tensor([2**32 + 1, 2])
        first, second = (_weight(rows, k, dtype, layout) for rows, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
        given = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOPK), ids
        return cls(*given, (first[0], second[0]), (first[1], second[1]), dtype, layout)

    def compute(self) -> Tensor:
        """The result of `fused_moe`."""
        given = self.x, *self.w, self.weights, self.ids, "silu", *self.scales
        return tritongemm.fused_moe(*given, scale_layout=self.layout)

    def exact(self) -> Tensor:
        """Expert by expert in float64, of activations that are quantised as the weights are."""
        first, second = (
            [dequantised(q, powers, self.layout, k) for q, powers in zip(w, scales, strict=True)]
            for w, scales, k in zip(self.w, self.scales, (HIDDEN, INNER), strict=True)
        )
        out = torch.zeros_like(self.x, dtype=torch.float64)
        x = self._rounded(self.x)
        for token, (shares, chosen) in enumerate(zip(self.weights, self.ids.tolist(), strict=True)):
            for share, expert in zip(shares, chosen, strict=True):
                if 0 <= expert < EXPERTS:
                    gate, up = (first[expert] @ x[token]).chunk(2)
                    inner = self._rounded((functional.silu(gate) * up)[None])
                    out[token] += share * (second[expert] @ inner[0])
        return out

    def _rounded(self, rows: Tensor) -> Tensor:
        return dequantised(*tritongemm.quantize(rows.float(), "mx", self.dtype), "", rows.shape[1])


def _weight(rows: int, k: int, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    """Weights of all experts and their powers of two."""
    loud = torch.logspace(-10, 10, k, base=2.0)[torch.randperm(k)]
    given = torch.randn(EXPERTS, rows, k) * loud / loud.norm()
    pairs = [tritongemm.quantize(each, "mx", dtype, layout or "rows") for each in given]
    return torch.stack([q for q, _ in pairs]), torch.stack([powers for _, powers in pairs])
