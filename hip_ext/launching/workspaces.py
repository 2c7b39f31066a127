"""Allocates the memory that a kernel's programs share: a workspace, and counters that every launch leaves zero."""

import threading
from collections.abc import Callable, Hashable

from tritongemm.core.errors import TritonGemmError, WorkspaceError
from tritongemm.core.integers import round_up
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.stream import capture_id

_COUNTER_ALIGNMENT_BYTES = 256  # alignment of each set of counters
_FEWEST_SETS, _MOST_SETS = 16, 1024  # sets of counters that are allocated at once
_MOST_BYTES = 64 << 20  # the most memory of sets allocated at once, if more than the fewest


class WorkspacePool:
    """A workspace and counters for each stream, and counters for each stream of the captures of one pool of memory.

    A capture needs others than its stream, because a graph may be replayed beside that. (Its workspace comes from
    PyTorch's allocator, which puts it into the graph's pool.) Graphs whose memory is one pool, as a server's hundreds
    are, never run beside each other, and share theirs. The memory comes from the driver, so that
    no graph's pool holds it, and is never freed: queued work and graphs point to it. Instead of counters a kernel may
    keep sums there that it finds at zero and leaves at zero. Sizes are what the most demanding kernel needs.
    """

    def __init__(self, device: driver.Device, workspace_bytes: int, counter_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self.counter_bytes = round_up(max(counter_bytes, 1), _COUNTER_ALIGNMENT_BYTES)
        self._device = device
        self._lock = threading.Lock()
        self._free: list[int] = []
        self.of_streams: dict[int, tuple[int, int]] = {}
        self._of_captures: dict[tuple[Hashable, int], int] = {}
        self._allocate_counters()

    def holds(self, workspace_bytes: int, counter_bytes: int) -> bool:
        """Return whether this pool is enough for a kernel that needs these bytes of each."""
        return workspace_bytes <= self.workspace_bytes and counter_bytes <= self.counter_bytes

    def for_stream(self, stream: int) -> tuple[int, int]:
        """Return the addresses of a stream's workspace and counters, the same each time, while nothing is captured.

        Without memory for them a WorkspaceError is raised.
        """
        pair = self.of_streams.get(stream)
        if pair is None:
            with self._lock:
                if not self._free:
                    self._allocate_counters()
                if stream not in self.of_streams:
                    workspace = self._allocate(self.workspace_bytes) if self.workspace_bytes else 0
                    self.of_streams[stream] = workspace, self._free.pop()
                pair = self.of_streams[stream]
        return pair

    def for_capture(self, stream: int, find_pool: Callable[[], Hashable]) -> int | None:
        """Return the address of the counters of the capture that a stream is in; None when all are given out.

        `find_pool` says, at a capture's first call, which pool the graph's memory is from; None where that is unknown.
        """
        key = (capture_id(self._device.api, stream), stream)
        with self._lock:
            if key not in self._of_captures:
                shared = (find_pool() or key[0], stream)
                if shared not in self._of_captures and not self._free:
                    return None
                self._of_captures[key] = self._of_captures.get(shared) or self._free.pop()
                self._of_captures[shared] = self._of_captures[key]
            return self._of_captures[key]

    def _allocate(self, nbytes: int) -> int:
        try:
            with self._device.relaxed():
                return self._device.alloc(nbytes)
        except TritonGemmError as error:
            raise WorkspaceError(f"no memory for what programs share: {error}") from error

    def _allocate_counters(self) -> None:
        count = max(_FEWEST_SETS, min(_MOST_SETS, _MOST_BYTES // self.counter_bytes))
        start = self._allocate(count * self.counter_bytes)
        # Waiting for the entire device would wait for queued work, and break a capture.
        stream = self._device.stream()
        self._device.memset(start, 0, count * self.counter_bytes, stream.handle)
        stream.synchronize()
        stream.destroy()
        self._free += [start + i * self.counter_bytes for i in range(count)]
