"""Stage: a launchable candidate → its error against the reference.

C is filled with NaN first, so that an element that was not written shows. The candidate runs twice, so that counters
which a launch leaves behind show too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tritongemm.core.operands import Call, Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.numerics import epilogues
from tritongemm.numerics.grouped import written
from tritongemm.plugins.contracts import Family


def epilogue_reference(problem: Problem, operands: Operands) -> Tensor:
    """Return C in float64 [M, N] or [batch, M, N]: the epilogue of the sum over K, saturated as kernels do."""
    exact = operands["a"].double() @ operands["b"].double()
    for extra in (e for e in problem.extras if e.applied == "epilogue"):
        vector = operands[extra.name].double()
        if vector.dim() == len(extra.lead) + 1:
            by_rows = vector.unsqueeze(-1 if extra.along == "m" else -2)
            vector = vector.view_as(exact) if extra.along == "mn" else by_rows
        exact = exact.mul_(vector) if extra.operator == "*" else exact.add_(vector)
    exact = epilogues.apply(problem.epilogue, exact, problem.run)
    if (problem.c.type.is_fp8 and not problem.in_blocks) or problem.c.dtype == "int8":
        exact = exact.clamp(-problem.c.type.maximum - (problem.c.dtype == "int8"), problem.c.type.maximum)
    return exact


def deviation(c: Tensor, exact: Tensor) -> float:
    """Return the largest |C - reference| / (|reference| + rms(reference)); NaN in C counts as infinite."""
    return float(_deviations(c, exact).max())


def outside(c: Tensor, exact: Tensor, limit: float) -> float:
    """Return the share of the elements whose deviation is more than `limit`."""
    return float((_deviations(c, exact) > limit).double().mean())


def _deviations(c: Tensor, exact: Tensor) -> Tensor:
    rms = exact.square().mean().sqrt().clamp_min(1e-30)
    return (c.double() - exact).abs_().div_(exact.abs() + rms).nan_to_num_(nan=float("inf"))


# An element with this error was not computed, whatever share may exceed the tolerance; the unit is that of
# `error_metric.deviation`.
LOST_ERROR = 0.5

# PyTorch lets its library round partial sums to the type of C, unless a program forbids it: rounding so often is no
# fault of a library's own choice. What drops or repeats a part of K is off by far more.
ROUNDINGS_OF_A_LIBRARY = 3


@dataclass(frozen=True)
class VerifyResult:
    """How far a candidate's result is from the reference, and whether that passes."""

    error: float  # as `error_metric.deviation` measures it; infinite if an element was not written
    tolerance: float  # largest error allowed
    outside: float | None = None  # share of the elements beyond the tolerance; None where it was not counted
    ratio: float = 0.0  # largest such share allowed; the others must not be lost either (`LOST_ERROR`)

    @property
    def ok(self) -> bool:
        """Whether the result is correct: no error beyond the tolerance, or few enough of them and none lost."""
        some = self.outside is not None and self.outside <= self.ratio and self.error <= LOST_ERROR
        return self.error <= self.tolerance or some

    @property
    def reason(self) -> str:
        """Why the result is wrong, with the numbers; "" where it is correct."""
        if self.ok:
            return ""
        share = f", in {self.outside:.3g} of the elements" if self.outside is not None else ""
        return f"error {self.error:.3g} > {self.tolerance:.3g}{share}"


def library_fault(problem: Problem, result: VerifyResult) -> str:
    """Return why the result of a library's own choice is wrong, with the numbers; "" where it is correct."""
    allowed = result.tolerance + ROUNDINGS_OF_A_LIBRARY * problem.c.type.epsilon
    return "" if result.error <= allowed else result.reason


def poison(c: Tensor) -> None:
    """Fill with NaN, or with a value far from any result where the dtype has none."""
    if c.dtype.is_floating_point:
        c.fill_(float("nan"))
    else:
        c.fill_(-77 if c.element_size() == 1 else -(2**31) + 7)


def verify(
    problem: Problem, family: Family, run: Callable[[], None], c: Tensor, reference: Tensor, ratio: float = 0.0
) -> VerifyResult:
    """Run a candidate twice on a poisoned C and compare.

    `run` launches the candidate, which writes C [M, N], and waits for it; the reference is in float64. `ratio` is the
    largest share of elements beyond the tolerance that passes.
    """
    import torch

    once = verify_once(problem, family, run, c, reference, ratio)
    bits = c.view(torch.uint8) if c.element_size() == 1 else c
    first = bits.clone()
    poison(c)
    run()
    if torch.equal(first, bits):
        return once
    again = compare(problem, family, c, reference, ratio)
    shares = [v.outside for v in (once, again) if v.outside is not None]
    return replace(once if once.error >= again.error else again, outside=max(shares, default=None))


def verify_once(
    problem: Problem, family: Family, run: Call, c: Tensor, reference: Tensor, ratio: float = 0.0
) -> VerifyResult:
    """Run a candidate once on a poisoned C and compare; C and the reference may be the same part of each."""
    poison(c)
    run()
    return compare(problem, family, c, reference, ratio)


def compare(problem: Problem, family: Family, c: Tensor, reference: Tensor, ratio: float = 0.0) -> VerifyResult:
    """Compare what is in C with the reference; arguments as of `verify`."""
    c, reference = written(problem, epilogues.numbers(problem, c), reference)
    error, tolerance = deviation(c, reference), family.tolerance(problem)
    counted = ratio and error > tolerance
    return VerifyResult(error, tolerance, outside(c, reference, tolerance) if counted else None, ratio)
