"""The operands of one problem on a device, in copies, and the candidates that are prepared to run on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.epilogues import RESIDUAL
from tritongemm.core.errors import DriverError
from tritongemm.core.group_rows import group_ends
from tritongemm.core.integers import round_up
from tritongemm.core.launch import Buffer, HostLaunch, Launch
from tritongemm.core.operands import Call, Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.hip_ext.launching.patched_launch import ZeroedLaunch, prepare_launch, tensor_map_makers
from tritongemm.measure.guarded_operands import GuardedOperands
from tritongemm.measure.jobs import LaunchCandidate, MeasureSetup
from tritongemm.numerics import shared_rows
from tritongemm.numerics.grouped import one_group
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Clock, Family, LibraryBackend, Timer

ALIGNMENT_BYTES = 512  # An allocator gives memory at multiples of it.
_WEIGHTS = ("b", "scale_b")  # operands that do not depend on M


def side_by_side(tensors: Operands, count: int) -> list[Operands]:
    """Return the tensors of `count` copies, in one piece of memory.

    Placement changes times by up to 4 % on an H200, and each process places separate allocations differently.
    """
    import torch

    sizes = [round_up(t.numel() * t.element_size(), ALIGNMENT_BYTES) for t in tensors.values()]
    slab = torch.empty(count * sum(sizes), dtype=torch.uint8, device=next(iter(tensors.values())).device)
    pieces = iter(slab.split(sizes * count))

    def copied(tensor: Tensor) -> Tensor:
        piece = next(pieces)[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return piece.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    return [{name: copied(tensor) for name, tensor in tensors.items()} for _ in range(count)]


def _allocate_in(pool: Any, call: Call) -> object:
    """Return what a library returns while PyTorch's allocations are of a pool: its result, where it allocates that."""
    import torch

    with torch.cuda.use_mem_pool(pool):
        return call()


class LibraryRefusal(Exception):
    """A library has no kernel for the problem."""


@dataclass(frozen=True)
class PreparedCandidate:
    """A candidate that is ready to run."""

    calls: list[Call]  # its launch functions, one for each set of operands
    module: driver.Module | None = None  # its loaded code, to be unloaded; None if a library holds the code
    # Name of the kernel that each call dispatches once; "" if a library decides, or memory is zeroed before it.
    symbol: str = ""

    def in_turn(self, launches: int) -> list[Call]:
        """Return `launches` calls, cycling through the sets of operands."""
        return [self.calls[i % len(self.calls)] for i in range(launches)]

    def unload(self) -> None:
        """Unload its code from the device, unless it is a library's."""
        if self.module is not None:
            self.module.unload()


class LeadInKernel:
    """The kernel that runs before each sample: it reads memory on the entire device.

    It hides the host's launch latency from the sample. Also, some of cuBLAS's kernels have two speeds up to a tenth
    apart, and keep one of them until other kernels run in between: with a lead-in kernel before each sample, more gains
    were reproduced in another process.
    """

    def __init__(self, torch_device: Any) -> None:
        import torch

        self._rows = torch.zeros((1 << 16, 256), device=torch_device)
        self._sums = torch.empty(1 << 16, device=torch_device)

    def __call__(self) -> None:
        """Queue it on the current stream."""
        import torch

        torch.sum(self._rows, 1, out=self._sums)


def _wanted_copies(setup: MeasureSetup) -> int:
    """Return the number of copies needed to rotate through as much memory as the protocol requires."""
    wanted = math.ceil(setup.protocol.rotation_bytes(setup.target) / setup.problem.bytes) + 1
    return max(1, min(wanted, OperandSets.MAX_COPIES))


def _shares_weights(setup: MeasureSetup) -> bool:
    """Return whether the weights of all groups are out of the cache without copies of them."""
    problem = setup.problem
    enough = problem.groups is not None and _weight_bytes(problem) >= setup.protocol.rotation_bytes(setup.target)
    extras = {e.name for e in problem.extras} <= {problem.group_operand, "scale_a", "scale_b"}
    return enough and extras and not problem.masked


def _weight_bytes(problem: Problem) -> int:
    """Return the bytes of B and its scale factors, of all groups."""
    specs = (spec for name, spec in problem.operands.items() if name in _WEIGHTS)
    return sum(spec.count * spec.dtype.bytes // spec.dtype.packed for spec in specs)


class OperandSets:
    """The operands of one problem on one device, in as many copies as it takes to keep them out of the cache.

    All work runs on `stream`. The first rows of `taller` operands are used, as `can_narrow` allows, instead of new
    ones, or the weights of `alike` ones, as `has_weights_of` allows.
    """

    MAX_COPIES = 256
    # A problem heats the device when its arithmetic takes this share of the time that its memory traffic takes, both
    # at the rates of the data sheet.
    HEATING_ARITHMETIC_RATIO = 0.25

    def __init__(
        self,
        setup: MeasureSetup,
        device: driver.Device,
        stream: int,
        taller: OperandSets | None = None,
        alike: OperandSets | None = None,
    ) -> None:
        problem, protocol, target = setup.problem, setup.protocol, setup.target
        self.problem, self.device, self.stream = problem, device, stream
        self.family = registry.get(Family, problem.family)
        self.protocol = protocol
        set_bytes = problem.bytes
        self._shares_weights = taller is None and _shares_weights(setup)
        own_bytes = problem.held_bytes - (_weight_bytes(problem) if self._shares_weights else 0)
        if taller is None:
            room = int(device.memory()[0] * 0.5) // own_bytes
            self.copies: int = max(1, min(_wanted_copies(setup), room, self.MAX_COPIES))
            self.sets: list[Operands] = self._new_sets(setup.device, alike)
        else:
            self.copies = _wanted_copies(setup)
            rows = {name: problem.operands[name].shape[0] for name in ("a", "c")}
            first_rows = [{name: of[name][:m] for name, m in rows.items()} for of in taller.sets[: self.copies]]
            self.sets = [of | cut for of, cut in zip(taller.sets, first_rows, strict=False)]
        self.cold = self.copies * set_bytes > target.llc_bytes
        self._operand_bytes: int = self.copies * own_bytes
        self._buffers: dict[str, Tensor] = {}
        self._reference: Tensor | None = None if taller is None else taller.reference[: problem.m]
        # Much arithmetic draws more than a GPU's power limit: after some 50 ms of it the clock falls by a fifth, for
        # one kernel more than for another, and the order of the race decides what is measured when.
        arithmetic_s = target.roofline_seconds(problem.flops, 0, problem.a.type)
        traffic_s = target.roofline_seconds(0, problem.bytes, problem.a.type)
        heats = arithmetic_s > self.HEATING_ARITHMETIC_RATIO * traffic_s
        self.sustained, self._rests = heats and protocol.sustained, heats and not protocol.sustained
        self.rotation_bytes = protocol.rotation_bytes(target)
        self._target = target
        self._least_s = target.roofline_seconds(problem.flops, problem.bytes, problem.a.type) + 1e-6

    def can_narrow(self, setup: MeasureSetup) -> bool:
        """Say whether the first rows of A and C, and all of B, can serve another problem, in enough copies."""
        problem, mine = setup.problem, self.problem
        if not (mine.a.row_major and mine.kind == "one" and all(e.name == "bias" for e in mine.extras)):
            return False
        if mine.bias == "m" or mine.epilogue == RESIDUAL or problem.m > mine.m or problem != replace(mine, m=problem.m):
            return False
        return setup.protocol == self.protocol and _wanted_copies(setup) <= self.copies

    def has_weights_of(self, setup: MeasureSetup) -> bool:
        """Say whether another M of the same groups can have B and its scale factors from here."""
        problem, mine = setup.problem, self.problem
        return self._shares_weights and setup.protocol == self.protocol and problem.at(mine.m) == mine.at(mine.m)

    @property
    def weights(self) -> Operands:
        """Return B and its scale factors where all sets share them, and other M may."""
        return {name: self.sets[0][name] for name in _WEIGHTS if name in self.sets[0]} if self._shares_weights else {}

    def _new_sets(self, device: int, alike: OperandSets | None) -> list[Operands]:
        """Return new random operands, in `copies` copies."""
        import torch

        problem, place = self.problem, f"cuda:{device}"
        made = one_group(problem, problem.rows) if alike else problem
        operands: Operands = self.family.make_inputs(made, place, self.protocol.init, self.protocol.seed)
        operands = operands | (alike.weights if alike else {})
        c = torch.empty(problem.operands["c"].extents, dtype=getattr(torch, problem.c.type.torch), device=place)
        # Vectors are small, and a library's plan may hold their addresses: all sets share them.
        copied = {"a": operands["a"]} | ({} if self._shares_weights else {"b": operands["b"]}) | {"c": c}
        copied |= {"bias": operands["bias"]} if problem.epilogue == RESIDUAL else {}
        sets = [operands | copy for copy in side_by_side(copied, self.copies)]
        if self._shares_weights:  # each launch reads the weights of other groups, which are in no cache
            counts = problem.row_counts
            order = sorted(range(len(counts)), key=lambda group: counts[group] == 0)  # those with rows come first
            step = max(sum(map(bool, counts)), len(counts) // self.copies)
            for number, one in enumerate(sets):
                shift = number * step % len(counts)
                rows = {group: counts[of] for of, group in zip(order, (*order[shift:], *order[:shift]), strict=True)}
                turned = group_ends([rows[group] for group in range(len(counts))])
                one[problem.group_operand] = torch.tensor(turned, dtype=torch.int32, device=place)
        return sets

    @cached_property
    def race_clock(self) -> Clock:
        """The clock of the race."""
        return self._timer.clock(self.device, self.stream)

    @cached_property
    def screen_clock(self) -> tuple[Clock, str]:
        """The clock of the screen and its label: the race's own, or the one that the race's timer names instead."""
        name = self._timer.screens_with
        if not name:
            return self.race_clock, self._timer.label
        timer = registry.get(Timer, name)
        return timer.clock(self.device, self.stream), timer.label

    @property
    def _timer(self) -> Timer:
        timer: Timer = registry.get(Timer, self.protocol.timer)
        return timer

    @property
    def bytes(self) -> int:
        """Bytes of device memory in use by this object."""
        others = [*self._buffers.values(), *([] if self._reference is None else [self._reference])]
        return self._operand_bytes + sum(int(t.numel() * t.element_size()) for t in others)

    @property
    def reference(self) -> Tensor:
        """Return the float64 result, computed once."""
        if self._reference is None:
            self._reference = self.family.reference(self.problem, self.sets[0])
        return self._reference

    @cached_property
    def shared_rows(self) -> Operands:
        """Operands with few rows of A at many places."""
        return shared_rows.make_operands(self.problem, str(self.sets[0]["a"].device))

    def buffer_address(self, name: str, nbytes: int) -> int:
        """Return the address of the workspace (initially NaN) or the counters (initially zero), grown to `nbytes`."""
        import torch

        held = self._buffers.get(name)
        if held is None or held.numel() < nbytes:
            fill = Buffer(name, nbytes).fill
            held = torch.full((max(nbytes, 256),), fill, dtype=torch.uint8, device=self.sets[0]["a"].device)
            torch.cuda.synchronize()
            self._buffers[name] = held
        return int(held.data_ptr())

    def reserve_buffers(self, launches: Iterable[Launch | HostLaunch | None]) -> None:
        """Grow the shared buffers to the largest launch: a captured graph keeps their addresses."""
        import torch

        wanted = {(b.bytes, b.name) for launch in launches if launch for b in launch.buffers}
        for nbytes, name in sorted(wanted, reverse=True):
            # A launch that needs more than there is is refused in its turn.
            with suppress(torch.cuda.OutOfMemoryError):
                self.buffer_address(name, nbytes)

    def _addresses(self, launch: Launch | HostLaunch, tensors: Operands) -> dict[str, int]:
        """Return the device addresses of a launch's buffers, with these operands."""
        operands = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        return operands | {buffer.name: self.buffer_address(buffer.name, buffer.bytes) for buffer in launch.buffers}

    def prepare(self, candidate: LaunchCandidate, copies: int) -> PreparedCandidate:
        """Prepare a candidate on the first `copies` sets of operands.

        Raises:
            DriverError: the driver refuses its code or its launch.
            UnavailableError: a library that it needs does not load.
            LibraryRefusal: the library has no kernel for the problem.
        """
        if "semaphore" in self._buffers:
            self._buffers["semaphore"].zero_()  # counters that a faulty candidate left must not affect the next
        config, launch = candidate.config, candidate.launch
        if launch is None:
            calls = self.library_calls(config.backend, copies, config)
            if not calls:
                raise LibraryRefusal(f"{config.backend} has no kernel for {self.problem.key}")
            return PreparedCandidate(calls)
        return self._prepared(launch, [self._addresses(launch, one) for one in self.sets[:copies]])

    def prepare_guarded(self, candidate: LaunchCandidate, guarded: GuardedOperands) -> PreparedCandidate | None:
        """Prepare a candidate that `prepare` took on guarded copies; None for a library's, or without memory for it."""
        if candidate.launch is None:
            return None
        addresses = guarded.addresses(candidate.launch.buffers)
        return self._prepared(candidate.launch, [addresses]) if addresses else None

    def prepare_shared_rows(self, candidate: LaunchCandidate) -> PreparedCandidate:
        """Prepare a candidate that `prepare` took on operands of equal rows, `shared_rows`; errors are those."""
        config, launch = candidate.config, candidate.launch
        if launch is None:
            call = registry.get(LibraryBackend, config.backend).operation(self.problem, self.shared_rows, config)
            if call is None:
                raise LibraryRefusal(f"{config.backend} has no kernel for {self.problem.key}")
            return PreparedCandidate([call])
        return self._prepared(launch, [self._addresses(launch, self.shared_rows)])

    def _prepared(self, launch: Launch | HostLaunch, places: list[dict[str, int]]) -> PreparedCandidate:
        """Return a launch with its code loaded, once for each dictionary of the addresses of its buffers."""
        if isinstance(launch, HostLaunch):
            host_calls = [PreparedCall(launch, addresses) for addresses in places]
            return PreparedCandidate([partial(call.launch, self.stream) for call in host_calls])
        module = self.device.load(launch.read_code())
        try:
            function, makers = module.function(launch.symbol), tensor_map_makers(self.device, launch)
            prepared = [prepare_launch(function, launch, makers, addresses) for addresses in places]
        except BaseException:
            module.unload()
            raise
        starts = [self._zeroed(launch, *each) for each in zip(places, (one.launch for one in prepared), strict=True)]
        symbol = "" if launch.zeroed else launch.symbol  # A fill of memory may be a dispatch of another kernel.
        return PreparedCandidate([partial(start, self.stream) for start in starts], module, symbol)

    def _zeroed(self, launch: Launch, addresses: dict[str, int], start: Callable[[int], None]) -> Callable[[int], None]:
        """Return a launch that begins by setting the buffers to zero that the kernel adds into."""
        if not launch.zeroed:
            return start
        zeroed = ZeroedLaunch(self.device, launch.zeroed, start)
        for buffer in launch.zeroed:
            zeroed.set_address(buffer.name, addresses[buffer.name])
        return zeroed

    def library_calls(self, backend: str, copies: int, config: Config | None = None) -> list[Call]:
        """Return a library's calls on the first `copies` sets of operands; none if it has no kernel for the problem.

        What they allocate stays theirs: a graph of them writes to it again, whatever PyTorch would have there by then.
        """
        import torch

        library = registry.get(LibraryBackend, backend)
        operations = [library.operation(self.problem, operands, config) for operands in self.sets[:copies]]
        calls = [operation for operation in operations if operation is not None]
        own = torch.cuda.MemPool() if calls and self.sets[0]["a"].is_cuda else None
        return [partial(_allocate_in, own, call) for call in calls] if own else calls

    def capture(self, calls: list[Call]) -> driver.Graph:
        """Capture the calls in a graph, which launch on the stream of these operands."""
        self.device.begin_capture(self.stream)
        try:
            for call in calls:
                call()
        except BaseException:
            with suppress(DriverError):  # The call's own failure is raised, not that of the capture.
                self.device.end_capture(self.stream).destroy()
            raise
        return self.device.end_capture(self.stream)

    def rest(self, busy_s: float) -> None:
        """Idle for as long as the GPU was just busy, if its clock would drop otherwise and is not to."""
        if self._rests:
            time.sleep(busy_s)

    def traffic_seconds(self, nbytes: int) -> float:
        """Return the shortest time of a kernel that moves this many bytes, in seconds."""
        return self._target.roofline_seconds(0, nbytes, self.problem.a.type) + 1e-6

    def launches_for(self, seconds: float, most: int, spared: int = 0) -> int:
        """Return the number of launches in one graph: to pass through all but `spared` copies, and fill `seconds`.

        The seconds are those of a replay if each launch takes its shortest time.
        """
        return max(1, min(max(int(seconds / self._least_s), min(self.copies - spared, most)), most))
