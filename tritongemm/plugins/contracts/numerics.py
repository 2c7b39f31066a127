"""The contracts of families, and of the memory layouts of weights and scale factors."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

from tritongemm.core.dtypes import DType
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import NO_SCALES, SCALED_BLOCK, ScalePair, choose_pair
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.plugin import Plugin


class Family(Plugin, abstract=True):
    """The meaning of a GEMM: C = A @ B with its scale factors, bias and dtypes."""

    package = "tritongemm.numerics.families"
    kind = "family"
    summary: ClassVar[str]  # one line for `--help`
    defaults: ClassVar[Defaults] = Defaults.of("fp16")  # default dtypes and layout of B
    # Other names for the family with other defaults, e.g. for another layout of B.
    variants: ClassVar[Mapping[str, Defaults]] = {}
    # Values of `Problem.kind` for which it can create inputs and references.
    kinds: ClassVar[tuple[str, ...]] = ("one",)

    @final
    def problem(self, plain: Problem, scales: str = "") -> Problem:
        """Make a product one of this family, with scale factors of a name of `scalings`, or raise an InputError."""
        pairs = self.scalings(plain.a.dtype, plain.b.dtype)
        if not pairs:
            types = f"{plain.a.dtype} by {plain.b.dtype}"
            raise InputError(f"family {self.name} does not multiply {types}; it is {self.summary}")
        return replace(plain.scaled(choose_pair(scales, pairs)), family=self.name)

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """Return all pairs of scale factors that A and B of these types may have, the default first; () of none."""
        return (NO_SCALES,)

    @final
    def computes(self, problem: Problem) -> Support:
        """Say whether any target could compute a problem: whether its kind, scales and types are the family's."""
        if problem.kind not in self.kinds:
            kinds = " and ".join(self.kinds)
            return Support(f"family {self.name} computes {kinds} GEMM a call; {problem.kind} ones are not computed yet")
        if problem.scalings not in self.scalings(problem.a.dtype, problem.b.dtype):
            return Support(f"{problem.key} does not have the scales of family {self.name}")
        if problem.epilogue != "none" and (problem.kind == "batched" or problem.c.type.is_integer):
            what = "of a batch" if problem.kind == "batched" else f"into a C of {problem.c.dtype}"
            return Support(f"no kernel computes the epilogue {problem.epilogue} {what}")
        if problem.groups and problem.fold > 1 and problem.n % 2:
            return Support(f"N is {problem.n}, but must be even: with {problem.epilogue} B has gate, then up")
        if not problem.groups and problem.fold > 1 and problem.n % (2 * (run := problem.run)):
            return Support(
                f"N is {problem.n}, but must be a multiple of {2 * run}: "
                f"with {problem.epilogue} B has {run} columns of gate, then {run} of up, in turn"
            )
        if problem.in_blocks and (not problem.c.type.is_fp8 or problem.columns % SCALED_BLOCK):
            what = f"{problem.c.dtype} and {problem.columns} columns"
            return Support(f"blocks of C are of fp8 and of {SCALED_BLOCK} columns: {what} can't be {problem.epilogue}")
        return self._computes(problem)

    @final
    def supports(self, problem: Problem, target: Target) -> Support:
        """Say whether a target can compute a problem, regardless of the kernels there are for it."""
        possible = self.computes(problem)
        if possible and problem.held_bytes > target.memory_bytes:
            return Support(f"its operands take {problem.held_bytes} bytes, {target.name} has {target.memory_bytes}")
        return possible and self._supports(problem, target)

    def _computes(self, problem: Problem) -> Support:
        return SUPPORTED

    @abstractmethod
    def _supports(self, problem: Problem, target: Target) -> Support: ...

    @abstractmethod
    def make_inputs(self, problem: Problem, device: str, distribution: str = "randn", seed: int = 0) -> Operands:
        """Create random operands: A [M, K], B [K, N] and the others by their names, in the problem's layouts.

        Operands that each product of a batch has get a leading dimension.
        """

    @abstractmethod
    def reference(self, problem: Problem, operands: Operands) -> Tensor:
        """Compute C in float64 [M, N], or [batch, M, N]."""

    @abstractmethod
    def tolerance(self, problem: Problem) -> float:
        """Return the largest max |C - reference| / (|reference| + rms) that rounding can cause."""

    @abstractmethod
    def input_deviation(self, problem: Problem) -> float:
        """Return the standard deviation of the random floats of A and B."""

    def typical_scale(self, problem: Problem) -> float:
        """Return the median of the random scale factors of A and B, with which C is about one."""
        return 1.0


@dataclass(frozen=True)
class Pieces:
    """An interleaved layout of B: in each group of columns, the next piece along K of every column follows the last."""

    columns: int  # columns of a group
    run: int  # contiguous elements of a column along K; for packed types bytes


class WeightLayout(Plugin, abstract=True):
    """A memory layout of B other than row-major and column-major."""

    package = "tritongemm.numerics.weight_layouts"
    kind = "weight layout"
    fastest_on: ClassVar[tuple[str, ...]] = ()  # architectures whose kernels read a weight of four bits fastest so

    @abstractmethod
    def supports(self, problem: Problem) -> Support:
        """Say whether a problem's B can be stored in this layout."""

    def pieces(self, dtype: DType) -> Pieces | None:
        """Return how columns of a type are interleaved, which generated kernels can read; None for another layout."""
        return None

    def apart(self) -> int:
        """Return how many elements along K the number in a byte's high half comes after the one in its low half."""
        return 1

    def fragments(self) -> bool:
        """Return whether blocks of a weight of four bits are what threads give a matrix instruction."""
        return False

    @abstractmethod
    def pack(self, b: Tensor) -> Tensor:
        """Convert B [K, N], column-major, to this layout; for packed types K counts bytes."""

    @abstractmethod
    def unpack(self, b: Tensor) -> Tensor:
        """Return the argument of `pack`."""


class ScaleLayout(Plugin, abstract=True):
    """A memory layout of scale factors other than ``rows`` and ``groups``."""

    package = "tritongemm.numerics.scale_layouts"
    kind = "scale layout"
    pad: ClassVar[tuple[int, int]] = (1, 1)  # multiples to which rows and groups are padded
    # row_place, group_place: a factor's offset in memory is their sum, of its row and its group along K, as source text
    # for kernels in `r`, `g` and `groups`, the padded number of groups of a row; "" if none of our kernels reads the
    # layout
    row_place: ClassVar[str] = ""
    group_place: ClassVar[str] = ""
    # block, axes: how a block of `pad` factors is stored, where kernels may load complete blocks: factors that are next
    # to each other, as [blocks of rows, blocks of groups, *block], become [rows, groups] when these axes are put into
    # this order
    block: ClassVar[tuple[int, ...]] = ()
    axes: ClassVar[tuple[int, ...]] = ()

    @abstractmethod
    def pack(self, scales: Tensor) -> Tensor:
        """Convert factors [rows, groups along K] to this layout, padded."""

    @abstractmethod
    def unpack(self, scales: Tensor) -> Tensor:
        """Return the argument of `pack`."""
