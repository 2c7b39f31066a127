import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, fake_ray, raising
from tests.support.nouns import InputError, Patch, UnavailableError, apart, fails, refuses
from tritongemm.system import ray_hosts
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerTimeout
from tritongemm.system.ray_hosts import HostLost, RayHosts, RemoteHost

FAULTS = {
    "killed": WorkerDied("signal SIGKILL", from_outside=True),
    "died": WorkerDied("signal SIGSEGV"),
    "late": WorkerTimeout("no answer within 5 s"),
    "failed": WorkerError("ValueError: that can't be"),
    "missing": UnavailableError("no further process can be started"),
}


class Process:
    """Counts, and then ends in the way that the request says."""

    def __init__(self, role: str) -> None:
        self.role = role

    def start(self, opening: object = None) -> None:
        if opening == "fail":
            raise UnavailableError("no further process can be started")

    def ask(self, request: str, timeout: float) -> Iterator[object]:
        yield from range(2)
        if request in FAULTS:
            raise FAULTS[request]
        yield self.role, timeout

    def kill(self) -> None:
        """Nothing was started."""


@pytest.fixture
def ray(monkeypatch: Patch) -> fake_ray.FakeRay:
    return fake_ray.put_in_place(monkeypatch, {"one": 1}, Process)


@pytest.fixture
def host(ray: fake_ray.FakeRay) -> RemoteHost:
    hosts = RayHosts("auto")
    return hosts.begin("a:Role", hosts.nodes()[0], count=2)


def test_answers_come_as_of_a_process_here(host: RemoteHost) -> None:
    assert list(host.ask("well", 3.0)) == [0, 1, ("a:Role", 3.0)]
    assert host.begin_once("another:Role", "well", 4.0)() == [0, 1, ("another:Role", 4.0)]


@pytest.mark.parametrize("how", FAULTS)
def test_a_request_ends_as_one_of_a_process_here(host: RemoteHost, how: str) -> None:
    kind = WorkerError if how == "missing" else type(FAULTS[how])
    for _ in range(3):
        answers = host.ask(how, 3.0)
        assert [next(answers), next(answers)] == [0, 1]
        with pytest.raises(kind) as raised:
            next(answers)
        assert str(raised.value) == str(FAULTS[how]) and not host.lost
        assert isinstance(raised.value, WorkerDied) is (how in ("killed", "died"))
        if isinstance(raised.value, WorkerDied):
            assert raised.value.from_outside is (how == "killed")
        fails(kind, "", host.begin_once("a:Role", how, 3.0))


def test_a_lost_host_ends_a_request_from_outside(ray: fake_ray.FakeRay, host: RemoteHost) -> None:
    answers = host.ask("well", 3.0)
    assert next(answers) == 0
    ray.lost.add("one")
    with pytest.raises(HostLost, match=r"^host one was lost: The actor died$") as raised:
        next(answers)
    assert raised.value.from_outside and host.lost
    host.end()
    host.kill()


@apart(
    (fake_ray.RayActorError("The actor died.\nmore"), HostLost, "host one was lost: The actor died"),
    (fake_ray.ActorUnschedulableError("The node is gone."), HostLost, "host one was lost: The node is gone"),
    (fake_ray.RayTaskError("more\nNo module named 'tritongemm'"), UnavailableError, "can't run tritongemm: No module"),
)
def test_an_actor_that_never_comes(
    fault: Exception, kind: type[Exception], said: str, /, host: RemoteHost, monkeypatch: Patch
) -> None:
    """Because its host is gone, which Ray lists for a while, or can't run it."""
    monkeypatch.setattr(host._ray, "get", raising(fault))
    fails(kind, said, host.ready, 1.0)
    assert host.lost == (kind is HostLost)
    if isinstance(fault, fake_ray.RayActorError):
        monkeypatch.setattr(fault, "actor_init_failed", True)
        fails(UnavailableError, "host one can't run tritongemm: more", host.ready, 1.0)


def test_files_are_kept_in_the_cache_of_the_host(host: RemoteHost, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path))
    kept = host.keep({"here/a.cubin": ("a.cubin", b"code"), "there/a.cubin": ("a.cubin", b"other")})
    assert {key: Path(path).read_bytes() for key, path in kept.items()} == {
        "here/a.cubin": b"code",
        "there/a.cubin": b"other",
    }
    assert all(Path(path).is_relative_to(tmp_path) for path in kept.values())
    tmp_path.chmod(0o777)
    fails(WorkerError, r"OutputError: .* can be written by others", host.keep, {"here/b.cubin": ("b.cubin", b"code")})


def test_an_address_is_checked_before_ray_waits_for_it(monkeypatch: Patch) -> None:
    """Ray itself would wait for minutes, and take no signal."""
    monkeypatch.setitem(sys.modules, "ray", fake_ray.FakeRay({}))
    for address, why in {
        "head": "HOST:PORT",
        "head:": "HOST:PORT",
        ":1": "HOST:PORT",
        "head:70000": "HOST:PORT",
        "ray://head:10001": "on a host of the cluster itself",
        "127.0.0.1:1": "no Ray cluster can be used there: Connection refused",
    }.items():
        refuses(why, RayHosts, address)
    monkeypatch.setattr(ray_hosts, "_PROBE", "import sys, time; time.sleep(60)")
    monkeypatch.setattr(ray_hosts, "_PROBE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(InputError, match=r"no answer within 0\.1 s"):
        RayHosts(f"127.0.0.1:{silent.getsockname()[1]}")
    monkeypatch.setattr(ray_hosts, "_PROBE_SECONDS", 20.0)
    monkeypatch.setattr(ray_hosts, "_PROBE", "raise RuntimeError('Version mismatch: the cluster has another Ray')")
    refuses("RuntimeError: Version mismatch", RayHosts, "auto")


def test_ray_that_is_missing_or_refuses_users_is_reported(ray: fake_ray.FakeRay, monkeypatch: Patch) -> None:
    monkeypatch.setattr(ray, "init", raising(ConnectionError("\nCould not find any running Ray instance.\n")))
    refuses(r"--ray auto: no Ray cluster .*: Could not find any running Ray instance;", RayHosts, "auto")
    monkeypatch.setitem(sys.modules, "ray", None)
    fails(UnavailableError, r"pip install 'tritongemm\[ray\]'", RayHosts, "auto")


def test_signals_to_stop_stay_the_commands(ray: fake_ray.FakeRay, monkeypatch: Patch) -> None:
    """Ray takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    RayHosts("auto").close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_actors_import_nothing_of_the_current_folder(ray: fake_ray.FakeRay, monkeypatch: Patch, tmp_path: Path) -> None:
    """Ray has them look first where the job begins."""
    begun: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", lambda **_: begun.append(Path.cwd()))
    RayHosts("auto").close()
    assert begun == [ROOT] and Path.cwd() == tmp_path
