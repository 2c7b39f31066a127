"""Family: C = A @ B (+ bias) with no scales, in any pair of dtypes the target's matrix units read.

The reference is float64. The error is max |C - reference| / (|reference| + rms(reference)): one wrong element
anywhere shows, and rounding C contributes at most half its epsilon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.errors import InputError
from tritongemm.problem import Problem
from tritongemm.target import Target

if TYPE_CHECKING:
    from torch import Tensor

INITS = ("randn", "hpl", "trig_float", "zeros")


def unsupported(problem: Problem, target: Target) -> str | None:
    """Why the target can't run this problem, or None."""
    for name, dtype in (("A", problem.a), ("B", problem.b)):
        if not target.supports(dtype):
            return (
                f"{target.name} has no matrix instruction for {dtype.name} ({name}); its fp8 encoding is {target.fp8}"
            )
    if problem.c.is_fp8 and not target.supports(problem.c):
        return f"{target.name} does not convert to {problem.c.name} (C); its fp8 encoding is {target.fp8}"
    if problem.a.is_integer != problem.b.is_integer:
        return f"{problem.dtype_a} times {problem.dtype_b} mixes integers with floats"
    if problem.a.is_integer != problem.c.is_integer:
        return f"{problem.dtype_a} operands need an integer C, not {problem.dtype_c}"
    if "int32" in (problem.dtype_a, problem.dtype_b):
        return "int32 operands: matrix units read int8"
    return None


def tolerance(problem: Problem) -> float:
    """Largest error that is rounding rather than a fault; 0 for integers."""
    if problem.c.is_integer:
        return 0.0
    if problem.a.is_fp8 or problem.b.is_fp8:
        accumulate = 2**-6  # Hopper's fp8 units keep about 14 bits of the running sum
    elif "fp32" in (problem.dtype_a, problem.dtype_b) or problem.dtype_a != problem.dtype_b:
        accumulate = 2**-8  # tf32 operands
    else:
        accumulate = 2**-12
    return problem.c.epsilon + accumulate


def scale(problem: Problem) -> float:
    """Standard deviation of the random operands; keeps an eight-bit C well inside its range."""
    return round((16 / problem.k**0.5) ** 0.5, 4) if problem.c.is_fp8 else 1.0


def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """A [M, K], B [K, N] and the bias (or None), in the problem's layouts.

    Args:
        problem: sizes, dtypes, layouts.
        device: a torch device.
        init: ``randn``, ``hpl`` (uniform in [-0.5, 0.5]), ``trig_float`` (sines and cosines of the index) or ``zeros``.
        seed: of the random numbers.

    Raises:
        InputError: unknown init.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def fill(shape: tuple[int, ...], dtype: torch.dtype, phase: float) -> Tensor:
        if init == "zeros":
            return torch.zeros(shape, device=device, dtype=dtype)
        if not dtype.is_floating_point:
            return torch.randint(-64, 64, shape, device=device, generator=generator, dtype=torch.int8).to(dtype)
        if init == "randn":
            return (torch.randn(shape, device=device, generator=generator) * scale(problem)).to(dtype)
        if init == "hpl":
            return (torch.rand(shape, device=device, generator=generator) - 0.5).to(dtype)
        if init == "trig_float":
            count = 1
            for extent in shape:
                count *= extent
            return torch.sin(torch.arange(count, device=device, dtype=torch.float32) + phase).reshape(shape).to(dtype)
        raise InputError(f"--init_type is {init!r}; there are: {', '.join(INITS)}")

    def operand(rows: int, cols: int, dtype: torch.dtype, row_major: bool, phase: float) -> Tensor:
        return fill((rows, cols), dtype, phase) if row_major else fill((cols, rows), dtype, phase).T

    a = operand(problem.m, problem.k, getattr(torch, problem.a.torch), problem.row_major_a, 0.0)
    b = operand(problem.k, problem.n, getattr(torch, problem.b.torch), problem.row_major_b, 1.5707963)
    if problem.bias == "none":
        return a, b, None
    length = problem.m if problem.bias == "m" else problem.n
    return a, b, fill((length,), getattr(torch, problem.bias_dtype.torch), 0.5)


def reference(problem: Problem, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """C in float64 [M, N], saturated as the kernels saturate."""
    exact = a.double() @ b.double()
    if bias is not None:
        exact += bias.double()[:, None] if problem.bias == "m" else bias.double()[None, :]
    if problem.c.is_fp8 or problem.dtype_c == "int8":
        exact = exact.clamp(-problem.c.maximum - (problem.dtype_c == "int8"), problem.c.maximum)
    return exact


def deviation(c: Tensor, exact: Tensor) -> float:
    """Largest |C - reference| / (|reference| + rms(reference)); NaN in C counts as infinite."""
    return float(_deviations(c, exact).max())


def outside(c: Tensor, exact: Tensor, limit: float) -> float:
    """Share of the elements whose deviation is more than `limit`."""
    return float((_deviations(c, exact) > limit).double().mean())


def _deviations(c: Tensor, exact: Tensor) -> Tensor:
    rms = exact.square().mean().sqrt().clamp_min(1e-30)
    error = (c.double() - exact).abs_().div_(exact.abs() + rms)
    return error.nan_to_num_(nan=float("inf"))
