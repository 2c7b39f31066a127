"""Grouped products (a mixture of experts): their random operands, their reference, and the rows of C."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tritongemm.core.epilogues import RESIDUAL
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import PLAIN, Operand, Problem
from tritongemm.core.scaling import NO_SCALES, Scaling
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics import epilogues
from tritongemm.numerics.random_inputs import random_factors, random_inputs
from tritongemm.numerics.scale_factors import in_rows


def one_group(problem: Problem, rows: int) -> Problem:
    """Return the product of one group of a grouped problem, with this number of rows."""
    return replace(problem, m=rows, groups=None)


def supports(problem: Problem) -> Support:
    """Return whether a grouped problem is one that has inputs and a reference here."""
    after, unlike = problem.epilogue != "none", problem.masked or problem.microscaled or problem.b.type.packed > 1
    scales = [scaling for scaling in problem.scalings if scaling is not None]
    wrong = (
        "a batch" if problem.batch > 1 else "",
        "a column-major A" if not problem.a.row_major else "",
        f"a bias along {problem.bias.upper()}" if problem.bias != "none" else "",
        f"the epilogue {problem.epilogue}" if problem.epilogue == RESIDUAL or (after and unlike) else "",
        f"B in the order {problem.b.order}" if problem.b.order != PLAIN and problem.b.type.packed == 1 else "",
        "scales of an entire operand" if any(s.rows == 0 for s in scales) else "",
        "scales with padded rows" if any(s.layout == "groups" and s.pad != (1, 1) for s in scales) else "",
    )
    found = " and ".join(filter(None, wrong))
    return (
        Support(f"a grouped product has a row-major A and B as it is, and no bias; not {found}") if found else SUPPORTED
    )


def make_inputs(
    problem: Problem, deviation: float, typical_scale: float, device: str, distribution: str, seed: int
) -> Operands:
    """Return random operands of all groups; arguments as of `random_inputs`.

    Rows of the masked form that belong to no group are NaN where A has one, so that a kernel that reads them shows.
    """
    import torch

    def fill(rows: int, number: int) -> Operands:
        small = one_group(problem, rows).scaled(NO_SCALES)
        return random_inputs(small, deviation, typical_scale, device, distribution, seed + number)

    each = problem.operands["a"].shape[:-1]
    a = fill(problem.rows, 0)["a"].reshape(*each, -1)
    if problem.masked and a.dtype.is_floating_point:
        for group, rows in enumerate(problem.row_counts):
            a[group, rows:] = float("nan")
    operands = {"a": a, "b": _stacked(problem, lambda group: fill(1, group + 1)["b"])}
    generator = torch.Generator(device=device).manual_seed(seed)
    for spec in problem.extras:
        if spec.scaling is not None:
            operands[spec.name] = random_factors(spec, typical_scale, generator)
    numbers = torch.tensor(problem.group_numbers, dtype=torch.int32, device=device)
    return operands | {problem.group_operand: numbers}


def _stacked(problem: Problem, of_group: Callable[[int], Tensor]) -> Tensor:
    """Return B of all groups [groups, K, N], filled one group at a time, as all of them may fill the memory."""
    import torch

    first = of_group(0)
    matrix = first if problem.b.row_major else first.T
    stored = torch.empty((problem.group_count, *matrix.shape), dtype=first.dtype, device=first.device)
    b = stored if problem.b.row_major else stored.mT
    for group in range(problem.group_count):
        b[group].copy_(of_group(group) if group else first)
    return b


def reference(problem: Problem, operands: Operands, of_one: Callable[[Problem, Operands], Tensor]) -> Tensor:
    """Return C in float64, in the shape of C; NaN in rows that belong to no group."""
    import torch

    shape = (*problem.operands["a"].shape[:-1], problem.columns)
    exact = torch.full(shape, float("nan"), dtype=torch.float64, device=operands["a"].device)
    flat = exact.view(-1, problem.columns)
    arranged = operands | {
        e.name: in_rows(e.scaling, operands[e.name])
        for e in problem.extras
        if e.scaling is not None and e.scaling.depth and not e.scaling.zeros and e.name in operands
    }
    plain = problem.scaled((_rows(problem.a.scaling), _rows(problem.b.scaling)))
    plain = replace(plain, epilogue="none", c=Operand("fp32") if problem.epilogue != "none" else problem.c)
    for group, first, rows in groups_of(problem, operands):
        made = of_one(one_group(plain, rows), _of_group(problem, arranged, group, first, rows))
        flat[first : first + rows] = epilogues.apply(problem.epilogue, made, problem.run)
    return exact


def groups_of(problem: Problem, operands: Operands) -> Iterator[tuple[int, int, int]]:
    """Yield the number, first row of A and number of rows of each group that has any, from the operands."""
    first = 0
    for group, number in enumerate(operands[problem.group_operand].tolist()):
        if problem.masked:
            first, rows = group * problem.group_m, number
        else:
            rows = number - first
        if rows > 0:
            yield group, first, rows
        first += rows


def _rows(scaling: Scaling | None) -> Scaling | None:
    """Return the scaling of factors for the same elements, stored as [rows, groups along K], or with zero points."""
    return scaling if scaling is None or scaling.zeros else scaling._replace(layout="rows", pad=(1, 1))


def _of_group(problem: Problem, operands: Operands, group: int, first: int, rows: int) -> Operands:
    """Return the operands of one group's product, of factors stored as [rows, groups along K]."""
    found = {"a": operands["a"].flatten(0, -2)[first : first + rows], "b": operands["b"][group]}
    for spec in problem.extras:
        factors = operands.get(spec.name)
        if spec.scaling is None or factors is None:
            continue
        if spec.name == "scale_b":
            found[spec.name] = factors.reshape(problem.group_count, -1)[group] if factors.dim() == 1 else factors[group]
        else:
            found[spec.name] = (factors if factors.dim() < 3 else factors.flatten(0, 1))[first : first + rows]
    return found


def written(problem: Problem, c: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of C and of its reference that belong to a group: all, but of the masked form."""
    if not problem.masked:
        return c, exact
    there = ~exact[..., 0].isnan()
    return c[there], exact[there]
