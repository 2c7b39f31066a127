"""One layer of experts, and the forms in which it is computed beside `tritongemm.fused_moe`: two calls of a product.

DeepGEMM's product wants room between experts. The places of their rows are known to it beforehand, for nothing.
Sorting, quantising, the activation and the weighted sum are those of `fused_moe`, so that only the products differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.scaling import SCALED_BLOCK

Pair = tuple[Tensor, "Tensor | None"]


@dataclass(frozen=True)
class Mixture:
    """The operands of `fused_moe`, and what shares a scale factor.

    Attributes:
        x: [tokens, hidden].
        w1, w2: [experts, 2 * inner, hidden] and [experts, hidden, inner].
        weights, ids: [tokens, experts of a token].
        scale1, scale2: factors of the weights, or None.
        mode: ``""`` without factors, ``row`` or ``block``.
    """

    x: Tensor
    w1: Tensor
    w2: Tensor
    weights: Tensor
    ids: Tensor
    scale1: Tensor | None = None
    scale2: Tensor | None = None
    mode: str = ""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `fused_moe`, in their order."""
        return self.x, self.w1, self.w2, self.weights, self.ids, "silu", self.scale1, self.scale2

    @property
    def counts(self) -> list[int]:
        """Rows of each expert; the GPU is waited for."""
        found: list[int] = torch.bincount(self.ids.flatten(), minlength=self.w1.shape[0]).tolist()
        return found


def make_mixture(
    tokens: int, experts: int, topk: int, hidden: int, inner: int, mode: str, fp8: torch.dtype, device: str = "cuda"
) -> Mixture:
    """Random operands; each token goes to experts drawn evenly."""
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    weights = torch.rand(tokens, topk, device=device).softmax(-1)
    ids = torch.rand(tokens, experts, device=device).topk(topk)[1].int()
    made: list[tuple[Tensor, Tensor | None]] = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        w = torch.randn(experts, n, k, device=device, dtype=torch.bfloat16)
        if not mode:
            made.append((w.mul_(k**-0.5), None))
            continue
        shape = (experts, n) if mode == "row" else (experts, cdiv(n, SCALED_BLOCK), cdiv(k, SCALED_BLOCK))
        made.append((w.to(fp8), (0.5 + torch.rand(shape, device=device)) * k**-0.5))
    (w1, scale1), (w2, scale2) = made
    return Mixture(x, w1, w2, weights, ids, scale1, scale2, mode)


def reference(mixture: Mixture) -> Tensor:
    """The result in float64 of activations that were not quantised."""
    m, out = mixture, torch.zeros(mixture.x.shape, dtype=torch.float64, device=mixture.x.device)
    for expert in range(m.w1.shape[0]):
        token, which = (m.ids == expert).nonzero(as_tuple=True)
        if token.numel():
            gate, up = (m.x[token].double() @ _wide(m.w1, m.scale1, expert).T).chunk(2, -1)
            y = (functional.silu(gate) * up) @ _wide(m.w2, m.scale2, expert).T
            out.index_add_(0, token, y * m.weights[token, which, None].double())
    return out


def _wide(w: Tensor, scale: Tensor | None, expert: int) -> Tensor:
    """One expert's weight in float64, times its factors."""
    wide = w[expert].double()
    if scale is None:
        return wide
    of_it = scale[expert].double()
    if of_it.dim() == 1:
        return wide * of_it[:, None]
    rows, depth = wide.shape
    return wide * of_it.repeat_interleave(SCALED_BLOCK, 0)[:rows].repeat_interleave(SCALED_BLOCK, 1)[:, :depth]


def deviation(result: Tensor, exact: Tensor) -> float:
    """The norm of the error over the norm of what is exact."""
    return float((result.double() - exact).norm() / exact.norm())


def by_public_calls(mixture: Mixture) -> Tensor:
    """The layer as a program writes it with `tritongemm.quantize`, `tritongemm.grouped_mm` and PyTorch between them."""
    import tritongemm
    from tritongemm.operations import mixture_steps

    m = mixture

    def quantised(rows: Tensor) -> Pair:
        if not m.mode:
            return rows, None
        return tritongemm.quantize(rows, m.mode, m.w1.dtype, "groups" if m.mode == "block" else "rows")

    order, place, ends = mixture_steps.sort(m.ids, m.w1.shape[0])
    a, of_a = quantised(m.x[order // m.ids.shape[1]])
    gate, up = tritongemm.grouped_mm(a, m.w1.mT, ends, of_a, m.scale1, m.x.dtype).chunk(2, -1)
    b, of_b = quantised(functional.silu(gate) * up)
    y = tritongemm.grouped_mm(b, m.w2.mT, ends, of_b, m.scale2, m.x.dtype)
    return mixture_steps.combine(y, place, ends, m.weights, m.x.dtype)


@dataclass(frozen=True)
class Places:
    """The places of the rows of experts once there is room between them.

    Attributes:
        shape: of all rows: [rows], or [experts, room] of the masked form.
        at: int64, the place of each row, in the order of its experts.
        whose: int32, the expert of each row or -1; of the masked form how many rows each expert has.
    """

    shape: tuple[int, ...]
    at: Tensor
    whose: Tensor


def contiguous_places(counts: Sequence[int], step: int, device: torch.device) -> Places:
    """Each expert's rows begin at a multiple of `step`."""
    at, whose = list[int](), list[int]()
    for expert, count in enumerate(counts):
        at += range(len(whose), len(whose) + count)
        whose += [expert] * count + [-1] * (-count % step)
    return Places((len(whose),), _long(at, device), torch.tensor(whose, dtype=torch.int32, device=device))


def masked_places(counts: Sequence[int], step: int, device: torch.device) -> Places:
    """Each expert has room for as many rows as the one that has most, up to a multiple of `step`."""
    room = round_up(max(counts), step)
    at = [expert * room + i for expert, count in enumerate(counts) for i in range(count)]
    return Places((len(counts), room), _long(at, device), torch.tensor(counts, dtype=torch.int32, device=device))


def _long(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


# Writes the product of a left and a right side, each with its factors, of these places.
Product = Callable[[Pair, Pair, Tensor, Places], object]


class PaddedCalls:
    """The layer in two calls of a product that wants room between experts; what it writes is in memory of its own.

    Args:
        mixture: the operands, without factors or with those of blocks.
        places: where rows go.
        product: computes both products; the factors of the left side are [..., room, K / 128], stored with K first.
    """

    def __init__(self, mixture: Mixture, places: Places, product: Product) -> None:
        from tritongemm.serving import mixtures

        m, device = mixture, mixture.x.device
        self._mixture, self._places, self._product = m, places, product
        self._steps = mixtures.steps_for(m.x)
        experts, both, hidden = m.w1.shape
        self._left, self._inner = (self._operand(k) for k in (hidden, both // 2))
        self._h, self._y = (
            torch.zeros(*places.shape, n, dtype=m.x.dtype, device=device) for n in (both, hidden)
        )  # fmt: skip
        _, place, _ = self._steps.sort(m.ids, experts)
        self._combined_from = places.at[place.long()].int()
        self._rows = torch.tensor([prod(places.shape)], dtype=torch.int32, device=device)

    def _operand(self, k: int) -> Pair:
        """Memory of a left side and its factors; nothing of use between experts."""
        m, shape = self._mixture, self._places.shape
        q = torch.zeros(*shape, k, dtype=m.w1.dtype, device=m.x.device)
        if not m.mode:
            return q, None
        return q, torch.ones(*shape[:-1], cdiv(k, SCALED_BLOCK), shape[-1], device=m.x.device)

    def __call__(self) -> Tensor:
        """The result in new memory."""
        import _mixture_kernels as kernels

        m, at = self._mixture, self._places.at
        order, _, _ = self._steps.sort(m.ids, m.w1.shape[0])
        kernels.gather_to(m.x, order, m.ids.shape[1], at, m.mode, *self._left)
        self._multiply(self._left, (m.w1, m.scale1), self._h)
        kernels.activate_at(self._h, at, m.mode, *self._inner)
        self._multiply(self._inner, (m.w2, m.scale2), self._y)
        y = self._y.view(-1, self._y.shape[-1])
        return self._steps.combine(y, self._combined_from, self._rows, m.weights, m.x.dtype)

    def _multiply(self, left: Pair, right: Pair, out: Tensor) -> None:
        a, of_a = left
        self._product((a, None if of_a is None else of_a.mT), right, out, self._places)


def deep_gemm_product(expected_rows: int, scaled: bool) -> Product:
    """DeepGEMM's grouped product, of the form that the places have.

    Args:
        expected_rows: of an expert, which the masked form takes.
        scaled: whether operands have factors of blocks.

    Raises:
        UnavailableError: the package does not load, or has no such products.
    """
    from tritongemm.backends.deepgemm import package

    names = {form: f"m_grouped_{'fp8' if scaled else 'bf16'}_gemm_nt_{form}" for form in ("contiguous", "masked")}
    contiguous, masked = (package.find(names[form]) for form in ("contiguous", "masked"))
    options: dict[str, Any] = {"disable_ue8m0_cast": True} if scaled else {}

    def product(left: Pair, right: Pair, out: Tensor, places: Places) -> None:
        a, b = (pair if scaled else pair[0] for pair in (left, right))
        if len(places.shape) == 2:
            masked(a, b, out, places.whose, expected_rows, **options)
        else:
            contiguous(a, b, out, places.whose, **options)

    return product
