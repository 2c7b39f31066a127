from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from tests.gpu.here import DENSE, VENDOR, needed_fp8, needs_gpu, nvidia
from tests.support import scaled_operands
from tests.support.nouns import Config, Groups, Machine, Operands, Problem, Record, Support, matrices, registry
from tests.support.scaled_operands import PAIRS
from tritongemm.backends.blaslt import algorithms
from tritongemm.hip_ext.driver import driver
from tritongemm.numerics import grouped
from tritongemm.numerics.verify import deviation
from tritongemm.plugins.contracts import Backend, Family, LibraryBackend

BLASLT = registry.get(LibraryBackend, "blaslt")
FP8, LAYOUTS = ("fp8e4m3fn", "fp8e4m3fn"), ("NN", "NT", "TN", "TT")


def made(problem: Problem) -> tuple[Operands, torch.Tensor]:
    """Operands with a C of NaN, and what it is to be."""
    family, type_c = registry.get(Family, problem.family), getattr(torch, problem.c.type.torch)
    operands = family.make_inputs(problem, "cuda")
    c = torch.full(problem.operands["c"].extents, float("nan"), device="cuda").to(type_c)
    return operands | {"c": c}, family.reference(problem, operands)


def check(
    backend: LibraryBackend,
    problem: Problem,
    configs: Iterable[Config | None] = (None,),
    given: tuple[Operands, torch.Tensor] | None = None,
) -> None:
    """Each algorithm, None for the library's own choice, computes the product on a stream, and in a graph."""
    (operands, exact), stream = given or made(problem), torch.cuda.Stream()
    spoilt = operands["c"].clone()  # NaN
    for config in configs:
        # Sums that are not promoted lose more the longer K is: a race would refuse them then.
        is_fast = config is not None and config.option("fast")
        tolerance = 0.1 if is_fast else registry.get(Family, problem.family).tolerance(problem)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            call = backend.operation(problem, operands, config)
            assert call is not None, f"no algorithm for {problem.key}"
            operands["c"].copy_(spoilt)
            call()
        stream.synchronize()
        assert deviation(*grouped.written(problem, operands["c"], exact)) <= tolerance, f"{config} of {problem.key}"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        operands["c"].copy_(spoilt)
        graph.replay()
        torch.cuda.synchronize()
        assert deviation(*grouped.written(problem, operands["c"], exact)) <= tolerance, f"{config}, in a graph"


@needs_gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bias", ["none", "n", "m"])
def test_layouts_and_biases(dtype: str, bias: str) -> None:
    for layout, (m, n, k) in itertools.product(LAYOUTS, ((128, 256, 192), (16, 40, 72), (1, 96, 64))):
        check(BLASLT, Problem(m, n, k, *matrices(dtype, layout=layout), bias=bias))


@needs_gpu
@nvidia
@pytest.mark.skipif(not VENDOR or torch.cuda.get_device_capability() < (8, 9), reason="no fp8 units")
@pytest.mark.parametrize("out", ["fp16", "bf16", "fp32", "fp8e4m3fn"])
def test_fp8_in_every_output(out: str) -> None:
    for bias in ("none",) if out == "fp8e4m3fn" else ("none", "n"):
        problem = Problem(64, 256, 512, *matrices(*FP8, out, layout="TN"), bias=bias)
        configs = BLASLT.list_algorithms(problem, made(problem)[0])
        assert {c.option("fast") for c in configs} == {0, 1}
        check(BLASLT, problem, (None, configs[0], configs[-1]))
    row = Problem(64, 256, 512, *matrices(*FP8, out))
    assert BLASLT.operation(row, made(row)[0]) is None  # not TN


@needs_gpu
def test_int8_and_mixed_types() -> None:
    for types, bias in (
        (("int8", "int8", "int32"), "none"),
        (("int8", "int8", "int32"), "n"),
        (("fp16", "", "fp32"), "none"),
    ):
        check(BLASLT, Problem(64, 256, 512, *matrices(*types, layout="TN"), bias=bias))
    mixed = Problem(64, 256, 512, *matrices(b="bf16", c="fp32"))
    assert BLASLT.operation(mixed, made(mixed)[0]) is None


@needs_gpu
def test_every_algorithm_is_right_and_finds_its_way_back() -> None:
    problem = Problem(256, 1280, 2048, *matrices("bf16", layout="TN"), bias="n")
    given = made(problem)
    configs = BLASLT.list_algorithms(problem, given[0])
    assert len(configs) > 1 and len({algorithms.identity(c) for c in configs}) == len(configs)
    assert all(Config.parse(c.name) == c for c in configs)
    check(BLASLT, problem, configs[:: max(1, len(configs) // 64)], given)
    assert algorithms.resolve(configs[-1], problem, algorithms.version()) is configs[-1]
    assert algorithms.resolve(configs[-1], problem, 1) == configs[-1]  # found again by what it is
    gone = Config.parse(configs[0].name.replace("__tile", "__tile9"))
    assert gone is not None and algorithms.resolve(gone, problem, 1) is None


@needs_gpu
@nvidia  # hipBLASLt's indices need no rebuilding
def test_algorithms_are_rebuilt_from_their_attributes() -> None:
    problem = Problem(256, 1280, 2048, *matrices("bf16", layout="TN"))
    operands, exact = made(problem)
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
            assert deviation(c, exact) <= DENSE.tolerance(problem)
    print(f"rebuilt {same} of {len(plan.algorithms)}")
    assert same >= len(plan.algorithms) // 2


@needs_gpu
def test_operands_that_are_not_aligned() -> None:
    odd = Problem(33, 7, 13, *matrices("bf16"))
    operands, exact = made(odd)
    flat = torch.empty(33 * 13 + 1, device="cuda", dtype=torch.bfloat16)
    check(BLASLT, odd, given=(operands | {"a": flat[1:].view(33, 13).copy_(operands["a"])}, exact))


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


def check_listed(backend: LibraryBackend, problem: Problem) -> int:
    """Check each algorithm that a library lists for a product with scale factors; the number of them."""
    given = scaled_operands.operands(problem, "cuda")
    configs = backend.list_algorithms(problem, given[0], 12)
    check(backend, problem, configs, given)
    return len(configs)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", COMPETITORS)
def test_fp8_with_every_granularity(gpu_machine: Machine, name: str, pair: str) -> None:
    dtype = needed_fp8(gpu_machine.target)
    backend = prepared(gpu_machine, name, scaled_operands.problem(96, 256, 512, PAIRS[pair], dtype))
    counts = {size: check_listed(backend, scaled_operands.problem(*size, PAIRS[pair], dtype)) for size in SIZES}
    print(f"{name}, {pair}: algorithms by size {counts}")
    assert counts[96, 256, 512], "no algorithm at 96 x 256 x 512"


@pytest.mark.parametrize(
    ("name", "pair", "dtype", "m", "bias"),
    [
        ("torch", "row", "fp8", 33, "n"),
        ("blaslt", "row", "fp8", 33, "n"),
        *(("torch", pair, "int8", *case) for pair in ("tensor", "row") for case in ((33, "none"), (130, "n"))),
    ],
)
def test_a_bias_and_int8(gpu_machine: Machine, name: str, pair: str, dtype: str, m: int, bias: str) -> None:
    dtype = needed_fp8(gpu_machine.target) if dtype == "fp8" else dtype
    problem = scaled_operands.problem(m, 272, 640, PAIRS[pair], dtype, bias=bias)
    assert check_listed(prepared(gpu_machine, name, problem), problem)


@pytest.mark.parametrize("shared", ["", "a", "b"])
@pytest.mark.parametrize(
    ("name", "family", "dtype", "bias"),
    [
        *((name, "dense", "bf16", bias) for name in ("torch", "blaslt") for bias in ("none", "n", "m")),
        *(("torch", family, dtype, "none") for family, dtype in (("a8w8", "fp8"), ("a8w8", "int8"))),
        ("torch", "a8w8_blockscale", "fp8", "none"),
    ],
)
def test_batches(gpu_machine: Machine, name: str, family: str, dtype: str, bias: str, shared: str) -> None:
    """Where a library has no batches of a kind, the backend computes one product after another."""
    dtype = needed_fp8(gpu_machine.target) if dtype == "fp8" else dtype
    for layout in LAYOUTS if family == "dense" else ("TN",):
        stored = matrices(dtype, c="bf16", layout=layout, shared=shared)
        problem = registry.get(Family, family).problem(Problem(48, 128, 256, *stored, bias=bias, batch=5))
        backend, given = prepared(gpu_machine, name, problem), made(problem)
        if backend.operation(problem, given[0]) is None and family != "dense":
            pytest.skip("this PyTorch has no such product")
        check(backend, problem, (None, *backend.list_algorithms(problem, given[0], 3)), given)


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
    groups, operands_of = Groups(len(counts), room, "captured", counts), matrices(dtype, c="bf16", layout="TN")
    problem = registry.get(Family, family).problem(Problem(sum(counts), 1040, 768, *operands_of, groups=groups))
    backend, given = prepared(gpu_machine, "deepgemm", problem), made(problem)
    configs = backend.list_algorithms(problem, given[0])
    assert configs
    check(backend, problem, configs, given)
