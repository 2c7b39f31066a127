"""Stands in for Ray: actors are objects of this process, and a host is lost when a test says so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support.lent_processes import LentProcess
from tests.support.nouns import BuildPool, Patch
from tritongemm.system import host_processes, ray_hosts
from tritongemm.system.child_process import WorkerDied, WorkerError


class RayError(Exception):
    """As Ray's, and so on below."""


class RayTaskError(RayError):
    """An actor's method has raised."""


class RayActorError(RayError):
    """An actor is gone."""

    actor_init_failed = False


class ActorUnschedulableError(RayError):
    """The host that an actor should be on is gone."""


class GetTimeoutError(RayError):
    """Nothing came in time."""


def in_process(role: str) -> InProcess | LentProcess:
    """A process of a role; compilers change theirs too much to be in this one."""
    return LentProcess(role) if role == BuildPool.ROLE else InProcess(role)


class InProcess:
    """Serves requests in this process, as a `WorkerProcess` does in another."""

    def __init__(self, role: str) -> None:
        module, name = role.split(":")
        self._make: Callable[[], Any] = getattr(import_module(module), name)

    def start(self, opening: object = None) -> None:
        """Nothing has to start."""

    def ask(self, request: Any, timeout: float) -> Iterator[Any]:
        try:
            yield from self._make()(request)
        except (WorkerDied, WorkerError):
            raise
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from None

    def kill(self) -> None:
        """Nothing was started."""


class Reference(Future[Any]):
    def future(self) -> Future[Any]:
        return self


class FakeRay(ModuleType):
    """A cluster.

    Args:
        gpus: of each host, by its name.

    Attributes:
        lost: names of hosts that are gone.
        held: GPUs that actors have, by the name of the host.
        busy: names of hosts whose GPUs other jobs hold.
    """

    def __init__(self, gpus: dict[str, int]) -> None:
        super().__init__("ray")
        self.gpus = gpus
        self.lost, self.busy, self.held = set[str](), set[str](), dict.fromkeys(gpus, 0)
        self.exceptions = SimpleNamespace(
            RayError=RayError,
            RayTaskError=RayTaskError,
            GetTimeoutError=GetTimeoutError,
            RayActorError=RayActorError,
            ActorUnschedulableError=ActorUnschedulableError,
        )

    def init(self, **_: Any) -> None:
        """Connect."""

    def shutdown(self) -> None:
        """Disconnect."""

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": name not in self.lost, "NodeManagerHostname": name, "NodeManagerAddress": name}
            | {"Resources": {"GPU": float(count), "CPU": 1.0}}
            for name, count in self.gpus.items()
        ]

    def available_resources(self) -> dict[str, float]:
        return {"GPU": float(sum(self.free(name) for name in self.gpus))}

    def free(self, name: str) -> int:
        return 0 if name in self.lost | self.busy else self.gpus[name] - self.held[name]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "head")

    def get(self, reference: Future[Any], timeout: float | None = None) -> Any:
        if timeout is not None and not reference.done():
            raise GetTimeoutError
        return reference.result()

    def kill(self, actor: Actor) -> None:
        actor.leave()

    def remote(self, made: Callable[..., Any]) -> Any:
        def options(*, num_gpus: int, scheduling_strategy: Any, **_: Any) -> Any:
            free = next((name for name in self.gpus if self.free(name)), "")
            place = free if scheduling_strategy is None else scheduling_strategy.name
            return SimpleNamespace(remote=lambda *arguments: Actor(self, place, num_gpus, made(*arguments)))

        return SimpleNamespace(options=options)


class Actor:
    def __init__(self, ray: FakeRay, place: str, gpus: int, held: Any) -> None:
        self._ray, self.place, self._gpus, self._held = ray, place, gpus, held
        ray.held[place] += gpus

    def leave(self) -> None:
        self._held.end()
        self._ray.held[self.place] -= self._gpus
        self._gpus = 0

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Reference:
            done = Reference()
            if not (self._gpus and self.place in self._ray.busy):
                self._settle(done, lambda: getattr(self._held, name)(*arguments))
            return done

        def stream(*arguments: Any) -> Iterator[Reference]:
            answers = iter(getattr(self._held, name)(*arguments))
            while True:
                done = Reference()
                self._settle(done, lambda: next(answers))
                if isinstance(done.exception(), StopIteration):
                    return
                yield done

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=stream))

    def _settle(self, done: Future[Any], work: Callable[[], Any]) -> None:
        if self.place in self._ray.lost:
            done.set_exception(RayActorError("The actor died.\nmore"))
            return
        try:
            done.set_result(work())
        except StopIteration as end:
            done.set_exception(end)
        except Exception as error:
            done.set_exception(RayTaskError(f"Traceback\n{type(error).__name__}: {error}"))


def put_in_place(patch: Patch, gpus: dict[str, int], process: Callable[[str], Any] = in_process) -> FakeRay:
    """Have ``import ray`` find a cluster with these GPUs, whose actors ask this kind of process."""
    ray = FakeRay(gpus)
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.__dict__["NodeAffinitySchedulingStrategy"] = lambda name, soft: SimpleNamespace(name=name)
    for name, module in {"ray": ray, "ray.util": ModuleType("ray.util"), strategies.__name__: strategies}.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(host_processes, "WorkerProcess", process)
    patch.setattr(ray_hosts, "_check", lambda address: None)
    return ray
