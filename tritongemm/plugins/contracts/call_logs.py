"""The contract of readers of libraries' logs, and the classes of what they read.

These use the libraries' own terms, column-major: D[m, n] = alpha * op(A) @ op(B) + beta * C. Other properties of a call
are kept, whether we can compute it or not, as they distinguish it from other calls.
"""

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from tritongemm.plugins.contracts.plugin import Plugin

SCALES = ("none", "tensor", "row", "block")  # layouts of factors, in the order of hipBLASLt's numbers


@dataclass(frozen=True)
class LoggedCall:
    """A product that a library was asked for, in its column-major terms."""

    # m, n, k: sizes
    m: int
    n: int
    k: int
    transposes: str  # of A and B: N, T, or C for the conjugate
    types: tuple[str, str, str, str]  # of A, B, C and D, as rocBLAS names them, such as `bf16_r`
    compute: str  # type of the sums, such as `f32_r`; `xf32_r` for products of float32 that are rounded to tf32
    # Elements between the columns of A, B, C and D; 0 where they are dense.
    leads: tuple[int, int, int, int] = (0, 0, 0, 0)
    batch: int = 1  # products that are one after the other
    # Elements between the products of a batch, for A, B, C and D; 0 where the batch is 1, or shares one.
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    # alpha, beta: factors; NaN where they are on the device
    alpha: float = 1.0
    beta: float = 0.0
    bias: str = ""  # type of the vector that is added to each column of D; "" without one
    # For each of A, B, C and D one of `SCALES`, or `1x128` or `128x128`: elements that share a float32.
    scales: tuple[str, str, str, str] = ("none", "none", "none", "none")
    activation: str = "none"  # what is applied to D, or `none`
    others: tuple[str, ...] = ()  # what else is asked for, in words of the log

    @property
    def flops(self) -> int:
        """The call in short, such as ``bf16_r TN 16032 x 109 x 16384``."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def words(self) -> str:
        """The call in a few words, such as ``bf16_r TN 16032 x 109 x 16384``."""
        types = self.types[0] if self.types[0] == self.types[1] else "*".join(self.types[:2])
        batch = f" x {self.batch} products" if self.batch != 1 else ""
        return f"{types} to {self.types[3]} {self.transposes} {self.m} x {self.n} x {self.k}{batch}"


@dataclass(frozen=True)
class LoggedRow:
    """A call in one line of a log."""

    call: LoggedCall  # the product
    count: float  # number of calls
    line: int  # its number, from 1
    kind: str  # of line; a call that appears in lines of several kinds was made once


@dataclass(frozen=True)
class LogFault:
    """A line that begins as one of a log's lines and can't be parsed to its end."""

    line: int  # its number, from 1
    reason: str  # what is wrong


@dataclass
class LogContents:
    """The lines of one kind in a log."""

    rows: list[LoggedRow] = field(default_factory=list)  # the products that were called
    faults: list[LogFault] = field(default_factory=list)  # lines that can't be parsed
    others: Counter[str] = field(default_factory=Counter)  # calls of functions that compute no such product, by name
    # Fields of calls that their lines leave out, with the default that is taken, and how often.
    assumed: Counter[str] = field(default_factory=Counter)


class CallLog(Plugin, abstract=True):
    """Lines of a library's log that name the products it was called for.

    One file may hold lines of several kinds, mixed with those of other programs; each plug-in finds its own.
    """

    package = "tritongemm.campaigns.logs"
    kind = "call log"
    title: ClassVar[str]  # what writes such lines, and how to enable it, for messages

    @abstractmethod
    def read(self, text: str) -> LogContents:
        """Return the calls in the lines of this kind, in order; nothing if a text has none.

        The text is full lines of a log, also of other kinds, of several processes and of other programs. A truncated
        line is a fault, never a call that the library did not get.
        """
