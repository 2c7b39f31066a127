"""A matrix product as cuBLASLt and hipBLASLt see it: the operands, the product and one algorithm for it."""

from dataclasses import dataclass

# how a library says that it has nothing for a problem
REFUSALS = ("NOT_SUPPORTED", "INVALID_VALUE", "ARCH_MISMATCH")


@dataclass(frozen=True)
class Matrix:
    """One operand in memory, column-major.

    Attributes:
        dtype: our name of the element type.
        rows, cols: size.
        ld: elements from one column to the next.
        batch, stride: number of matrices, and elements from one to the next.
    """

    dtype: str
    rows: int
    cols: int
    ld: int
    batch: int = 1
    stride: int = 0


@dataclass(frozen=True)
class Matmul:
    """D = op(A) op(B) + beta C (+ bias): all that the choice of an algorithm depends on.

    Attributes:
        a, b, c, d: operands.
        trans: ``N`` or ``T`` for A, then for B.
        compute, scale: compute type and the type of alpha and beta, names of the table.
        bias: address of a vector with one value per row of D; 0 for none.
        bias_dtype: its element type.
        scales: addresses of the scales of A, B and D; 0 for one.
        scale_modes: what those of A and B point to, names of the table.
        fast: fp8 sums are not promoted on the way (cuBLASLt).
        alignment: bytes that every operand's address is a multiple of.
    """

    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
    trans: str = "NN"
    compute: str = "fp32"
    scale: str = "fp32"
    bias: int = 0
    bias_dtype: str = ""
    scales: tuple[int, int, int] = (0, 0, 0)
    scale_modes: tuple[str, str] = ("scalar", "scalar")
    fast: bool = False
    alignment: int = 256


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of the library for a Matmul.

    Attributes:
        raw: the library's own struct.
        workspace: bytes it needs.
        values: cuBLASLt: its attributes (`ATTRIBUTES`); hipBLASLt: ``solution``, its index in the library.
        name: of the kernel where the library names it, else "".
    """

    raw: bytes
    workspace: int
    values: tuple[tuple[str, int], ...]
    name: str = ""
