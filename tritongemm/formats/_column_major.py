"""Converts products of hipBLASLt's files, which are column-major: the first size is our N and its A is our B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, NamedKernel
from tritongemm.core.problem import DEFAULT_FAMILY, PLAIN, Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.formats._rows import baseline_won, make_problem
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend

# Our dtypes by the names that rocBLAS, hipBLASLt and their logs have for them.
LIBRARY_TYPES = {
    "f16_r": "fp16", "bf16_r": "bf16", "f32_r": "fp32", "f8_r": "fp8e4m3fn", "f8_fnuz_r": "fp8e4m3fnuz",
    "bf8_r": "fp8e5m2", "bf8_fnuz_r": "fp8e5m2fnuz", "i8_r": "int8", "i32_r": "int32", "f4_r": "fp4e2m1",
}  # fmt: skip
LIBRARY = "hipblaslt"  # as the backend that calls it names its kernels


@dataclass(frozen=True)
class ColumnMajor:
    """A product D[m, n] = op(A) op(B) of column-major matrices.

    Read by rows it is C[n, m] = op(B)^T op(A)^T: our M is its n, our A its B. An operand that is taken as it is stored
    (N) is row-major to us, one that is transposed (T) column-major.
    """

    transposes: str  # of A and B, N or T each
    # m, n, batch, k: sizes
    m: int
    n: int
    batch: int
    k: int
    # a, b, c: our dtypes of A, B and D
    a: str
    b: str
    c: str

    @classmethod
    def of(cls, problem: Problem) -> ColumnMajor:
        """Return the product that computes a problem's C, as far as sizes, layouts and types say."""
        transposes = ("N" if problem.b.row_major else "T") + ("N" if problem.a.row_major else "T")
        types = problem.b.dtype, problem.a.dtype, problem.c.dtype
        return cls(transposes, problem.n, problem.m, problem.batch, problem.k, *types)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """M, N, batch and K, in the order that Tensile has them."""
        return self.m, self.n, self.batch, self.k

    def problem(self, more: Mapping[str, Any]) -> Problem:
        """Return the product as a problem, dense but for what `more` has."""
        dense: dict[str, Any] = {
            "dtype_a": self.b, "dtype_b": self.a, "dtype_c": self.c, "row_major_a": self.transposes[1] == "N",
            "row_major_b": self.transposes[0] == "N", "bias": "none", "batch": self.batch, "family": DEFAULT_FAMILY,
            "order_b": PLAIN,
        }  # fmt: skip
        return make_problem(Defaults(), self.n, self.m, self.k, dense | dict(more))


def column_major(problem: Problem) -> ColumnMajor | Support:
    """Return a problem as hipBLASLt's files have it, or why they have no such product."""
    if problem.epilogue != "none" or problem.groups or problem.b.order != PLAIN or problem.shared:
        return Support("a row holds single products and batches of dense operands alone")
    return ColumnMajor.of(problem)


def winning_solution(record: Record) -> NamedKernel | Support:
    """Return the solution of hipBLASLt that won, or why there is none."""
    if record.predicted:
        return Support("its time is a prediction, which no timer measured")
    if baseline_won(record):
        return Support("hipBLASLt's own choice stays, as no other was faster")
    config = record.config
    try:
        kernel = registry.get(Backend, config.backend).named_kernel(config)
    except InputError:  # a backend that is not here
        kernel = None
    if record.winner != config.backend or kernel is None or kernel.library != LIBRARY:
        return Support(f"{config.name} won, which is no solution of hipBLASLt")
    return kernel
