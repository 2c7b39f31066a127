"""Foreign file formats: one file each.

A plug-in defines

    FORMAT                              what it reads, in a few words, for error messages
    recognises(path, text) -> bool      whether this file is in its format, by extension or contents
    read(path, text, defaults) -> list[Row]

and, where our results can be told in it, ``write(records) -> str``. Plug-ins are asked in the order of their names.
A file whose name starts with an underscore is shared by several.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.dtypes import BY_ENCODING, dtype
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.plugins import registry

EXAMPLE = "- {'M': 4096, 'N': 4096, 'K': 8192}"


@dataclass(frozen=True)
class FormatRow:
    """One row of a file of sizes or results.

    Attributes:
        problem: what to tune, check or time.
        config: how to run it; None for a bare size.
        record: the result, where the row has a time.
        line: where the row starts, from 1; None for the command line.
    """

    problem: Problem
    config: Config | None = None
    record: Record | None = None
    line: int | None = None


@dataclass(frozen=True)
class Defaults:
    """What holds for a row that does not say.

    Attributes:
        dtype_a: name or alias; None for the family's DTYPE_A, or fp16.
        dtype_b: the same; None for A's.
        dtype_c: the same; None for the family's DTYPE_C, or for A's, or fp16 where A is fp8, or int32 where A is int8.
        row_major_a, row_major_b: layouts.
        bias: ``none``, ``m`` or ``n``.
        family: plug-in of families/.
        fp8_encoding: meaning of ``fp8`` and ``bf8``: ``fn``, ``fnuz`` or, on a target without fp8, ``none``.
    """

    dtype_a: str | None = None
    dtype_b: str | None = None
    dtype_c: str | None = None
    row_major_a: bool = True
    row_major_b: bool = True
    bias: str = "none"
    family: str = "dense"
    fp8_encoding: str = "fn"

    def dtype(self, name: str) -> str:
        """Our name of the dtype called `name`.

        Raises:
            InputError: unknown, or ``fp8`` and the like on a target that has none.
        """
        encodings = BY_ENCODING.get(name.lower().removeprefix("torch."))
        if encodings and self.fp8_encoding not in encodings:
            raise InputError(f"dtype {name!r}: the target has no fp8; choose another dtype, or a --target that has it")
        return dtype(name, self.fp8_encoding).name

    def problem(
        self,
        m: int,
        n: int,
        k: int,
        dtype_a: str | None = None,
        dtype_b: str | None = None,
        dtype_c: str | None = None,
        row_major_a: bool | None = None,
        row_major_b: bool | None = None,
        bias: str | None = None,
        batch: int = 1,
        family: str | None = None,
    ) -> Problem:
        """The problem with these sizes; what is None is filled in.

        Raises:
            InputError: a size, dtype, bias or family is wrong.
        """
        family = family or self.family
        known = registry.load("families", family)
        a = self.dtype(dtype_a or self.dtype_a or str(getattr(known, "DTYPE_A", "fp16")))
        b = self.dtype(dtype_b or self.dtype_b or a)
        wide = getattr(known, "DTYPE_C", "") or ("fp16" if dtype(a).is_fp8 else "int32" if a == "int8" else a)
        return Problem(
            m,
            n,
            k,
            a,
            b,
            self.dtype(dtype_c or self.dtype_c or wide),
            row_major_a=self.row_major_a if row_major_a is None else row_major_a,
            row_major_b=self.row_major_b if row_major_b is None else row_major_b,
            bias=bias or self.bias,
            batch=batch,
            family=family,
        )


def text_of(path: Path) -> str:
    """Contents of a file that should hold rows.

    Raises:
        InputError: missing, unreadable, not text, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; name a file in it") from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise InputError(f"{path} is empty; write one line a size, such as {EXAMPLE}")
    return text
