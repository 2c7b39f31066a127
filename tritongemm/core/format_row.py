"""The nouns of files of sizes or results.

`FormatRow` is one row; `DamagedRow` and `ResultsFile` are all that a file holds; `Defaults` is what holds for a row
that does not say; `Translation`, `Merged` and `NamedKernel` (a kernel) are for the files of other tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tritongemm.core.config import Config
from tritongemm.core.dtypes import BY_ENCODING, dtype
from tritongemm.core.errors import InputError
from tritongemm.core.problem import DEFAULT_FAMILY, PLAIN, Problem
from tritongemm.core.record import Record

_MOST_NAMED = 10  # damaged rows of a file that one line names


@dataclass(frozen=True)
class FormatRow:
    """One row of a file of sizes or results.

    Attributes:
        problem: what to tune, check or time.
        config: how to run it; None for a bare size.
        record: the result, where the row has a time.
        line: where the row starts, from 1; None for the command line.
        number: its place among the rows of the file, from 1; None where that is not said.
        target: name of the target that the config is for; "" where that is not said.
        compute_units: of the device that the row is for; 0 where that is not said.
        count: calls of it in the workload of the file, or what else weighs it against other rows.
        operation: the operation that was called, such as ``linear``; "" where that is not said.
        callers: modules that called it.
        subject: the columns of a row of another tool's file, where results are written in rows of the same
            words; empty elsewhere.
        foreign: the kernel that a row of another tool's file names and that nothing here runs, in words; "" for none.
        optional: the file is for several targets, of which each passes over the rows that another one alone computes.
    """

    problem: Problem
    config: Config | None = None
    record: Record | None = None
    line: int | None = None
    number: int | None = field(default=None, compare=False)
    target: str = field(default="", compare=False)
    compute_units: int = field(default=0, compare=False)
    count: float = 1.0
    operation: str = ""
    callers: tuple[str, ...] = ()
    subject: Mapping[str, str] = field(default_factory=dict, compare=False)
    foreign: str = field(default="", compare=False)
    optional: bool = field(default=False, compare=False)

    def where(self, path: str) -> str:
        """Return the file at `path`, and the row and line in it, for messages."""
        if self.line is None:
            return path
        return f"{path}: row {self.number} (line {self.line})" if self.number else f"{path}: line {self.line}"


@dataclass(frozen=True)
class DamagedRow:
    """A row that can't be used, as it is wrong, double, can't be read, or is of a product that nothing here computes.

    Attributes:
        row: its number, from 1.
        line: where it starts, from 1; None where that is not known.
        reason: file, row, line, field and what is wrong.
    """

    row: int
    line: int | None
    reason: str


@dataclass(frozen=True)
class ResultsFile:
    """The contents of a file of results.

    Attributes:
        rows: those that can be used, in the order of the file.
        damaged: those that can't be used.
        untunable: those of another tool's file that are right, of products that nothing here computes.
    """

    rows: tuple[FormatRow, ...] = ()
    damaged: tuple[DamagedRow, ...] = ()
    untunable: tuple[DamagedRow, ...] = ()

    def describe_damaged(self) -> str:
        """Return a line with what is wrong with the first damaged row, and which ones there are; there must be one."""
        numbers = [str(row.row) for row in self.damaged]
        others = f" and {len(numbers) - _MOST_NAMED} others" if len(numbers) > _MOST_NAMED else ""
        which = f"rows {', '.join(numbers[:_MOST_NAMED])}{others} are" if len(numbers) > 1 else "the row is"
        return f"{self.damaged[0].reason}; {which} not used"

    def require_undamaged(self) -> ResultsFile:
        """Return the file itself, where no row is damaged.

        Raises:
            InputError: one is; says what is wrong with the first.
        """
        if self.damaged:
            raise InputError(self.damaged[0].reason)
        return self


@dataclass(frozen=True)
class Translation:
    """Results written in a format.

    Attributes:
        files: text of each file by its name; "" is the output itself, the only one unless the format keeps a folder.
        count: of the results that the files hold.
        omitted: results that the format can express in part or not at all, each with the reason.
    """

    files: Mapping[str, str]
    count: int
    omitted: tuple[tuple[Record, str], ...] = ()


@dataclass(frozen=True)
class Merged:
    """Files of one format as one text, what was kept byte for byte, and notes on those that lost something."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedKernel:
    """A kernel as files of other tools name it.

    Attributes:
        library: whose it is, by the name or an alias of a backend.
        name: its own name.
        index: its number in one version of the library; 0 where it has none.
        split_k: workgroups that share the K loop of a tile; 0 where the library decides that.
    """

    library: str
    name: str
    index: int = 0
    split_k: int = 0


@dataclass(frozen=True)
class Defaults:
    """The values of a row that states none.

    Attributes:
        dtype_a: name or alias; None for the family's own default.
        dtype_b: the same; None for A's.
        dtype_c: the same; None for the family's default, or for A's, or fp16 where A is fp8, or int32 where A is int8.
        row_major_a, row_major_b: layouts.
        bias: ``none``, ``m`` or ``n``.
        family: plug-in of numerics/families.
        order_b: order of B in memory, ``plain`` or a plug-in of numerics/weight_layouts.
        groups, group_form, spread, counts, room: as of a `Problem`.
        scales: granularity of the scale factors, of `core.scaling`; "" for the family's usual one.
        fp8_encoding: meaning of ``fp8`` and ``bf8``: ``fn``, ``fnuz`` or, on a target without fp8, ``none``.
        families: what such a target computes all the same, for messages.
        batch: number of independent products.
        shared: operand that all products of a batch share: ``a``, ``b`` or "".
    """

    dtype_a: str | None = None
    dtype_b: str | None = None
    dtype_c: str | None = None
    row_major_a: bool = True
    row_major_b: bool = True
    bias: str = "none"
    family: str = DEFAULT_FAMILY
    order_b: str = PLAIN
    scales: str = ""
    fp8_encoding: str = "fn"
    families: tuple[str, ...] = ()
    batch: int = 1
    shared: str = ""
    groups: int = 1
    group_form: str = "contiguous"
    spread: str = "uniform"
    counts: tuple[int, ...] = ()
    room: int = 0

    def dtype(self, name: str) -> str:
        """Return our name of the dtype called `name`.

        Raises:
            InputError: unknown, or ``fp8`` and the like on a target that has none.
        """
        encodings = BY_ENCODING.get(name.lower().removeprefix("torch."))
        if encodings and self.fp8_encoding not in encodings:
            others = f"; in others it computes the families {', '.join(self.families)}" if self.families else ""
            raise InputError(
                f"dtype {name!r}: the target has no fp8; choose another dtype, or a --target that has it{others}"
            )
        return dtype(name, self.fp8_encoding).name
