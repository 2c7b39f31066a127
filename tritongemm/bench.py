"""The GPU's own process: buffers, screening, verification and the final race of one device.

It may die: an illegal access or a hang ends it, the parent starts another and goes on with the next candidate.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tritongemm import choose, registry, verify
from tritongemm.config import Config
from tritongemm.errors import DriverError
from tritongemm.hip_ext import driver
from tritongemm.launch import Launch
from tritongemm.problem import Problem
from tritongemm.target import Target
from tritongemm.trial import Trial

# After these the context is lost; everything else is the candidate's own refusal.
FATAL = ("ILLEGAL", "MISALIGNED", "LAUNCH_FAILED", "LAUNCH_FAILURE", "INVALID_PC", "HARDWARE", "ASSERT", "UNKNOWN")


@dataclass(frozen=True)
class Protocol:
    """How measurements are taken; trials of different protocols are not compared.

    Attributes:
        timer: plug-in of timers/.
        init: distribution of the operands.
        rotating_mb: operands rotate through this much memory; negative for three times the last-level cache.
        iters: timed launches of a finalist at least.
        warmup: launches before them.
        seed: of the operands.
    """

    timer: str = "events"
    init: str = "randn"
    rotating_mb: int = -1
    iters: int = 200
    warmup: int = 20
    seed: int = 0

    def rotation_bytes(self, target: Target) -> int:
        return 3 * target.llc_bytes if self.rotating_mb < 0 else self.rotating_mb * 2**20


@dataclass(frozen=True)
class Request:
    """Work for the GPU's process.

    Attributes:
        kind: ``screen`` (cheap times, one answer each), ``check`` (errors) or ``final`` (errors, then one race of those
            that pass).
        problem, target, protocol, vendor, device: where and how.
        candidates: what to launch.
        library: plug-in of backends/ that races with them, for ``final``.
        best: seconds of the best screened so far; a candidate twice as slow is not measured further.
    """

    kind: str
    problem: Problem
    target: Target
    protocol: Protocol
    vendor: str
    device: int
    candidates: tuple[tuple[Config, Launch], ...]
    library: str = ""
    best: float = math.inf


@dataclass
class Contender:
    """A candidate made ready to race."""

    name: str
    graph: driver.Graph
    launches: int
    module: driver.Module | None = None
    samples: list[float] = field(default_factory=list)


class Workbench:
    """Operands of one problem on one device, in as many copies as it takes to keep them out of the cache.

    Args:
        request: names problem, target, protocol and device.
        device: the device.
        stream: handle of the stream all work runs on.
    """

    MOST_COPIES = 256

    def __init__(self, request: Request, device: driver.Device, stream: int) -> None:
        import torch

        problem, protocol = request.problem, request.protocol
        self.problem, self.device, self.stream = problem, device, stream
        self.family = registry.load("families", problem.family)
        self.timer = registry.load("timers", protocol.timer).Timer(device, stream)
        self.protocol = protocol
        place = f"cuda:{request.device}"
        a, b, self.bias = self.family.inputs(problem, place, protocol.init, protocol.seed)
        c = torch.empty((problem.m, problem.n), dtype=getattr(torch, problem.c.torch), device=place)
        one_set = sum(t.numel() * t.element_size() for t in (a, b, c))
        room = int(device.memory()[0] * 0.5) // one_set
        wanted = math.ceil(protocol.rotation_bytes(request.target) / one_set) + 1
        self.copies = max(1, min(wanted, room, self.MOST_COPIES))
        self.cold = self.copies * one_set > request.target.llc_bytes
        self.sets = [(a, b, c)] + [(a.clone(), b.clone(), torch.empty_like(c)) for _ in range(self.copies - 1)]
        self.bytes = self.copies * one_set
        self._scratch: dict[str, Any] = {}
        self._exact: Any = None
        # One launch's worth of time decides how many share a graph.
        self.floor = request.target.roofline_seconds(problem.flops, problem.bytes, problem.a) + 1e-6

    @property
    def exact(self) -> Any:
        """The float64 reference, computed once."""
        if self._exact is None:
            self._exact = self.family.reference(self.problem, *self.sets[0][:2], self.bias)
        return self._exact

    def scratch(self, name: str, nbytes: int) -> int:
        """Address of the workspace (NaN at first) or the counters (zero), grown to `nbytes`."""
        import torch

        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes:
            fill = 0 if name == "semaphore" else 0xFF
            held = torch.full((max(nbytes, 256),), fill, dtype=torch.uint8, device=self.sets[0][0].device)
            torch.cuda.synchronize()
            self._scratch[name] = held
        return int(held.data_ptr())

    def addresses(self, launch: Launch, copy: int) -> dict[str, int]:
        """Device addresses of a launch's buffers, with the operands of one copy."""
        a, b, c = self.sets[copy]
        found = {"a": a.data_ptr(), "b": b.data_ptr(), "c": c.data_ptr()}
        if self.bias is not None:
            found["bias"] = self.bias.data_ptr()
        return found | {buffer.name: self.scratch(buffer.name, buffer.bytes) for buffer in launch.buffers}

    def prepare(self, launch: Launch, copies: int) -> tuple[driver.Module, list[driver.Prepared]]:
        """Load a candidate's code; its launches on the first `copies` sets of operands."""
        module = self.device.load(Path(launch.path).read_bytes())
        function = module.function(launch.symbol)
        prepared = []
        for copy in range(copies):
            addresses = self.addresses(launch, copy)
            maps = {
                i: self.device.tensor_map(
                    addresses[str(p.value)], p.elem_type, p.elem_size, p.shape, p.stride, p.box, p.swizzle
                )
                for i, p in enumerate(launch.params)
                if p.kind == "tma"
            }
            params = launch.pack(addresses, maps)
            prepared.append(function.prepare(launch.grid, launch.block, launch.shared, params, launch.cluster))
        return module, prepared

    def capture(self, calls: list[Callable[[], object]]) -> driver.Graph:
        """A graph of the calls, which launch on this bench's stream."""
        self.device.begin_capture(self.stream)
        try:
            for call in calls:
                call()
        except BaseException:
            self.device.end_capture(self.stream).destroy()
            raise
        return self.device.end_capture(self.stream)

    def launches_for(self, seconds: float, most: int) -> int:
        """Launches of one graph: enough to fill `seconds`, and to pass through the copies."""
        return max(1, min(max(int(seconds / self.floor), min(self.copies, most)), most))


class Bench:
    """What the GPU's process does with a request."""

    SCREEN_SECONDS = 1e-4
    RACE_SECONDS = 4e-4

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._benches: OrderedDict[tuple[Problem, Protocol], Workbench] = OrderedDict()
        self._device: driver.Device | None = None
        self._stream: Any = None

    def __call__(self, request: Request) -> Iterator[Any]:
        torch = self._torch
        if self._device is None:
            torch.cuda.set_device(request.device)
            torch.zeros(1, device=f"cuda:{request.device}")
            torch.backends.cuda.matmul.allow_tf32 = True
            self._stream = torch.cuda.Stream(request.device)
            self._device = driver.open(request.vendor).device(request.device)
        with torch.cuda.stream(self._stream):
            bench = self._bench(request)
            yield {"copies": bench.copies, "cold": bench.cold}
            yield from self._screen(bench, request) if request.kind == "screen" else self._final(bench, request)

    def _bench(self, request: Request) -> Workbench:
        key = (request.problem, request.protocol)
        if key not in self._benches:
            assert self._device is not None
            while self._benches and sum(b.bytes for b in self._benches.values()) > self._device.memory()[1] * 0.3:
                self._benches.popitem(last=False)
                self._torch.cuda.empty_cache()
            self._benches[key] = Workbench(request, self._device, self._stream.cuda_stream)
            self._torch.cuda.synchronize()
        self._benches.move_to_end(key)
        return self._benches[key]

    def _guard(self, config: Config, stage: str, work: Callable[[], Trial]) -> Trial:
        """A refusal as a trial; a fatal fault as a crashed one, after which the process must end."""
        try:
            return work()
        except DriverError as error:
            fatal = any(word in error.name.upper() for word in FATAL)
            return Trial(config, "crashed" if fatal else "out_of_resources", str(error), stage=stage)
        except self._torch.cuda.OutOfMemoryError as error:
            return Trial(config, "out_of_resources", str(error).splitlines()[0], stage=stage)

    def _screen(self, bench: Workbench, request: Request) -> Iterator[Trial]:
        best = request.best
        for config, launch in request.candidates:
            trial = self._guard(config, "screen", lambda: self._screened(bench, config, launch, best))  # noqa: B023
            yield trial
            if trial.status == "crashed":
                raise SystemExit(f"{config.name}: {trial.reason}")
            if trial.status == "ok":
                best = min(best, trial.seconds)

    def _screened(self, bench: Workbench, config: Config, launch: Launch, best: float) -> Trial:
        label = registry.load("timers", bench.protocol.timer).LABEL
        launches = bench.launches_for(self.SCREEN_SECONDS, 32)
        module, prepared = bench.prepare(launch, min(bench.copies, launches))
        try:
            prepared[0].launch(bench.stream)
            calls = [lambda i=i: prepared[i % len(prepared)].launch(bench.stream) for i in range(launches)]
            graph = bench.capture(calls)  # type: ignore[arg-type]
            try:
                samples = [bench.timer.time(graph, launches)]
                if samples[0] < 2 * best:
                    samples = [bench.timer.time(graph, launches) for _ in range(3)]
            finally:
                graph.destroy()
        finally:
            module.unload()
        return Trial(config, "ok", samples=tuple(samples), timer=label)

    def _final(self, bench: Workbench, request: Request) -> Iterator[Any]:
        """Answers: a Trial each with its error, then {name: samples} of those that passed and the library ("")."""
        contenders: list[Contender] = []
        for config, launch in request.candidates:
            trial = self._guard(config, "final", lambda: self._verified(bench, config, launch, contenders))  # noqa: B023
            yield trial
            if trial.status == "crashed":
                raise SystemExit(f"{config.name}: {trial.reason}")
        if request.kind == "final":
            library = self._library(bench, request)
            yield self._race(bench, contenders, library)
            contenders += library
        self._release(contenders)

    def _verified(self, bench: Workbench, config: Config, launch: Launch, contenders: list[Contender]) -> Trial:
        launches = bench.launches_for(self.RACE_SECONDS, Workbench.MOST_COPIES)
        module, prepared = bench.prepare(launch, min(bench.copies, launches))

        def run() -> None:
            prepared[0].launch(bench.stream)
            self._torch.cuda.current_stream().synchronize()

        found = verify.verify(bench.problem, bench.family, run, bench.sets[0][2], bench.exact)
        trial = Trial(config, "ok", stage="final", error=found.error, tolerance=found.tolerance)
        if not found.ok:
            module.unload()
            return replace(trial, status="wrong", reason=found.reason)
        calls = [lambda i=i: prepared[i % len(prepared)].launch(bench.stream) for i in range(launches)]
        contenders.append(Contender(config.name, bench.capture(calls), launches, module))  # type: ignore[arg-type]
        return trial

    def _library(self, bench: Workbench, request: Request) -> list[Contender]:
        if not request.library:
            return []
        backend = registry.load("backends", request.library)
        launches = bench.launches_for(self.RACE_SECONDS, Workbench.MOST_COPIES)
        calls = [backend.operation(bench.problem, *s[:2], bench.bias, s[2]) for s in bench.sets[:launches]]
        if not calls or calls[0] is None:
            return []
        try:
            calls[0]()  # workspace and handles are made outside the capture
            self._torch.cuda.current_stream().synchronize()
            graph = bench.capture([calls[i % len(calls)] for i in range(launches)])
        except RuntimeError:  # the library has no kernel for it
            return []
        return [Contender("", graph, launches)]

    def _race(self, bench: Workbench, ours: list[Contender], library: list[Contender]) -> dict[str, list[float]]:
        """Samples by name, taken in rounds of a new order each, so that drift meets all alike."""
        entries = ours + library
        order = random.Random(bench.protocol.seed)
        for entry in entries:
            for _ in range(max(1, math.ceil(bench.protocol.warmup / entry.launches))):
                bench.timer.time(entry.graph, entry.launches)
        rounds = max(10, math.ceil(bench.protocol.iters / max((e.launches for e in entries), default=1)))
        running, deadline = list(entries), time.perf_counter() + 3.0
        for done in range(1, 4 * rounds + 1):
            for entry in order.sample(running, len(running)):
                entry.samples.append(bench.timer.time(entry.graph, entry.launches))
            if done % 5 == 0:
                kept = choose.still_racing({e.name: e.samples for e in running})
                running = [e for e in running if e.name in kept]
            if len(running) < 2 and done >= rounds or (
                done >= rounds and choose.decided({e.name: e.samples for e in running})
            ):
                break
            if time.perf_counter() > deadline:
                break
        return {e.name: e.samples for e in entries}

    def _release(self, contenders: list[Contender]) -> None:
        for contender in contenders:
            contender.graph.destroy()
            if contender.module:
                contender.module.unload()
