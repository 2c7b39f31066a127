"""PyTorch's products of groups of rows: of uneven ones, and of those that have room for equally many rows each."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tritongemm.core.operands import Call, Operands
from tritongemm.core.problem import Problem
from tritongemm.operations.torch_limits import takes_groups

_DENSE = ("bf16", "fp16", "fp32")


def function(problem: Problem) -> str:
    """Return PyTorch's function for groups: ``_grouped_mm``, ``_scaled_grouped_mm``, ``bmm`` or "" for none."""
    same = len({problem.a.dtype, problem.b.dtype, problem.c.dtype}) == 1
    if problem.bias != "none" or not problem.a.row_major:
        return ""
    if problem.masked:
        return "bmm" if same and problem.a.dtype in _DENSE else ""
    readable = takes_groups(problem.k * problem.a.type.bytes, problem.n * problem.b.type.bytes)
    if same and problem.a.dtype == "bf16":
        return "_grouped_mm" if readable else ""
    rows = [e.name for e in problem.extras if e.operator == "*"] == ["scale_a", "scale_b"]
    scaled = (
        problem.a.type == problem.b.type and problem.a.type.is_fp8 and rows and problem.a.scaling == problem.b.scaling
    )
    return "_scaled_grouped_mm" if scaled and readable and problem.c.dtype == "bf16" and not problem.b.row_major else ""


def operation(problem: Problem, operands: Operands, into: bool) -> Call | None:
    """Return a call that computes C as a user of PyTorch would, or None where PyTorch has none."""
    import torch

    name = function(problem)
    if not name or not hasattr(torch, name):
        return None
    a, b, c = operands["a"], operands["b"], operands["c"]
    if name == "bmm":
        return lambda: torch.bmm(a, b, out=c)
    given: dict[str, Any] = {"offs": operands["offsets"]}
    if name == "_scaled_grouped_mm":
        given |= {"scale_a": operands["scale_a"], "scale_b": operands["scale_b"].view(problem.group_count, problem.n)}
        given |= {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    product: Callable[[], Any] = partial(getattr(torch, name), a, b, **given)
    return (lambda: c.copy_(product())) if into else product
