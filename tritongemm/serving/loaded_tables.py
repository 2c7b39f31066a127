"""The tables of tuned records that a process has loaded, and the one line that it logs of them for each GPU."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tritongemm.core import settings
from tritongemm.core.printable import printable
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.serving import rank_agreement
from tritongemm.serving.record_source import read_source
from tritongemm.serving.served_problems import ExpertWeights, expert_weights, is_layer, is_product, is_scaled, is_served
from tritongemm.serving.source_row import SourceRow

if TYPE_CHECKING:
    from tritongemm.export.library.storage import KernelLibrary
    from tritongemm.serving.device_kernels import DeviceKernels

_LOG = logging.getLogger("tritongemm")
_DIGEST_DIGITS = 12  # of a hash, which tell apart the tables that anybody has


@dataclass(frozen=True)
class LoadedTable:
    """Tuned records from one source.

    Attributes:
        name: the file's path, or ``records``.
        digest: the first digits of the SHA-256 of the file, or of a library's manifest, in hexadecimal.
        rows: those of linear layers, with or without scales, of batches and of groups, which calls can ask for.
        library: that the rows are from; None for a file or records.
    """

    name: str
    digest: str
    rows: tuple[SourceRow, ...]
    library: KernelLibrary | None = None

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of the rows."""
        return tuple(row.record for row in self.rows)

    @property
    def weights(self) -> frozenset[tuple[int, int]]:
        """(N, K) of the weights without scales that have a record."""
        problems = (row.record.problem for row in self.rows)
        return frozenset((problem.n, problem.k) for problem in problems if is_product(problem))

    @property
    def weights_by_layout(self) -> frozenset[tuple[int, int]]:
        """(N, K) of those weights that have a record of another memory layout than a linear layer's."""
        problems = (row.record.problem for row in self.rows)
        return frozenset((p.n, p.k) for p in problems if is_product(p) and not is_layer(p))

    @property
    def scaled_weights(self) -> frozenset[tuple[int, int]]:
        """(N, K) of the weights with scales that have a record."""
        problems = (row.record.problem for row in self.rows)
        return frozenset((problem.n, problem.k) for problem in problems if is_scaled(problem))

    @property
    def expert_weights(self) -> frozenset[ExpertWeights]:
        """The weights of grouped products that have a record."""
        problems = (row.record.problem for row in self.rows)
        return frozenset(weights for problem in problems if (weights := expert_weights(problem)) is not None)


def read_table(source: str | os.PathLike[str] | Iterable[Record], family: str = "") -> LoadedTable:
    """The records of a results file or a library, or those given, with what tells them from others.

    Args:
        source: a path, or records.
        family: what another tool calls what the file is of; "" where only the file says.

    Raises:
        InputError: the file can't be read, or holds no tuned result.
        TypeError: the source is neither a path nor records.
    """
    from tritongemm.export.library import storage  # whose import takes longer than that of the rest

    # A folder that is no library, as that of a campaign in which nothing gained, is told as one.
    if isinstance(source, str | Path) and (storage.is_library(Path(source)) or os.path.isdir(source)):
        from tritongemm.serving.library_rows import read_library

        library, rows = read_library(Path(source))
        return LoadedTable(os.fspath(source), library.digest[:_DIGEST_DIGITS], _served(rows), library)
    rows = read_source(source, family)
    if isinstance(source, str | os.PathLike):
        name, content = os.fspath(source), b""
        with suppress(OSError):  # It was read a moment ago.
            content = Path(source).read_bytes()
    else:
        name, content = "records", repr([row.record for row in rows]).encode()
    return LoadedTable(name, _digest(content), _served(rows))


def _served(rows: Iterable[SourceRow]) -> tuple[SourceRow, ...]:
    return tuple(row for row in rows if is_served(row.record.problem))


def combined_digest(tables: Sequence[LoadedTable]) -> str:
    """What tells the tables of one process from another's: the file's hash where there is one table."""
    return tables[0].digest if len(tables) == 1 else _digest(" ".join(table.digest for table in tables).encode())


def announce(tables: Sequence[LoadedTable], device: DeviceKernels, generation: int = 1) -> None:
    """Log the line that tells what a process serves on a GPU, and warn where another rank loaded other tables.

    Args:
        tables: all that were loaded.
        device: the GPU and its kernels.
        generation: how often tables were added.
    """
    if not tables:
        return
    _LOG.info("%s", describe(tables, device))
    rank_agreement.agree(combined_digest(tables), generation)


def describe(tables: Sequence[LoadedTable], device: DeviceKernels) -> str:
    """Which files were loaded, their hashes, how many of their rows a GPU can use, and why it can't use the others."""
    here, rows = device.device, [row for table in tables for row in table.rows]
    files = ", ".join(f"{printable(table.name)} (sha256 {table.digest})" for table in tables)
    reasons = [_why_stale(row.record, device) for row in rows]
    stale = Counter(reason for reason in reasons if reason)
    others = "".join(f"; {count} {reason}" for reason, count in stale.most_common())
    installed = settings.version("triton")
    compiled = [row.record for row, why in zip(rows, reasons, strict=True) if not why and row.code is None]
    checked = sum(record.toolchain.get("triton") != installed for record in compiled)
    again = f"; {checked} of those that serve were made by another Triton than {installed}" if checked else ""
    usable = f"{len(rows) - stale.total()} of {len(rows)} rows serve"
    return f"{files}: {usable} {here.torch_device} ({here.arch}, {here.compute_units} compute units){others}{again}"


def _why_stale(record: Record, device: DeviceKernels) -> str:
    """Why a record does not serve a GPU; "" where it does."""
    here = device.device
    if record.target != here.arch:
        return f"for {printable(record.target or 'no target named')}"
    if record.compute_units not in (0, here.compute_units):
        return f"for {record.compute_units} compute units"
    if record.predicted:
        return "predicted, not measured"
    return "refused when loaded" if isinstance(device.loaded_for(record), Support) else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_DIGITS]
