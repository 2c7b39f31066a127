"""Runs every command: prepares the streams and signals, and turns errors into messages and exit statuses.

Whatever ends a command, the user gets one line, and the exit status is one of these:

0     done
1     a result is wrong, a size failed, or a row of a file to tune is of a product that no family computes
2     bad input, a place that can't be written, or no memory left
130   Ctrl-C, or another signal to stop

An error that is not the user's is a fault of this program and keeps its traceback. What can't be printed, because
the reader of a pipe is gone or a disk is full, is dropped: it changes neither the work nor the exit status.
"""

import atexit
import functools
import importlib
import io
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from tritongemm.core.errors import TritonGemmError
from tritongemm.report.alike_lines import summarise
from tritongemm.report.plain_table import align, keep_words, terminal_width
from tritongemm.system import stop_signals, temporary_folder
from tritongemm.system.printable import printable
from tritongemm.system.stop_signals import end_at_once, handled, on_stop

DONE, WRONG, REFUSED, INTERRUPTED = 0, 1, 2, stop_signals.INTERRUPTED
_AGAIN_SECONDS = 0.01  # until a lost Ctrl-C is repeated


def run(command: str) -> int:
    """Run a command, ``module:function`` decorated with `command`, as this entire process; return its exit status.

    Nothing is to be undone before the command's modules are imported and after it is over, so a signal to stop ends the
    process at once then: an exception may get lost in the code of packages that are being imported.
    """
    _open_streams()
    warnings.showwarning = _show_warning
    sys.unraisablehook = _interrupt_again
    atexit.register(on_stop, signal.SIG_IGN)  # the last to be called; what Python does then takes no handler
    end_at_once()
    status = _exit_status(functools.partial(_import_and_run, command))
    # Python takes an interrupt that passed through an `exec`, as packages use it to make classes, for one that was not
    # caught; the next `exec` of text makes it forget it, so that it ends with the status that it is given.
    exec("")
    sys.stdout.flush()
    end_at_once(status, b"")
    return status


def command(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorate a command's main: it gets the words of the command line, and its errors become exit statuses."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        with handled(signal.default_int_handler):  # the signals of a batch system or a closed terminal, as Ctrl-C
            return _exit_status(lambda: main(sys.argv[1:] if argv is None else list(argv)))

    return guarded


def report(text: str) -> None:
    """Print one line for a person on the standard error."""
    _print_line(text, sys.stderr)


def answer(text: str) -> None:
    """Print one line of what a command was asked for on the standard output."""
    _print_line(text, sys.stdout)


def answer_table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str]) -> None:
    """Print a table on the standard output; columns in `words` are aligned on the left."""
    for line in align(columns, rows, words, terminal_width(sys.stdout)):
        print(line)


def _print_line(text: str, stream: TextIO) -> None:
    print(keep_words(printable(text), terminal_width(stream)), file=stream)


def report_alike(lines: Iterable[str], verbose: bool) -> None:
    """Print messages about rows, one of each kind with a count, or all of them."""
    for line in summarise(lines, verbose):
        report(line)


def _import_and_run(command: str) -> int:
    module, name = command.split(":")
    os.getcwd()  # imported packages use it, and fail in their own ways
    main: Callable[[], int] = getattr(importlib.import_module(module), name)
    return main()


def _exit_status(work: Callable[[], int]) -> int:
    """Return the exit status of some work, and report what ends it early."""
    try:
        return work()
    except KeyboardInterrupt:
        report("interrupted")
        return INTERRUPTED
    except TritonGemmError as error:
        report(f"error: {error}")
    except MemoryError:
        report("error: there is not enough memory; use fewer processes (--num_threads), or fewer sizes at a time")
    except RecursionError:
        report("error: what was read is nested too deeply")
    except OSError as error:
        report(f"error: {_described(error)}")
    return REFUSED


def _described(error: OSError) -> str:
    """Return what the system refused, with the file's name, and advice where there is any."""
    if error.filename is None and not _has_current_folder():
        return "the current folder is not there any more; change into another one"
    path = error.filename if isinstance(error.filename, str) else ""
    try:
        advice = f"; {temporary_folder.TEMPORARY_ADVICE}" if temporary_folder.is_temporary(Path(path)) else ""
    except OSError as none:  # no folder for temporary files at all
        return f"{none.strerror}; name one in TMPDIR"
    return (f"{path}: " if path else "") + (error.strerror or str(error)) + advice


def _has_current_folder() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


# --- signals --------------------------------------------------------------------------------------------------------


def _interrupt_again(lost: Any) -> None:
    """Repeat a Ctrl-C that came where Python drops exceptions, e.g. while an object is being deleted.

    It would be dropped here too.
    """
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    is_over = False

    def repeat() -> None:
        while not is_over:
            time.sleep(_AGAIN_SECONDS)
        time.sleep(_AGAIN_SECONDS)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # its wait ends by a signal to it alone

    try:
        threading.Thread(target=repeat, daemon=True).start()
    finally:
        is_over = True


# --- what is printed ------------------------------------------------------------------------------------------------


class _UnfailingFile(io.FileIO):
    """A file to which no write fails: what it can't take is dropped."""

    def write(self, data: Any, /) -> int:
        """Write some bytes; return how many are done with."""
        try:
            while (count := super().write(data)) is None:  # a terminal that another program changed may be busy
                select.select((), (self,), ())
            return count
        except OSError:
            return memoryview(data).nbytes


def _open_streams() -> None:
    """Make the standard streams print any text, and never fail; one that is closed is opened on the null device.

    Else a file of results that took its number would get what compilers print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = _unfailing(1, sys.stdout), _unfailing(2, sys.stderr)


def _unfailing(descriptor: int, stream: TextIO | None) -> TextIO:
    """Return a stream of any text that goes where another one goes."""
    file = _UnfailingFile(descriptor, "w", closefd=False)
    at_once = isinstance(stream, io.TextIOWrapper) and stream.write_through  # python -u
    lines = descriptor == 2 or at_once or file.isatty()
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(io.BufferedWriter(file), encoding, "backslashreplace", line_buffering=lines)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning in one line, without the line of code that gave it."""
    report(f"warning: {message}")
