from collections.abc import Callable, Sequence
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


def one_by_one(
    x: Tensor,
    w: Sequence[Tensor],
    weights: Tensor,
    ids: Tensor,
    activation: str = "silu",
    rounded: Callable[[Tensor], Tensor] = lambda row: row,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The sum of the experts of each token in float64; `rounded` is what quantising makes of a row of activations."""
    w1, w2 = w
    first, second = biases or (torch.zeros(one.shape[:2]) for one in w)
    rows = []
    for token, shares, chosen in zip(x.double(), weights.double(), ids.tolist(), strict=True):
        row = torch.zeros(w2.shape[1], dtype=torch.float64)
        for share, expert in zip(shares, chosen, strict=True):
            if 0 <= expert < len(w1):
                gate, up = (w1[expert].double() @ rounded(token) + first[expert]).chunk(2)
                if activation == "clamped_swiglu":
                    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                else:
                    inner = getattr(functional, activation)(gate) * up
                row = row + share * (w2[expert].double() @ rounded(inner) + second[expert])
        rows.append(row)
    return torch.stack(rows)


def dequantised(q: Tensor, powers: Tensor, layout: str, k: int) -> Tensor:
    return numbers(q).double() * spread(powers, powers_of("mx_shuffled" if layout else "mx"), q.shape[0], k).double()


@dataclass(frozen=True)
class Mixture:
    """Arguments of a call; the weights have outliers along K, so that a misplaced power is no small error."""

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
        given = self.x, *self.w, self.weights, self.ids, "silu", *self.scales
        return tritongemm.fused_moe(*given, scale_layout=self.layout)

    def exact(self) -> Tensor:
        """Expert by expert in float64, of activations that are quantised as the weights are."""
        first, second = (
            [dequantised(q, powers, self.layout, k) for q, powers in zip(w, scales, strict=True)]
            for w, scales, k in zip(self.w, self.scales, (HIDDEN, INNER), strict=True)
        )
        entire = torch.stack(first), torch.stack(second)
        return one_by_one(self.x, entire, self.weights, self.ids, rounded=self._rounded)

    def _rounded(self, row: Tensor) -> Tensor:
        q, powers = tritongemm.quantize(row[None].float(), "mx", self.dtype)
        return dequantised(q, powers, "", row.shape[0])[0]


def _weight(rows: int, k: int, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    loud = torch.logspace(-10, 10, k, base=2.0)[torch.randperm(k)]
    given = torch.randn(EXPERTS, rows, k) * loud / loud.norm()
    pairs = [tritongemm.quantize(each, "mx", dtype, layout or "rows") for each in given]
    return torch.stack([q for q, _ in pairs]), torch.stack([powers for _, powers in pairs])
