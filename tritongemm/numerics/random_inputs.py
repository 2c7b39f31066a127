"""Generates random operands for families."""

from __future__ import annotations

from math import log2, prod
from typing import TYPE_CHECKING

from tritongemm.core.dtypes import E8M0_BIAS, INT4_ZERO
from tritongemm.core.errors import InputError
from tritongemm.core.operands import Operands, OperandSpec
from tritongemm.core.problem import Problem

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Random factors that change along K are two to the power of a whole number from minus this to this, times one from a
# half to one and a half: a factor in another's place can't be missed.
OUTLIER_POWER = 10

INITS = ("randn", "hpl", "trig_float", "zeros")


def random_inputs(
    problem: Problem, deviation: float, typical_scale: float, device: str, init: str, seed: int
) -> Operands:
    """Return A [M, K] and B [K, N] in the problem's layouts, and the other operands in their shapes, vectors flat.

    Numbers that share a byte are random bytes: [M, K / 2] and [K / 2, N].

    What each product of a batch has, has a dimension for it in front.

    Args:
        problem: sizes, dtypes, layouts and the other operands.
        deviation: standard deviation of A and B.
        typical_scale: scale factors are uniform between a half and one and a half of this; those that change along K
            have it as their root mean square, and most of them are far smaller (`OUTLIER_POWER`).
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
            return (torch.randn(shape, device=device, generator=generator) * deviation).to(dtype)
        if init == "hpl":
            return (torch.rand(shape, device=device, generator=generator) - 0.5).to(dtype)
        if init == "trig_float":
            return (
                torch.sin(torch.arange(prod(shape), device=device, dtype=torch.float32) + phase)
                .reshape(shape)
                .to(dtype)
            )
        raise InputError(f"--init_type is {init!r}; there are: {', '.join(INITS)}")

    def matrix(name: str, row_major: bool, phase: float) -> Tensor:
        spec = problem.operands[name]
        stored = spec.shape if row_major else spec.shape[::-1]
        if spec.dtype.packed > 1:  # bytes: all bits are numbers
            shape = (*spec.lead, stored[0], stored[1] // spec.dtype.packed)
            most = 1 if init == "zeros" else 256
            data = torch.randint(0, most, shape, device=device, generator=generator, dtype=torch.uint8)
        else:
            data = fill((*spec.lead, *stored), getattr(torch, spec.dtype.torch), phase)
        return data if row_major else data.mT

    def vector(operand: OperandSpec) -> Tensor:
        if operand.scaling is not None:
            return random_factors(operand, typical_scale, generator)
        return fill((*operand.lead, prod(operand.shape)), getattr(torch, operand.dtype.torch), 0.5)

    a = matrix("a", problem.a.row_major, 0.0)
    b = matrix("b", problem.b.row_major, 1.5707963)
    return {"a": a, "b": b} | {operand.name: vector(operand) for operand in problem.extras}


def random_factors(operand: OperandSpec, typical_scale: float, generator: Generator) -> Tensor:
    """Return scale factors in their shape, those of an epilogue flat, with the spread that `random_inputs` states."""
    import torch

    along_k, device = operand.applied == "mainloop", generator.device
    shape = operand.extents if along_k else (*operand.lead, prod(operand.shape))
    if operand.dtype.name == "e8m0":
        return _random_exponents(shape, typical_scale, generator)
    factors = (torch.rand(shape, device=device, generator=generator) + 0.5) * typical_scale
    if along_k:  # powers of two, with a root mean square of one
        every = torch.exp2(torch.arange(-OUTLIER_POWER, OUTLIER_POWER + 1, device=device, dtype=torch.float32))
        chosen = torch.randint(0, len(every), shape, device=device, generator=generator)
        factors *= every[chosen] / every.square().mean().sqrt()
    if operand.scaling is not None and operand.scaling.zeros:
        zeros = factors[..., 1, :]  # from 0 to 15, less INT4_ZERO
        zeros[:] = torch.randint(-INT4_ZERO, INT4_ZERO, zeros.shape, device=device, generator=generator)
    return factors.to(getattr(torch, operand.dtype.torch))


def _random_exponents(shape: tuple[int, ...], typical_scale: float, generator: Generator) -> Tensor:
    """Return powers of two as e8m0 bytes, with the spread that `random_inputs` states for factors along K."""
    import torch

    squares = sum(4.0**i for i in range(-OUTLIER_POWER, OUTLIER_POWER + 1)) / (2 * OUTLIER_POWER + 1)
    middle = E8M0_BIAS + round(log2(typical_scale) - log2(squares) / 2)
    low, high = middle - OUTLIER_POWER, middle + OUTLIER_POWER
    return torch.randint(low, high + 1, shape, device=generator.device, generator=generator, dtype=torch.uint8)
