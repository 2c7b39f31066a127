"""Records + a live device → loaded kernels."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritongemm import settings
from tritongemm.errors import TritonGemmError
from tritongemm.hip_ext import driver
from tritongemm.hip_ext.shared_object import PreparedCall
from tritongemm.launch import HostCall, Launch
from tritongemm.loaded import Hosted, Kernel, Library, Loaded
from tritongemm.problem import Problem
from tritongemm.record import Record
from tritongemm.scratch import Scratch

if TYPE_CHECKING:
    from tritongemm.compile import Cache
    from tritongemm.target import Target
    from tritongemm.trial import Built


LAUNCHED = ("triton", "asm", "ck", "cutlass")  # backends whose winners are a `Launch` or a `HostCall`
LIBRARY = "blaslt"  # the one whose winners are algorithms of a library


def moved(record: Record) -> bool:
    """Whether another Triton than the one installed made the record, so that its kernel must be checked again."""
    return record.toolchain.get("triton") != settings.version("triton")


def rounds(record: Record) -> bool:
    """Whether a winner rounds float32 operands to tf32."""
    from tritongemm import target

    if record.problem.dtype_a != "fp32":
        return False
    # A library is asked for tf32 on any target.
    return record.winner == LIBRARY or (record.target in target.names() and target.load(record.target).has("tf32"))


def launches(records: Sequence[Record], target: Target, cache: Cache) -> dict[Problem, Launch | HostCall | str]:
    """The launch of each record's config, compiled in parallel where the cache lacks it; or why there is none.

    Args:
        records: one for each problem, tuned for the target.
        target: facts of the live device; its compute units size persistent grids.
        cache: compiled kernels.
    """
    from tritongemm import generate, registry
    from tritongemm.codegen import kernels
    from tritongemm.compile import Compiler

    found: dict[Problem, Launch | HostCall | str] = {}
    waiting: dict[Problem, Any] = {}

    def finish(record: Record, built: Built) -> None:
        # Configs that differ in their arguments alone share a binary.
        mine, problem = replace(built, config=record.config), record.problem
        try:
            ok = built.status == "ok"
            backend = registry.load("backends", record.config.backend)
            found[problem] = backend.launch(mine, problem, target) if ok else f"{built.status}: {built.reason}"
        except TritonGemmError as error:
            found[problem] = str(error)

    with tempfile.TemporaryDirectory(prefix="tritongemm-") as folder:
        for record in records:
            problem, config = record.problem, record.config
            try:
                backend = registry.load("backends", config.backend)
                generated = config.backend == "triton"
                if generated:
                    kernels.kernel_template(config.template)  # the record may be older or newer than the templates
                job = backend.job(config, problem, target, "")
                built = cache.get(job.digest)
                if built is None:
                    # A file for each problem: modules of equal sizes but other layouts differ in name already.
                    module = generate.module(problem, [config], target, Path(folder)) if generated else ""
                    waiting[problem] = record, backend.job(config, problem, target, str(module))
                else:
                    finish(record, built)
            except (TritonGemmError, OSError) as error:
                found[problem] = str(error)
        if waiting:
            compiler = Compiler(cache, min(len(os.sched_getaffinity(0)), len(waiting)))
            try:
                by_digest = {built.digest: built for built in compiler.stream(job for _, job in waiting.values())}
            finally:
                compiler.close()
            for record, job in waiting.values():
                finish(record, by_digest[job.digest])
    return found


class Served:
    """What one device serves.

    Args:
        index: the device.
        records: every record that `mm` can ask for, by target and problem.
        former: what the device served before, whose scratch memory is kept if it is large enough.

    Attributes:
        index, place: the device, as PyTorch counts and names it.
        arch: the device's architecture.
        kernels: what is launched for each problem that a kernel or an algorithm won, or why there is none.
        scratch: for those that need a workspace or counters; None if there are none.
        direct: PyTorch's own kernels, for problems without one of ours.
        rounding: problems whose kernels round float32 operands to tf32.
    """

    def __init__(self, index: int, records: dict[tuple[str, Problem], Record], former: Served | None = None) -> None:
        import torch

        from tritongemm.direct import Direct
        from tritongemm.fallback import precision

        vendor = driver.present()
        assert vendor is not None, "PyTorch sees a GPU, its driver does not"
        self.index, self.place = index, torch.device("cuda", index)
        self.kernels: dict[Problem, Loaded | str] = {}
        self.scratch: Scratch | None = former.scratch if former else None
        self.direct = Direct(self)
        self.rounding: frozenset[Problem] = frozenset()
        with torch.cuda.device(index):
            torch.zeros(1, device=self.place)  # starts PyTorch's context before ours is made current
            self.device: driver.Device = driver.open(vendor).device(index)
            self.arch = self.device.arch
            mine = [r for (target, _), r in records.items() if target == self.arch and is_kernel(r)]
            self._load([r for r in mine if r.winner in LAUNCHED])
            self.kernels |= {r.problem: self._library(r) for r in mine if r.winner == LIBRARY}
            self._share()
            self.rounding = frozenset(r.problem for r in mine if rounds(r))
            for (target, problem), record in records.items():
                if target == self.arch and record.winner in ("torch", record.library):
                    self.direct.find(problem, precision() if problem.dtype_a == "fp32" else "fp32")

    def _load(self, records: Sequence[Record]) -> None:
        from tritongemm import machine
        from tritongemm.compile import Cache

        if not records:
            return
        target = machine.find(None, str(self.index)).target
        ready = launches(records, target, Cache(settings.cache_folder()))
        by_problem = {r.problem: r for r in records}
        for problem, launch in ready.items():
            self.kernels[problem] = launch if isinstance(launch, str) else self._kernel(by_problem[problem], launch)

    def _library(self, record: Record) -> Library | str:
        from tritongemm import registry

        reason = registry.unavailable("backends", LIBRARY)
        if reason:
            return reason
        from tritongemm.backends import _blaslt_served

        try:
            return Library(record, _blaslt_served.tuned(record.problem, record.config, self.index, self.device))
        except (TritonGemmError, LookupError) as error:
            return str(error)

    def _share(self) -> None:
        """Provide the memory that the kernels share, and check those that were tuned with other tools."""
        from tritongemm import recheck

        loaded = [k for k in self.kernels.values() if not isinstance(k, str)]
        need = [max((k.bytes(b) for k in loaded), default=0) for b in ("workspace", "semaphore")]
        if any(need) and not (self.scratch and self.scratch.holds(*need)):
            self.scratch = Scratch(self.device, *need)
        for kernel in loaded:
            # A library loads its kernel when it is first called, which must not be while a graph is captured.
            late = isinstance(kernel, Library | Hosted)
            reason = recheck.complaint(kernel, self) if late or moved(kernel.record) else None
            if reason:
                self.kernels[kernel.record.problem] = reason

    def _kernel(self, record: Record, launch: Launch | HostCall) -> Kernel | Hosted | str:
        try:
            if isinstance(launch, HostCall):
                PreparedCall(launch, {})
                return Hosted(record, launch)
            function = self.device.load(Path(launch.path).read_bytes()).function(launch.symbol)
            _ = function.attributes  # the driver may load code late; a capture must not be the first to ask
            return Kernel(record, launch, function)
        except (TritonGemmError, OSError) as error:
            return str(error)


def is_kernel(record: Record) -> bool:
    """Whether a kernel that we launch, or an algorithm that we ask for, won, measured and not predicted."""
    known = record.winner in (*LAUNCHED, LIBRARY)
    return record.winner == record.config.backend and known and record.timer != "model"
