"""Tables of tuned records: what `load` and the environment name, and what is reported of them.

Of rows of one problem on one kind of device in several files that the environment names the fastest counts, of
equally fast ones the first file's, and a measured row before a predicted one.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritongemm.core.errors import InputError
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.hip_ext.launching import native_calls
from tritongemm.operations.served_problems import describe_factors, is_served, why_unserved
from tritongemm.serving import shipped_tables
from tritongemm.serving.record_table import RowKey, row_key
from tritongemm.serving.source_row import SourceRow, read_library, read_source, same_memory
from tritongemm.system import settings
from tritongemm.system.printable import printable
from tritongemm.system.settings import AiterConfig

if TYPE_CHECKING:
    from tritongemm.export.library.storage import KernelLibrary
    from tritongemm.serving.device_kernels import DeviceKernels

_LOG = logging.getLogger("tritongemm")
_DIGEST_DIGITS = 12  # digits of a hash, enough to distinguish anyone's tables


@dataclass(frozen=True)
class LoadedTable:
    """Tuned records from one source."""

    name: str  # the file's path, or `records`
    digest: str  # the first digits of the SHA-256 of the file, or of a library's manifest, in hexadecimal
    # Those of products, with or without scales, of batches and of groups, which calls can ask for.
    rows: tuple[SourceRow, ...]
    library: KernelLibrary | None = None  # that the rows are from; None for a file or records
    unserved: tuple[Record, ...] = ()  # records of products that no call can ask for

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of the rows."""
        return tuple(row.record for row in self.rows)


def read_table(source: str | os.PathLike[str] | Iterable[Record], family: str = "") -> LoadedTable:
    """Return the records of a results file or a library, or those given, with what distinguishes them from others.

    Raises:
        InputError: the file can't be read, or holds no tuned result.
        TypeError: the source is neither a path nor records.
    """
    from tritongemm.export.library import storage  # whose import takes longer than that of the rest

    if isinstance(source, str | Path) and str(source) == shipped_tables.NAME:
        found = shipped_tables.read()
        content = b"".join(path.read_bytes() for path in shipped_tables.files())
        return LoadedTable(shipped_tables.NAME, _digest(content), tuple(row for one in found for row in one.rows))
    # A folder that is no library, as that of a campaign in which nothing gained, is refused as such.
    if isinstance(source, str | Path) and (storage.is_library(Path(source)) or os.path.isdir(source)):
        library, rows = read_library(Path(source))
        return LoadedTable(os.fspath(source), library.digest[:_DIGEST_DIGITS], *_split(rows, library))
    rows = read_source(source, family)
    if isinstance(source, str | os.PathLike):
        name, content = os.fspath(source), b""
        with suppress(OSError):  # It was read a moment ago.
            content = Path(source).read_bytes()
    else:
        name, content = "records", repr([row.record for row in rows]).encode()
    return LoadedTable(name, _digest(content), *_split(rows))


def _split(
    rows: Sequence[SourceRow], library: KernelLibrary | None = None
) -> tuple[tuple[SourceRow, ...], KernelLibrary | None, tuple[Record, ...]]:
    """Return the fields of a table after its digest: the rows that calls can ask for, the library, other records."""
    served = tuple(row for row in rows if is_served(row.record.problem))
    return served, library, tuple(row.record for row in rows if not is_served(row.record.problem))


class LoadReport(int):
    """How many records `load` took; printed, how many of them serve this process's GPU, and why the others do not."""

    _text: str

    def __new__(cls, table: LoadedTable, device: DeviceKernels | None) -> LoadReport:
        """Return the report of a table on a GPU; None for no GPU."""
        report = super().__new__(cls, len(table.rows))
        report._text = _describe_rows([table], device)
        if device and isinstance(why := native_calls.load(), Support):
            report._text += f"; Python makes the launches: {why}"
        return report

    def __repr__(self) -> str:
        return self._text

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def combined_digest(tables: Sequence[LoadedTable]) -> str:
    """Return what distinguishes the tables of one process from another's: the file's hash where there is one table."""
    return tables[0].digest if len(tables) == 1 else _digest(" ".join(table.digest for table in tables).encode())


def announce(tables: Sequence[LoadedTable], device: DeviceKernels, generation: int = 1) -> None:
    """Log which tables serve a GPU, and warn where another rank loaded other tables."""
    if not tables:
        return
    _LOG.info("%s", describe(tables, device))
    agree(combined_digest(tables), generation)


def describe(tables: Sequence[LoadedTable], device: DeviceKernels) -> str:
    """Return which files were loaded, their hashes, and how many rows a GPU can use, and why not the others."""
    rows = [row for table in tables for row in table.rows]
    files = ", ".join(f"{printable(table.name)} (sha256 {table.digest})" for table in tables)
    serving = [row.record for row in rows if row.code is None and not _why_idle(row, device)]
    triton, torch = settings.version("triton"), settings.version("torch")
    checked = sum(record.toolchain.get("triton") != triton for record in serving)
    again = f"; {checked} of those that serve were made by another Triton than {triton}" if checked else ""
    moved = [record for record in serving if record.toolchain.get("torch", torch) != torch]
    if stale := sum(map(device.is_algorithm, moved)):
        again += f"; {stale} are algorithms of the library beside another torch than {torch}, each checked when loaded"
    here = device.device.driver_device.name
    elsewhere = Counter(record.toolchain.get("device", here) for record in serving)
    del elsewhere[here]
    again += "".join(f"; {n} were timed on {printable(name)}, not on this {here}" for name, n in elsewhere.items())
    return f"{files}: {_describe_rows(tables, device)}{again}"


def _describe_rows(tables: Sequence[LoadedTable], device: DeviceKernels | None) -> str:
    """Return how many rows of tables serve a GPU, and why the others do not, each reason with its count."""
    found = [(row.record.problem, _why_idle(row, device)) for table in tables for row in table.rows]
    factors = Counter(filter(None, (describe_factors(problem) for problem, reason in found if not reason)))
    reasons = [reason for _, reason in found]
    reasons += [why_unserved(record.problem) for table in tables for record in table.unserved]
    idle = Counter(reason for reason in reasons if reason)
    if device is None:
        where = "rows serve, as no GPU is here"
    else:
        here = device.device
        where = f"rows serve {here.torch_device} ({here.arch}, {here.compute_units} compute units)"
    others = "".join(f"; {count} of them with {layout}" for layout, count in factors.most_common())
    others += "".join(f"; {count} {reason}" for reason, count in idle.most_common())
    return f"{len(reasons) - idle.total()} of {len(reasons)} {where}{others}"


def why_layer_is_idle(
    tables: Sequence[LoadedTable], holds: Callable[[Record], bool], device: DeviceKernels | None
) -> str:
    """Return why no row of tables that `holds` serves layers on a GPU, behind their number; "" where one does."""
    if device is None:
        return "on no GPU, so that PyTorch computes them"
    rows = [row for table in tables for row in table.rows if holds(row.record)]
    reasons = Counter(_why_idle(row, device) for row in rows)
    return "" if "" in reasons else f"with rows that are {reasons.most_common(1)[0][0]}" if reasons else "without a row"


def _why_idle(row: SourceRow, device: DeviceKernels | None) -> str:
    """Return why a row does not serve a GPU, behind the number of such rows; "" where it does."""
    record = row.record
    if device is None:
        units = f", {record.compute_units} compute units" if record.compute_units else ""
        target = f"for {printable(record.target or 'no target named')}{units}"
        return f"predicted, not measured, {target}" if record.predicted else target
    here = device.device
    if record.target != here.arch:
        return f"for {printable(record.target or 'no target named')}"
    if record.compute_units not in (0, here.compute_units):
        return f"for {record.compute_units} compute units"
    if record.predicted:
        return "predicted, not measured"
    if row.shipped_for and not same_memory(row.shipped_for, here.memory_gbps):
        return f"for memory of {row.shipped_for} GB/s, not {here.memory_gbps}"
    return "refused when loaded" if isinstance(device.loaded_for(record), Support) else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_DIGITS]


def read_shipped() -> tuple[LoadedTable, ...]:
    """Return the tables that come along in this package; none in an installation without them."""
    return (read_table(shipped_tables.NAME),) if shipped_tables.files() else ()


def read_configured() -> tuple[LoadedTable, ...]:
    """Return the tables of TRITONGEMM_CONFIG, then those of AITER's variables, without rows that another shadows.

    Each of AITER's variables is for one of its families, which distinguishes files with the same columns.

    Raises:
        InputError: a file can't be read, or one of TRITONGEMM_CONFIG is missing or holds no tuned result.
    """
    named = settings.tuned_configs()
    tables = [read_table(path) for path in named]
    known = {os.path.realpath(path) for path in named}
    for config in settings.aiter_configs():
        if os.path.realpath(config.path) not in known and (table := _read_aiters(config)) is not None:
            tables.append(table)
            known.add(os.path.realpath(config.path))
    return merge(tables)


@cache
def warn_of_missing() -> None:
    """Log once which files of TRITONGEMM_CONFIG are not there: calls on a CPU read none of them."""
    for path in settings.tuned_configs():
        if str(path) != shipped_tables.NAME:
            _is_there(path, "TRITONGEMM_CONFIG")


def _is_there(path: Path, variable: str) -> bool:
    """Return whether a file that a variable names is there; a warning says where it is not."""
    if not os.path.exists(path):
        _LOG.warning("%s: there is no such file; %s names it", printable(str(path)), variable)
        return False
    return True


def _read_aiters(config: AiterConfig) -> LoadedTable | None:
    """Return a table of one of AITER's variables; as AITER does, one that is missing is passed over."""
    if not _is_there(config.path, config.variable):
        return None
    try:
        return read_table(config.path, config.family)
    except InputError as error:
        _LOG.warning("%s; none of its rows is served", error)
        return None


def merge(tables: Sequence[LoadedTable]) -> tuple[LoadedTable, ...]:
    """Return the tables without the rows that a better one shadows; one line is logged for all of those."""
    best: dict[RowKey, SourceRow] = {}
    rows = [row for table in tables for row in table.rows]
    for row in rows:
        kept = best.setdefault(row_key(row), row)
        if _rank(row) < _rank(kept):
            best[row_key(row)] = row
    if shadowed := [row for row in rows if best[row_key(row)] is not row]:
        first = shadowed[0]
        _LOG.info(
            "%d of %d rows are shadowed by faster ones of the same problem and device; the first is %s, by %s",
            len(shadowed),
            len(rows),
            printable(first.where),
            printable(best[row_key(first)].where),
        )
    return tuple(replace(table, rows=tuple(row for row in table.rows if best[row_key(row)] is row)) for table in tables)


def _rank(row: SourceRow) -> tuple[bool, float]:
    return row.record.predicted, row.record.seconds


def agree(digest: str, generation: int = 1) -> bool:
    """Return whether this rank's tables are those of the rank that loaded first; a warning says where they are not.

    Ranks compare through the store that they met in, not through a collective operation: no rank waits for one that
    loads later, or for one that loads nothing, which is therefore not noticed. Without torch.distributed, or before it
    is initialised, there is no other rank to compare with.
    """
    from torch import distributed  # when asked: commands that run no kernel read tables without PyTorch

    if not distributed.is_available() or not distributed.is_initialized():
        return True
    first = _first_digest(distributed.distributed_c10d._get_default_store(), digest, generation)
    if first == digest:
        return True
    _LOG.warning(
        "rank %d loaded other tuned records (sha256 %s) than the rank that was first (sha256 %s): "
        "ranks will compute by different kernels; give all of them the same file in TRITONGEMM_CONFIG",
        distributed.get_rank(),
        digest,
        first,
    )
    return False


def _first_digest(store: Any, digest: str, generation: int) -> str:
    """Return the digest of the first rank that asked, which is this one if no other did before."""
    answer: bytes = store.compare_set(f"tritongemm/tables/{generation}", "", digest)
    return answer.decode()
