import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.gpu.here import ARCH, fp8, graph_of, needed_fp8, needs_gpu, record, replayed
from tests.support.nouns import Config, Machine, Problem, Scaling, load_target, matrices, registry, verify
from tests.support.patched_layers import HIDDEN, experts, fp8_experts, rows_of_experts, tokens
from tests.support.tuned_calls import make_call
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.operations.factors import spread
from tritongemm.operations.quantisation import by_torch
from tritongemm.plugins.contracts import Backend, Family, LibraryBackend
from tritongemm.serving.quantize import own_fp8
from tritongemm.tune import quantization

pytestmark = needs_gpu
TARGET = load_target(ARCH)
N, K = 384, 512
SCALINGS = {"tensor": Scaling(rows=0), "row": Scaling(), "block": Scaling(depth=128)}
GROUPED = Config("grouped", 16, 64, 128, 1, 1, 4, 2, (("per_unit", 1),))


@pytest.mark.parametrize(("m", "k"), [(1, 7168), (13, 321), (200, 16384)])
@pytest.mark.parametrize(
    ("family", "scales"),
    [
        ("a8w8", ""),
        ("a8w8", "tensor"),
        ("a8w8_blockscale", ""),
        ("a8w8_blockscale", "block_rows"),
        ("a8w8_blockscale", "mx"),
        ("a4w4_blockscale", ""),
    ],
)
def test_quantising_is_timed(gpu: GpuEvaluator, family: str, scales: str, m: int, k: int) -> None:
    dtype = fp8(gpu.target) if scales != "mx" else "fp8e4m3fn"
    if family == "a4w4_blockscale":
        dtype, k = "fp4e2m1", k + k % 2
    problem = registry.get(Family, family).problem(Problem(m, 256, k, *matrices(dtype, c="bf16", layout="TN")), scales)
    asked = quantization.quantization_of(problem)
    assert asked is not None and gpu.times_quantization
    found = gpu.time_quantization(problem, quantization._launches(asked, gpu.target))
    assert found is not None and found > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("m", "k"), [(1, 8321), (5, 17000), (300, 2048)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_factors_of_no_number_are_nan(gpu_machine: Machine, dtype: torch.dtype, m: int, k: int, value: float) -> None:
    if dtype != torch.int8 and gpu_machine.target.fp8 != "fn":
        pytest.skip("another encoding of fp8")
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    x[m // 2, k // 3] = value
    for granularity in ("tensor", "row", "block"):
        _, scale = tritongemm.quantize(x, granularity, dtype)
        _, factors = tritongemm.quantize(x.cpu(), granularity, dtype)
        assert bool(factors.isnan().any()) and torch.equal(scale.cpu().nan_to_num(-1), factors.nan_to_num(-1))


@pytest.mark.usefixtures("dispatcher")
def test_experts_are_served(gpu_machine: Machine) -> None:
    kinds = [False, True] if gpu_machine.target.fp8 == "fn" else [False]
    model = nn.ModuleDict({"bf16": experts(), "fp8": fp8_experts(experts())}).cuda()
    given = [tensor.cuda() for tensor in tokens()]
    wanted = model["bf16"](*given)

    patched = tritongemm.patch(
        model, [record(one.problem, GROUPED) for is_fp8 in kinds for one in rows_of_experts(is_fp8)]
    )
    assert len(patched.patched) == len(kinds)
    for name in patched.patched:
        model[name](*given)
        out = replayed(model[name], *given)
        assert out.shape == (given[0].shape[0], HIDDEN)
        assert (out.float() - wanted.float()).norm() < (0.1 if name == "fp8" else 0.02) * wanted.float().norm()


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.usefixtures("dispatcher")
def test_rows_decide_whether_a_layer_quantises(gpu_machine: Machine, scales: str) -> None:
    """At M 16 the rows say that bf16 is the faster one, at M 64 that fp8 is; in a graph too."""
    n, k, name = 256, 512, needed_fp8(gpu_machine.target)
    family = registry.get(Family, "a8w8" if scales == "row" else "a8w8_blockscale")
    tile, rows = Config("tile", 64, 64, 128, 4, 1, 4, 2), []
    for m, seconds in ((16, 7e-6), (64, 9e-6)):
        quantised = family.problem(Problem(m, n, k, *matrices(name, c="bf16", layout="TN")), scales)
        entire = Problem(m, n, k, *matrices("bf16", layout="TN"))
        rows.append(record(quantised, tile, seconds=5e-6, quantize_seconds=3e-6))
        rows.append(record(entire, tile, seconds=seconds))
    assert tritongemm.load(rows) == len(rows)
    w, factors = tritongemm.quantize(torch.randn(n, k, device="cuda"), "row" if scales == "row" else "tensor")
    factors = factors.flatten() if scales == "row" else factors.repeat(n // 128, k // 128)
    spread = factors[:, None] if scales == "row" else factors[0, 0]
    unquantized = (w.float() * spread).bfloat16()
    for m, word in ((16, "unquantised"), (64, "quantised")):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        reported = tritongemm.explain("linear_fp8", x, w, factors, unquantized=unquantized).splitlines()
        assert reported[0].startswith(f"{word}: ") and reported[1].startswith("exact: ")
        tritongemm.linear_fp8(x, w, factors, unquantized=unquantized)
        out = replayed(tritongemm.linear_fp8, x, w, factors, unquantized=unquantized)
        assert torch.equal(out, tritongemm.mm(x, unquantized)) == (m == 16)
        if word == "quantised":
            quantised, factor = tritongemm.quantize(x, scales)
            x = quantised.double() * factor.double().repeat_interleave(k // factor[0].numel(), -1).reshape(m, k)
        # The weights of bf16 were rounded once more than those of fp8 times their factors.
        assert verify.deviation(out, x.double() @ unquantized.double().T) < 0.02


# What quantising A to e4m3 adds to a product. With 3 bits of mantissa a number is off by half a step of 2**-3 at the
# most, evenly spread: by 2**-3 / sqrt(12) of itself at the most as a root mean square. The sum over K is then off by as
# much of C's own root mean square, and the largest of some 15000 sums by at most 5 times that; 0.09 to 0.123 were seen.
QUANTISED = 5 * 2**-3 / 12**0.5


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(m + k)
    x = torch.randn(m, k, generator=generator, device="cuda") * torch.logspace(-4, 2, m, device="cuda")[:, None]
    x[m // 2] = 0
    return x.to(dtype) if m > 1 else torch.randn(1, k, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_quantisation_is_right(name: str, dtype: torch.dtype) -> None:
    if name == "fp8":
        needed_fp8(TARGET)
    wanted = torch.int8 if name == "int8" else own_fp8(torch.device("cuda", 0))
    places = [("tensor", "rows"), ("row", "rows"), *(("block", layout) for layout in ("rows", "groups", "tma"))]
    for m, k in ((1, 128), (3, 129), (9, 7168), (257, 1000), (64, 4096), (5, 20000)):
        x = activations(m, k, dtype)
        for granularity, layout in places:
            q, scale = tritongemm.quantize(x, granularity, wanted, layout)
            expected_q, expected = by_torch(x, granularity, wanted, layout)
            assert scale.stride() == expected.stride() and scale.shape == expected.shape
            assert torch.equal(scale, expected)  # both divide as IEEE 754 rounds
            factors = spread(scale, SCALINGS[granularity], m, k).double().expand(m, k)
            least = factors * (1.0 if name == "int8" else 2.0**-9)
            step = torch.maximum(x.double().abs() * (0.0 if name == "int8" else 2.0**-3), least)
            assert bool(((q.double() * factors - x.double()).abs() <= step * 0.5001).all())
            assert torch.equal(q.float(), expected_q.float())


def test_quantisation_is_captured_once_it_ran() -> None:
    x = activations(33, 7168, torch.bfloat16)
    tritongemm.quantize(x, "block", layout="groups")
    graph, (q, scale) = graph_of(tritongemm.quantize, x, "block", layout="groups")
    x.copy_(activations(33, 7168, torch.bfloat16).flip(0))
    graph.replay()
    torch.cuda.synchronize()
    expected_q, expected = by_torch(x, "block", q.dtype, "groups")
    assert torch.equal(scale, expected) and torch.equal(q.float(), expected_q.float())


@pytest.mark.parametrize("form", ["row", "block"])
@pytest.mark.usefixtures("dispatcher")
def test_a_layer_quantises_for_the_kernel_that_serves_it(form: str) -> None:
    family = registry.get(Family, "a8w8" if form == "row" else "a8w8_blockscale")
    problem = family.problem(Problem(16, N, K, *matrices(needed_fp8(TARGET), c="bf16", layout="TN")))
    tritongemm.load([record(problem, Config("tile", 16, 64, 128, 1, 1, 4, 3))])
    w, scale = tritongemm.quantize(torch.randn(N, K, device="cuda"), "row")
    scale, scaling = scale[:, 0], SCALINGS["row"]
    if form == "block":
        scale, scaling = torch.rand(N // 128, K // 128, device="cuda") + 0.5, Scaling(rows=128, depth=128)
    weight = (w.double() * spread(scale, scaling, N, K)).T
    compiled = torch.compile(tritongemm.linear_fp8, fullgraph=True, dynamic=True)
    for m in (16, 40, 3):
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        for layer in (tritongemm.linear_fp8, compiled):
            assert verify.deviation(layer(x, w, scale), x.double() @ weight) < QUANTISED
    if form == "block" and TARGET.fp8 == "fn":
        module = pytest.importorskip("transformers.integrations.finegrained_fp8").FP8Linear(K, N, block_size=(128, 128))
        module.cuda().load_state_dict({"weight": w, "weight_scale_inv": scale})
        patched = tritongemm.patch(model := nn.Sequential(module))
        assert patched.patched == ("0",) and verify.deviation(model(x), x.double() @ weight) < QUANTISED


@pytest.mark.usefixtures("dispatcher")
def test_a_librarys_algorithm_serves() -> None:
    """An algorithm of the vendor's library for factors of rows, which none of its own choice is."""
    family = registry.get(Family, "a8w8")
    problem = family.problem(Problem(48, 512, K, *matrices(needed_fp8(TARGET), c="bf16", layout="TN")))
    for backend in registry.every(Backend):
        if not isinstance(backend, LibraryBackend) or backend.baseline or not backend.supports(problem, TARGET):
            continue
        call, given, exact = make_call(problem, "cuda")
        given |= {"c": torch.empty(48, 512, dtype=torch.bfloat16, device="cuda")}
        if configs := backend.list_algorithms(problem, given, 4):
            tritongemm.load([record(problem, configs[-1], winner=backend.name)])
            if tritongemm.explain("scaled_mm", *call.given).startswith("exact"):
                assert verify.deviation(call(), exact) <= family.tolerance(problem)
                return
    pytest.skip("no library here has an algorithm that can be called")
