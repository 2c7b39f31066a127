"""Records + a live device → loaded kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tritongemm.build.prepare import prepare_launches
from tritongemm.core import settings
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.runtime.loaded_kernels import HostLaunchedKernel, LibraryKernel, Loaded, TunedKernel
from tritongemm.runtime.workspaces import WorkspacePool

LAUNCHED = ("triton", "asm", "ck", "cutlass")  # backends whose winners are a `Launch` or a `HostCall`
LIBRARY = "blaslt"  # the one whose winners are algorithms of a library


def moved(record: Record) -> bool:
    """Whether another Triton than the one installed made the record, so that its kernel must be checked again."""
    return record.toolchain.get("triton") != settings.version("triton")


def rounds(record: Record) -> bool:
    """Whether a winner rounds float32 operands to tf32."""
    from tritongemm.search_spaces import loader as target_files

    if record.problem.dtype_a != "fp32":
        return False
    # A library is asked for tf32 on any target.
    return record.winner == LIBRARY or (
        record.target in target_files.target_names() and target_files.load_target(record.target).has("tf32")
    )


class DeviceKernels:
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

    def __init__(
        self, index: int, records: dict[tuple[str, Problem], Record], former: DeviceKernels | None = None
    ) -> None:
        import torch

        from tritongemm.serve.torch_fallback import precision
        from tritongemm.serve.torch_kernels import TorchKernels

        vendor = driver.present()
        assert vendor is not None, "PyTorch sees a GPU, its driver does not"
        self.index, self.place = index, torch.device("cuda", index)
        self.kernels: dict[Problem, Loaded | str] = {}
        self.scratch: WorkspacePool | None = former.scratch if former else None
        self.direct = TorchKernels(self)
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
        from tritongemm.build.cache import ArtifactCache
        from tritongemm.runtime import machine

        if not records:
            return
        target = machine.find(None, str(self.index)).target
        ready = prepare_launches(records, target, ArtifactCache(settings.cache_folder()))
        by_problem = {r.problem: r for r in records}
        for problem, launch in ready.items():
            self.kernels[problem] = launch if isinstance(launch, str) else self._kernel(by_problem[problem], launch)

    def _library(self, record: Record) -> LibraryKernel | str:
        from tritongemm.plugins import _modules as registry

        reason = registry.unavailable("backends", LIBRARY)
        if reason:
            return reason
        from tritongemm.backends.blaslt import served_algorithm

        try:
            return LibraryKernel(
                record, served_algorithm.tuned_algorithm(record.problem, record.config, self.index, self.device)
            )
        except (TritonGemmError, LookupError) as error:
            return str(error)

    def _share(self) -> None:
        """Provide the memory that the kernels share, and check those that were tuned with other tools."""
        from tritongemm.serve import load_check

        loaded = [k for k in self.kernels.values() if not isinstance(k, str)]
        need = [max((k.bytes(b) for k in loaded), default=0) for b in ("workspace", "semaphore")]
        if any(need) and not (self.scratch and self.scratch.holds(*need)):
            self.scratch = WorkspacePool(self.device, *need)
        for kernel in loaded:
            # A library loads its kernel when it is first called, which must not be while a graph is captured.
            late = isinstance(kernel, LibraryKernel | HostLaunchedKernel)
            reason = load_check.complaint(kernel, self) if late or moved(kernel.record) else None
            if reason:
                self.kernels[kernel.record.problem] = reason

    def _kernel(self, record: Record, launch: Launch | HostLaunch) -> TunedKernel | HostLaunchedKernel | str:
        try:
            if isinstance(launch, HostLaunch):
                PreparedCall(launch, {})
                return HostLaunchedKernel(record, launch)
            function = self.device.load(Path(launch.path).read_bytes()).function(launch.symbol)
            _ = function.attributes  # the driver may load code late; a capture must not be the first to ask
            return TunedKernel(record, launch, function)
        except (TritonGemmError, OSError) as error:
            return str(error)


def is_kernel(record: Record) -> bool:
    """Whether a kernel that we launch, or an algorithm that we ask for, won, measured and not predicted."""
    known = record.winner in (*LAUNCHED, LIBRARY)
    return record.winner == record.config.backend and known and record.timer != "model"
