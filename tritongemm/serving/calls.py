"""What a call asks for: its operands, and the signature that sources of kernels see; and what is kept for the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.problem import Problem
from tritongemm.core.serving import CallSignature
from tritongemm.core.support import Support
from tritongemm.operations.served_problems import layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES, float32_precision, output_dtype

FREQUENT_CALLS = 64  # A size is frequent from this call of one thread on; a model of 32 layers has come by twice then.
_MOST_CALLS = 8192  # Calls kept in a table; sequences of any length must not fill the memory.


def keep(table: dict[Any, Any], key: Any, ready: Any) -> None:
    """Keep what serves calls of a key in a table, which is emptied before it grows too large."""
    if len(table) >= _MOST_CALLS:
        table.clear()
    table[key] = ready


class CallOperands(NamedTuple):
    """The arguments of `mm`."""

    x: Tensor
    w: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None


def are_transposed(x: Tensor, w: Tensor) -> tuple[bool, bool]:
    """Whether x and w are read as transposed views of row-major matrices, as all that are not contiguous are."""
    return x.dim() == 2 and not x.is_contiguous(), not w.is_contiguous()


def sign_call(operands: CallOperands, precision: str | None, frequent: bool) -> CallSignature | Support:
    """The signature of a call, or why no kernel could compute it.

    Args:
        operands: its arguments.
        precision: how float32 is multiplied, ``fp32`` or ``tf32``; None for as PyTorch is set.
        frequent: whether the size is called frequently.
    """
    problem = _problem(operands)
    if isinstance(problem, Support):
        return problem
    if problem.dtype_a != "fp32":
        precision = "fp32"
    return CallSignature(problem, precision or float32_precision(), operands.x.dim() == 1, frequent)


def _problem(operands: CallOperands) -> Problem | Support:
    x, w, bias, out_dtype = operands
    if not x.is_cuda:
        return Support(f"x is on {x.device}; tuned kernels run on a GPU")
    if x.layout != torch.strided or w.layout != torch.strided:
        return Support("an operand is sparse")
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        return Support(f"x {tuple(x.shape)} and w {tuple(w.shape)} are not [..., K] and [N, K]")
    result = output_dtype(x, out_dtype)
    unknown = {x.dtype, w.dtype, result} - DTYPE_NAMES.keys()
    if unknown:
        return Support(f"no kernels for {', '.join(sorted(map(str, unknown)))}")
    n, k = w.shape
    if not x.numel() or not w.numel():
        return Support("an operand is empty")
    dtypes = DTYPE_NAMES[x.dtype], DTYPE_NAMES[w.dtype], DTYPE_NAMES[result]
    layer = layer_problem((x.numel() // k, n, k), dtypes, "none" if bias is None else "n")
    transposed_x, transposed_w = are_transposed(x, w)
    problem = replace(layer, row_major_a=not transposed_x, row_major_b=transposed_w)
    if bias is not None and (tuple(bias.shape) != (n,) or DTYPE_NAMES.get(bias.dtype) != problem.bias_dtype.name):
        return Support(f"the bias is {bias.dtype} {tuple(bias.shape)}; kernels take {problem.bias_dtype.torch} ({n},)")
    return problem
