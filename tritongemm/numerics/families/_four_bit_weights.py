"""Holds what families of a weight of four bits share: what its bytes are, the reference, and how it is stored."""

from math import log2, sqrt

from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics.families._standard import StandardFamily, unpacked
from tritongemm.numerics.scale_factors import four_bits_as_numbers, multiplied
from tritongemm.numerics.verify import epilogue_reference

_OF_ONE_FACTOR = 14.0  # times larger the rounding is where one factor is for all of K
SIZES = {"int4": 4.6, "fp4e2m1": 2.9}  # root mean square of numbers whose bits are random


class FourBitWeightFamily(StandardFamily, abstract=True):
    """C = A @ (B * scale_b) (+ bias), of a weight of four bits whose scales change along K."""

    kinds = ("one", "batched", "grouped")

    def _stored(self, problem: Problem) -> Support:
        """Return whether kernels read a weight that is stored so, and give such a C."""
        if problem.c.dtype not in ("bf16", "fp16", "fp32"):
            return Support(f"family {self.name} gives bf16, fp16 or fp32, not {problem.c.dtype}")
        if problem.b.row_major or problem.k % problem.scale_depth:
            depth = problem.scale_depth
            return Support(
                f"family {self.name} wants B column-major (-col_b) and K a multiple of {depth}: "
                f"each {depth} numbers of a column have one scale"
            )
        return SUPPORTED

    def _rounded(self, problem: Problem) -> float:
        """Return how many times larger the rounding of numbers times factors is, beside the root mean square of C.

        With few factors along K some elements of C are far larger than that, and so is their rounding: that alone is up
        to 0.017 with 9 of them, and on an H200 the error was 0.015, and 0.0164 with 32 of them in 29 million elements.
        Powers of two round nothing.
        """
        if problem.b.scaling is None or problem.b.scaling.dtype == "e8m0":
            return 1.0
        return max(1.0, _OF_ONE_FACTOR / sqrt(problem.k / problem.b.scaling.depth))

    def typical_scale(self, problem: Problem) -> float:
        """Return the root mean square of the random scales; random operands then give a C of about one."""
        return float(2.0 ** -round(log2(SIZES[problem.b.dtype]) + log2(problem.k) / 2))

    def _reference(self, problem: Problem, operands: Operands) -> Tensor:
        """Return C in float64 [M, N] or [batch, M, N]."""
        numbers = four_bits_as_numbers(unpacked(problem, operands["b"]).mT, problem.b.dtype).mT
        return epilogue_reference(problem, multiplied(problem, operands | {"b": numbers}))
