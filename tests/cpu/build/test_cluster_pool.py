"""Compilers on other hosts: kernels come into the cache of this host, and what is lost there is compiled here."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import Empty

import pytest

from tests.support import fake_ray
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.cluster_pool import ClusterBuildPool
from tritongemm.build.pool import BuildPool
from tritongemm.build.prepare import compile_job
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.search_spaces import loader as target_files
from tritongemm.system.child_process import WorkerDied, WorkerTimeout
from tritongemm.system.ray_hosts import RayHosts, RemoteHost

CONFIG = Config("tile", 16, 16, 16, num_warps=1)


def job() -> CompileJob:
    made = compile_job(Problem(16, 16, 16), CONFIG, target_files.load_target("gfx1100"))
    assert isinstance(made, CompileJob)
    return made


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> fake_ray.FakeRay:
    return fake_ray.put_in_place(monkeypatch, {"away": 0})


@pytest.fixture
def away(ray: fake_ray.FakeRay) -> RemoteHost:
    hosts = RayHosts("auto")
    return hosts.begin(BuildPool.ROLE, hosts.nodes()[0])


@pytest.fixture
def pool(away: RemoteHost, tmp_path: Path) -> Iterator[ClusterBuildPool]:
    with closing(ClusterBuildPool(ArtifactCache(tmp_path), 1)) as made:
        made.add(away, 1)
        yield made


def builds_here(pool: ClusterBuildPool, monkeypatch: pytest.MonkeyPatch) -> list[CompileJob]:
    """The jobs that this host is given to compile, which it does at once."""
    jobs: list[CompileJob] = []

    def noted(self: BuildPool, one: CompileJob) -> Artifact:
        jobs.append(one)
        return Artifact(one.config, one.digest)

    monkeypatch.setattr(BuildPool, "_compile", noted)
    return jobs


def test_a_kernel_that_is_compiled_away_is_in_this_hosts_cache(
    pool: ClusterBuildPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = builds_here(pool, monkeypatch)
    built = pool.build(job())
    assert built.status == "ok" and built.seconds > 0 and built.config == CONFIG and not here
    assert Path(built.path).is_relative_to(tmp_path) and Path(built.path).read_bytes()[:4] == b"\x7fELF"
    assert pool.build(job()) == replace(built, seconds=0.0), "from the cache"
    assert pool.width == 2 and pool.jobs == 1


def test_what_is_lost_away_is_compiled_here(
    pool: ClusterBuildPool, ray: fake_ray.FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing more is sent there."""
    here = builds_here(pool, monkeypatch)
    ray.lost.add("away")
    assert [a.status for a in pool.stream([job()])] == ["ok"] and here == [job()]
    ray.lost.clear()
    with pytest.raises(Empty):
        pool._build_away(job())


@pytest.mark.parametrize(("fault", "status"), [(WorkerDied("signal SIGSEGV"), "ok"), (WorkerTimeout(""), "timeout")])
def test_a_compiler_that_crashes_away_has_its_second_chance_here(
    pool: ClusterBuildPool, away: RemoteHost, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: str
) -> None:
    here = builds_here(pool, monkeypatch)

    def ask(request: object, timeout: float) -> Iterator[object]:
        raise fault
        yield

    monkeypatch.setattr(away, "ask", ask)
    built = pool.build(job())
    assert built.status == status and len(here) == (status == "ok")


def test_kernels_that_need_files_of_this_host_are_compiled_on_it(
    pool: ClusterBuildPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = builds_here(pool, monkeypatch)
    one = replace(job(), config=replace(CONFIG, backend="ck"))
    pool.build(one)
    assert here == [one]
