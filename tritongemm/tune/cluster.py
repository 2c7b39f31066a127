"""Opens the GPUs and the cores of a Ray cluster's hosts for a run."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

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
from tritongemm.search_spaces.loader import chips_of, load_target, target_of_device
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
    devices, output = request.devices, request.outputs.path
    named = output and _DEVICE.search(output.name)
    device = named[1] if named else ""
    if devices.ray is None:
        offline = "" if devices.target or count_devices() else device
        if offline and not target_of_device(offline):
            raise TargetError(f"-o {output}: no target is known by the device's name; give one with --target")
        machine = find_machine(devices.target or offline or None, devices.gpu_ids, devices.ngpus)
        _require_named(machine, device)
        yield machine, None
        return
    with ExitStack() as stack:
        hosts = RayHosts(devices.ray)
        stack.callback(hosts.close)
        arch = load_target(devices.target).name if devices.target else None
        gpus = ClusterGpus(hosts, arch, devices.ngpus, say)
        stack.callback(gpus.close)
        _require_named(gpus.machine, device)
        yield gpus.machine, Cluster(hosts, gpus)


def _require_named(machine: Machine, device: str) -> None:
    """Refuse an output whose name says another device than the results will be of; a name of no known one is free."""
    chips, here = chips_of(device), chips_of(machine.product) if machine.devices else frozenset()
    if target_of_device(device) not in ("", machine.target.name) or (chips and here and not chips & here):
        raise TargetError(
            f"-o: the table's name says {device}, and this run is for {machine.product} ({machine.target.name}): "
            "change the name, or tune on the other GPU"
        )
