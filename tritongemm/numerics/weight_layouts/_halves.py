"""The class `Halves`: weights of four bits whose bytes hold numbers from the two halves of a span along K."""

from typing import ClassVar

from tritongemm.core.operands import Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.plugins.contracts import WeightLayout


class Halves(WeightLayout, abstract=True):
    """Spans of elements along K of a column, in whose bytes the low halves are its first half and the high its second.

    A kernel that takes bytes apart has two blocks of neighbours along K then, which it multiplies by two blocks of A.
    """

    span: ClassVar[int]  # elements of a span, all of which share a factor

    def supports(self, problem: Problem) -> Support:
        """Return whether a problem's B consists of spans."""
        if problem.b.type.packed != 2 or problem.a.type.packed != 1 or problem.layout != "TN":
            return Support(
                f"B in the order {self.name} is a weight of four bits, column-major (-col_b), beside a wider A"
            )
        if problem.k % self.span or problem.scale_depth % self.span:
            return Support(
                f"B in the order {self.name} wants K and the elements of a scale to be multiples of {self.span}"
            )
        return SUPPORTED

    def apart(self) -> int:
        """Return half a span."""
        return self.span // 2

    def pack(self, b: Tensor) -> Tensor:
        """Return B [K / 2, N] of bytes, column-major, with its numbers in this order."""
        numbers = _halves(b.mT.unflatten(-1, (-1, self.span // 2))).flatten(-2)
        low, high = numbers[..., : self.span // 2], numbers[..., self.span // 2 :]
        return (low | high << 4).flatten(-2).mT

    def unpack(self, b: Tensor) -> Tensor:
        """Return the argument of `pack`."""
        numbers = _halves(b.mT.unflatten(-1, (-1, self.span // 2))).mT.flatten(-2).unflatten(-1, (-1, 2))
        return (numbers[..., 0] | numbers[..., 1] << 4).flatten(-2).mT


def _halves(packed: Tensor) -> Tensor:
    """Return the numbers [..., 2] of bytes, those of the low halves first."""
    import torch

    return torch.stack((packed & 15, packed >> 4), -1)
