"""The contracts of what is computed, and of orders in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from tritongemm.core.dtypes import DType
from tritongemm.core.operands import Operands
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import NO_SCALES, ScalePair, choose_pair, granularity
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FamilyDefaults:
    """Dtypes and order of B of a problem that does not say.

    Attributes:
        dtype_a: of A.
        dtype_b: of B; "" for A's.
        dtype_c: of C; "" for A's, or fp16 where A is fp8, or int32 where A is int8.
        order_b: order of B.
        row_major_b: B is stored [K, N]; otherwise [N, K].
    """

    dtype_a: str = "fp16"
    dtype_b: str = ""
    dtype_c: str = ""
    order_b: str = PLAIN
    row_major_b: bool = True


class Family(Plugin, abstract=True):
    """What is computed: C = A @ B with scales and a bias, in some dtypes.

    Attributes:
        summary: one line for ``--help``.
        defaults: dtypes of a problem that does not say.
        variants: other names for the family with other defaults, e.g. for another order of B.
        kinds: of `Problem.kind` that it can make inputs and references for.
    """

    package = "tritongemm.numerics.families"
    kind = "family"
    summary: ClassVar[str]
    defaults: ClassVar[FamilyDefaults] = FamilyDefaults()
    variants: ClassVar[Mapping[str, FamilyDefaults]] = {}
    kinds: ClassVar[tuple[str, ...]] = ("one",)

    @final
    def problem(  # noqa: PLR0913 (what a problem has)
        self,
        m: int,
        n: int,
        k: int,
        dtype_a: str,
        dtype_b: str,
        dtype_c: str,
        *,
        row_major_a: bool = True,
        row_major_b: bool = True,
        bias: str = "none",
        batch: int = 1,
        groups: int = 1,
        order_b: str = PLAIN,
        scales: str = "",
        shared: str = "",
        group_form: str = "contiguous",
        spread: str = "uniform",
        counts: tuple[int, ...] = (),
        room: int = 0,
    ) -> Problem:
        """A problem of this family with its operands; dtypes by our names, scales by that of one of `scalings`.

        Raises:
            InputError: a size, dtype, bias or granularity of scales that can't be.
        """
        pairs = self.scalings(dtype_a, dtype_b)
        pair = choose_pair(scales, pairs)
        return Problem(
            m, n, k, dtype_a, dtype_b, dtype_c, row_major_a, row_major_b, bias, batch, self.name, order_b, *pair,
            groups, group_form, spread, counts, room, scales="" if pair == pairs[0] else scales, shared=shared,
        )  # fmt: skip

    def scaling(self, dtype_a: str, dtype_b: str) -> ScalePair:
        """The scale factors that A and B of these types have in this family where nobody says otherwise."""
        return NO_SCALES

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """All pairs of scale factors that A and B of these types may have in this family, that of `scaling` first."""
        return (self.scaling(dtype_a, dtype_b),)

    @final
    def supports(self, problem: Problem, target: Target) -> Support:
        """Whether a target can compute a problem, whatever kernels there are for it."""
        if problem.kind not in self.kinds:
            kinds = " and ".join(self.kinds)
            return Support(
                f"family {self.name} computes {kinds} GEMM a call; {problem.kind} ones (batch {problem.batch}, groups "
                f"{problem.groups}) are not computed yet"
            )
        pairs = self.scalings(problem.dtype_a, problem.dtype_b)
        pair = problem.scale_a, problem.scale_b
        if pair not in pairs or problem.scales != ("" if pair == pairs[0] else granularity(pair)):
            return Support(f"{problem.key} does not have the scales of family {self.name}")
        if problem.held_bytes > target.memory_bytes:
            return Support(f"its operands take {problem.held_bytes} bytes, {target.name} has {target.memory_bytes}")
        return self._supports(problem, target)

    @abstractmethod
    def _supports(self, problem: Problem, target: Target) -> Support: ...

    @abstractmethod
    def make_inputs(self, problem: Problem, device: str, distribution: str = "randn", seed: int = 0) -> Operands:
        """Random operands: A [M, K], B [K, N] and the others by their names, in the problem's orders; those that each
        product of a batch has have a dimension for it in front.
        """

    @abstractmethod
    def reference(self, problem: Problem, operands: Operands) -> Tensor:
        """C in float64 [M, N], or [batch, M, N]."""

    @abstractmethod
    def tolerance(self, problem: Problem) -> float:
        """Largest error that is rounding rather than a fault: of max |C - reference| / (|reference| + rms)."""

    @abstractmethod
    def input_deviation(self, problem: Problem) -> float:
        """Standard deviation of the random floats of A and B."""

    def typical_scale(self, problem: Problem) -> float:
        """Middle of the random scale factors, of A and of B alike; random operands then give a C of about one."""
        return 1.0


@dataclass(frozen=True)
class Pieces:
    """How the columns of B are interleaved: groups of them follow each other, in each the next piece of every column.

    Attributes:
        columns: of a group.
        run: elements of a column that stay together, along K; of packed ones bytes.
    """

    columns: int
    run: int


class WeightLayout(Plugin, abstract=True):
    """An order of B in memory beside rows and columns."""

    package = "tritongemm.numerics.weight_layouts"
    kind = "weight layout"

    @abstractmethod
    def supports(self, problem: Problem) -> Support:
        """Whether a problem's B can lie in this order."""

    def pieces(self, dtype: DType) -> Pieces | None:
        """How columns of a type are interleaved in pieces, which generated kernels can read; None in another order."""
        return None

    @abstractmethod
    def pack(self, b: Tensor) -> Tensor:
        """B [K, N], column-major, in this order; of packed elements K counts bytes."""

    @abstractmethod
    def unpack(self, b: Tensor) -> Tensor:
        """What `pack` was given."""


class ScaleLayout(Plugin, abstract=True):
    """An order of scale factors in memory beside rows and groups.

    Attributes:
        pad: multiples to which rows and groups are padded.
        row_place, group_place: the place of a factor in memory is their sum: what its row adds and what its group along
            K adds, as kernels write them of ``r``, ``g`` and ``groups``, the number of groups of a row with padding;
            "" where no kernel of ours reads the order.
    """

    package = "tritongemm.numerics.scale_layouts"
    kind = "scale layout"
    pad: ClassVar[tuple[int, int]] = (1, 1)
    row_place: ClassVar[str] = ""
    group_place: ClassVar[str] = ""

    @abstractmethod
    def pack(self, scales: Tensor) -> Tensor:
        """Factors [rows, groups along K], padded, in this order."""

    @abstractmethod
    def unpack(self, scales: Tensor) -> Tensor:
        """What `pack` was given."""
