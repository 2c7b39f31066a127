"""PyTorch's products of operands with scale factors, as a user calls them.

PyTorch asks for some factors in an order of its own. A program that runs there keeps them so, and its calls make no
copies; neither do these: operands in another layout are copied before.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tritongemm.backends._accepted import accepts
from tritongemm.backends._scales import coverage, dense, factors
from tritongemm.core.operands import Call, Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.operations.torch_limits import PADDED_GROUPS, takes_fp8

_ALONG_K = ("block", "group")


def function(problem: Problem) -> str:
    """Return PyTorch's function with factors: ``_scaled_mm``, ``scaled_mm``, ``_int_mm`` or ""."""
    scales = coverage(problem)
    if problem.a.type.is_fp8:
        # cuBLASLt reads fp8 as row-major A times column-major B only.
        if problem.c.type.is_fp8 or problem.bias == "m" or not takes_fp8(problem.n, problem.k):
            return ""
        if scales in _ALONG_K:
            return "scaled_mm" if problem.bias == "none" else ""
        known = scales == "tensor" or (scales == "row" and problem.c.dtype == "bf16")
        return "_scaled_mm" if known else ""
    return (
        "_int_mm" if problem.a.dtype == "int8" and scales in ("tensor", "row") and not problem.c.type.is_integer else ""
    )


def product(problem: Problem, operands: Operands, own_c: bool, fast: bool) -> Call | None:
    """Return a call that computes C, or None where PyTorch refuses it here.

    With `own_c` C is written rather than a new tensor; with `fast` sums of fp8 need not be promoted on the way.
    """
    if problem.a.dtype == "int8":
        return _integers(problem, operands)
    c = operands["c"]
    left = operands["a"].contiguous()
    right = operands["b"].T.contiguous().T
    if coverage(problem) not in _ALONG_K:
        made = {"out": c} if own_c else {}
        named = {"use_fast_accum": fast, "out_dtype": c.dtype, **made}
        calls = iter([_complete_rows(problem, operands, left, right, named)])
    else:
        calls = _along_k(problem, operands, left, right, own_c)
    return next(filter(accepts, calls), None)


def _complete_rows(problem: Problem, operands: Operands, left: Tensor, right: Tensor, named: dict[str, Any]) -> Call:
    """Return a call of `_scaled_mm` with a factor for all, or for each row of A and column of B."""
    import torch

    of_a, of_b = (factors(problem, operands, name) for name in ("scale_a", "scale_b"))
    return partial(torch._scaled_mm, left, right, of_a, of_b.T, bias=operands.get("bias"), **named)


def _along_k(problem: Problem, operands: Operands, left: Tensor, right: Tensor, own_c: bool) -> Iterator[Call]:
    """Yield calls of a product whose factors change along K, today's first; versions of PyTorch differ in them.

    Factors of 1 x 128 are stored group by group along K, those of 128 x 128 the other way round, with groups padded.
    """
    import torch

    c = operands["c"]
    of_a = dense(factors(problem, operands, "scale_a").T).T
    of_b = factors(problem, operands, "scale_b")
    groups, square = of_b.shape[1], coverage(problem) == "block"
    of_b = dense(of_b, PADDED_GROUPS).T if square else dense(of_b.T).T
    kinds = getattr(torch.nn.functional, "ScalingType", None)
    if kinds is not None:
        vector, other = kinds.BlockWise1x128, kinds.BlockWise128x128 if square else kinds.BlockWise1x128
        if own_c:
            recipes: tuple[list[Any], ...] = ([of_a], [vector.value], [], [of_b], [other.value], [])
            yield partial(torch.ops.aten._scaled_mm_v2.out, left, right, *recipes, None, c.dtype, out=c)
        else:
            yield partial(torch.nn.functional.scaled_mm, left, right, of_a, vector, of_b, other, output_dtype=c.dtype)
    older = of_b[:groups] if square else of_b.T
    yield partial(torch._scaled_mm, left, right, of_a, older, out_dtype=c.dtype, **({"out": c} if own_c else {}))


def _integers(problem: Problem, operands: Operands) -> Call:
    """Return a call of `_int_mm`, whose sums are then multiplied by the factors."""
    import torch

    a, b, c, bias = operands["a"], operands["b"], operands["c"], operands.get("bias")
    of_a, of_b = factors(problem, operands, "scale_a"), factors(problem, operands, "scale_b").T
    if bias is None:
        return lambda: torch.mul(torch._int_mm(a, b) * of_a, of_b, out=c)
    added = bias[:, None] if problem.bias == "m" else bias
    return lambda: torch.add((torch._int_mm(a, b) * of_a).mul_(of_b), added, out=c)
