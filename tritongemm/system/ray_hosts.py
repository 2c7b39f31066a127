"""Runs processes on hosts of a Ray cluster that serve requests as a `WorkerProcess` does here.

An actor on a host holds child processes of one role, so that a crash or a hang costs that process, there as here. Where
the actor or its host is lost, the request ends as if its process had died, killed from outside.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.system import import_path
from tritongemm.system.child_process import WorkerDied, WorkerError
from tritongemm.system.host_processes import HostProcesses, fault_of

_CONNECT_SECONDS = 5.0  # until a port without an answer counts as closed
_PROBE_SECONDS = 30.0  # a cluster accepts its users within a few
# Ray waits without end for an address, and no signal ends that; a process can be killed.
_PROBE = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"


class HostLost(WorkerDied):
    """The actor or its host is lost with all that it held; another one may do the same request."""

    def __init__(self, how: str) -> None:
        super().__init__(how, from_outside=True)


@dataclass(frozen=True)
class RayNode:
    """A host of a cluster that lives."""

    id: str  # Ray's
    name: str  # the host's, with its address where that is another
    gpus: int  # GPUs that Ray knows of
    cpus: int  # cores that Ray knows of


class RemoteHost:
    """An actor with processes on a host."""

    def __init__(self, ray: Any, actor: Any, name: str, node: str) -> None:
        self._ray, self._actor, self.name, self.node = ray, actor, name, node
        self.lost = False

    def start(self, opening: object = None) -> Any:
        """Begin to start its processes; return Ray's reference to the end of that, once the actor is there."""
        return self._actor.start.remote(opening)

    def ready(self, seconds: float) -> bool:
        """Return whether the actor is there within a number of seconds."""
        exceptions = self._ray.exceptions
        try:
            self._ray.get(self._actor.keep.remote({}), timeout=seconds)
        except exceptions.GetTimeoutError:
            return False
        except exceptions.ActorUnschedulableError as error:
            raise self._loss(error) from None
        except exceptions.RayError as error:
            if isinstance(error, exceptions.RayActorError) and not error.actor_init_failed:
                raise self._loss(error) from None
            raise UnavailableError(f"host {self.name} can't run tritongemm: {_last_line(error)}") from None
        return True

    def _loss(self, error: Exception) -> HostLost:
        """Note that the actor or its host is gone."""
        self.lost = True
        return HostLost(f"host {self.name} was lost: {next(iter(_lines(error)), type(error).__name__)}")

    def ask(self, request: Any, timeout: float) -> Iterator[Any]:
        """Return the answers to a request as `WorkerProcess.ask`; a HostLost where the actor or its host is gone."""
        with _Translated(self):
            for reference in self._actor.ask.options(num_returns="streaming").remote(request, timeout):
                kind, value = self._ray.get(reference)
                if kind != "answer":
                    raise fault_of(kind, value)
                yield value

    def begin_once(self, role: str, request: Any, timeout: float) -> Callable[[], list[Any]]:
        """Ask a process of another role, which then ends; return what waits for all answers, and raises as `ask`."""
        asked = self._actor.ask_once.remote(role, request, timeout)

        def wait() -> list[Any]:
            with _Translated(self):
                answers: list[tuple[str, Any]] = self._ray.get(asked)
            for kind, value in answers:
                if kind != "answer":
                    raise fault_of(kind, value)
            return [value for _, value in answers]

        return wait

    def keep(self, files: Mapping[str, tuple[str, bytes]]) -> dict[str, str]:
        """Return the paths there of compiled files, each a name and its content; errors are those of `ask`."""
        with _Translated(self):
            kept: dict[str, str] = self._ray.get(self._actor.keep.remote(files))
        return kept

    def end(self) -> None:
        """End its idle processes; the next request starts others."""
        with suppress(self._ray.exceptions.RayError):
            self._actor.end.remote()

    def kill(self) -> None:
        """End the actor, and its processes with it."""
        self.lost = True
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)


class _Translated:
    """A context in which Ray's errors are those of a `WorkerProcess`."""

    def __init__(self, host: RemoteHost) -> None:
        self._host = host

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        exceptions = self._host._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):  # raised there by the object that serves the request
            raise WorkerError(_last_line(error)) from None
        if isinstance(error, exceptions.RayError):
            raise self._host._loss(error) from None


class RayHosts:
    """A Ray cluster that this process is connected to until it is closed.

    The address is ``auto`` for the cluster that this host is of, or the host and port of its head.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            import ray
        except ImportError as error:
            raise UnavailableError(f"--ray needs Ray: pip install 'tritongemm[ray]' ({error})") from None
        _check(address)
        try:
            with _own_signals(), _in_own_folder():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _no_cluster(address, _last_line(error)) from None
        self._ray: Any = ray
        self._actors: list[RemoteHost] = []

    def nodes(self) -> list[RayNode]:
        """Return the hosts that live, in the order of their names."""
        found = []
        for node in self._ray.nodes():
            if node["Alive"]:
                host, address, has = node["NodeManagerHostname"], node["NodeManagerAddress"], node["Resources"]
                name = host if host == address else f"{host} ({address})"
                found.append(RayNode(node["NodeID"], name, int(has.get("GPU", 0)), int(has.get("CPU", 0))))
        return sorted(found, key=lambda node: (node.name, node.id))

    @property
    def own_node(self) -> str:
        """Return Ray's name of this process's host."""
        return str(self._ray.get_runtime_context().get_node_id())

    def free_gpus(self) -> int:
        """Return the number of GPUs of the cluster that are free."""
        return int(self._ray.available_resources().get("GPU", 0))

    def begin(self, role: str, node: RayNode | None = None, count: int = 1, gpus: int = 0) -> RemoteHost:
        """Begin to start an actor with `count` processes of a role of `WorkerProcess`, anywhere or on a node.

        With `gpus` 1 it is pinned to a GPU, which its processes see as their only one; else it holds a core for each
        process.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = None if node is None else NodeAffinitySchedulingStrategy(node.id, soft=False)
        options = {"num_gpus": gpus, "num_cpus": 0 if gpus else count, "max_concurrency": count}
        actor = self._ray.remote(HostProcesses).options(**options, scheduling_strategy=where).remote(role, count)
        host = RemoteHost(self._ray, actor, node.name if node else "of a free GPU", node.id if node else "")
        self._actors.append(host)
        return host

    def close(self) -> None:
        """End all actors, and leave the cluster."""
        for host in self._actors:
            host.kill()
        self._ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of signals: Ray replaces that of SIGTERM, and results would not be merged."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _in_own_folder() -> Iterator[None]:
    """Change to the package's folder, as actors look for modules first in the folder where a job begins."""
    before = os.open(os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(import_path.HOME)
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def _check(address: str) -> None:
    """Check within seconds whether a cluster can be used."""
    if "://" in address:
        raise InputError(
            f"--ray {address}: this command must run on a host of the cluster itself (ray start --address=HEAD:PORT "
            "--num-cpus=0 makes this host one): then give --ray auto, or HOST:PORT"
        )
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise InputError(f"--ray {address}: give auto, or the HOST:PORT that ray start --head has printed")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except OSError as error:
            raise _no_cluster(address, error.strerror or str(error)) from None
    path = f"import sys; sys.path[:] = {import_path.for_children()!r}; "
    try:
        probe = [sys.executable, "-c", path + _PROBE, address]
        done = subprocess.run(probe, capture_output=True, timeout=_PROBE_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise _no_cluster(address, f"no answer within {_PROBE_SECONDS:g} s") from None
    if done.returncode:
        raise _no_cluster(address, _last_line(done.stderr.decode(errors="replace")))


def _no_cluster(address: str, why: str) -> InputError:
    return InputError(f"--ray {address}: no Ray cluster can be used there: {why}; `ray status` says what there is")


def _last_line(error: object) -> str:
    return next(reversed(_lines(error)), type(error).__name__)


def _lines(error: object) -> list[str]:
    return [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
