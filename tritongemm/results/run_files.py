"""Names the files that a run keeps for an output, and checks what is there and who holds them.

Beside the results are their journal, the one before it, a lock and the number of the process that holds it. Modules are
in a folder of their own, which has a lock and the name of its output, so that two outputs never share one.
"""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tritongemm.core.errors import OutputError
from tritongemm.formats import results_format
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Format
from tritongemm.results.journal import is_journal
from tritongemm.system import files
from tritongemm.system.locks import locked

# Such names are other kinds of files, which a user who writes one expects.
_OTHER_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".xlsx", ".html", ".md", ".py", ".so", ".co", ".hsaco", ".cubin")
_ADVICE = "choose another file with -o"
_OWNER = ".output"  # the file of a folder of modules that names their output


def check_output_name(path: Path) -> None:
    """Refuse a name that is one of another kind of file."""
    ours = results_format()
    others = {suffix for f in registry.every(Format) for suffix in f.suffixes} - set(ours.suffixes)
    suffix = path.suffix.lower()
    if suffix in others or suffix in _OTHER_SUFFIXES:
        also = "; a CSV of every candidate is written by --profile_file" if suffix == ".csv" else ""
        raise OutputError(
            f"-o {path}: results are written as YAML, not as {suffix}; write -o {path.with_suffix('.yaml')}{also}"
        )


class RunFiles:
    """Paths of what a run keeps for an output, and their lock.

    A link to the results stays one, and two links to one file share its lock. `old_journal` is what --no-resume sets
    aside.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        try:
            self.results = Path(os.path.realpath(output))
        except OSError as error:  # the current folder was deleted
            raise OutputError(f"{output} can't be written: {error.strerror}; {_ADVICE}") from error
        name = self.results.name
        suffixes = (".journal", ".journal.old", ".lock", ".pid")
        self.journal, self.old_journal, self.lock_file, self.pid = (
            self.results.with_name(name + suffix) for suffix in suffixes
        )
        self._lock = ExitStack()

    def every(self) -> list[Path]:
        """Return all files of the run that are beside each other."""
        return [self.results, self.journal, self.old_journal, self.lock_file, self.pid]

    def hold(self) -> None:
        """Lock the output for this process, and remove what a killed one left unfinished."""
        check_output_name(self.output)
        files.check_place(self.results, _is_any, "results", _ADVICE)
        for path, is_ours, what in (
            (self.journal, is_journal, "a journal of tritongemm"),
            (self.old_journal, is_journal, "a journal of tritongemm"),
            (self.lock_file, _is_empty, "a lock of tritongemm"),
            (self.pid, _is_process_number, "the number of a process"),
        ):
            files.check_place(path, is_ours, what, f"move it away, or {_ADVICE}")
        refusal = f"{self.output} is held by another run (process {self._holder()}); wait for it, or choose another -o"
        self._lock.enter_context(locked(self.lock_file, refusal, _ADVICE))
        self._lock.callback(self._forget_process)
        for path in (self.results, self.pid):
            files.sweep(path.parent, path.name)
        with suppress(OutputError):  # it only serves the message to a second run
            files.atomic_write(self.pid, str(os.getpid()))

    def set_aside(self) -> None:
        """Rename the results and their journal as old ones, so that a run begins anew; `hold` is around it."""
        old_results = self.results.with_name(f"{self.results.name}.old")
        for path, old in ((self.results, old_results), (self.journal, self.old_journal)):
            try:
                os.replace(path, old)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise OutputError(f"{path} can't be set aside: {error.strerror}; {_ADVICE}") from error

    def _holder(self) -> str:
        """Return the number of the process that holds the output, as far as is known."""
        try:
            return files.read_regular(self.pid, 20).decode("ascii", "replace") or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        """Unlock the output; a second call does nothing."""
        self._lock.close()

    def _forget_process(self) -> None:
        with suppress(OSError):
            self.pid.unlink(missing_ok=True)


def _is_any(start: bytes) -> bool:
    """Return True: a reader of the file checks more of it than its beginning."""
    return True


def _is_empty(start: bytes) -> bool:
    return not start


def _is_process_number(start: bytes) -> bool:
    """Return whether a file holds a run's process number; that of another program's process ends its line."""
    return re.fullmatch(rb"\d{0,10}", start) is not None


def module_folder(output: Path) -> Path:
    """Return the path of an output's modules: beside it, in ``results_kernels`` for ``results.yaml``.

    Another output's folder has its full name: what follows the last dot of ``tuned.gfx942`` is no suffix.
    """
    name = output.stem if output.suffix == ".yaml" else output.name
    return output.with_name(f"{name}_kernels")


@contextmanager
def holding_module_folder(folder: Path, output: Path) -> Iterator[None]:
    """Lock a folder of modules, so that a compile finds the text that was written for it."""
    advice = f"move it away, or {_ADVICE}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}, the folder of modules, can't be made: {error.strerror}; {advice}") from error
    for path, is_ours, what in (
        (folder / ".lock", _is_empty, "a lock of tritongemm"),
        (folder / _OWNER, _is_any, "the name of an output"),
    ):
        files.check_place(path, is_ours, what, advice)
    refusal = f"another run writes its modules into {folder}; wait for it, or {_ADVICE}"
    with locked(folder / ".lock", refusal, _ADVICE):
        name, owner = os.fsencode(output.name).decode(errors="backslashreplace"), _owner(folder)
        if owner not in ("", name):
            raise OutputError(
                f"{folder} holds the modules of {owner}, which this run would replace; {_ADVICE}, or delete that folder"
            )
        if not owner:
            files.atomic_write(folder / _OWNER, name)
        files.sweep(folder)
        yield


def _owner(folder: Path) -> str:
    """Return the name of the output that a folder's modules belong to; "" in a new folder."""
    try:
        return files.read_regular(folder / _OWNER).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise OutputError(f"{folder / _OWNER} can't be read: {error.strerror}; {_ADVICE}") from error
