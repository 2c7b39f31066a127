from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support import fake_ray
from tests.support.fake_ray import FakeRay
from tests.support.host_device import host_launch
from tests.support.nouns import Artifact, Backend, Config, Launch, Machine, MeasureProtocol, Patch, Trial, registry
from tests.support.refusals import fails, refuses
from tritongemm.core.errors import TritonGemmError, UnavailableError
from tritongemm.core.problem import Problem, matrices
from tritongemm.measure import cluster
from tritongemm.measure.cluster import ClusterGpus, HostFacts, own_versions
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.measure.jobs import MeasureAnswer, MeasureJob, OperandsReady, ScreenJob
from tritongemm.search_spaces import loader as target_files
from tritongemm.system.child_process import WorkerDied
from tritongemm.system.ray_hosts import RayHosts

SIZE = Problem(24, 40, 16, *matrices("fp32"))
CONFIGS = [Config("tile", 16, 16, 16, group_m=g, num_warps=1) for g in (1, 2, 3)]
ARTIFACTS = [Artifact(c, f"digest{c.group_m}", threads=32) for c in CONFIGS]
H200 = Machine(target_files.load_target("sm90"), "nvidia", (0,), "H200", "")
ROLES = (f"{__name__}:Gpu", f"{__name__}:Survey")


class Survey:
    """Reports of the next host."""

    facts: ClassVar[list[HostFacts]] = []

    def __call__(self, request: object) -> Iterator[HostFacts]:
        yield self.facts.pop(0) if self.facts else HostFacts(H200, own_versions())


class Gpu:
    before: ClassVar[Callable[[Launch], None]] = lambda launch: None
    launches: ClassVar[list[Launch]] = []

    def __call__(self, job: MeasureJob) -> Iterator[MeasureAnswer]:
        assert isinstance(job, ScreenJob) and job.setup.device == 0
        yield OperandsReady(1, True)
        for one in job.candidates:
            assert isinstance(one.launch, Launch)
            type(self).before(one.launch)
            self.launches.append(one.launch)
            yield Trial(one.config, "ok", samples=(1e-6,), timer="sundial")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def clean(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(Survey, "facts", [])
    monkeypatch.setattr(Gpu, "launches", [])
    monkeypatch.setattr(Gpu, "before", lambda launch: None)
    monkeypatch.setattr(cluster, "_FREE_SECONDS", 0.0)
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "there"))
    here = tmp_path / "kernel"
    here.write_bytes(b"code")
    launch = lambda artifact, problem, target: replace(host_launch(tmp_path, "right", problem), path=str(here))
    monkeypatch.setattr(registry.get(Backend, "triton"), "launch", launch)


def found(ray: FakeRay, said: list[str], arch: str | None = None, most: int = 0) -> ClusterGpus:
    return ClusterGpus(RayHosts("auto"), arch, most, said.append, ROLES)


def evaluators(gpus: ClusterGpus) -> list[GpuEvaluator]:
    machine = gpus.machine
    return [
        GpuEvaluator(machine.target, machine.vendor, n, MeasureProtocol(), 5.0, process)
        for n, process in enumerate(gpus.processes())
    ]


def facts(**other: Any) -> HostFacts:
    return HostFacts(replace(H200, **other), own_versions())


def test_every_gpu_of_the_hosts_is_used_up_to_what_is_asked_for(monkeypatch: Patch, said: list[str]) -> None:
    machine = found(fake_ray.put_in_place(monkeypatch, {"head": 0, "one": 2, "two": 1}), said).machine
    assert machine.devices == (0, 1, 2) and machine.vendor == "nvidia" and machine.target is H200.target
    assert machine.why == "tuning on H200 x 3 (sm90) of a Ray cluster; one: 2, two: 1" and not said
    ray = fake_ray.put_in_place(monkeypatch, {"one": 2, "two": 2})
    assert found(ray, said, most=3).machine.devices == (0, 1, 2) and ray.held == {"one": 2, "two": 1}


def test_gpus_of_several_kinds_are_refused_or_chosen_by_their_architecture(monkeypatch: Patch, said: list[str]) -> None:
    ray = fake_ray.put_in_place(monkeypatch, {"one": 1, "two": 1})
    a100 = facts(target=target_files.load_target("sm80"), product="A100")
    Survey.facts[:] = [facts(), a100]
    refuses(r"not 1 x H200 .*\(sm90\), 1 x A100 .*\(sm80\); --target", found, ray, said)
    ray.held = dict.fromkeys(ray.held, 0)
    Survey.facts[:] = [facts(), a100]
    assert found(ray, said, "sm80").machine.product == "A100"
    assert said == ["1 GPUs of the cluster are of another kind, and have no part"] and ray.held == {"one": 0, "two": 1}
    ray.held = dict.fromkeys(ray.held, 0)
    Survey.facts[:] = [facts(), facts(product="H100")]
    refuses(r"H200 .*H100 .*\(sm90\)$", found, ray, said, "sm90")
    refuses("no GPU of gfx942, but 2 x H200", found, ray, said, "gfx942")


def test_a_cluster_that_can_not_be_used_is_refused(monkeypatch: Patch, said: list[str]) -> None:
    refuses("the cluster has no GPU", found, fake_ray.put_in_place(monkeypatch, {"head": 0}), said)
    ray = fake_ray.put_in_place(monkeypatch, {"one": 1})
    Survey.facts[:] = [HostFacts(H200, ("0.1.0", "2.0", "1.0"))]
    refuses(r"host one has \w+ .*, this one .*; install one version", found, ray, said)
    Survey.facts[:] = [facts(devices=())]
    refuses("host one offers a GPU that no driver there can use", found, ray, said)


def test_gpus_that_others_hold_have_no_part(monkeypatch: Patch, said: list[str]) -> None:
    ray = fake_ray.put_in_place(monkeypatch, {"one": 1, "two": 1})
    ray.busy = {"two"}
    assert found(ray, said).machine.devices == (0,) and said == ["a GPU of host two has no part: others hold it"]
    ray.busy = {"one", "two"}
    refuses("other jobs hold all 2 GPUs", found, ray, said)


def test_a_host_that_is_lost_but_still_listed_has_no_part(monkeypatch: Patch, said: list[str]) -> None:
    ray = fake_ray.put_in_place(monkeypatch, {"one": 1, "two": 1})
    nodes = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    ray.lost = {"one"}
    assert found(ray, said).machine.devices == (0,) and said == ["a GPU of host one has no part: the host is lost"]


def test_code_objects_are_sent_once(monkeypatch: Patch, said: list[str], tmp_path: Path) -> None:
    (gpu,) = evaluators(found(fake_ray.put_in_place(monkeypatch, {"one": 1}), said))
    for _ in range(2):
        assert [t.status for t in gpu.screen(SIZE, ARTIFACTS, 1.0)] == ["ok"] * 3
    (path,) = {launch.path for launch in Gpu.launches}
    assert Path(path).is_relative_to(tmp_path / "there") and Path(path).read_bytes() == b"code"


def lose_at(ray: FakeRay, monkeypatch: Patch, losses: dict[int, str]) -> None:
    def before(launch: Launch) -> None:
        ray.lost |= {host for count, host in losses.items() if count <= len(Gpu.launches)}

    monkeypatch.setattr(Gpu, "before", before)


def test_another_gpu_does_the_work_of_one_that_is_lost(monkeypatch: Patch, said: list[str]) -> None:
    """The candidate that ran is tried again, and no other."""
    ray = fake_ray.put_in_place(monkeypatch, {"one": 1, "two": 1})
    first, second = evaluators(found(ray, said))
    lose_at(ray, monkeypatch, {1: "one"})
    assert [(t.config, t.status) for t in list(first.screen(SIZE, ARTIFACTS, 1.0))] == [(c, "ok") for c in CONFIGS]
    assert said == ["a GPU of host one is lost; one of two does its work too"]
    assert len(list(second.screen(SIZE, ARTIFACTS, 1.0))) == 3


def test_a_free_gpu_takes_over_and_without_any_left_the_size_fails(monkeypatch: Patch, said: list[str]) -> None:
    ray = fake_ray.put_in_place(monkeypatch, {"one": 1, "two": 2})
    first = evaluators(found(ray, said, most=2))[0]
    lose_at(ray, monkeypatch, {1: "one"})
    assert [t.status for t in first.screen(SIZE, ARTIFACTS, 1.0)] == ["ok"] * 3
    assert said == ["a GPU of host one is lost; one that was free takes over"] and ray.held["two"] == 2
    ray = fake_ray.put_in_place(monkeypatch, {"one": 1, "two": 1})
    gpus = found(ray, said)
    first = evaluators(gpus)[0]
    lose_at(ray, monkeypatch, {0: "one", 1: "two"})
    gpus.require_left()
    with pytest.raises(TritonGemmError, match="no GPU of the cluster is left; the last was on host two"):
        list(first.screen(SIZE, ARTIFACTS, 1.0))
    fails(UnavailableError, "--ray auto: no GPU of the cluster is left; what is done is kept", gpus.require_left)


def test_nothing_is_replaced_once_the_run_is_over(monkeypatch: Patch, said: list[str]) -> None:
    """Actors end then, under threads that may still work."""
    ray = fake_ray.put_in_place(monkeypatch, {"one": 1, "two": 2})
    gpus = found(ray, said, most=1)
    gpus.close()
    ray.lost.add("one")
    fails(TritonGemmError, "the run is over", list, evaluators(gpus)[0].screen(SIZE, ARTIFACTS, 1.0))
    assert not said


def test_a_process_that_ends_costs_its_candidate_alone(monkeypatch: Patch, said: list[str]) -> None:
    (gpu,) = evaluators(found(fake_ray.put_in_place(monkeypatch, {"one": 1}), said))

    def before(launch: Launch) -> None:
        if len(Gpu.launches) == 1:
            Gpu.launches.append(launch)
            raise WorkerDied("signal SIGSEGV: bad address")

    monkeypatch.setattr(Gpu, "before", before)
    trials = list(gpu.screen(SIZE, ARTIFACTS, 1.0))
    assert [t.status for t in trials] == ["ok", "crashed", "ok"] and trials[1].reason == "signal SIGSEGV: bad address"
    assert not said
