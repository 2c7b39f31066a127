import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import Empty

import pytest

from tests.support import fake_ray
from tests.support.nouns import Artifact, ArtifactCache, CompileJob, Config, Patch, Problem, each, fails, load_target
from tests.support.stores import ONE, record
from tritongemm.build import pool as pool_module
from tritongemm.build.cluster_pool import ClusterBuildPool
from tritongemm.build.pool import BuildPool, JobStream
from tritongemm.build.prepare import compile_job, prepare_launches
from tritongemm.system.child_process import WorkerDied, WorkerTimeout
from tritongemm.system.ray_hosts import RayHosts, RemoteHost

LIMIT = 20.0  # seconds for what should take none


def job(number: int) -> CompileJob:
    config = Config("toy", 16, 16, 16, group_m=number)
    return CompileJob(config, {"toy": config.name}, {})


def stream(folder: Path, build: "Builder", until: float = float("inf"), first: tuple[str, ...] = ()) -> JobStream:
    return JobStream(ArtifactCache(folder), build, 1, until, lambda digest: digest not in first)


class Builder:
    """Builds at once, and notes what; `held` numbers wait until they may go on."""

    def __init__(self, *held: int, status: str = "ok") -> None:
        self.status = status
        self.order: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.held = held

    def __call__(self, job: CompileJob) -> Artifact:
        self.order.append(job.config.group_m)
        if job.config.group_m in self.held:
            self.begun.set()
            assert self.go_on.wait(LIMIT)
        return Artifact(job.config, job.digest, status=self.status)


@each(("second", "status", "order"), [(2, "ok", [1, 2]), (1, "ok", [1]), (1, "timeout", [1, 1])])
def test_builds_begin_while_jobs_are_being_made(tmp_path: Path, second: int, status: str, order: list[int]) -> None:
    """What is wanted later is there, or built again where that failed: nothing waits for ever for what was reported."""
    reported = threading.Event()

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        assert reported.wait(LIMIT), "the first is not built before there is a second"
        yield job(second)

    built = stream(tmp_path, builder := Builder(status=status)).artifacts(jobs())
    assert next(built).config.group_m == 1
    reported.set()
    assert [b.config.group_m for b in built] == [second] and builder.order == order


def test_jobs_of_a_lower_turn_go_before_others_that_wait(tmp_path: Path) -> None:
    builder = Builder(1)

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        assert builder.begun.wait(LIMIT)
        yield from map(job, (2, 3, 4, 5))
        builder.go_on.set()

    found = list(stream(tmp_path, builder, first=(job(4).digest, job(5).digest)).artifacts(jobs()))
    assert builder.order == [1, 4, 5, 2, 3] == [b.config.group_m for b in found]


def test_equal_jobs_are_built_once_and_none_when_the_time_is_spent(tmp_path: Path) -> None:
    builder = Builder(1)

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        assert builder.begun.wait(LIMIT)
        yield job(1)
        builder.go_on.set()

    assert len(list(stream(tmp_path, builder).artifacts(jobs()))) == 1 and builder.order == [1]
    idle = Builder()
    assert list(stream(tmp_path, idle, until=0.0).artifacts(map(job, range(5)))) == [] and idle.order == []


@each("who", ["builder", "jobs"])
def test_errors_end_the_stream(tmp_path: Path, who: str) -> None:
    class Failing(Builder):
        def __call__(self, job: CompileJob) -> Artifact:
            raise OSError("builder")

    def jobs() -> Iterator[CompileJob]:
        yield job(1)
        raise OSError("jobs")

    made = iter([job(1)]) if who == "builder" else jobs()
    fails(OSError, who, list, stream(tmp_path, Failing() if who == "builder" else Builder()).artifacts(made))


def test_a_row_whose_kernel_does_not_compile_says_why(tmp_path: Path, monkeypatch: Patch) -> None:
    failed = Artifact(CONFIG, "", status="compile_failed", reason="no room")
    fail = lambda jobs, cache: {one.digest: replace(failed, config=one.config, digest=one.digest) for one in jobs}
    monkeypatch.setattr(pool_module, "build_missing", fail)
    found = prepare_launches([record(ONE)], load_target("gfx942"), ArtifactCache(tmp_path))
    assert found == {ONE: "compile_failed: no room"}


CONFIG = Config("tile", 16, 16, 16, num_warps=1)


def cluster_job() -> CompileJob:
    made = compile_job(Problem(16, 16, 16), CONFIG, load_target("gfx1100"))
    assert isinstance(made, CompileJob)
    return made


@pytest.fixture
def ray(monkeypatch: Patch) -> fake_ray.FakeRay:
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


def builds_here(pool: ClusterBuildPool, monkeypatch: Patch) -> list[CompileJob]:
    """The jobs that this host is given to compile, which it does at once."""
    jobs: list[CompileJob] = []

    def noted(self: BuildPool, one: CompileJob) -> Artifact:
        jobs.append(one)
        return Artifact(one.config, one.digest)

    monkeypatch.setattr(BuildPool, "_compile", noted)
    return jobs


def test_kernels_compiled_away_are_in_our_cache(pool: ClusterBuildPool, monkeypatch: Patch, tmp_path: Path) -> None:
    here = builds_here(pool, monkeypatch)
    built = pool.build(cluster_job())
    assert built.status == "ok" and built.seconds > 0 and built.config == CONFIG and not here
    assert Path(built.path).is_relative_to(tmp_path) and Path(built.path).read_bytes()[:4] == b"\x7fELF"
    assert pool.build(cluster_job()) == replace(built, seconds=0.0), "from the cache"
    assert pool.width == 2 and pool.jobs == 1


def test_what_is_lost_away_is_compiled_here(pool: ClusterBuildPool, ray: fake_ray.FakeRay, monkeypatch: Patch) -> None:
    here = builds_here(pool, monkeypatch)
    ray.lost.add("away")
    assert [a.status for a in pool.stream([cluster_job()])] == ["ok"] and here == [cluster_job()]
    ray.lost.clear()
    fails(Empty, "", pool._build_away, cluster_job())


@pytest.mark.parametrize(("fault", "status"), [(WorkerDied("signal SIGSEGV"), "ok"), (WorkerTimeout(""), "timeout")])
def test_a_compiler_that_crashes_away_has_its_second_chance_here(
    pool: ClusterBuildPool, away: RemoteHost, monkeypatch: Patch, fault: Exception, status: str
) -> None:
    here = builds_here(pool, monkeypatch)

    def ask(request: object, timeout: float) -> Iterator[object]:
        raise fault
        yield

    monkeypatch.setattr(away, "ask", ask)
    assert pool.build(cluster_job()).status == status and len(here) == (status == "ok")


def test_kernels_that_need_files_of_this_host_are_compiled_on_it(pool: ClusterBuildPool, monkeypatch: Patch) -> None:
    here = builds_here(pool, monkeypatch)
    one = replace(cluster_job(), config=replace(CONFIG, backend="ck"))
    pool.build(one)
    assert here == [one]
