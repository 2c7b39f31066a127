"""The public call `linear_act`: a linear layer and its activation by one kernel."""

import torch
from torch import Tensor

from tritongemm.operations.linear_act import LINEAR_ACT
from tritongemm.serving.added_operations import make_function


def linear_act(
    x: Tensor, w: Tensor, act: str, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute act(x @ w.T + bias) with the tuned kernel for this size, else with PyTorch in two steps.

    With ``silu_mul``, ``gelu_mul`` and ``gelu_tanh_mul`` w holds gate and up, whose rows alternate by 8 as
    `interleave_gate_up` writes them, and the result is act(gate) * up: SwiGLU and GeGLU without the round trip of the
    product through memory. Tune such sizes with ``--epilogue``.

    Args:
        x: [..., K], contiguous for tuned kernels.
        w: [N, K], contiguous for tuned kernels.
        act: ``silu``, ``gelu``, ``gelu_tanh``, ``relu``, or one of gate and up.
        bias: [N] or None.
        out_dtype: x's by default; a type of floats.

    Returns:
        [..., N], or of gate and up [..., N / 2], contiguous, ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes, dtypes or devices that do not fit together, or no such activation.
        DriverError: the driver refused a launch.

    Examples:
        >>> w = tritongemm.interleave_gate_up(torch.randn(32, 64), torch.randn(32, 64))
        >>> tritongemm.linear_act(torch.randn(4, 64), w, "silu_mul").shape
        torch.Size([4, 32])
    """
    return _call(x, w, act, bias, out_dtype)


_call = make_function(LINEAR_ACT)
