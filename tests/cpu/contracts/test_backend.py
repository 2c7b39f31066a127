import json
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.nouns import Config, Groups, Launch, Problem, Support, Target, each, load_target, matrices, registry
from tests.support.refusals import refuses
from tests.support.toys.backend_toy import ToyBackend
from tritongemm.codegen import template_facts
from tritongemm.core.config import AXES
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.launch import HostLaunch
from tritongemm.plugins.contracts import Backend, BuildInputs, Capabilities, KernelBackend, LibraryBackend

DENSE = Problem(64, 64, 192, *matrices("bf16", layout="TN"))
PROBLEMS = (DENSE, replace(DENSE, bias="n"), Problem(33, 100, 77))
TARGETS = [load_target(name) for name in ("gfx942", "sm90")]
OWN = "a b c bias workspace semaphore m n k lda ldb ldc group_m null null"


def example_backend() -> KernelBackend:
    backend = ToyBackend()
    backend.name = "toy"
    return backend


BACKENDS: dict[str, Backend] = {b.name: b for b in (*registry.every(Backend), example_backend())}
KERNELS = {name: b for name, b in BACKENDS.items() if isinstance(b, KernelBackend)}


@pytest.fixture(scope="module", autouse=True)
def manifest(tmp_path_factory: pytest.TempPathFactory) -> BuildInputs:
    """A manifest with a kernel whose code object is missing, so that assembly has a candidate."""
    path = tmp_path_factory.mktemp("manifest") / "kernels.csv"
    path.write_text(f"knl_name,co_name,tile_m,tile_n,layout\nk,k.co,16,16,{OWN}\n")
    return BuildInputs(manifests=(path,))


@cache
def list_candidates(name: str, problem: Problem, target: Target, inputs: BuildInputs) -> list[Config]:
    return KERNELS[name].candidates(problem, target, inputs)


@pytest.fixture
def inputs(manifest: BuildInputs) -> BuildInputs:
    return manifest


@each("name", BACKENDS)
def test_it_describes_itself(name: str) -> None:
    backend = BACKENDS[name]
    assert backend.name == name and backend.label and backend.summary
    assert isinstance(backend.capabilities, Capabilities) and isinstance(backend, KernelBackend | LibraryBackend)
    assert isinstance(backend.available(), Support)


@each("target", TARGETS)
@each("name", BACKENDS)
def test_what_it_does_not_compute_has_a_reason(name: str, target: object) -> None:
    backend = BACKENDS[name]
    grouped = replace(DENSE, groups=Groups(2))
    if grouped.kind not in backend.capabilities.kinds:
        assert backend.supports(grouped, target).reason  # type: ignore[arg-type]
    for problem in PROBLEMS:
        state = backend.supports(problem, target)  # type: ignore[arg-type]
        assert bool(state) != bool(state.reason)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("name", KERNELS)
def test_candidates_are_its_own_and_pass_its_check(name: str, target: object, inputs: BuildInputs) -> None:
    backend = KERNELS[name]
    for problem in PROBLEMS:
        candidates = list_candidates(name, problem, target, inputs)
        has = backend.has_candidates(problem, target, inputs)  # type: ignore[arg-type]
        assert bool(has) == bool(candidates) and len(candidates) == len(set(candidates))
        assert not candidates or backend.supports(problem, target)  # type: ignore[arg-type]
        for config in candidates[:3]:
            assert config.backend == name and Config.parse(config.name) == config
            assert backend.check(config, problem, target, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", KERNELS)
def test_everything_is_no_less_than_the_default(name: str, inputs: BuildInputs) -> None:
    for target in TARGETS:
        entire = KERNELS[name].candidates(DENSE, target, inputs, everything=True)
        assert set(list_candidates(name, DENSE, target, inputs)) <= set(entire)


@pytest.mark.parametrize("name", KERNELS)
def test_a_compile_job_survives_json(name: str, inputs: BuildInputs) -> None:
    backend, made = KERNELS[name], 0
    for target in TARGETS:
        for config in list_candidates(name, DENSE, target, inputs)[:2]:
            try:
                job = backend.compile_job(config, DENSE, target, inputs)
            except UnavailableError as error:
                pytest.skip(str(error))
            again = backend.compile_job(config, DENSE, target, inputs)
            assert json.loads(json.dumps(job.identity)).keys() == job.identity.keys()
            assert job.identity["backend"] == name and again.digest == job.digest
            made += 1
    assert made


@each("name", KERNELS)
def test_configs_of_others_are_refused(name: str) -> None:
    other = Config("t", 1, 1, 1, backend="other")
    refuses(f"a config of backend other, not of {name}", KERNELS[name].check, other, DENSE, TARGETS[0])
    refuses("not of", KERNELS[name].compile_job, other, DENSE, TARGETS[0])


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_any_numbers_of_a_config_have_a_reason(name: str, manifest: BuildInputs, data: st.DataObject) -> None:
    """Its check raises nothing, and what it lets pass can be made a job of; what it does not is no job."""
    backend, target = KERNELS[name], data.draw(st.sampled_from(TARGETS))
    problem = data.draw(st.sampled_from((*PROBLEMS, replace(DENSE, batch=3), replace(DENSE, m=2**31 - 1))))
    own = [config.template for config in list_candidates(name, DENSE, target, manifest)[:3]]
    named = (*template_facts.names(), *own, "none")
    number = st.sampled_from((0, 1, 2, 3, 4, 8, 16, 32, 48, 64, 128, 2**20, 2**31 - 1, 2**31, 10**19 - 1))
    axes = data.draw(st.fixed_dictionaries(dict.fromkeys(AXES, number)))
    options = data.draw(
        st.dictionaries(st.sampled_from(("kpack", "share", "xcds", "pipeline", "swap_ab", "frob")), number)
    )
    config = Config(data.draw(st.sampled_from(named)), **axes, options=tuple(options.items()), backend=name)
    possible = backend.check(config, problem, target, manifest)
    assert "Error" not in possible.reason, "a rule for it, rather than the net below all rules"
    if not possible:
        with pytest.raises(InputError) as refused:
            backend.compile_job(config, problem, target, manifest)
        assert str(refused.value) == f"{config.name} can't compute {problem.key} on {target.name}: {possible}"
        return
    with suppress(UnavailableError):
        assert backend.compile_job(config, problem, target, manifest).config == config


def test_a_fault_in_a_check_or_a_launch_that_can_not_start_is_a_reason() -> None:
    class Divides(ToyBackend):
        def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
            return Support(str(1 // (config.split_k - 1)))

    divides = Divides()
    divides.name = "toy"
    found = divides.check(Config("toy", 16, 16, 32, backend="toy"), DENSE, TARGETS[0])
    assert found.reason.startswith("its numbers fit no kernel of toy (ZeroDivisionError: ")
    backend = example_backend()
    (config,) = backend.candidates(DENSE, TARGETS[0])
    artifact, _, _ = backend.compile(backend.compile_job(config, DENSE, TARGETS[0]))
    with pytest.raises(InputError, match="can't be launched on gfx942: 2048 threads in a workgroup"):
        backend.launch(replace(artifact, threads=2048), DENSE, TARGETS[0])


def test_the_toys_launch_reads_what_it_says() -> None:
    backend = example_backend()
    (config,) = backend.candidates(DENSE, TARGETS[0])
    artifact, code, file = backend.compile(backend.compile_job(config, DENSE, TARGETS[0]))
    launch = backend.launch(artifact, DENSE, TARGETS[0])
    assert isinstance(launch, Launch) and not isinstance(launch, HostLaunch)
    assert (launch.grid, code, file) == ((4, 4, 1), b"code", "kernel.toy")
    with pytest.raises(InputError, match="was not compiled: too large"):
        backend.launch(replace(artifact, status="out_of_resources", reason="too large"), DENSE, TARGETS[0])
    row = backend.manifest_row(None, launch, TARGETS[0])  # type: ignore[arg-type]
    assert isinstance(row, Support) and "toy" in row.reason
