"""Tuned records with the place that they were read from: files, libraries and records that `load` is given.

Also which backend won a record, what of it can be launched, and the M that AITER looks its own rows up at.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tritongemm.core.errors import DamagedFileWarning, InputError, UnavailableError
from tritongemm.core.integers import power_of_two, round_up
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, LibraryBackend

if TYPE_CHECKING:
    from tritongemm.export.library.storage import KernelLibrary, StoredCode

_STEPS = ((256, 16), (1024, 32), (4096, 64))  # up to this M, multiples of that
_STEP_ABOVE = 128
_SAME_MEMORY = 0.95  # share of bandwidth from which two GPUs have the same memory: statements of it differ by 3 %
_LARGE_M, _LARGE_N = 8192, 4096  # beyond both, AITER looks up the largest M that it tunes


@dataclass(frozen=True)
class SourceRow:
    """A tuned record and where it stands."""

    record: Record  # the record
    file: str = ""  # the file's path; "" for a record that was given
    where: str = "a record that was given"  # the file, the row and the line, for messages
    # Whether calls of other M find it at AITER's padded M, as in the files that AITER itself reads.
    padded: bool = False
    code: StoredCode | None = None  # its kernel in a library; None where it is compiled, or where no kernel of ours won
    # Memory bandwidth in GB/s of the GPUs that a row of the shipped tables is for; 0 for other rows. The kernels of
    # shipped rows are loaded at the first call of their product.
    shipped_for: int = 0


def same_memory(one: float, other: float) -> bool:
    """Return whether two bandwidths are those of GPUs with the same memory."""
    return min(one, other) >= _SAME_MEMORY * max(one, other)


def kind_of(record: Record, m: int) -> str:
    """Return how a record was found for a call of some M: ``exact``, ``range``, or ``bucket`` for a padded M."""
    if record.problem.m == m:
        return "exact"
    return "range" if record.serves(m) else "bucket"


def describe_kernel(record: Record) -> str:
    """Return a record's kernel and its times, in words."""
    gain = f", {record.speedup:.2f}x {record.library}" if record.speedup else ""
    return f"{record.config.name} ({record.seconds * 1e6:.2f} us{gain})"


def padded_ms(m: int, n: int) -> Iterator[int]:
    """Yield the M at which AITER looks a call up that has no row of its own M, the finer steps first."""
    step = next((step for most, step in _STEPS if m <= most), _STEP_ABOVE)
    yield round_up(m, step)
    yield _LARGE_M if m > _LARGE_M and n > _LARGE_N else power_of_two(m)


def find_winner(record: Record) -> Backend | Support:
    """Return the backend that won a record, or why it can't be asked here."""
    try:
        winner: Backend = registry.get(Backend, record.winner)
    except InputError:
        return Support(f"its winner {record.winner} can't be called from here")
    except UnavailableError as error:
        return Support(str(error))
    return winner


def is_launchable(record: Record) -> Support:
    """Return whether a kernel, or an algorithm of a library, that can be launched by itself won a record, measured."""
    key = record.problem.key
    if record.predicted:
        return Support(f"{key}: its record is a prediction (timer: model); tune it on the GPU")
    if baseline_won(record):
        return Support(f"{record.winner} won the tuning of {key} on {record.target}")
    winner = find_winner(record)
    if isinstance(winner, Support):
        return Support(f"{key}: {winner}")
    if record.winner != record.config.backend:
        return Support(f"{key}: its winner {record.winner} can't be called from here")
    return SUPPORTED


def baseline_won(record: Record) -> bool:
    """Return whether the library that users run today won a record, by a kernel of its own choice."""
    winner = find_winner(record)
    if isinstance(winner, Backend) and winner.baseline:
        return True
    return record.winner == record.library and record.winner != record.config.backend


def rounds_to_tf32(record: Record) -> bool:
    """Return whether the kernel that won a record rounds float32 operands to tf32."""
    if record.problem.a.dtype != "fp32":
        return False
    if isinstance(find_winner(record), LibraryBackend):
        return True  # a library is asked for tf32 on any target
    from tritongemm.search_spaces import loader  # which reads YAML

    return record.target in loader.target_names() and loader.load_target(record.target).has("tf32")


_OF_LOAD = 4  # the level of the stack whose call a warning names
_MOST_NAMED = 10  # entries that a warning names


def read_source(source: str | os.PathLike[str] | Iterable[Record], family: str = "") -> list[SourceRow]:
    """Return the tuned rows of a results file, or the records given.

    Raises:
        InputError: the file can't be read, is no regular file, or holds no tuned result.
        TypeError: neither a path nor records.
    """
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if not isinstance(path, str):
            raise TypeError(f"a results file is named by text, not by {type(path).__name__}: {path!r:.100}")
        _require_regular(path)
        return _read_rows(Path(path), family)
    if isinstance(source, bytes | bytearray) or not isinstance(source, Iterable):
        raise TypeError(f"load takes the path of a results file, or records, not {type(source).__name__}")
    records = list(source)
    if others := [r for r in records if not isinstance(r, Record)]:
        raise TypeError(f"load takes records; one of those given is a {type(others[0]).__name__}")
    return [SourceRow(record) for record in records]


def _require_regular(path: str) -> None:
    """Refuse what is there but no file with an end, such as a pipe or a device: reading it might never return."""
    if "\0" in path:
        raise InputError(f"{path!r:.100} can't be the name of a file")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise InputError(f"{Path(path)} is a pipe, a socket or a device; name a results file")


def _read_rows(path: Path, family: str) -> list[SourceRow]:
    """Return the rows of a file of any known format that hold a tuned result. A warning names damaged rows.

    `family` is what another tool calls what its file is of; "" where only the file says.
    """
    from tritongemm.formats import Defaults, format_of, read_text
    from tritongemm.plugins.contracts import TunerFormat

    text = read_text(path)
    format_ = format_of(path, text)
    table = format_ if isinstance(format_, TunerFormat) else None
    defaults = Defaults(family=family) if table and family in table.families else Defaults()
    found = format_.read_usable(path, text, defaults)
    rows = [
        SourceRow(row.record, str(path), row.where(str(path)), bool(table and table.padded_m))
        for row in found.rows
        if row.record is not None
    ]
    if not rows:
        found.require_undamaged()
        raise InputError(f"{path}: holds no tuned result: {found.describe_untuned()}; tune it first")
    if found.damaged:
        warnings.warn(found.describe_damaged(), DamagedFileWarning, stacklevel=_OF_LOAD)
    return rows


def read_library(path: Path) -> tuple[KernelLibrary, list[SourceRow]]:
    """Return a library and its usable entries. A warning names the others, whose sizes have no row.

    Raises:
        InputError: it can't be read, or holds no usable entry.
    """
    from tritongemm.export.library.storage import StoredCode, open_library  # whose import takes longer than the rest

    library = open_library(path)
    if library.damaged:
        more = [f"and {len(library.damaged) - _MOST_NAMED} more"] if len(library.damaged) > _MOST_NAMED else []
        listed = "; ".join([*map(str, library.damaged[:_MOST_NAMED]), *more])
        if not library.entries:
            raise InputError(f"{path}: none of its entries can be used: {listed}; build it again")
        text = f"{path}: {len(library.damaged)} entries are not used: {listed}"
        warnings.warn(text, DamagedFileWarning, stacklevel=_OF_LOAD)
    if not library.entries:
        raise InputError(f"{path}: the library is empty")
    rows = []
    for entry in library.entries:
        code = None if entry.kernel is None else StoredCode(library, entry.kernel)
        rows.append(SourceRow(entry.record, str(path), f"{path}: {entry.name}", code=code))
    return library, rows
