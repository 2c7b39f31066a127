"""Memory that programs of one tile share: a workspace of any contents, and words that every launch leaves zero, counters
or sums that aren't there yet.
"""

from __future__ import annotations

import threading

from tritongemm.core.errors import ScratchError, TritonGemmError
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.driver.stream import capture_id


class WorkspacePool:
    """A workspace and counters for each stream, and counters for each stream of each capture, because a graph may be
    replayed beside the stream that it was captured on. (A capture's workspace comes from PyTorch's allocator, which
    puts it into the graph's own pool.)

    The memory comes from the driver, so that no graph's pool holds it, and stays: queued work and graphs point to it.

    Args:
        device: the device.
        workspace: bytes that the most demanding kernel needs.
        counters: likewise.

    Raises:
        ScratchError: there is no memory for them.
    """

    FEWEST, SETS, MOST_BYTES = 16, 1024, 64 << 20

    def __init__(self, device: driver.Device, workspace: int, counters: int) -> None:
        self.workspace, self.each = workspace, -(-max(counters, 1) // 256) * 256
        self._device = device
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._streams: dict[int, tuple[int, int]] = {}
        self._captures: dict[tuple[int, int], int] = {}
        self._grow()

    def holds(self, workspace: int, counters: int) -> bool:
        """Whether this is enough for a kernel that needs so many bytes of each."""
        return workspace <= self.workspace and counters <= self.each

    def of_stream(self, stream: int) -> tuple[int, int]:
        """Addresses of a stream's workspace and counters, while nothing is being captured on it; the same pair each
        time.

        Raises:
            ScratchError: there is no memory for them.
        """
        pair = self._streams.get(stream)
        if pair is None:
            with self._lock:
                if not self._free:
                    self._grow()
                if stream not in self._streams:
                    workspace = self._alloc(self.workspace) if self.workspace else 0
                    self._streams[stream] = workspace, self._free.pop()
                pair = self._streams[stream]
        return pair

    def of_capture(self, stream: int) -> int | None:
        """Address of the counters of the capture that `stream` is in; None when all are given out, as memory can't
        be allocated meanwhile.
        """
        key = (capture_id(self._device.api, stream), stream)
        with self._lock:
            if key not in self._captures:
                if not self._free:
                    return None
                self._captures[key] = self._free.pop()
            return self._captures[key]

    def _alloc(self, nbytes: int) -> int:
        try:
            with self._device.relaxed():
                return self._device.alloc(nbytes)
        except TritonGemmError as error:
            raise ScratchError(f"no memory for what programs share: {error}") from error

    def _grow(self) -> None:
        count = max(self.FEWEST, min(self.SETS, self.MOST_BYTES // self.each))
        start = self._alloc(count * self.each)
        # To wait for the whole device would wait for queued work, and break a capture.
        stream = self._device.stream()
        self._device.memset(start, 0, count * self.each, stream.handle)
        stream.synchronize()
        stream.destroy()
        self._free += [start + i * self.each for i in range(count)]
