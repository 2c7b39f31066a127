"""Commands as processes of their own: run to the end, killed at a moment, or held to a small disk."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture.outcome import TortureFailure

LIMIT_SECONDS = 120.0  # a command that takes longer waits for something that never comes
STATUSES = (0, 1, 2, 130)  # those that docs/reference/commands.md states


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit status, negative for a signal, and what it wrote."""

    argv: tuple[str, ...]
    status: int
    out: str
    err: str

    def checked(self) -> "Ended":
        """Itself; a TortureFailure where it ended in a way that no user should see."""
        if self.status not in STATUSES:
            raise self.failure(f"exit status {self.status}")
        for text in (self.out, self.err):
            if "Traceback (most recent call last)" in text:
                raise self.failure("a traceback")
            odd = [c for c in text if (ord(c) < 32 and c not in "\n\t") or ord(c) == 127]
            if odd:
                raise self.failure(f"control characters {set(odd)!r} reach the terminal")
            if any(len(line) > 20_000 for line in text.splitlines()):
                raise self.failure("a line of more than 20,000 characters")
        if self.status == 2 and not self.err.strip():
            raise self.failure("exit status 2 without a word")
        return self

    def failure(self, what: str) -> TortureFailure:
        shown = [word if len(word) < 300 else f"{word[:100]}… ({len(word)} characters)" for word in self.argv]
        return TortureFailure(f"{what}: {shown}: status {self.status}\n{self.out[-500:]}\n{self.err[-3000:]}")


class Command:
    """One start of `tritongemm NAME ARGUMENTS…` in a folder, with variables beside those of this process.

    No file that it writes may pass `file_bytes`, as on a disk that fills; 0: any may.
    """

    def __init__(
        self, name: str, argv: Sequence[str], folder: Path, environment: dict[str, str], file_bytes: int = 0
    ) -> None:
        self.argv = (name, *argv)

        def limit() -> None:
            if file_bytes:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        paths = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tritongemm", name, *argv],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "TERM": "dumb", **environment},
            start_new_session=True, preexec_fn=limit,
        )  # fmt: skip

    @property
    def process_id(self) -> int:
        return self._process.pid

    def end(self, limit_s: float = LIMIT_SECONDS) -> Ended:
        """Wait until it has ended and its output is closed; a TortureFailure after `limit_s` seconds."""
        try:
            out, err = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise self._ended(*self._process.communicate()).failure(f"no end within {limit_s:g} s") from None
        return self._ended(out, err)

    def _ended(self, *texts: bytes) -> Ended:
        return Ended(self.argv, self._process.returncode, *(text.decode(errors="replace") for text in texts))

    def signalled(self, number: signal.Signals, after_s: float, end_s: float = LIMIT_SECONDS) -> Ended:
        """Send a signal after a time, unless it has ended before; then as `end`."""
        deadline = time.monotonic() + after_s
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self.end(end_s)


def processes_with(marker: str) -> list[int]:
    """Processes whose environment holds a text, this one left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
