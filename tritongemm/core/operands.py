"""The classes `OperandSpec` and `Operands`: one operand of a GEMM with its memory layout, and all tensors of a GEMM."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from tritongemm.core.dtypes import DType
from tritongemm.core.scaling import Scaling

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any  # for annotations: to import PyTorch takes a second, and much here runs without it

# A [M, K] and B [K, N] as ``a`` and ``b``, a problem's other operands by their names; where something is computed, C
# [M, N] as ``c``. Those of a batch have a dimension for it in front.
Operands: TypeAlias = dict[str, Tensor]
Call: TypeAlias = Callable[[], object]  # computes a product of operands that it holds


@dataclass(frozen=True)
class OperandSpec:
    """One operand, dense."""

    name: str  # `a`, `b`, `c`, `scale_a`, `scale_b`, `bias`, `offsets` or `counts`
    dtype: DType  # of its elements
    # Extents, of one product of a batch; a factor or an addend of the epilogue is [M, 1], [N] or [M, N], so that it
    # broadcasts over C.
    shape: tuple[int, ...]
    order: str = "rows"  # memory layout: `rows`, `columns`, or the name of a layout of weights or scales
    # Where a kernel applies it: `epilogue` (to the sum over K, before C is rounded), `mainloop` (scales that change
    # along K), or "" for A, B and C.
    applied: str = ""
    scaling: Scaling | None = None  # granularity of a scale factor; None for other operands
    # How many there are, one after the other in memory, as a dimension in front of `shape`; 0 where there is no such
    # dimension: of a single product, or shared by an entire batch.
    batch: int = 0

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimension of the batch, or nothing: what a tensor's shape has before `shape`."""
        return (self.batch,) if self.batch else ()

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of its tensor, the batch in front."""
        return self.lead + self.shape

    @property
    def operator(self) -> str:
        """How the epilogue applies it: ``*`` for a scale, ``+`` for a bias, "" where it does not."""
        return ("*" if self.scaling else "+") if self.applied == "epilogue" else ""

    @property
    def single(self) -> bool:
        """Whether it is one scale factor for all of A, or all of B."""
        return self.scaling is not None and not self.scaling.rows and not self.scaling.depth

    @property
    def along(self) -> str:
        """``m`` for one value per row of C, ``n`` for one per column, ``mn`` for one per element."""
        return "n" if len(self.shape) == 1 else "m" if self.scaling or self.shape[1] == 1 else "mn"

    @property
    def count(self) -> int:
        """Number of elements, over the entire batch."""
        return prod(self.extents)
