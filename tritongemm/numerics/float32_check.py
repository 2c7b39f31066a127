"""Checks a C that was computed in float32, with harder operands and an error for each element by its own sum."""

from dataclasses import replace
from math import sqrt

from tritongemm.core.dtypes import E8M0_NAN, INT4_ZERO
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Operand, Problem
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.numerics import epilogues
from tritongemm.plugins.contracts import Family

# Four times the rounding of one addition; the error of K additions grows with the square root of K.
ERROR_OF_AN_ADDITION = 2.0**-22
LARGE = 300.0  # larger than random numbers are by far
FEWEST = 4  # rows or columns of which one may be infinite, so that most others are not


def tolerance(problem: Problem) -> float:
    """Return the largest error of an element that rounding in float32 can cause; 0 for integers."""
    return 0.0 if problem.c.type.is_integer else ERROR_OF_AN_ADDITION * sqrt(problem.k)


def deviation(c: Tensor, exact: Tensor, magnitude: Tensor) -> float:
    """Return the largest |C - reference| over what the element adds up; what is not finite must be the same."""
    import torch

    c = c.double()
    same = (c == exact) | (c.isnan() & exact.isnan())
    error = (c - exact).abs_().div_(magnitude.clamp_min(1e-30)).nan_to_num_(nan=float("inf"))
    return float(torch.where(same, 0.0, error).max())


def deviation_of_factors(problem: Problem, c: Tensor) -> float:
    """Return how far the largest number of each block of C is from its type's largest, relative to that.

    Beyond it numbers of eight bits would be cut, which those in float32 are not; far below they would lose digits.
    """
    largest = epilogues.parts(c, problem.m)[0].unflatten(-1, (-1, SCALED_BLOCK)).abs().amax(-1)
    return float((largest / problem.c.type.maximum - 1).abs()[largest.isfinite() & (largest > 0)].max())


def magnitudes(problem: Problem, family: Family, operands: Operands) -> Tensor:
    """Return the sum of the absolute values that each element of C adds up, in float64 in the shape of C."""
    positive = {name: _absolute(problem, name, tensor) for name, tensor in operands.items()}
    sums = family.reference(replace(problem, c=Operand("fp32"), epilogue="none"), positive)
    return epilogues.bound(problem.epilogue, sums, problem.run)


def enlarge(problem: Problem, operands: Operands) -> None:
    """Set the first row of A and the last column of B to a number as large as their types allow, up to `LARGE`."""
    for name, row, column in (("a", 0, problem.k // 2), ("b", problem.k // 3, -1)):
        dtype = problem.operands[name].dtype
        if dtype.packed == 1:
            _put(operands[name], (row, column), min(LARGE, 0.9 * dtype.maximum))


def make_infinite(problem: Problem, operands: Operands) -> None:
    """Set an infinity in a row of A and a NaN in a column of B, or in their factors; the rest of C stays finite.

    The interpreter knows neither in eight bits. A factor along K is NaN, because it depends on the order of sums and
    products whether an infinite one gives infinity.
    """
    import torch

    if problem.in_blocks:
        return  # one would be the factor of finite numbers
    places = (("a", problem.m, (1, -1), float("inf")), ("b", problem.n, (0, problem.n // 2), float("nan")))
    for name, extent, place, value in places:
        spec = problem.operands.get(f"scale_{name}")
        if extent < FEWEST:
            continue
        if problem.operands[name].dtype.bytes > 1 and not problem.operands[name].dtype.is_integer:
            _put(operands[name], place, value)
        elif spec is not None and spec.scaling is not None and spec.scaling.rows == 1:
            factors = operands[f"scale_{name}"]
            middle = tuple(size // 2 for size in factors.shape)
            if spec.dtype.name == "e8m0":
                factors.view(torch.uint8)[middle] = E8M0_NAN
            elif spec.dtype.bytes > 1:
                factors[middle] = float("nan") if spec.scaling.depth else value


def _put(matrix: Tensor, place: tuple[int, int], value: float) -> None:
    """Set an element of a matrix, or of each of several."""
    import torch

    if matrix.element_size() > 1 or not matrix.dtype.is_floating_point:
        matrix[..., place[0], place[1]] = value
    else:  # PyTorch sets no elements of eight-bit floats.
        bits = torch.tensor(value).to(matrix.dtype).view(torch.uint8)
        matrix.view(torch.uint8)[..., place[0], place[1]] = bits


def _absolute(problem: Problem, name: str, tensor: Tensor) -> Tensor:
    """Return the absolute values of an operand in its own type."""
    import torch

    spec = problem.operands[name]
    if spec.dtype.name == "int4":
        absolute = [((tensor >> shift & 15).char() - INT4_ZERO).abs().clamp(max=7) + INT4_ZERO for shift in (0, 4)]
        return (absolute[0] | absolute[1] << 4).byte()
    if spec.dtype.packed > 1:
        return tensor & 0x77  # clear the signs of both numbers
    if spec.dtype.is_fp8:
        return (tensor.view(torch.uint8) & 0x7F).view(tensor.dtype)
    if spec.scaling is not None and spec.scaling.zeros:  # what is subtracted adds to a sum of absolute values
        return tensor.abs() * torch.tensor([[1], [-1]], dtype=tensor.dtype, device=tensor.device)
    return tensor.clamp(min=-127).abs() if spec.dtype.name == "int8" else tensor.abs()
