"""What every evaluator must do: the GPU's on a stand-in for its driver, the offline one, and that of other tests."""

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from tests.support.evaluators import FakeEvaluator, passed
from tests.support.host_device import Device, gpu_on_host, host_launch
from tests.support.nouns import BASELINE_ENTRY, Artifact, Config, MeasureProtocol, Patch, each, load_target, registry
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem, matrices
from tritongemm.measure.device_worker import DeviceWorker
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.plugins.contracts import Backend, Evaluator

SIZE = Problem(24, 40, 16, *matrices("fp32"))
CONFIGS = [Config("tile", 16, 16, 16, group_m=g, num_warps=1) for g in (1, 2, 3)]
ARTIFACTS = [Artifact(c, f"digest{c.group_m}", threads=32) for c in CONFIGS]
CLASSES = (GpuEvaluator, OfflineEvaluator, FakeEvaluator)
Make = Callable[[pytest.FixtureRequest], Evaluator]


def gpu(request: pytest.FixtureRequest) -> Evaluator:
    """The process and its device in this process, every kernel a right one."""
    patch, folder = request.getfixturevalue("monkeypatch"), request.getfixturevalue("tmp_path")
    request.getfixturevalue("host_gpu")
    backend = registry.get(Backend, "triton")
    patch.setattr(backend, "launch", lambda artifact, problem, target: host_launch(folder, "right", problem))
    made = GpuEvaluator(load_target("sm90"), "nvidia", 0, MeasureProtocol(rotating_mb=1), 5.0)
    worker = DeviceWorker()
    patch.setattr(made, "_process", SimpleNamespace(ask=lambda job, timeout: worker(job), start=int, kill=int))
    return made


def offline(request: pytest.FixtureRequest) -> Evaluator:
    """The interpreter finds everything right, without being asked."""
    request.getfixturevalue("monkeypatch").setattr(OfflineEvaluator, "_interpret", passed)
    return OfflineEvaluator(load_target("gfx942"), 5.0)


def fake(request: pytest.FixtureRequest) -> Evaluator:
    made = FakeEvaluator()
    backend = registry.get(Backend, "triton")
    request.getfixturevalue("monkeypatch").setattr(backend, "launch", lambda artifact, problem, target: None)
    return made


@pytest.fixture
def host_gpu(monkeypatch: Patch) -> Iterator[Device]:
    with gpu_on_host(monkeypatch) as device:
        yield device


@pytest.fixture(params=[gpu, offline, fake], ids=lambda make: str(make.__name__))
def evaluator(request: pytest.FixtureRequest) -> Iterator[Evaluator]:
    make: Make = request.param
    one = make(request)
    one.start()
    yield one
    one.close()
    one.close()


@each("made", CLASSES)
def test_it_is_called_as_the_contract_says(made: type[Evaluator]) -> None:
    for name, method in vars(Evaluator).items():
        if getattr(method, "__isabstractmethod__", False):
            assert list(inspect.signature(getattr(made, name)).parameters) == list(inspect.signature(method).parameters)


def test_one_that_leaves_something_out_can_not_be_made() -> None:
    class Halfway(Evaluator):
        """Does nothing."""

    with pytest.raises(TypeError, match="abstract"):
        Halfway()  # type: ignore[abstract]


def test_a_screen_and_a_verification_have_an_answer_for_each_candidate(evaluator: Evaluator) -> None:
    trials = list(evaluator.screen(SIZE, ARTIFACTS, float("inf")))
    assert [t.config for t in trials] == CONFIGS
    assert all(t.status == "ok" and t.seconds > 0 and t.timer and t.stage == "screen" for t in trials)
    assert list(evaluator.screen(SIZE, [], 1.0)) == []
    trials = list(evaluator.verify(SIZE, ARTIFACTS))
    assert [t.config for t in trials] == CONFIGS
    for trial in trials:
        assert trial.status == "ok" and trial.stage == "final"
        assert trial.error is not None and trial.tolerance is not None and trial.error <= trial.tolerance


@pytest.mark.parametrize("baseline", ["", "torch"])
def test_a_race_has_samples_of_those_that_are_right(
    evaluator: Evaluator, baseline: str, request: pytest.FixtureRequest
) -> None:
    final = evaluator.race(SIZE, ARTIFACTS, baseline)
    names = {c.name for c in CONFIGS}
    raced = {t.config.name: t for t in final.trials if t.samples}
    assert raced and raced.keys() <= names
    assert set(final.samples) - {BASELINE_ENTRY} == raced.keys() and (baseline or BASELINE_ENTRY not in final.samples)
    for name, trial in raced.items():
        assert trial.status == "ok" and trial.stage == "final" and trial.timer and trial.error is not None
        assert tuple(final.samples[name]) == trial.samples
    assert isinstance(final.cold, bool)
    if isinstance(evaluator, GpuEvaluator):
        device = request.getfixturevalue("host_gpu")
        assert raced.keys() == names and (not baseline or BASELINE_ENTRY in final.samples)
        assert device.graphs == 0 and device.modules == 0 and all(len(s) >= 2 for s in final.samples.values())


def test_a_library_is_listed_and_results_say_how_they_are_verified(evaluator: Evaluator) -> None:
    try:
        configs = evaluator.list_algorithms(SIZE, "torch", 1)
    except TritonGemmError as error:
        assert "torch" in str(error)
    else:
        assert len(configs) <= 1 and all(c.backend == "torch" for c in configs)
    assert evaluator.describe(SIZE, CONFIGS[0]).strip() and evaluator.verification and evaluator.target.name
