"""What a GPU's process works with: the request, the operands of one problem in copies, and candidates made ready."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritongemm.core.config import Config
from tritongemm.core.errors import DriverError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.operands import Operands
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.measure.jobs import Request
from tritongemm.plugins import _modules as registry
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import Family, LibraryBackend
from tritongemm.runtime.zeroed_launch import ZeroedLaunch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNED = 512  # bytes; what an allocator gives


def side_by_side(tensors: Operands, count: int) -> list[Operands]:
    """So many copies of all tensors in one piece of memory.

    Where operands lie is worth up to 4 % of a time on an H200, and pieces of an allocator lie elsewhere in each process.
    """
    import torch

    sizes = [-(-t.numel() * t.element_size() // ALIGNED) * ALIGNED for t in tensors.values()]
    slab = torch.empty(count * sum(sizes), dtype=torch.uint8, device=tensors["a"].device)
    places = iter(slab.split(sizes * count))

    def copied(tensor: Tensor) -> Tensor:
        place = next(places)[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return place.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    return [{name: copied(tensor) for name, tensor in tensors.items()} for _ in range(count)]


class LibraryRefusal(Exception):
    """A library has no kernel for the problem."""


@dataclass(frozen=True)
class PreparedCandidate:
    """A candidate made ready.

    Attributes:
        operations: one call for each set of operands.
        module: loaded code, to give back.
        symbol: kernel that each call is one dispatch of; "" where a library decides, or memory is set to zero before.
    """

    operations: list[Callable[[], object]]
    module: driver.Module | None = None
    symbol: str = ""

    def repeated(self, launches: int) -> list[Callable[[], object]]:
        """So many calls, going round the sets of operands."""
        return [self.operations[i % len(self.operations)] for i in range(launches)]

    def release(self) -> None:
        if self.module is not None:
            self.module.unload()


class LeadInKernel:
    """What runs before each sample: it reads memory on the whole device.

    The host's way to the graph is then not in the sample. And some of cuBLAS's kernels have two speeds up to a tenth apart
    and keep one of them until other kernels run in between: with one before each sample, more gains were found again
    in another process.

    Args:
        place: torch device.
    """

    def __init__(self, place: Any) -> None:
        import torch

        self._rows = torch.zeros((1 << 16, 256), device=place)
        self._sums = torch.empty(1 << 16, device=place)

    def __call__(self) -> None:
        import torch

        torch.sum(self._rows, 1, out=self._sums)


class OperandSets:
    """Operands of one problem on one device, in as many copies as it takes to keep them out of the cache.

    Args:
        request: names problem, target, protocol and device.
        device: the device.
        stream: handle of the stream all work runs on.
    """

    MOST_COPIES = 256
    DENSE = 0.25  # arithmetic's time over memory's, at the data sheet's rates

    def __init__(self, request: Request, device: driver.Device, stream: int) -> None:
        import torch

        problem, protocol = request.problem, request.protocol
        self.problem, self.device, self.stream = problem, device, stream
        self.family = plugins.get(Family, problem.family)
        self.protocol = protocol
        place = f"cuda:{request.device}"
        operands: Operands = self.family.make_inputs(problem, place, protocol.init, protocol.seed)
        a, b = operands["a"], operands["b"]
        c = torch.empty((problem.m, problem.n), dtype=getattr(torch, problem.c.torch), device=place)
        one_set = sum(t.numel() * t.element_size() for t in (a, b, c))
        room = int(device.memory()[0] * 0.5) // one_set
        wanted = math.ceil(protocol.rotation_bytes(request.target) / one_set) + 1
        self.copies: int = max(1, min(wanted, room, self.MOST_COPIES))
        self.cold = self.copies * one_set > request.target.llc_bytes
        # Vectors are small, and a library's plan may hold their addresses: all sets share them.
        self.sets: list[Operands] = [operands | copy for copy in side_by_side({"a": a, "b": b, "c": c}, self.copies)]
        self._held: int = self.copies * one_set
        self._scratch: dict[str, Any] = {}
        self._exact: Any = None
        # Dense arithmetic draws more than a GPU's power limit: after some 50 ms of it the clock falls by a fifth, for one
        # kernel more than for another, and the order of the race decides who is measured when.
        arithmetic = request.target.roofline_seconds(problem.flops, 0, problem.a)
        self._draws = arithmetic > self.DENSE * request.target.roofline_seconds(0, problem.bytes, problem.a)
        # One launch's worth of time decides how many share a graph.
        self.floor = request.target.roofline_seconds(problem.flops, problem.bytes, problem.a) + 1e-6

    @cached_property
    def timer(self) -> Any:
        """The clock of the race."""
        return self._clock(self.protocol.timer)

    @cached_property
    def screener(self) -> tuple[Any, str]:
        """The clock of the screen and its label: the race's own, or the one it names in its place."""
        name = getattr(registry.load("timers", self.protocol.timer), "SCREEN", self.protocol.timer)
        own = name == self.protocol.timer
        return self.timer if own else self._clock(name), registry.load("timers", name).LABEL

    def _clock(self, name: str) -> Any:
        return registry.load("timers", name).Timer(self.device, self.stream)

    @property
    def bytes(self) -> int:
        """Of the device's memory that this holds by now."""
        others = [*self._scratch.values(), *([] if self._exact is None else [self._exact])]
        more: int = sum(t.numel() * t.element_size() for t in others)
        return self._held + more

    @property
    def exact(self) -> Any:
        """The float64 reference, computed once."""
        if self._exact is None:
            self._exact = self.family.reference(self.problem, self.sets[0])
        return self._exact

    def scratch(self, name: str, nbytes: int) -> int:
        """Address of the workspace (NaN at first) or the counters (zero), grown to `nbytes`."""
        import torch

        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes:
            fill = 0 if name == "semaphore" else 0xFF
            held = torch.full((max(nbytes, 256),), fill, dtype=torch.uint8, device=self.sets[0]["a"].device)
            torch.cuda.synchronize()
            self._scratch[name] = held
        address: int = held.data_ptr()
        return address

    def provide(self, launches: Iterable[Launch | HostLaunch | None]) -> None:
        """Make the memory that launches share large enough for each: a captured graph holds its address for good."""
        import torch

        wanted = {(b.bytes, b.name) for launch in launches if launch for b in launch.buffers}
        for nbytes, name in sorted(wanted, reverse=True):
            with suppress(torch.cuda.OutOfMemoryError):  # who asks for too much is told when its turn comes
                self.scratch(name, nbytes)

    def addresses(self, launch: Launch | HostLaunch, copy: int) -> dict[str, int]:
        """Device addresses of a launch's buffers, with the operands of one copy."""
        found = {name: tensor.data_ptr() for name, tensor in self.sets[copy].items()}
        return found | {buffer.name: self.scratch(buffer.name, buffer.bytes) for buffer in launch.buffers}

    def calls(self, config: Config, launch: Launch | HostLaunch | None, copies: int) -> PreparedCandidate:
        """A candidate's calls on the first `copies` sets of operands.

        Raises:
            DriverError: the driver refuses its code or its launch.
            UnavailableError: a library it is in does not load.
            LibraryRefusal: the library has no kernel for the problem.
        """
        if "semaphore" in self._scratch:
            self._scratch["semaphore"].zero_()  # whatever a faulty candidate left there must not meet the next
        if launch is None:
            backend = plugins.get(LibraryBackend, config.backend)
            operations = [backend.operation(self.problem, operands, config) for operands in self.sets[:copies]]
            prepared = [operation for operation in operations if operation is not None]
            if len(prepared) < len(operations):
                raise LibraryRefusal(f"{config.backend} has no kernel for {self.problem.key}")
            return PreparedCandidate(prepared)
        if isinstance(launch, HostLaunch):
            prepared_calls = [PreparedCall(launch, self.addresses(launch, copy)) for copy in range(copies)]
            return PreparedCandidate([partial(call.launch, self.stream) for call in prepared_calls])
        module = self.device.load(Path(launch.path).read_bytes())
        try:
            function = module.function(launch.symbol)
            prepared = [self._prepared(launch, function, copy) for copy in range(copies)]
        except BaseException:
            module.unload()
            raise
        starts = [self._zeroed(launch, copy, one.launch) for copy, one in enumerate(prepared)]
        symbol = "" if launch.zeroed else launch.symbol  # a fill of memory may be a dispatch of another kernel
        return PreparedCandidate([partial(start, self.stream) for start in starts], module, symbol)

    def _zeroed(self, launch: Launch, copy: int, start: Callable[[int], None]) -> Callable[[int], None]:
        """A launch after what it adds into has been set to zero."""
        if not launch.zeroed:
            return start
        zeroed, addresses = ZeroedLaunch(self.device, launch.zeroed, start), self.addresses(launch, copy)
        for buffer in launch.zeroed:
            zeroed.set_address(buffer.name, addresses[buffer.name])
        return zeroed

    def _prepared(self, launch: Launch, function: driver.Function, copy: int) -> driver.PreparedLaunch:
        addresses = self.addresses(launch, copy)
        maps = {
            i: self.device.tensor_map(
                addresses[str(p.value)], p.elem_type, p.elem_size, p.shape, p.stride, p.box, p.swizzle
            )
            for i, p in enumerate(launch.params)
            if p.kind == "tma"
        }
        params = launch.pack(addresses, maps)
        return function.prepare(
            launch.grid, launch.block, launch.shared, params, launch.cluster, overlap=launch.overlap
        )

    def release(self, calls: PreparedCandidate) -> None:
        """Give back a candidate's code, unless the clock needs all code to stay."""
        if not getattr(registry.load("timers", self.protocol.timer), "KEEPS_CODE", False):
            calls.release()

    def capture(self, calls: list[Callable[[], object]]) -> driver.Graph:
        """A graph of the calls, which launch on this bench's stream."""
        self.device.begin_capture(self.stream)
        try:
            for call in calls:
                call()
        except BaseException:
            with suppress(DriverError):  # that the capture failed is no news
                self.device.end_capture(self.stream).destroy()
            raise
        return self.device.end_capture(self.stream)

    def rest(self, seconds: float) -> None:
        """Idle as long as the GPU was just busy, where it would slow down otherwise: times are those of its full clock."""
        if self._draws:
            time.sleep(seconds)

    def launches_for(self, seconds: float, most: int, spared: int = 0) -> int:
        """Launches of one graph: enough to fill `seconds`, and to pass through the copies but for those `spared`."""
        return max(1, min(max(int(seconds / self.floor), min(self.copies - spared, most)), most))
