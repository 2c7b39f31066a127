"""The arithmetic of epilogues, by PyTorch in the type of what it is given."""

from tritongemm.core.epilogues import GATED, RUN, activation_of
from tritongemm.core.operands import Tensor


def apply(epilogue: str, y: Tensor) -> Tensor:
    """Return what an epilogue makes of a product [..., N]: [..., N], or [..., N / 2] of a gated one."""
    activation = activation_of(epilogue)
    if epilogue in GATED:
        gate, up = _separated(y)
        return (_activated(activation, gate) * up).flatten(-2)
    return _activated(activation, y) if activation else y


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return the weight [2 N, K] of gate and of up [N, K] whose rows alternate, or a bias [2 N]."""
    import torch

    return torch.stack([one.unflatten(0, (-1, RUN)) for one in (gate, up)], 1).flatten(0, 2)


def _separated(y: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = y.unflatten(-1, (-1, 2, RUN)).unbind(-2)
    return gate, up


def bound(epilogue: str, y: Tensor) -> Tensor:
    """Return what an epilogue's rounding errors are relative to, of a product's sums of absolute values."""
    if epilogue in GATED:
        gate, up = _separated(y)
        return (3.0 * gate * up.clamp_min(1.0)).flatten(
            -2
        )  # activations are at most 1.13 times as steep as their argument
    return y if epilogue == "none" else 2.0 * y


def _activated(activation: str, y: Tensor) -> Tensor:
    from torch.nn import functional

    if activation.startswith("gelu"):
        return functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    result: Tensor = functional.silu(y) if activation == "silu" else functional.relu(y)
    return result
