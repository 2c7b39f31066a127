"""Publishes tuned results as a library on disk, in place of an earlier one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritongemm.core.record import Record
from tritongemm.export.library import building, writing
from tritongemm.export.library.building import Built
from tritongemm.export.library.storage import MANIFEST
from tritongemm.export.library.writing import Contents
from tritongemm.hip_ext.machine import Machine


@dataclass(frozen=True)
class Published:
    """The outcome of publishing tuned results as a library.

    Attributes:
        built: their entries, and what no library can hold.
        contents: of the library; without an entry none was written.
        conflicts: a line for each thing that two results claim.
    """

    built: Built
    contents: Contents
    conflicts: tuple[str, ...]

    def describe_missing(self) -> Iterator[str]:
        """Yield a line for each result and kernel that the library does not hold."""
        for record, reason in self.built.left_out:
            yield f"left out: {record.problem.key}: {reason}"
        for what, reason in self.built.compiled_late:
            yield f"not held: {what}: {reason}; where nothing compiles it, PyTorch computes it"


def publish(records: Sequence[Record], output: Path, here: Machine) -> Published:
    """Compile what the cache lacks of results, and write a library of them."""
    contents = Contents()
    with writing.held(output):
        built = building.build(records, here)
        conflicts = writing.merge(contents, built.entries, built.readers())
        if built.entries:
            writing.add_beside(contents, built.helpers, built.targets, built.readers())
            writing.write(output, contents)
    return Published(built, contents, tuple(conflicts))


def withdraw(output: Path) -> None:
    """Remove a library's manifest, so that it is no longer served; code objects stay for processes that serve them."""
    if (output / MANIFEST).exists():
        with writing.held(output):
            (output / MANIFEST).unlink(missing_ok=True)
