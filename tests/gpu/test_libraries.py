"""Libraries' products on a real GPU against float64: the vendor's, PyTorch's, DeepGEMM's, with scales too."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.gpu.here import DENSE, VENDOR, needed_fp8, needs_gpu, nvidia
from tests.support import scaled_operands
from tests.support.nouns import Config, Groups, Machine, Operands, Problem, Record, Support, matrices, registry
from tests.support.scaled_operands import PAIRS
from tritongemm.backends.blaslt import algorithms
from tritongemm.hip_ext.driver import driver
from tritongemm.numerics import grouped, verify
from tritongemm.numerics.verify import deviation
from tritongemm.plugins.contracts import Backend, Family, LibraryBackend

BLASLT = registry.get(LibraryBackend, "blaslt")
FP8 = ("fp8e4m3fn", "fp8e4m3fn")


def made(problem: Problem) -> Operands:
    c = torch.empty(problem.m, problem.n, dtype=getattr(torch, problem.c.type.torch), device="cuda")
    return DENSE.make_inputs(problem, "cuda") | {"c": c}


def operation(problem: Problem, operands: Operands, config: Config | None = None) -> Callable[[], object]:
    """The call of an algorithm that the library must have."""
    call = BLASLT.operation(problem, operands, config)
    assert call is not None, f"no algorithm for {problem.key}"
    return call


def check(problem: Problem, config: Config | None = None, operands: Operands | None = None) -> None:
    given = operands or made(problem)
    call = operation(problem, given, config)

    def run() -> None:
        call()
        torch.cuda.synchronize()

    found = verify.verify(problem, DENSE, run, given["c"], DENSE.reference(problem, given))
    assert found.ok, f"{problem.key}: {found.reason}"


@needs_gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bias", ["none", "n", "m"])
@pytest.mark.parametrize(("row_a", "row_b"), list(itertools.product([True, False], repeat=2)))
def test_layouts_and_biases(dtype: str, bias: str, row_a: bool, row_b: bool) -> None:
    for m, n, k in ((128, 256, 192), (16, 40, 72), (1, 96, 64)):
        check(Problem(m, n, k, *matrices(dtype, layout="NT"[row_a] + "NT"[row_b]), bias=bias))


@needs_gpu
@nvidia
@pytest.mark.skipif(not VENDOR or torch.cuda.get_device_capability() < (8, 9), reason="no fp8 units")
@pytest.mark.parametrize("out", ["fp16", "bf16", "fp32", "fp8e4m3fn"])
def test_fp8_in_every_output(out: str) -> None:
    for bias in ("none",) if out == "fp8e4m3fn" else ("none", "n"):
        problem = Problem(64, 256, 512, *matrices(*FP8, out, layout="TN"), bias=bias)
        check(problem)
        operands = made(problem)
        configs = BLASLT.list_algorithms(problem, operands)
        assert {c.option("fast") for c in configs} == {0, 1}
        for config in (configs[0], configs[-1]):
            check(problem, config, operands)
    row = Problem(64, 256, 512, *matrices(*FP8, out))
    assert BLASLT.operation(row, made(row)) is None  # not TN


@needs_gpu
def test_int8_and_mixed_types() -> None:
    check(Problem(64, 256, 512, *matrices("int8", c="int32", layout="TN")))
    check(Problem(64, 256, 512, *matrices("int8", c="int32", layout="TN"), bias="n"))
    check(Problem(64, 256, 512, *matrices(c="fp32", layout="TN")))
    mixed = Problem(64, 256, 512, *matrices(b="bf16", c="fp32"))
    assert BLASLT.operation(mixed, made(mixed)) is None


@needs_gpu
def test_every_algorithm_is_right_and_finds_its_way_back() -> None:
    problem = Problem(256, 1280, 2048, *matrices("bf16", layout="TN"), bias="n")
    operands = made(problem)
    configs = BLASLT.list_algorithms(problem, operands)
    assert len(configs) > 1 and len({algorithms.identity(c) for c in configs}) == len(configs)
    assert all(Config.parse(c.name) == c for c in configs)
    for config in configs[:: max(1, len(configs) // 64)]:
        check(problem, config, operands)
    assert algorithms.resolve(configs[-1], problem, algorithms.version()) is configs[-1]
    assert algorithms.resolve(configs[-1], problem, 1) == configs[-1]  # found again by what it is
    gone = Config.parse(configs[0].name.replace("__tile", "__tile9"))
    assert gone is not None and algorithms.resolve(gone, problem, 1) is None


@needs_gpu
@nvidia  # hipBLASLt's indices need no rebuilding
def test_algorithms_are_rebuilt_from_their_attributes() -> None:
    problem = Problem(256, 1280, 2048, *matrices("bf16", layout="TN"))
    operands = made(problem)
    prepared = algorithms._prepared(problem, operands, False)
    assert prepared is not None
    plan, _ = prepared
    same = 0
    for algorithm in plan.algorithms:
        again = plan.rebuild(dict(algorithm.values))
        same += again is not None and again.values == algorithm.values
        if again is not None:
            c = operands["c"].fill_(float("nan"))
            args = (operands["b"].data_ptr(), operands["a"].data_ptr(), c.data_ptr(), c.data_ptr())
            plan.prepare(again, *args)(algorithms._workspace(c.device, 0).data_ptr(), 0)
            torch.cuda.synchronize()
            assert verify.deviation(c, DENSE.reference(problem, operands)) <= DENSE.tolerance(problem)
    print(f"rebuilt {same} of {len(plan.algorithms)}")
    assert same >= len(plan.algorithms) // 2


@needs_gpu
def test_graphs_streams_and_operands_that_are_not_aligned() -> None:
    problem = Problem(64, 128, 256, *matrices("bf16", layout="TN"), bias="m")
    operands = made(problem)
    call, c = operation(problem, operands), operands["c"]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    c.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert verify.deviation(c, DENSE.reference(problem, operands)) <= DENSE.tolerance(problem)
    odd = Problem(33, 7, 13, *matrices("bf16"))
    flat = torch.randn(33 * 13 + 1, device="cuda", dtype=torch.bfloat16)
    check(odd, None, made(odd) | {"a": flat[1:].view(33, 13)})


SIZES = ((1, 2112, 7168), (7, 336, 640), (33, 272, 1152), (96, 256, 512), (130, 1040, 2176))
COMPETITORS = ("torch", "blaslt", "deepgemm")


def prepared(machine: Machine, name: str, problem: Problem) -> LibraryBackend:
    """The backend, if it is here and has such products."""
    state = registry.available(Backend, name)
    backend = registry.get(LibraryBackend, name)
    state = state and backend.supports(problem, machine.target)
    if not state:
        pytest.skip(f"{name}: {state}")
    return backend


def check_each(backend: LibraryBackend, problem: Problem, operands: Operands, exact: torch.Tensor, limit: int) -> int:
    """Number of algorithms, each of which computes the product, in a graph too."""
    configs, c, stream = backend.list_algorithms(problem, operands, limit), operands["c"], torch.cuda.Stream()
    for config in configs:
        # Sums that are not promoted lose more the longer K is: a race would refuse them then.
        tolerance = 0.1 if config.option("fast") else registry.get(Family, problem.family).tolerance(problem)
        with torch.cuda.stream(stream):
            call = backend.operation(problem, operands, config)
            assert call is not None, f"{config.name} is listed and can't be called"
            c.fill_(float("nan"))
            call()
        stream.synchronize()
        assert deviation(c, exact) <= tolerance, f"{config.name} of {problem.key}"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        c.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert deviation(c, exact) <= tolerance, f"{config.name} of {problem.key}, in a graph"
    return len(configs)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", COMPETITORS)
def test_fp8_with_every_granularity(gpu_machine: Machine, name: str, pair: str) -> None:
    dtype = needed_fp8(gpu_machine.target)
    backend = prepared(gpu_machine, name, scaled_operands.problem(96, 256, 512, PAIRS[pair], dtype))
    counts = {}
    for m, n, k in SIZES:
        problem = scaled_operands.problem(m, n, k, PAIRS[pair], dtype)
        operands, exact = scaled_operands.operands(problem, "cuda")
        counts[m] = check_each(backend, problem, operands, exact, 12)
    print(f"{name}, {pair}: algorithms by M {counts}")
    assert counts[96], "no algorithm at 96 x 256 x 512"


@pytest.mark.parametrize("name", ["torch", "blaslt"])
def test_fp8_with_a_bias(gpu_machine: Machine, name: str) -> None:
    problem = scaled_operands.problem(33, 272, 640, PAIRS["row"], needed_fp8(gpu_machine.target), bias="n")
    operands, exact = scaled_operands.operands(problem, "cuda")
    assert check_each(prepared(gpu_machine, name, problem), problem, operands, exact, 8)


@pytest.mark.parametrize("pair", ["tensor", "row"])
def test_int8_by_pytorch(gpu_machine: Machine, pair: str) -> None:
    for m, bias in ((33, "none"), (130, "n")):
        problem = scaled_operands.problem(m, 272, 640, PAIRS[pair], "int8", bias=bias)
        operands, exact = scaled_operands.operands(problem, "cuda")
        assert check_each(prepared(gpu_machine, "torch", problem), problem, operands, exact, 0)


@pytest.mark.parametrize(
    ("name", "pair"), [("blaslt", "row"), ("blaslt", "block, A in groups"), ("deepgemm", "block, A in groups")]
)
def test_a_record_is_served_at_any_addresses(gpu_machine: Machine, name: str, pair: str) -> None:
    problem = scaled_operands.problem(64, 1040, 2048, PAIRS[pair], needed_fp8(gpu_machine.target))
    backend = prepared(gpu_machine, name, problem)
    tolerance = registry.get(Family, problem.family).tolerance(problem)
    made = [scaled_operands.operands(problem, "cuda", seed) for seed in range(2)]
    device, stream = driver.open_driver(gpu_machine.vendor).device(0), torch.cuda.Stream()
    for config in backend.list_algorithms(problem, made[0][0], 4):
        record = Record(problem, gpu_machine.target.name, config, name, 1e-6, 0.0, "events")
        loaded = backend.load(record, 0, device)
        assert not isinstance(loaded, Support), f"{config.name}: {loaded.reason}"
        launch = loaded.prepare(device)
        scratch = torch.empty(max(loaded.bytes("workspace"), 1), dtype=torch.uint8, device="cuda")
        launch.set_address("workspace")(scratch.data_ptr())
        for operands, exact in made:
            operands["c"].fill_(float("nan"))
            torch.cuda.synchronize()
            for operand in ("a", "b", "c", "scale_a", "scale_b"):
                launch.set_address(operand)(operands[operand].data_ptr())
            launch.launch(stream.cuda_stream)
            stream.synchronize()
            assert deviation(operands["c"], exact) <= tolerance, config.name
        print(f"{config.name}: launched without the library: {getattr(loaded, 'captured', None)}")


def test_a_factor_in_another_ones_place_shows(gpu_machine: Machine) -> None:
    needed_fp8(gpu_machine.target)
    problem = scaled_operands.problem(33, 272, 1152, PAIRS["block, A in groups"])
    operands, exact = scaled_operands.operands(problem, "cuda")
    swapped = operands | {"scale_a": operands["scale_a"].roll(1, 0).contiguous()}
    backend = registry.get(LibraryBackend, "blaslt")
    if not registry.available(Backend, "blaslt") or not (call := backend.operation(problem, swapped)):
        pytest.skip("no block scales here")
    call()
    torch.cuda.synchronize()
    assert deviation(operands["c"], exact) > 0.5


@pytest.mark.parametrize(("family", "dtype"), [("dense", "bf16"), ("a8w8_blockscale", "fp8e4m3fn")])
@pytest.mark.parametrize("counts", [(5, 0, 130, 1), (128, 256, 0, 128)])
@pytest.mark.parametrize("room", [0, 264])
def test_groups_of_rows(gpu_machine: Machine, family: str, dtype: str, counts: tuple[int, ...], room: int) -> None:
    backend, numbers = registry.get(LibraryBackend, "deepgemm"), registry.get(Family, family)
    groups, operands_of = Groups(len(counts), room, "captured", counts), matrices(dtype, c="bf16", layout="TN")
    problem = numbers.problem(Problem(sum(counts), 1040, 768, *operands_of, groups=groups))
    state = registry.available(Backend, "deepgemm") and backend.supports(problem, gpu_machine.target)
    if not state:
        pytest.skip(state.reason)
    operands = numbers.make_inputs(problem, "cuda")
    operands["c"] = torch.empty(problem.operands["c"].shape, dtype=torch.bfloat16, device="cuda")
    configs = backend.list_algorithms(problem, operands)
    assert configs
    for config in configs:
        operands["c"].fill_(float("nan"))
        call = backend.operation(problem, operands, config)
        assert call is not None
        operands["c"].fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        c, exact = grouped.written(problem, operands["c"], numbers.reference(problem, operands))
        assert deviation(c, exact) <= numbers.tolerance(problem), config.name
