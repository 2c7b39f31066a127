"""Replaces entries of a library one by one, each on the disk when that is done; the rest stays as it was."""

from contextlib import ExitStack
from pathlib import Path

from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.export.library import building, writing
from tritongemm.export.library.storage import KernelLibrary, open_library
from tritongemm.export.library.writing import Contents
from tritongemm.hip_ext.machine import Machine


class HeldLibrary:
    """A library that no other process writes meanwhile."""

    def __init__(self, path: Path, here: Machine) -> None:
        self._path, self._here, self._held = path, here, ExitStack()
        with ExitStack() as stack:
            stack.enter_context(writing.held(path))
            self._contents = _contents(open_library(path))
            self._held = stack.pop_all()

    def has(self, record: Record) -> bool:
        """Return whether an entry is still what was read of it."""
        return any(entry.record == record for entry in self._contents.entries.values())

    def replace(self, before: Record, after: Record) -> Support:
        """Replace a result with another, compiled where the cache lacks it; or return why it can't be held."""
        built = building.build([after], self._here)
        for _, reason in built.left_out:
            return Support(reason)
        old = self._contents
        entries = {key: entry for key, entry in old.entries.items() if entry.record != before}
        new = Contents(entries | {entry.key: entry for entry in built.entries}, {**old.codes, **built.readers()})
        writing.add_beside(new, built.helpers, built.targets, new.codes)
        new.helpers, new.targets = {**old.helpers, **new.helpers}, {**new.targets, **old.targets}
        writing.write(self._path, new)
        self._contents = new
        return SUPPORTED

    def close(self) -> None:
        """Let others write the library."""
        self._held.close()


def _contents(library: KernelLibrary) -> Contents:
    """Return what a library holds, also the entries whose code is damaged; these have no code to be read."""
    return Contents(
        {entry.key: entry for entry in library.all_entries()},
        writing.readers(library, library.faults()),
        {helper.key: helper for helper in library.all_helpers()},
        dict(library.targets),
    )
