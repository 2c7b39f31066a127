"""Opens the GPUs and the cores of a Ray cluster's hosts for a run."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.cluster_pool import ClusterBuildPool
from tritongemm.build.pool import BuildPool
from tritongemm.core.errors import InputError, TargetError
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.hip_ext.machine import Machine, count_devices, find_machine
from tritongemm.measure.cluster import ClusterGpus
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Evaluator, ExternalTimer, Timer
from tritongemm.search_spaces.loader import load_target, target_of_device
from tritongemm.system.ray_hosts import RayHosts
from tritongemm.tune.request import TuneRequest

_DEVICE = re.compile(r"device_name=([^,]*?)(?:,|\.json)")  # in the names of tables of tiles of vLLM and SGLang


@dataclass(frozen=True)
class Cluster:
    """A cluster on which a run works."""

    hosts: RayHosts
    gpus: ClusterGpus

    @property
    def machine(self) -> Machine:
        """The machine to tune for, as if all GPUs were this machine's."""
        return self.gpus.machine

    def openers(self, protocol: MeasureProtocol, timeout: float) -> list[Callable[[], Evaluator]]:
        """Return functions that start a new process on each GPU."""
        if isinstance(registry.get(Timer, protocol.timer), ExternalTimer):
            raise InputError(f"--profiler {protocol.timer} times only on this host; omit it or --ray")
        machine = self.machine
        return [
            partial(GpuEvaluator, machine.target, machine.vendor, number, protocol, timeout, process)
            for number, process in enumerate(self.gpus.processes())
        ]

    def pool(self, cache: ArtifactCache, processes: int, timeout: float) -> BuildPool:
        """Return compilers on this host and all others, `processes` on each; 0 for one a core."""
        pool = ClusterBuildPool(cache, processes, timeout, must_keep=True)
        for node in self.hosts.nodes():
            count = min(processes or node.cpus, node.cpus)
            if count and node.id != self.hosts.own_node:
                pool.add(self.hosts.begin(BuildPool.ROLE, node, count), count)
        return pool


@contextmanager
def open_machine(request: TuneRequest, say: Callable[[str], None]) -> Iterator[tuple[Machine, Cluster | None]]:
    """Open the machine to tune on or for, and the cluster that a request names, left at the end; None without one."""
    devices = request.devices
    if devices.ray is None:
        yield find_machine(devices.target or _device_of(request.outputs.path), devices.gpu_ids, devices.ngpus), None
        return
    with ExitStack() as stack:
        hosts = RayHosts(devices.ray)
        stack.callback(hosts.close)
        arch = load_target(devices.target).name if devices.target else None
        gpus = ClusterGpus(hosts, arch, devices.ngpus, say)
        stack.callback(gpus.close)
        yield gpus.machine, Cluster(hosts, gpus)


def _device_of(output: Path | None) -> str | None:
    """Return the device that the name of a server's table says, where no GPU says what is tuned for."""
    named = None if output is None or count_devices() else _DEVICE.search(output.name)
    if named is not None and not target_of_device(named[1]):
        raise TargetError(f"-o {output}: no target is known by the device's name; give one with --target")
    return named and named[1]
