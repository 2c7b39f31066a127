"""A competitor made ready → verified, captured, and timed against the others of one size."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

from competitors import Ready, Refused, Setting
from tritongemm.measure.operand_sets import LeadInKernel, OperandSets
from tritongemm.numerics import verify

WARMUP = 3
HEAD_CLOCKS = 150_000  # the device waits this long before a sample, so that the host is never late


class Eager:
    """Stands in for a graph where calls can't be captured."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._calls = calls

    def launch(self, stream: int = 0) -> None:
        for call in self._calls:
            call()

    def destroy(self) -> None:
        pass


@dataclass
class Entry:
    """A competitor in the race.

    Attributes:
        name: of the competitor.
        ready: what it brought.
        graph: its captured calls, or what stands in for them.
        launches: in one graph.
        how: ``graph``, or ``events`` with the reason why it could not be captured.
        error, tolerance: deviation from float64, and the largest allowed.
        pool: memory its captured calls allocate from; no other tensor may get it while the graph lives.
        samples: seconds of one launch.
    """

    name: str
    ready: Ready
    graph: Any
    launches: int
    how: str
    error: float
    tolerance: float
    pool: Any
    samples: list[float] = field(default_factory=list)

    def release(self) -> None:
        self.graph.destroy()
        self.ready.release()


def enter(setting: Setting, name: str, ready: Ready, seconds: float) -> Entry:
    """Verify a competitor and capture its calls.

    Args:
        setting: the size.
        name: of the competitor.
        ready: what it brought.
        seconds: one graph takes at the roofline; it holds full passes through the copies.

    Raises:
        Refused: its result is wrong.
    """
    bench = setting.bench
    launches = bench.copies * ceil(bench.launches_for(seconds, OperandSets.MAX_COPIES) / bench.copies)
    try:
        with ready.scope():
            found = verified(setting, ready.calls[0])
            if not found.ok:
                raise Refused(f"wrong: {found.reason}")
            graph, how, pool = captured(bench, ready.calls, launches)
    except BaseException:
        ready.release()
        raise
    return Entry(name, ready, graph, launches, how, found.error, found.tolerance, pool)


def verified(setting: Setting, call: Callable[[], object]) -> verify.VerifyResult:
    """A call's error against float64."""
    import torch

    c = setting.bench.sets[0]["c"]

    def run() -> None:
        result = call()
        if isinstance(result, torch.Tensor) and result.data_ptr() != c.data_ptr():
            c.copy_(result)
        torch.cuda.synchronize()

    return verify.verify(setting.problem, setting.bench.family, run, c, setting.bench.reference)


def captured(bench: OperandSets, calls: Sequence[Callable[[], object]], launches: int) -> tuple[Any, str, Any]:
    """A graph of `launches` launches, going round the copies; a stand-in and the reason where that fails."""
    import torch

    pool = torch.cuda.MemPool()
    # Outputs that a call allocates take turns as those of the other competitors do.
    held: deque[object] = deque(maxlen=bench.copies)

    def keep(call: Callable[[], object]) -> None:
        held.append(call())

    try:
        with torch.cuda.use_mem_pool(pool):
            for i in range(bench.copies + 1):  # all memory a capture will ask for
                keep(calls[i % len(calls)])
            held.clear()
            torch.cuda.synchronize()
            graph = bench.capture([partial(keep, calls[i % len(calls)]) for i in range(launches)])
            held.clear()
        return graph, "graph", pool
    except Exception as error:
        held.clear()
        torch.cuda.synchronize()
        repeated = [calls[i % len(calls)] for i in range(launches)]
        return Eager(repeated), f"events: not captured: {reason(error)}", None


def race(bench: OperandSets, entries: Sequence[Entry], rounds: int, seed: int) -> None:
    """Time the entries, in rounds of a new random order each."""
    import torch

    order, head = random.Random(seed), LeadInKernel(bench.sets[0]["a"].device)
    for round_ in range(-WARMUP, rounds):
        for entry in order.sample(list(entries), len(entries)):
            with entry.ready.scope():
                head()
                torch.cuda._sleep(HEAD_CLOCKS if entry.how == "graph" else HEAD_CLOCKS * (1 + entry.launches // 2))
                seconds = bench.race_clock.time(entry.graph, entry.launches)
            bench.rest(seconds * entry.launches)
            if round_ >= 0:
                entry.samples.append(seconds)


def reason(error: BaseException) -> str:
    """An exception in one line."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]
