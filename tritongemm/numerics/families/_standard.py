"""Holds what families share: random operands, the reference in float64, and the supported dtypes and orders of B."""

from dataclasses import replace
from typing import ClassVar

from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import NO_SCALES
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.numerics import grouped
from tritongemm.numerics.random_inputs import random_inputs
from tritongemm.numerics.verify import epilogue_reference
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, WeightLayout

_INTEGERS = 37.0  # root mean square of the random ones
OCP_FP8 = frozenset(("fp8e4m3fn", "fp8e5m2"))  # the types of eight bits that scales of MX are for


class StandardFamily(Family, abstract=True):
    """A family whose inputs are random numbers of its dtypes and whose scales and bias the epilogue applies."""

    kinds: ClassVar[tuple[str, ...]] = ("one", "grouped")

    def _computes(self, problem: Problem) -> Support:
        possible = grouped.supports(problem) if problem.kind == "grouped" else SUPPORTED
        if possible and problem.microscaled and problem.layout != "TN":
            return Support("scales of MX are for an A row-major and a B column-major (-col_b): both are along K")
        return possible and self._types(problem) and order_of_b(problem)

    def _types(self, problem: Problem) -> Support:
        """Return whether there is such a product of these dtypes on any target."""
        return SUPPORTED

    def _supports(self, problem: Problem, target: Target) -> Support:
        return microscaled(problem, target) if problem.microscaled else readable(problem, target)

    def make_inputs(self, problem: Problem, device: str, distribution: str = "randn", seed: int = 0) -> Operands:
        """Return random operands; see `random_inputs`."""
        if problem.kind == "grouped":
            sizes = self.input_deviation(problem), self.typical_scale(problem)
            made = grouped.make_inputs(problem, *sizes, device, distribution, seed)
            return made | {"b": packed_groups(problem, made["b"])}
        operands = random_inputs(
            problem, self.input_deviation(problem), self.typical_scale(problem), device, distribution, seed
        )
        return operands | {"b": packed(problem, operands["b"])}

    def reference(self, problem: Problem, operands: Operands) -> Tensor:
        """Return C in float64 [M, N] or [batch, M, N], saturated as the kernels do; see `grouped.reference`."""
        if problem.kind == "grouped":
            return grouped.reference(problem, operands, self._reference)
        return self._reference(problem, operands)

    def _reference(self, problem: Problem, operands: Operands) -> Tensor:
        """Return C in float64 [M, N] or [batch, M, N], of one product or a batch."""
        return epilogue_reference(problem, operands | {"b": unpacked(problem, operands["b"])})

    def typical_scale(self, problem: Problem) -> float:
        """Return the root mean square of the random scales; random operands then give a C of about one."""
        size = _INTEGERS if problem.a.type.is_integer else 1.0
        return 1.0 if problem.scalings == NO_SCALES else float(round(problem.k**-0.25 / size, 6))

    def input_deviation(self, problem: Problem) -> float:
        """Return the standard deviation of the random floats of A and B."""
        return 1.0


def order_of_b(problem: Problem) -> Support:
    """Return whether B can be in the problem's order."""
    if problem.b.order == PLAIN:
        return SUPPORTED
    if problem.kind == "batched":
        return Support(f"the weights of a batch are in rows or columns, not in the order {problem.b.order}")
    return registry.get(WeightLayout, problem.b.order).supports(problem)


def packed(problem: Problem, b: Tensor) -> Tensor:
    """Return B [K, N] in the problem's order."""
    return b if problem.b.order == PLAIN else registry.get(WeightLayout, problem.b.order).pack(b)


def packed_groups(problem: Problem, b: Tensor) -> Tensor:
    """Return the B of each group [groups, K, N] in the problem's order."""
    if problem.b.order == PLAIN:
        return b
    import torch

    return torch.stack([packed(problem, each).mT for each in b]).mT


def unpacked(problem: Problem, b: Tensor) -> Tensor:
    """Return B [K, N] in rows or columns."""
    return b if problem.b.order == PLAIN else registry.get(WeightLayout, problem.b.order).unpack(b)


def readable(problem: Problem, target: Target) -> Support:
    """Return whether the target's matrix units read both operands."""
    for name, dtype in (("A", problem.a.type), ("B", problem.b.type)):
        if dtype.packed > 1:
            return Support(f"{dtype.name} ({name}) has no meaning without scales{offer_families(problem)}")
        if not target.supports(dtype):
            return Support(f"{target.name} has no matrix instruction for {dtype.name} ({name}); {fp8_of(target)}")
    return SUPPORTED


def offer_families(problem: Problem) -> str:
    """Return which families multiply numbers of a problem's types, behind why its own does not; "" where none does."""
    usual = replace(problem, b=problem.b._replace(row_major=False), c=problem.c._replace(dtype="bf16"))

    def multiplies(family: Family) -> bool:
        pairs = (pair for pair in family.scalings(problem.a.dtype, problem.b.dtype) if pair != NO_SCALES)
        return any(family.computes(replace(usual.scaled(pair), family=family.name)) for pair in pairs)

    names = [family.name for family in registry.every(Family) if multiplies(family)]
    return f"; with scales: --family {' or '.join(names)}" if names else ""


def microscaled(problem: Problem, target: Target) -> Support:
    """Return whether a target multiplies operands with MX scales, at least as wider numbers."""
    if not (target.has("dot_scaled") or (target.supports(problem.a.type) and target.supports(problem.b.type))):
        return Support(f"{target.name} has no matrix instruction for {problem.a.dtype} with scales of MX")
    return SUPPORTED


def fp8_of(target: Target) -> str:
    """Return the target's encoding of fp8, for messages."""
    return "it has no fp8" if target.fp8 == "none" else f"its fp8 encoding is {target.fp8}"
