"""How far another order of additions moves the log probabilities of a model: bf16 beside fp8 in blocks. Needs no GPU.

    python benchmarks/token_agreement.py [--hidden 512] [--layers 16] [--tokens 64]

A Llama with random weights computes the same tokens twice. The only difference is how its products are added up: in
float64, or as the sum of eight parts in float32. Results are rounded to bfloat16 both times. The last bit of few of
them differs then, and an activation beside a boundary is rounded to another number of fp8, six to twelve percent away.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK, _HEAD, _PARTS, _PROMPTS, _VOCABULARY = 128, 64, 8, 4, 4096
_LARGEST_FP8 = 448.0
_DEVIATION = 0.02 * math.sqrt(4096)  # of a product of normalised activations, as in models of this hidden size

Multiply = Callable[[Tensor, Tensor], Tensor]


class Difference(NamedTuple):
    """How far two runs are apart at the five most probable tokens: at most, in the mean square, and the best tokens."""

    largest: float
    root_mean_square: float
    same_best: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 16), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    for kind in ("bf16", "fp8 in blocks"):
        found = compare(args.hidden, args.layers, args.tokens, kind != "bf16")
        print(
            f"{kind}: log probabilities differ by up to {found.largest:.2g}, {found.root_mean_square:.2g} in the mean "
            f"square; {found.same_best:.1%} of the best tokens are the same"
        )


def compare(hidden: int, layers: int, tokens: int, fp8: bool) -> Difference:
    """Return how far two orders of additions are apart."""
    exact, parts = (_run(hidden, layers, tokens, fp8, multiply) for multiply in (_exactly, _by_parts))
    best = exact.topk(5, -1).indices
    apart = (exact.gather(-1, best) - parts.gather(-1, best)).abs()
    same = (exact.argmax(-1) == parts.argmax(-1)).float().mean()
    return Difference(float(apart.max()), float(apart.square().mean().sqrt()), float(same))


def _exactly(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double().T).float()


def _by_parts(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([x[..., i::_PARTS] @ w[:, i::_PARTS].T for i in range(_PARTS)]).sum(0)


def _run(hidden: int, layers: int, tokens: int, fp8: bool, multiply: Multiply) -> Tensor:
    """Return the log probabilities behind each token of random prompts."""
    generator = torch.Generator().manual_seed(0)
    inner, deviation = 3 * hidden, _DEVIATION / math.sqrt(hidden)

    def weight(n: int, k: int) -> Tensor:
        w = torch.randn(n, k, generator=generator) * deviation
        return _to_fp8(w.view(n // _BLOCK, _BLOCK, -1, _BLOCK), (1, 3)).view(n, k) if fp8 else _round(w)

    def linear(x: Tensor, n: int) -> Tensor:
        w = weight(n, x.shape[-1])
        return _round(multiply(_to_fp8(x.unflatten(-1, (-1, _BLOCK)), (-1,)).view_as(x) if fp8 else x, w))

    ids = torch.randint(_VOCABULARY, (_PROMPTS, tokens), generator=generator)
    x = _round(torch.randn(_VOCABULARY, hidden, generator=generator) * deviation)[ids]
    for _ in range(layers):
        q, k, v = linear(_normalise(x), 3 * hidden).unflatten(-1, (3, -1, _HEAD)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = _round(x + linear(_round(attended), hidden))
        gate, up = linear(_normalise(x), 2 * inner).chunk(2, -1)
        x = _round(x + linear(_round(functional.silu(gate) * up), hidden))
    head = torch.randn(_VOCABULARY, hidden, generator=generator) * deviation
    return torch.log_softmax(_normalise(x) @ head.T, -1)


def _round(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _normalise(x: Tensor) -> Tensor:
    return _round(functional.rms_norm(x, x.shape[-1:]))


def _to_fp8(blocks: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Round to fp8 with a factor for each block, which these axes span."""
    scale = blocks.abs().amax(axes, keepdim=True).clamp_min(1e-10) / _LARGEST_FP8
    return (blocks / scale).to(torch.float8_e4m3fn).float() * scale


if __name__ == "__main__":
    main()
