"""A tuned record with the place it was read from, and the M that AITER looks its own rows up at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritongemm.core.integers import round_up
from tritongemm.core.record import Record

if TYPE_CHECKING:
    from tritongemm.export.library.storage import StoredCode

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
    yield _LARGE_M if m > _LARGE_M and n > _LARGE_N else 1 << (m - 1).bit_length()
