"""Libraries' products with scales on a real GPU: all against float64, at odd sizes, with outliers along K."""

import pytest
import torch

from tests.gpu.here import needed_fp8
from tests.support import scaled_operands
from tests.support.scaled_operands import PAIRS
from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.machine import Machine
from tritongemm.numerics.verify import deviation
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Family, LibraryBackend

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
