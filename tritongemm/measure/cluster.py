"""The GPUs of a Ray cluster's hosts, each with an actor that is pinned to it, for evaluators on this host.

When a GPU is lost, alone or with its host, only the work in progress on it is lost: a free GPU takes over, or else one
of the others works for two evaluators, one request after the other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError, TritonGemmError, UnavailableError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.hip_ext.machine import Machine, find_machine
from tritongemm.measure.gpu_evaluator import DEVICE_ROLE
from tritongemm.measure.jobs import AlgorithmsJob, MeasureAnswer, MeasureJob, QuantizeJob
from tritongemm.system import settings
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerTimeout
from tritongemm.system.ray_hosts import HostLost, RayHosts, RayNode, RemoteHost

SURVEY_ROLE = "tritongemm.measure.cluster:HostSurvey"
JOIN_SECONDS = 30.0  # until an actor is there; a GPU whose actor is not is held by another job
SURVEY_SECONDS = 120.0  # until a host has reported what it has
_FREE_SECONDS = 5.0  # until Ray knows that a GPU is free whose actor is lost
_ALIKE = ("tritongemm", "triton", "torch")  # packages of which all hosts have one version


@dataclass(frozen=True)
class HostFacts:
    """What a host reports: itself as if it had one GPU alone, and versions of the packages that a result depends on."""

    machine: Machine
    versions: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, str, int]:
        """The values in which GPUs must agree for their times to be compared."""
        return self.machine.target.name, self.machine.product, self.machine.target.compute_units

    def described(self) -> str:
        """Return the kind of its GPU, for messages."""
        arch, product, units = self.kind
        return f"{product} of {units} compute units ({arch})"


class HostSurvey:
    """The request handler of a process that reports a host's facts."""

    def __call__(self, request: object) -> Iterator[HostFacts]:
        """Yield the facts of the host; it is asked nothing else."""
        yield HostFacts(find_machine(None), own_versions())


def own_versions() -> tuple[str, ...]:
    """Return the versions of the packages that all hosts must share, without PyTorch's build suffix."""
    return tuple(settings.version(package).partition("+")[0] for package in _ALIKE)


@dataclass(eq=False)
class _Gpu:
    """A GPU that an actor is pinned to."""

    host: RemoteHost
    facts: HostFacts
    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: dict[str, str] = field(default_factory=dict)
    users: int = 1


class ClusterGpus:
    """The GPUs of a cluster that a run tunes on, which are of one kind.

    `arch` is the architecture of the GPUs to use; None if all are of one. `most` is their maximum number; 0 for all.
    `say` receives remarks, one line each; `roles` are the request handlers of a GPU's process and of a host's survey.
    The run tunes for `machine`.

    Raises:
        InputError: there is no such GPU, they are of several kinds, or a host has other versions.
    """

    def __init__(
        self,
        hosts: RayHosts,
        arch: str | None,
        most: int,
        say: Callable[[str], None],
        roles: tuple[str, str] = (DEVICE_ROLE, SURVEY_ROLE),
    ) -> None:
        self._hosts, self._say, (self._role, self._survey_role) = hosts, say, roles
        self._changing = threading.Lock()
        self._closed = False
        found = self._survey(hosts.nodes())
        chosen = self._of_one_kind(found, arch)
        self._gpus = chosen[: most or len(chosen)]
        for gpu in found:
            if gpu not in self._gpus:
                gpu.host.kill()
        self._processes = [ClusterProcess(self, gpu) for gpu in self._gpus]
        self.machine = self._described()

    def processes(self) -> Sequence[ClusterProcess]:
        """Return a process for each GPU."""
        return self._processes

    def _survey(self, nodes: Sequence[RayNode]) -> list[_Gpu]:
        """Return the GPUs that answer in time; others are held by other jobs."""
        begun = [self._hosts.begin(self._role, node, gpus=1) for node in nodes for _ in range(node.gpus)]
        if not begun:
            raise InputError(
                f"--ray {self._hosts.address}: the cluster has no GPU; a host's are announced by ray start --num-gpus=N"
            )
        deadline, surveys = time.monotonic() + JOIN_SECONDS, list[tuple[RemoteHost, Callable[[], list[HostFacts]]]]()
        found: list[_Gpu] = []
        for host in begun:
            with self._leaving_out(host):
                if host.ready(max(0.0, deadline - time.monotonic())):
                    surveys.append((host, host.begin_once(self._survey_role, None, SURVEY_SECONDS)))
                else:
                    self._say(f"a GPU of host {host.name} has no part: others hold it")
                    host.kill()
        for host, answers in surveys:
            with self._leaving_out(host):
                found.append(_Gpu(host, self._facts(host, answers)))
        if not found:
            raise InputError(
                f"--ray {self._hosts.address}: other jobs hold all {len(begun)} GPUs of the cluster, or their hosts "
                "are lost; `ray status` says what is free"
            )
        return found

    @contextmanager
    def _leaving_out(self, host: RemoteHost) -> Iterator[None]:
        """Go on without a host that is lost, which Ray may still list."""
        try:
            yield
        except HostLost:
            self._say(f"a GPU of host {host.name} has no part: the host is lost")
            host.kill()

    @staticmethod
    def _facts(host: RemoteHost, answers: Callable[[], list[HostFacts]]) -> HostFacts:
        """Return what a host has, from its answers."""
        try:
            (facts,) = answers()
        except HostLost:
            raise
        except (WorkerDied, WorkerTimeout, WorkerError) as fault:
            raise InputError(f"--ray: host {host.name} can't say what GPU it has: {fault}") from None
        if not facts.machine.devices:
            raise InputError(f"--ray: host {host.name} offers a GPU that no driver there can use")
        for package, there, here in zip(_ALIKE, facts.versions, own_versions(), strict=True):
            if there != here:
                raise InputError(f"--ray: host {host.name} has {package} {there}, this one {here}; install one version")
        return facts

    def _of_one_kind(self, found: Sequence[_Gpu], arch: str | None) -> list[_Gpu]:
        """Return the GPUs of an architecture."""
        chosen = [gpu for gpu in found if arch is None or gpu.facts.kind[0] == arch]
        kinds = Counter(gpu.facts.described() for gpu in chosen or found)
        listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        if not chosen:
            raise InputError(f"--ray {self._hosts.address}: the cluster has no GPU of {arch}, but {listed}")
        if len(kinds) > 1:
            hint = "" if arch else "; --target names the architecture of those to use"
            raise InputError(f"--ray {self._hosts.address}: one run tunes on GPUs of one kind, not {listed}{hint}")
        if len(chosen) < len(found):
            self._say(f"{len(found) - len(chosen)} GPUs of the cluster are of another kind, and have no part")
        return chosen

    def _described(self) -> Machine:
        here = Counter(gpu.host.name for gpu in self._gpus)
        where = ", ".join(f"{host}: {count}" for host, count in here.items())
        first = self._gpus[0].facts.machine
        why = f"tuning on {first.product} x {len(self._gpus)} ({first.target.name}) of a Ray cluster; {where}"
        return replace(first, devices=tuple(range(len(self._gpus))), why=why)

    def take_over(self, lost: _Gpu) -> _Gpu:
        """Return the GPU that takes over a lost one's work; an UnavailableError if none is left, or the run is over."""
        with self._changing:
            if self._closed:
                raise UnavailableError("the run is over")
            patience = _FREE_SECONDS if lost in self._gpus else 0.0  # the process that met the loss first has waited
            if lost in self._gpus:
                self._gpus.remove(lost)
                lost.host.kill()
            found = self._free_gpu(lost, patience)
            if found is not None:
                self._gpus.append(found)
                self._say(f"a GPU of host {lost.host.name} is lost; one that was free takes over")
                return found
            if not self._gpus:
                raise UnavailableError(f"no GPU of the cluster is left; the last was on host {lost.host.name}")
            shared = min(self._gpus, key=lambda gpu: gpu.users)
            shared.users += 1
            self._say(f"a GPU of host {lost.host.name} is lost; one of {shared.host.name} does its work too")
            return shared

    def _free_gpu(self, lost: _Gpu, patience: float) -> _Gpu | None:
        """Return a free GPU of the kind, or None where `patience` seconds bring none."""
        deadline = time.monotonic() + patience
        while not self._hosts.free_gpus():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        host = self._hosts.begin(self._role, gpus=1)
        with suppress(TritonGemmError, HostLost):
            if host.ready(JOIN_SECONDS):
                facts = self._facts(host, host.begin_once(self._survey_role, None, SURVEY_SECONDS))
                if facts.kind == lost.facts.kind:
                    return _Gpu(host, facts)
        host.kill()
        return None

    def require_left(self) -> None:
        """Raise an UnavailableError if all GPUs are lost, so that work which failed failed for lack of one."""
        if not self._gpus:
            raise UnavailableError(
                f"--ray {self._hosts.address}: no GPU of the cluster is left; what is done is kept; the same command "
                "goes on from there when there is one"
            )

    def close(self) -> None:
        """Stop replacing lost GPUs."""
        self._closed = True


class ClusterProcess:
    """A process that works on a cluster's GPU, with the interface of a process on this host."""

    def __init__(self, gpus: ClusterGpus, gpu: _Gpu) -> None:
        self._gpus, self._gpu = gpus, gpu

    def start(self, opening: object = None) -> None:
        """Begin to start the process there."""
        self._gpu.host.start(opening)

    def ask(self, request: MeasureJob, timeout: float) -> Iterator[MeasureAnswer]:
        """Yield the answers to one request, as they come; raises as `WorkerProcess.ask`, also where no GPU is left."""
        if self._gpu.host.lost:
            self._gpu = self._gpus.take_over(self._gpu)
        gpu = self._gpu
        with gpu.lock:
            yield from gpu.host.ask(_moved(request, _carried(request, gpu)), timeout)

    def kill(self) -> None:
        """End the process there; the next request starts another."""
        if not self._gpu.host.lost:
            self._gpu.host.end()


def _launches(job: MeasureJob) -> list[Launch | HostLaunch]:
    if isinstance(job, AlgorithmsJob):
        return []
    if isinstance(job, QuantizeJob):
        return list(job.launches)
    return [candidate.launch for candidate in job.candidates if candidate.launch is not None]


def _carried(job: MeasureJob, gpu: _Gpu) -> dict[str, str]:
    """Return the paths on a GPU's host of the files that a job needs, by their paths here; missing ones are sent."""
    missing: dict[str, tuple[str, bytes]] = {}
    for launch in _launches(job):
        if launch.path not in gpu.kept:
            with suppress(OSError):  # opening it there reports it
                missing[launch.path] = Path(launch.path).name, Path(launch.path).read_bytes()
    if missing:
        gpu.kept |= gpu.host.keep(missing)
    return gpu.kept


def _moved(job: MeasureJob, paths: dict[str, str]) -> MeasureJob:
    """Return a job whose launches have other paths, and whose device is the only one of its process."""

    def moved(launch: Any) -> Any:
        return launch and replace(launch, path=paths.get(launch.path, launch.path))

    setup = replace(job.setup, device=0)
    if isinstance(job, AlgorithmsJob):
        return replace(job, setup=setup)
    if isinstance(job, QuantizeJob):
        return replace(job, setup=setup, launches=tuple(map(moved, job.launches)))
    candidates = tuple(replace(one, launch=moved(one.launch)) for one in job.candidates)
    return replace(job, setup=setup, candidates=candidates)
