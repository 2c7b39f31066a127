"""Holds what formats share: a row's problem, why a row is not used, a file's text and format, our results format."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tritongemm.core.dtypes import DTYPES, dtype
from tritongemm.core.epilogues import IN_BLOCKS
from tritongemm.core.errors import InputError, UnavailableError, UntunableRowsWarning
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, ResultsFile
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.record import Record
from tritongemm.core.scaling import find_pair
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Family, Format, ResultsFormat, TunerFormat
from tritongemm.system import reading

EXAMPLE = "- {M: 4096, N: 4096, K: 8192}"


def make_problem(defaults: Defaults, m: int, n: int, k: int, given: Mapping[str, Any] | None = None) -> Problem:
    """Return the problem with these sizes; missing values are the defaults, then the family's.

    `given` has other fields of `Problem` that the row has, by their names in JSON. Any wrong value raises an
    InputError.
    """
    row = dict(given or {})
    family, typical = registry.family_of(row.get("family") or defaults.family)
    a = defaults.dtype(row.get("dtype_a") or defaults.a.dtype or typical.a.dtype)
    scales = row.get("scales", defaults.scales)
    said_b = row.get("dtype_b") or defaults.b.dtype
    b = defaults.dtype(said_b or _dtype_of_b(family, a, typical.b.dtype or a, scales))
    in_blocks = (row.get("epilogue") or defaults.epilogue) in IN_BLOCKS
    wide = "fp8" if in_blocks else typical.c.dtype or ("fp16" if dtype(a).is_fp8 else "int32" if a == "int8" else a)
    said = {
        "m": m, "n": n, "k": k, "dtype_a": a, "dtype_b": b,
        "dtype_c": defaults.dtype(row.get("dtype_c") or defaults.c.dtype or wide),
        "row_major_a": row.get("row_major_a", defaults.a.row_major),
        "row_major_b": row.get("row_major_b", defaults.b.row_major and typical.b.row_major),
        "bias": row.get("bias") or defaults.bias,
        "epilogue": row.get("epilogue") or defaults.epilogue,
        "batch": row.get("batch", defaults.batch),
        "shared": row.get("shared", "" if "batch" in row else defaults.shared),
        "order_b": row.get("order_b") or (typical.b.order if defaults.b.order == PLAIN else defaults.b.order),
    }  # fmt: skip
    several = defaults.groups.to_json() if defaults.groups else {}
    if row.get("groups", 1) > 1:  # how its rows are shared out is said by the row alone
        several = {"group_form": "masked"} if row.get("room") else {}
        several |= {"spread": "captured"} if row.get("counts") else {}
        several |= {key: row[key] for key in ("groups", "group_form", "spread", "counts", "room") if row.get(key)}
    return family.problem(Problem.from_json(said | several), scales)


def _dtype_of_b(family: Family, a: str, typical: str, scales: str) -> str:
    """Return the type of a B that is not named: the usual one, or that of four bits which alone has such scales."""
    packed = (each.name for each in DTYPES.values() if each.packed > 1)
    return next((b for b in (typical, *packed) if find_pair(scales, family.scalings(a, b))), typical)


def results_format() -> ResultsFormat:
    """Return the format of this project's results."""
    return registry.every(ResultsFormat)[0]


def format_of(path: Path, text: str) -> Format:
    """Return the format that a file is in; an InputError says what is wrong with it, or which formats there are."""
    for format_ in registry.every(Format):
        if format_.recognises(path, text):
            return format_
    missing = [str(why) for name in registry.names(Format) if not (why := _loads(name))]
    fault = why_unrecognised(path, text)
    if fault and not missing:  # the file may be right for a format that is missing
        raise InputError(fault)
    sizes = f"a file of sizes has a line for each, such as {EXAMPLE}, or is a CSV that begins with the line M,N,K"
    raise InputError("; ".join([f"{path} is in no known format (see docs/reference/formats.md)", sizes, *missing]))


def why_unrecognised(path: Path, text: str) -> str:
    """Return what to change in a file that seems meant as another tuner's table; "" for any other."""
    faults = (format_.why_unrecognised(path, text) for format_ in registry.every(TunerFormat))
    return next(filter(None, faults), "")


def _loads(name: str) -> Support:
    """Return whether a format's own imports work."""
    try:
        registry.get(Format, name)
    except UnavailableError as error:
        return Support(str(error))
    return SUPPORTED


def plain_text(text: str) -> str:
    """Return the contents of a file without encoding marks, with plain line ends."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def read_exactly(path: Path) -> str:
    """Return the contents of a file to be written again: every character, line ends and marks too; "" without one."""
    try:
        return reading.decode(path) if path.exists() else ""
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Return the contents of a file that should hold rows, or of a pipe; an InputError where it has no text."""
    text = plain_text(reading.decode(path))
    if not text.strip():
        raise InputError(f"{path} is empty; write one line a size, such as {EXAMPLE}")
    return text


def by_device(records: Iterable[Record]) -> list[list[Record]]:
    """Return the results of each problem on each device: the best, then what may stand for it, as they are given."""
    found: dict[tuple[Problem, str, int], list[Record]] = {}
    for record in records:
        found.setdefault((record.problem, record.target, record.compute_units), []).append(record)
    return list(found.values())


def baseline_won(record: Record) -> bool:
    """Return whether what users run today won, which other tools run by themselves."""
    return record.winner in registry.names(Backend) and registry.get(Backend, record.winner).baseline


FULL_FLOAT32 = "it multiplies full float32; here products of float32 are of tf32"


class KeptError(Exception):
    """A row is of a product that is not supported."""


class RowFaults:
    """The rows of a file that can't be used, with the reasons."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damaged: list[DamagedRow] = []
        self._kept: list[tuple[int, int, str]] = []

    @contextmanager
    def of_row(self, row: int, line: int, key: str = "") -> Iterator[None]:
        """Record a `KeptError` or `InputError` about a row as the reason why it is not used."""
        try:
            yield
        except KeptError as why:
            self._kept.append((row, line, str(why)))
        except InputError as error:
            reason = " ".join(filter(None, (f"{self._path}: row {row} (line {line})", key, str(error))))
            self._damaged.append(DamagedRow(row, line, reason))

    def beside(self, rows: Iterable[FormatRow]) -> ResultsFile:
        """Return the file with the usable rows; a warning names those of products that can't be tuned."""
        return ResultsFile(tuple(rows), tuple(self._damaged), warn_of(self._path, self._kept))


def warn_of(path: Path, kept: Sequence[tuple[int, int, str]]) -> tuple[DamagedRow, ...]:
    """Warn of such rows of a file, in one line, and return them with full reasons."""
    rows = tuple(
        DamagedRow(row, line, f"{path}: row {row} (line {line}) can't be tuned here: {reason}")
        for row, line, reason in kept
    )
    if rows:
        count = len(rows) - 1
        others = f"; nor can {count} other{'s' * (count > 1)}" if count else ""
        warnings.warn(rows[0].reason + others, UntunableRowsWarning, stacklevel=3)
    return rows
