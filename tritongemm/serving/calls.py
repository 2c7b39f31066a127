"""What a call asks for: its operands, the signature that sources of kernels see, and the problems that calls know."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tritongemm.core.problem import DEFAULT_FAMILY, PLAIN, Problem
from tritongemm.core.serving import CallSignature
from tritongemm.core.support import Support
from tritongemm.serving.torch_fallback import DTYPE_NAMES, float32_precision, output_dtype

FREQUENT_CALLS = 64  # A size is frequent from this call of one thread on; a model of 32 layers has come by twice then.


class CallOperands(NamedTuple):
    """The arguments of `mm`."""

    x: Tensor
    w: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None


def layer_problem(sizes: tuple[int, int, int], dtypes: tuple[str, str, str], bias: str) -> Problem:
    """The problem of a linear layer: x [M, K] row-major, w [N, K], a bias along N or none.

    Args:
        sizes: M, N, K.
        dtypes: of x, of w and of the result.
        bias: ``n`` or ``none``.
    """
    return Problem(*sizes, *dtypes, row_major_b=False, bias=bias)


def is_layer(problem: Problem) -> bool:
    """Whether `mm` can ask for a problem."""
    p = problem
    return p.bias in ("none", "n") and p == layer_problem((p.m, p.n, p.k), (p.dtype_a, p.dtype_b, p.dtype_c), p.bias)


def is_scaled(problem: Problem) -> bool:
    """Whether `scaled_mm` can ask for a problem."""
    p = problem
    plain = replace(p, family=DEFAULT_FAMILY, order_b=PLAIN, scale_a=None, scale_b=None, scales="")
    return p.scale_a is not None and p.scale_b is not None and is_layer(plain)


class ExpertWeights(NamedTuple):
    """The weights of a mixture of experts, by which records of its products are found.

    Attributes:
        groups: how many experts have a weight [N, K] each.
        n, k: its extents.
        dtype: name of its type.
        family: what is computed.
    """

    groups: int
    n: int
    k: int
    dtype: str
    family: str


def expert_weights(problem: Problem) -> ExpertWeights | None:
    """The weights of a grouped product whose groups' rows lie one after another; None of other products."""
    if problem.kind != "grouped" or problem.room or problem.row_major_b:
        return None
    return ExpertWeights(problem.groups, problem.n, problem.k, problem.dtype_b, problem.family)


def is_served(problem: Problem) -> bool:
    """Whether any call at run time can ask for a problem."""
    return is_layer(problem) or is_scaled(problem) or problem.kind in ("batched", "grouped")


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
    problem = layer_problem((x.numel() // k, n, k), dtypes, "none" if bias is None else "n")
    if bias is not None and (tuple(bias.shape) != (n,) or DTYPE_NAMES.get(bias.dtype) != problem.bias_dtype.name):
        return Support(f"the bias is {bias.dtype} {tuple(bias.shape)}; kernels take {problem.bias_dtype.torch} ({n},)")
    return problem
