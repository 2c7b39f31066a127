"""The arithmetic of epilogues, by PyTorch in the type of what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.core.epilogues import RUN, activation_of, is_gated
from tritongemm.core.operands import Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import SCALED_BLOCK

if TYPE_CHECKING:
    import torch


def apply(epilogue: str, y: Tensor, run: int = RUN) -> Tensor:
    """Return what an epilogue makes of a product [..., N]: [..., N], or [..., N / 2] of a gated one.

    Columns of gate and of up alternate by `run`.
    """
    activation = activation_of(epilogue)
    if is_gated(epilogue):
        gate, up = _separated(y, run)
        return (_activated(activation, gate) * up).flatten(-2)
    return _activated(activation, y) if activation else y


def interleaved(gate: Tensor, up: Tensor, run: int = RUN) -> Tensor:
    """Return the weight [2 N, K] of gate and of up [N, K] whose rows alternate, or a bias [2 N]."""
    import torch

    return torch.stack([one.unflatten(0, (-1, run)) for one in (gate, up)], 1).flatten(0, 2)


def _separated(y: Tensor, run: int) -> tuple[Tensor, Tensor]:
    gate, up = y.unflatten(-1, (-1, 2, run)).unbind(-2)
    return gate, up


def parts(c: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the rows [M, N] of a C in blocks and its factors [N / 128, M], as views."""
    import torch

    groups = c.shape[1] // SCALED_BLOCK
    return c[:m], c[m:].flatten().view(torch.float32)[: groups * m].view(groups, m)


def quantize(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return numbers of a type of eight bits [M, N], and their float32 factors [N / 128, M]."""
    import torch

    most, blocks = torch.finfo(dtype).max, y.float().unflatten(-1, (-1, SCALED_BLOCK))
    factors = blocks.abs().amax(-1) / most
    factors = torch.where(factors == 0, 1.0, factors)
    return (blocks / factors[..., None]).clamp(-most, most).flatten(-2).to(dtype), factors.T


def numbers(problem: Problem, c: Tensor) -> Tensor:
    """Return what C stands for: itself, or of blocks their numbers times the factors, in float64."""
    if not problem.in_blocks:
        return c
    q, factors = parts(c, problem.m)
    return (q.double().unflatten(-1, (-1, SCALED_BLOCK)) * factors.T.double()[..., None]).flatten(-2)


def bound(epilogue: str, y: Tensor, run: int = RUN) -> Tensor:
    """Return what an epilogue's rounding errors are relative to, of a product's sums of absolute values."""
    if is_gated(epilogue):
        gate, up = _separated(y, run)
        # Activations are at most 1.13 times as steep as their argument.
        return (3.0 * gate * up.clamp_min(1.0)).flatten(-2)
    return y if epilogue == "none" else 2.0 * y


def _activated(activation: str, y: Tensor) -> Tensor:
    from torch.nn import functional

    if activation.startswith("gelu"):
        return functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    result: Tensor = functional.silu(y) if activation == "silu" else functional.relu(y)
    return result
