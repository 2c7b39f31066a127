"""A capture, from its start to its end: `Capture` for programs, `start_if_asked` for what starts with a process."""

import atexit
import os
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Final

from tritongemm.core.errors import InputError, OutputError
from tritongemm.system import settings
from tritongemm.workloads.capturing import child_processes
from tritongemm.workloads.capturing.graph_replays import GraphReplays
from tritongemm.workloads.capturing.hooks import Hooks
from tritongemm.workloads.capturing.product import Product
from tritongemm.workloads.capturing.recorder import Recorder
from tritongemm.workloads.capturing.workload_file import Counted, open_file

NEW_SECONDS = 0.3  # until a product that is met for the first time is written
COUNTS_SECONDS = 3.0  # between two times that counts are written
_JOIN_SECONDS = 60.0


class Capture:
    """Write every product that PyTorch is asked for while this is open, with counts and callers.

    Args:
        path: YAML of sizes, for ``tritongemm tune --gemm_size_file``; counts are added to those that a file
            has. A name that ends in ``.csv`` is a file of AITER's untuned sizes, without counts.

    Raises:
        InputError: another capture is under way.
        OutputError: no such file can be written there.

    Examples:
        >>> with tritongemm.capture("sizes.yaml"):
        ...     y = torch.nn.functional.linear(torch.ones(4, 256), torch.ones(32, 256))
        >>> print(open("sizes.yaml").readlines()[-1])
        - {"M": 4, "N": 32, "K": 256, ... "count": 1, ...
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._paths = (Path(os.path.expanduser(path)).absolute(),)

    def __enter__(self) -> None:
        """Start the capture."""
        _captures.start(self._paths)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the capture, and write what was counted."""
        _captures.stop()


capture = Capture  # its name for programs: `with tritongemm.capture(path):`


def start_if_asked() -> bool:
    """Start a capture until the process ends, if TRITONGEMM_CAPTURE or AITER_TUNE_GEMM ask for one; say if one runs.

    It does nothing where one is under way. A server's plug-in calls it in every process; it takes no GPU. Where the
    file can't be written a warning says so, and the program goes on.
    """
    paths = tuple(path.absolute() for path in settings.capture_files())
    if paths and not _captures.running:
        try:
            _captures.start(paths)
        except OutputError as error:
            warnings.warn(f"nothing is captured: {error}", RuntimeWarning, stacklevel=2)
    return _captures.running


def is_running() -> bool:
    """Return whether a capture is under way in this process."""
    return _captures.running


class _Captures:
    """The capture of this process, of which there is one at a time."""

    def __init__(self) -> None:
        self._session: OpenCapture | None = None

    @property
    def running(self) -> bool:
        """Whether a capture is under way."""
        return self._session is not None

    def start(self, paths: Sequence[Path]) -> None:
        """Start a capture."""
        if self._session:
            paths_there = ", ".join(str(file.path) for file in self._session.files)
            raise InputError(f"a capture into {paths_there} is under way in this process; end it first")
        session = OpenCapture(paths)
        session.start()
        self._session = session

    def stop(self) -> None:
        """End the capture that is under way, if any."""
        session, self._session = self._session, None
        if session:
            session.stop()

    def enter_child(self) -> None:
        """Go on capturing in a process that was forked, if a capture is under way."""
        if self._session:
            self._session.enter_child()


class OpenCapture:
    """One capture."""

    def __init__(self, paths: Sequence[Path]) -> None:
        # Those without counts first: where one fails, all of it is written once more.
        ordered = sorted(paths, key=lambda path: path.suffix != ".csv")
        self.files = [open_file(path) for path in ordered]
        self._recorder = Recorder(self._wake)
        self._hooks, self._replays = Hooks(self._recorder), GraphReplays(self._recorder)
        self._written: dict[Product, tuple[int, frozenset[str]]] = {}
        self._reported = False
        self._make_thread()

    def start(self) -> None:
        """Replace PyTorch's functions by those that count, here and in children, until the process ends."""
        self._hooks.install()
        self._replays.install()
        child_processes.cover(self.finish)
        atexit.register(self.finish)
        util.register_after_fork(self, OpenCapture.flush_at_end)

    def stop(self) -> None:
        """Remove the hooks, and write what is left."""
        self._hooks.remove()
        self._replays.remove()
        child_processes.uncover()
        atexit.unregister(self.finish)
        self._ending.set()
        self._new.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        self.finish()

    def enter_child(self) -> None:
        """Go on in a forked process: what its parent counted is the parent's to write, and threads are not forked."""
        self._recorder.enter_child()
        self._written = {p: (t.calls + t.replayed, frozenset(t.callers)) for p, t in self._recorder}
        self._make_thread()

    def flush_at_end(self) -> None:
        """Write what is left when a process ends that `multiprocessing` forked, which calls no function of atexit."""
        util.Finalize(self, self.finish, exitpriority=0)

    def finish(self) -> None:
        """Write what is left, with the spreads that the GPUs still hold."""
        self._recorder.spreads.wait()
        self.flush(last=True)

    def flush(self, last: bool = False) -> None:
        """Write what was counted since the last time.

        What can't be written is kept, which a warning says once; the `last` time it is lost, and a warning says so.
        """
        with self._writing:
            tallies = list(self._recorder)
            totals = {p: (t.calls + t.replayed, frozenset(t.callers)) for p, t in tallies}
            read = self._recorder.spreads.read()
            spreads = {p: read[t.spread_over] for p, t in tallies if t.spread_over in read}
            before = (0, frozenset[str]())
            counted = [
                Counted(product, calls - self._written.get(product, before)[0], callers, spreads.get(product))
                for product, (calls, callers) in totals.items()
                if (calls, callers) != self._written.get(product) or product in spreads
            ]
            if not counted:
                return
            try:
                for file in self.files:
                    file.add(counted, self._recorder.with_gradient)
                self._written = totals
                self._recorder.spreads.clear()
            except OutputError as error:
                if last:
                    lost = f"calls: {sum(one.calls for one in counted)}, products: {len(counted)}"
                    warnings.warn(f"what was captured is lost ({lost}): {error}", RuntimeWarning, stacklevel=1)
                elif not self._reported:
                    warnings.warn(f"what was captured is not written yet: {error}", RuntimeWarning, stacklevel=1)
                self._reported = True

    def _make_thread(self) -> None:
        self._new, self._ending, self._writing = threading.Event(), threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._write_on, name="tritongemm.capture", daemon=True)
        self._started = False

    def _wake(self) -> None:
        """Have what is new written soon; the thread is started by the first, as a fork would lose it."""
        if not self._started:
            self._started = True
            with suppress(RuntimeError):  # at the end of the process, which writes what is left by itself
                self._thread.start()
        self._new.set()

    def _write_on(self) -> None:
        new, ending = self._new, self._ending
        while not ending.is_set():
            if new.wait(COUNTS_SECONDS):
                ending.wait(NEW_SECONDS)
                new.clear()
            else:
                self._recorder.forget()
            self.flush()


_captures: Final = _Captures()
os.register_at_fork(after_in_child=_captures.enter_child)
