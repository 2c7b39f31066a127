"""PyTorch's batched products: ``bmm``, ``baddbmm``, and ``mm`` where all products of a batch share B.

It has none of eight-bit types. There its calls of single products are made one after another, in one graph, as its
users make them; where all products share B and nothing is added, that is one call of all rows.
"""

from collections.abc import Callable
from dataclasses import replace

from tritongemm.core.operands import Call, Operands, Tensor
from tritongemm.core.problem import Problem


def function(problem: Problem) -> str:
    """Return PyTorch's function for a batch: ``bmm`` or ``baddbmm``; "" where it has none, as for eight-bit types."""
    narrow = problem.a.type.bytes == 1 or any(spec.scaling for spec in problem.extras)
    if narrow or len({problem.a.dtype, problem.b.dtype, problem.c.dtype}) != 1:
        return ""
    return "bmm" if problem.bias == "none" else "baddbmm"


def product(problem: Problem, operands: Operands) -> Call | None:
    """Return a call that computes C [batch, M, N] as a user of PyTorch would; None where PyTorch has no function."""
    import torch

    name, c = function(problem), operands["c"]
    if name == "bmm" and problem.b.shared and problem.a.row_major:
        # One product of all rows, as ``torch.matmul`` makes of it.
        rows, out, b = operands["a"].flatten(0, 1), c.flatten(0, 1), operands["b"]
        return lambda: torch.mm(rows, b, out=out)
    left, right = _batch_of(operands["a"], problem.batch), _batch_of(operands["b"], problem.batch)
    if name == "baddbmm":
        added = operands["bias"].unsqueeze(-1 if problem.bias == "m" else -2)
        return lambda: torch.baddbmm(added, left, right, out=c)
    return (lambda: torch.bmm(left, right, out=c)) if name else None


def single(problem: Problem) -> Problem:
    """Return what PyTorch computes of a batch at a time where it has no function for a batch.

    It is one product, or all of them where they share B and all rows follow each other.
    """
    joined = problem.b.shared and problem.a.row_major and problem.bias == "none"
    by_rows = problem.a.scaling is None or (problem.a.scaling.rows == 1 and problem.a.scaling.layout == "rows")
    rows = problem.batch * problem.m if joined and by_rows else problem.m
    return replace(problem, m=rows, batch=1, a=problem.a._replace(shared=False), b=problem.b._replace(shared=False))


def one_after_another(
    problem: Problem, operands: Operands, call_of: Callable[[Problem, Operands], Call | None]
) -> Call | None:
    """Return a call that computes C [batch, M, N] by calls of `single` products; None where PyTorch has none."""
    one, specs = single(problem), problem.operands
    if one.m != problem.m:
        flat = {name: t.flatten(0, 1) if specs[name].batch else t for name, t in operands.items()}
        return call_of(one, flat)
    calls = list[Call]()
    for product in range(problem.batch):
        call = call_of(one, {name: t[product] if specs[name].batch else t for name, t in operands.items()})
        if call is None:
            return None
        calls.append(call)

    def compute() -> object:
        for call in calls:
            call()
        return operands["c"]

    return compute


def _batch_of(matrix: Tensor, batch: int) -> Tensor:
    return matrix if matrix.dim() == 3 else matrix.expand(batch, *matrix.shape)
