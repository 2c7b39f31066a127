"""How the rows of a program's grouped products are spread over their groups, averaged by ranges of M.

No one waits for a GPU. A call has the ends of its groups copied into pinned memory, in order of its stream; the thread
that writes the capture reads what has arrived. A graph that is captured meanwhile copies anew each time it is launched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

_SLOTS = 32  # calls of a range of M that are kept until they are read
_RANGES = 32  # of M, up to each power of two
_MOST_KINDS = 8  # numbers of groups that are distinguished; each has memory of its own
_ARRIVE_SECONDS = 2.0  # that the end of a capture gives the last copies
_LOOK_SECONDS = 0.001
Range: TypeAlias = tuple[int, int]  # number of groups, and the power of two that M is at most


@dataclass(frozen=True)
class Spread:
    """What groups had of the rows of some calls."""

    shares: tuple[float, ...]  # of all rows, the largest first, on average over the calls; they add up to 1
    samples: int  # how many calls

    def joined(self, other: Spread | None) -> Spread:
        """Return the spread of these calls and others; of these alone where the others had another number of groups."""
        if other is None or len(other.shares) != len(self.shares):
            return self
        both = self.samples + other.samples
        pairs = zip(self.shares, other.shares, strict=True)
        return Spread(tuple((a * self.samples + b * other.samples) / both for a, b in pairs), both)


def range_of(groups: int, rows: int) -> Range:
    """Return the range that a number of rows belongs to."""
    return groups, min((rows - 1).bit_length(), _RANGES - 1)


class GroupSpreads:
    """The spreads of one process that are not written yet."""

    def __init__(self) -> None:
        self.in_graph = False  # a graph is captured that will be given the memory that it writes to
        self._samples: dict[tuple[int, bool], _Samples] = {}
        self._devices: set[int] = set()
        self._unwritten: dict[Range, Spread] = {}

    @property
    def memory(self) -> list[Tensor]:
        """What graphs that were captured write to: it must live as long as they do."""
        return [samples.memory for samples in self._samples.values()]

    def note(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], where: Range) -> None:
        """Have one call's ends of groups copied, unless enough of its range wait to be read."""
        if torch._C._len_torch_dispatch_stack():  # someone watches what is run, and this is none of the program's
            return
        # The program's call succeeded, whatever happens here.
        with suppress(RuntimeError, AttributeError, TypeError, LookupError):
            assigned = _assignment_of(operation, args, kwargs)
            in_graph = assigned.is_cuda and torch.cuda.is_current_stream_capturing()
            if in_graph and not self.in_graph:
                return
            samples = self._of(where[0], assigned.is_cuda, in_graph)
            slot = samples.next_slot(where[1], in_graph) if samples else None
            if slot is not None:
                slot.copy_(_ends(operation, assigned, where[0]), non_blocking=True)
            if assigned.is_cuda:
                self._devices.add(assigned.get_device())

    def read(self) -> dict[Range, Spread]:
        """Return what was found since `clear`, with what has arrived by now."""
        for (groups, _), samples in list(self._samples.items()):
            for power, spread in samples.read():
                self._unwritten[groups, power] = spread.joined(self._unwritten.get((groups, power)))
        return dict(self._unwritten)

    def clear(self) -> None:
        """Forget what `read` gave, as it is written."""
        self._unwritten.clear()

    def wait(self) -> None:
        """Wait, but not for long, until the GPUs' current streams are done."""
        late = time.monotonic() + _ARRIVE_SECONDS
        with suppress(RuntimeError):  # a GPU that failed answers nothing more
            for device in self._devices:
                with torch.cuda.device(device):
                    if torch.cuda.is_current_stream_capturing():
                        continue
                    done = torch.cuda.Event()
                    done.record()
                while not done.query() and time.monotonic() < late:
                    time.sleep(_LOOK_SECONDS)

    def _of(self, groups: int, on_gpu: bool, in_graph: bool) -> _Samples | None:
        """Return the memory of a number of groups; None where it is not there, and can't be had now."""
        found = self._samples.get((groups, on_gpu))
        if found is None and not in_graph and len(self._samples) < _MOST_KINDS:
            found = self._samples.setdefault((groups, on_gpu), _Samples(groups, on_gpu))
        return found


class _Samples:
    """Ends of groups of the newest calls, by ranges of M."""

    def __init__(self, groups: int, on_gpu: bool) -> None:
        with torch.inference_mode(False):
            self.memory = torch.zeros(_RANGES, _SLOTS, groups, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
            self._slots = [list(slots) for slots in self.memory]
        self._numbers = self.memory.numpy()
        self._seen = self._numbers.copy()
        self._waiting, self._next = [0] * _RANGES, [0] * _RANGES

    def next_slot(self, power: int, in_graph: bool) -> Tensor | None:
        """Return where the ends of a call of a range go; None where all slots wait to be read. Graphs share slots."""
        if not in_graph and self._waiting[power] >= _SLOTS:
            return None
        self._waiting[power] += not in_graph
        self._next[power] = (self._next[power] + 1) % _SLOTS
        return self._slots[power][self._next[power]]

    def read(self) -> Iterable[tuple[int, Spread]]:
        """Yield the spread of what is new, of each range that has anything new.

        A copy may be under way, which mixes the ends of two calls; what can't be ends is passed over.
        """
        now = self._numbers.copy()
        changed = (now != self._seen).any(-1)
        self._seen, self._waiting = now, [0] * _RANGES
        for power in np.flatnonzero(changed.any(-1)).tolist():
            counts = np.diff(now[power, changed[power]], prepend=0, axis=-1)
            rows = counts.sum(-1)
            counts = counts[(counts >= 0).all(-1) & (rows > 0) & (rows <= 2**power)]
            if len(counts):
                shares = -np.sort(-counts / counts.sum(-1, keepdims=True), axis=-1)
                yield power, Spread(tuple(shares.mean(0).tolist()), len(counts))


def _assignment_of(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the argument that says which rows are whose."""
    name, place = {"tritongemm.fused_moe": ("topk_ids", 4), "_scaled_grouped_mm": ("offs", 4)}.get(
        operation, ("offs", 2)
    )
    found: Tensor = kwargs[name] if name in kwargs else args[place]
    return found


def _ends(operation: str, assigned: Tensor, groups: int) -> Tensor:
    """Return the row behind the last of each group; for ids of experts those of the sorted rows."""
    if operation != "tritongemm.fused_moe":
        return assigned
    # Ids of no expert are counted apart, and left out; what is no number of groups at all is not counted.
    counts = torch.histc(assigned.reshape(-1).float(), bins=groups + 1, min=0, max=groups + 1)[:groups]
    return counts.cumsum(0).to(torch.int32)
