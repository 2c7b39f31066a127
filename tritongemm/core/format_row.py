"""The nouns of files of sizes or results.

`FormatRow` is one row; `DamagedRow` and `ResultsFile` are all that a file holds; `Defaults` is what holds for a row
that does not say; `Translation`, `Merged` and `NamedKernel` (a kernel) are for the files of other tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.dtypes import BY_ENCODING, dtype
from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import DEFAULT_FAMILY, PLAIN, Operand, Problem, matrices
from tritongemm.core.record import Record

_MOST_NAMED = 10  # damaged rows of a file that one line names
_UNSAID = Operand("")


@dataclass(frozen=True)
class FormatRow:
    """One row of a file of sizes or results."""

    problem: Problem  # what to tune, check or time
    config: Config | None = None  # how to run it; None for a bare size
    record: Record | None = None  # the result, where the row has a time
    line: int | None = None  # where the row starts, from 1; None for the command line
    # Its place among the rows of the file, from 1; None where that is not said.
    number: int | None = field(default=None, compare=False)
    # Name of the target that the config is for; "" where that is not said.
    target: str = field(default="", compare=False)
    compute_units: int = field(default=0, compare=False)  # of the device that the row is for; 0 where that is not said
    count: float = 1.0  # calls of it in the workload of the file, or what else weighs it against other rows
    operation: str = ""  # the operation that was called, such as `linear`; "" where that is not said
    callers: tuple[str, ...] = ()  # modules that called it
    # The columns of a row of another tool's file, where results are written in rows of the same words; empty elsewhere.
    subject: Mapping[str, str] = field(default_factory=dict, compare=False)
    # The kernel that a row of another tool's file names and that nothing here runs, in words; "" for none.
    foreign: str = field(default="", compare=False)
    # The file is for several targets, of which each passes over the rows that another one alone computes.
    optional: bool = field(default=False, compare=False)

    def where(self, path: str) -> str:
        """Return the file at `path`, and the row and line in it, for messages."""
        if self.line is None:
            return path
        return f"{path}: row {self.number} (line {self.line})" if self.number else f"{path}: line {self.line}"


@dataclass(frozen=True)
class DamagedRow:
    """A row that can't be used: it is wrong, double or unreadable, or of a product that nothing here computes."""

    row: int  # its number, from 1
    line: int | None  # where it starts, from 1; None where that is not known
    reason: str  # file, row, line, field and what is wrong


@dataclass(frozen=True)
class ResultsFile:
    """The contents of a file of results."""

    rows: tuple[FormatRow, ...] = ()  # those that can be used, in the order of the file
    damaged: tuple[DamagedRow, ...] = ()  # those that can't be used
    # Those of another tool's file that are right, of products that nothing here computes.
    untunable: tuple[DamagedRow, ...] = ()

    def describe_damaged(self) -> str:
        """Return a line with what is wrong with the first damaged row, and which ones there are; there must be one."""
        numbers = [str(row.row) for row in self.damaged]
        others = f" and {len(numbers) - _MOST_NAMED} others" if len(numbers) > _MOST_NAMED else ""
        which = f"rows {', '.join(numbers[:_MOST_NAMED])}{others} are" if len(numbers) > 1 else "the row is"
        return f"{self.damaged[0].reason}; {which} not used"

    def describe_untuned(self) -> str:
        """Return what the rows without a result hold instead, and how many rows hold each; "" if there is none."""
        kinds: dict[str, list[FormatRow]] = {}
        for row in (row for row in self.rows if row.record is None):
            held = "configs without a time" if row.config else "sizes alone"
            kinds.setdefault("kernels that nothing here runs" if row.foreign else held, []).append(row)
        return "; ".join(
            f"{held} in {len(rows)} row{'s'[: len(rows) > 1]}"
            + (f", row {rows[0].number} {rows[0].foreign}" if rows[0].foreign else "")
            for held, rows in kinds.items()
        )

    def require_undamaged(self) -> ResultsFile:
        """Return the file itself; an InputError says what is wrong with the first damaged row, if there is one."""
        if self.damaged:
            raise InputError(self.damaged[0].reason)
        return self


@dataclass(frozen=True)
class Translation:
    """Results written in a format."""

    # Text of each file by its name; "" is the output itself, the only one unless the format keeps a folder.
    files: Mapping[str, str]
    count: int  # of the results that the files hold
    # Results that the format can express in part or not at all, each with the reason.
    omitted: tuple[tuple[Record, str], ...] = ()


@dataclass(frozen=True)
class Merged:
    """Files of one format as one text, what was kept byte for byte, and notes on those that lost something."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedKernel:
    """A kernel as files of other tools name it."""

    library: str  # whose it is, by the name or an alias of a backend
    name: str  # its own name
    index: int = 0  # its number in one version of the library; 0 where it has none
    split_k: int = 0  # workgroups that share the K loop of a tile; 0 where the library decides that


@dataclass(frozen=True)
class Defaults:
    """The values of a row that states none; those of a family are what its problems usually have."""

    # a, b, c: operands, of a dtype or an alias; "" is the family's own, else A's, or for C fp16 where A is fp8, and
    # int32 where A is int8
    a: Operand = _UNSAID
    b: Operand = _UNSAID
    c: Operand = _UNSAID
    bias: str = "none"  # `none`, `m` or `n`
    epilogue: str = "none"
    family: str = DEFAULT_FAMILY  # plug-in of numerics/families
    scales: str = ""  # granularity of the scale factors, of `core.scaling`; "" for the family's usual one
    fp8_encoding: str = "fn"  # meaning of `fp8` and `bf8`: `fn`, `fnuz` or, on a target without fp8, `none`
    families: tuple[str, ...] = ()  # what such a target computes all the same, for messages
    batch: int = 1  # number of independent products
    groups: Groups | None = None

    @classmethod
    def of(
        cls, a: str = "", b: str = "", c: str = "", *, layout: str = "TT", order: str = PLAIN, **more: Any
    ) -> Defaults:
        """Return the defaults with operands of these dtypes, in the layout and the order of B that `matrices` has."""
        left, right, _ = matrices(a, layout=layout, order=order, shared=more.pop("shared", ""))
        return cls(left, right._replace(dtype=b), Operand(c), **more)

    @property
    def shared(self) -> str:
        """The operand that all products of a batch share, ``a`` or ``b``; "" where each has its own."""
        return "a" if self.a.shared else "b" if self.b.shared else ""

    @property
    def group_count(self) -> int:
        """Number of groups; 1 of one product."""
        return self.groups.count if self.groups else 1

    def dtype(self, name: str) -> str:
        """Return our name of the dtype called `name`; an InputError where it is unknown, or none of the target's."""
        encodings = BY_ENCODING.get(name.lower().removeprefix("torch."))
        if encodings and self.fp8_encoding not in encodings:
            others = f"; in others it computes the families {', '.join(self.families)}" if self.families else ""
            raise InputError(
                f"dtype {name!r}: the target has no fp8; choose another dtype, or a --target that has it{others}"
            )
        return dtype(name, self.fp8_encoding).name
