"""Stage: CLI values and files → Problems. Each module of interop/ reads one format and says which files are its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tritongemm import registry
from tritongemm.config import Config
from tritongemm.dtypes import dtype
from tritongemm.errors import InputError
from tritongemm.problem import Problem
from tritongemm.record import Record


@dataclass(frozen=True)
class Defaults:
    """What a row that does not say gets.

    Attributes:
        dtype_a, dtype_b, dtype_c: None for the family's usual: A's is fp16, B's is A's, C's is A's, or fp16 for fp8
            and int32 for int8 operands.
        row_major_a, row_major_b: layouts.
        bias: ``none``, ``m`` or ``n``.
        fp8_encoding: the target's, for dtype names that leave it open.
    """

    dtype_a: str | None = None
    dtype_b: str | None = None
    dtype_c: str | None = None
    row_major_a: bool = True
    row_major_b: bool = True
    bias: str = "none"
    fp8_encoding: str = "fn"

    def dtypes(self, a: str | None = None, b: str | None = None, c: str | None = None) -> tuple[str, str, str]:
        """Full names of the three dtypes; those given win over the defaults.

        Raises:
            InputError: unknown dtype.
        """
        first = dtype(a or self.dtype_a or "fp16", self.fp8_encoding)
        second = dtype(b or self.dtype_b or first.name, self.fp8_encoding)
        usual = "fp16" if first.is_fp8 else "int32" if first.is_integer else first.name
        third = dtype(c or self.dtype_c or usual, self.fp8_encoding)
        return first.name, second.name, third.name


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        problem: what it names.
        config: the stored config, None in a plain list of sizes.
        record: the stored result, None where the row has no time.
        line: line of the file; 0 for the command line.
    """

    problem: Problem
    config: Config | None = None
    record: Record | None = None
    line: int = 0


def from_options(m: int, n: int, k: int, defaults: Defaults) -> list[Row]:
    """The one size of the command line.

    Raises:
        InputError: a size or dtype that can't be.
    """
    a, b, c = defaults.dtypes()
    return [Row(Problem(m, n, k, a, b, c, defaults.row_major_a, defaults.row_major_b, defaults.bias))]


def from_file(path: Path, defaults: Defaults) -> list[Row]:
    """The rows of a file in any format of interop/.

    Raises:
        InputError: no such file, no format claims it, or a row is wrong; names file, row and field.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not text: {error}") from error
    for name in registry.names("interop"):
        reader = registry.load("interop", name)
        if reader.recognises(path, text):
            return _unique(path, reader.read(path, text, defaults))
    raise InputError(f"{path}: no format of {', '.join(registry.names('interop'))} looks like this file")


def _unique(path: Path, rows: list[Row]) -> list[Row]:
    seen: dict[Problem, Row] = {}
    for row in rows:
        # A list of sizes may not repeat itself; of stored results each problem may have several, one per target.
        target = row.record.target if row.record else ""
        twin = seen.get(row.problem)
        if twin is not None and (twin.record.target if twin.record else "") == target:
            raise InputError(
                f"{path}: line {row.line} repeats line {twin.line} ({row.problem.key}); remove one of the two"
            )
        seen[row.problem] = row
    if not rows:
        raise InputError(f"{path}: holds no sizes; write a list of maps, e.g. - {{M: 16, N: 16, K: 16}}")
    return rows
