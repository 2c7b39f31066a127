"""Operands of which many rows of A are alike, and the bits of the rows of C that follow from them.

A kernel whose rows do not depend on M gives a row the same bits at every M, wherever it is in the batch and whatever
the other rows are. So A has a few rows, each at many places, among rows of huge numbers and of NaN; B, and the row at
the first place, are the same for every M. The second half of K undoes the sum of the first in reverse order: what is
left of a sum is what rounding did, so that another order of additions shows in most elements.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tritongemm.core.epilogues import RESIDUAL
from tritongemm.core.operands import Operands
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.support import Support
from tritongemm.numerics.grouped import one_group
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family

if TYPE_CHECKING:
    from torch import Tensor

ROWS, HUGE, NAN = 8, 6, 7  # rows of A that there are, and which of them have huge numbers and NaN
_SEED = 20
_BIAS = 2.0**-12  # of a usual bias, beside which what rounding leaves of a sum would be lost
_DIGITS = 16  # of a hash, in hexadecimal


def supports(problem: Problem) -> Support:
    """Return whether rows of a problem can be compared over M."""
    if problem.masked:
        return Support(f"{problem.key}: rows of groups with room of their own are not compared over M")
    if problem.bias == "m" or problem.epilogue == RESIDUAL:
        own = "what is added to C" if problem.epilogue == RESIDUAL else "the bias"
        return Support(f"{problem.key}: each row has numbers of its own in {own}, so that rows are not compared over M")
    return Support()


def places(m: int) -> list[int]:
    """Return which row of A is at each place of a batch: the first one at both ends, all rows between them."""
    mixed = [(i * 2654435761 >> 16) % ROWS for i in range(m)]
    mixed[0] = mixed[-1] = 0
    return mixed


def make_operands(problem: Problem, device: str) -> Operands:
    """Return the operands of a problem, C included, with rows of A at their `places`; all groups have the same B."""
    import torch

    if problem.groups:
        made = make_operands(one_group(problem, problem.m), device)
        numbers = torch.tensor(problem.group_numbers, dtype=torch.int32, device=device)
        shared = {name: _for_groups(problem, made[name]) for name in ("b", "scale_b") if name in made}
        return made | shared | {problem.group_operand: numbers}
    family = registry.get(Family, problem.family)
    few: Operands = family.make_inputs(problem.at(ROWS), device, "randn", _SEED)
    _undo_half(problem, few)
    if "bias" in few:
        few["bias"] = (few["bias"].float() * _BIAS).to(few["bias"].dtype)
    chosen = torch.tensor(places(problem.m), device=device)
    a = _bits(few["a"])
    if problem.a.type.torch.startswith(("float", "bfloat")) and problem.a.type.packed == 1:
        for row, value in ((HUGE, problem.a.type.maximum), (NAN, float("nan"))):
            a[..., row, :] = _bits(torch.full((1,), value, device=device).to(few["a"].dtype))
    taken = a.index_select(-2, chosen)
    taken = taken if problem.a.row_major else taken.mT.contiguous().mT
    c = torch.empty(problem.operands["c"].extents, dtype=getattr(torch, problem.c.type.torch), device=device)
    made = few | {"a": taken.view(few["a"].dtype), "c": c}
    if scaling := problem.a.scaling:
        made["scale_a"] = _spread_factors(problem, few["scale_a"], chosen) if scaling.rows == 1 else few["scale_a"]
    return made


def _for_groups(problem: Problem, of_one: Tensor) -> Tensor:
    """Return a weight, or its factors, once for each group, in the memory layout of one."""
    if of_one.dim() == 1:
        return of_one.repeat(problem.group_count)
    stored = of_one if of_one.is_contiguous() else of_one.mT
    every = stored.unsqueeze(0).expand(problem.group_count, *stored.shape).contiguous()
    return every if of_one.is_contiguous() else every.mT


def _spread_factors(problem: Problem, factors: Tensor, chosen: Tensor) -> Tensor:
    """Return the factors of the rows at their places."""
    import torch

    scaling = problem.a.scaling
    assert scaling is not None
    if not scaling.depth:
        return factors.index_select(-1, chosen)
    spec = problem.operands["scale_a"]
    if scaling.layout not in ("rows", "groups"):  # blocks of rows are interleaved: all rows have factors alike
        return torch.full(spec.extents, int(factors.flatten()[0]), dtype=factors.dtype, device=factors.device)
    along = -1 if scaling.layout == "groups" else -2
    padded = chosen.new_zeros(spec.shape[along])
    padded[: len(chosen)] = chosen
    return factors.index_select(along, padded)


def _undo_half(problem: Problem, operands: Operands) -> None:
    """Make the products of K's second half those of the first with the other sign, from the last to the first."""
    import torch

    half, depths = problem.k // 2, [s.depth for s in problem.scalings if s and s.depth]
    a, b = _bits(operands["a"]), _bits(operands["b"])
    plain = problem.b.order == PLAIN and problem.a.type.packed == problem.b.type.packed == 1
    if not half or not plain or problem.a.type.is_integer or any(problem.k % depth for depth in depths):
        return
    for name, spec in ((f"scale_{side}", getattr(problem, side).scaling) for side in "ab"):
        if spec and spec.depth:
            if spec.layout not in ("rows", "groups"):
                return
            along, groups = (-2 if spec.layout == "groups" else -1), problem.k // spec.depth
            factors = operands[name]
            upper = factors.narrow(along, groups - groups // 2, groups // 2)
            upper.copy_(factors.narrow(along, 0, groups // 2).flip(along).clone())
    lower = a[..., :half].flip(-1)
    sign = -(2 ** (8 * a.element_size() - 1))
    a[..., problem.k - half :] = torch.where(lower == 0, lower, lower ^ sign)
    b[..., problem.k - half :, :] = b[..., :half, :].flip(-2)


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of numbers as integers of their size, which can be moved and compared whatever the type."""
    import torch

    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def hash_rows(problem: Problem, c: Tensor) -> str | Support:
    """Return a hash of the first row of C, the same at every M; or which of its rows differ that should be alike."""
    import torch

    which, bits = places(problem.m), _bits(c)
    first = [which.index(row) for row in which]
    same = torch.tensor([row < HUGE for row in which], device=c.device).unsqueeze(-1)
    differ = ((bits != bits.index_select(-2, torch.tensor(first, device=c.device))) & same).any(-1)
    if differ.any():
        place = int(differ.flatten().nonzero()[0]) % problem.m
        return Support(f"equal rows {first[place]} and {place} of a batch of {problem.m} have other bits")
    row = bits[..., 0, :].contiguous().view(torch.uint8).cpu()
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()[:_DIGITS]
