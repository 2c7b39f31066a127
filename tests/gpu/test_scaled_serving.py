"""`scaled_mm`, `quantize`, `linear_fp8` on a real GPU: granularities, ranges of M, graphs, threads, torch.compile."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.gpu.here import ARCH, VENDOR, fp8, graph_of, needs_gpu, record
from tests.support.nouns import Config, InputError, Problem, Scaling, load_target, matrices, registry
from tests.support.tuned_calls import make_call
from tritongemm.core.scaling import granularity
from tritongemm.numerics import verify
from tritongemm.operations.factors import spread
from tritongemm.operations.quantisation import by_torch
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.plugins.contracts import Backend, Family, KernelBackend, LibraryBackend
from tritongemm.serving.quantize import own_fp8

pytestmark = [needs_gpu, pytest.mark.usefixtures("inference")]
TARGET = load_target(ARCH)
FP8 = fp8(TARGET)
TYPES = ([] if TARGET.fp8 == "none" else [FP8]) + ["int8"]
N, K = 384, 512
TILE = Config("tile", 16, 64, 128, 1, 1, 4, 3)
SPLIT = Config("tile", 32, 64, 128, 1, 2, 4, 3)
# What quantising A to e4m3 adds to a product. With 3 bits of mantissa a number is off by half a step of 2**-3 at the
# most, evenly spread: by 2**-3 / sqrt(12) of itself at the most as a root mean square. The sum over K is then off by as
# much of C's own root mean square, and the largest of some 15000 sums by at most 5 times that; 0.09 to 0.123 were seen.
QUANTISED = 5 * 2**-3 / 12**0.5


def problems() -> dict[str, Problem]:
    """One of each pair of float32 scales that the generated kernels compute here, of M 16 with and without a bias."""
    found: dict[str, Problem] = {}
    for name in ("a8w8", "a8w8_blockscale"):
        family = registry.get(Family, name)
        for dtype in TYPES:
            for pair in family.scalings(dtype, dtype):
                if granularity(pair).startswith("mx"):
                    continue  # test_scaled_kernels.py has those
                scales = "" if pair == family.scalings(dtype, dtype)[0] else granularity(pair)
                for bias in ("none", "n"):
                    one = family.problem(Problem(16, N, K, *matrices(dtype, c="bf16", layout="TN"), bias=bias), scales)
                    computed = registry.get(KernelBackend, "triton").supports(one, TARGET)
                    if family.supports(one, TARGET) and computed:
                        found[f"{granularity(pair)}, {dtype}, bias {bias}"] = one
    return found


PROBLEMS = problems() if VENDOR else {}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Each problem at M 16, and in a range of M 17 to 64."""
    ranges = [record(replace(one, m=64), SPLIT, m_from=17) for one in PROBLEMS.values()]
    assert tritongemm.load([*(record(one, TILE) for one in PROBLEMS.values()), *ranges]) == 2 * len(PROBLEMS)


def operands(one: Problem, m: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """(the arguments of `scaled_mm`, the exact result) of a problem at another M."""
    call, _, exact = make_call(replace(one, m=m), "cuda", seed)
    return dict(zip(("a", "b", "scale_a", "scale_b", "bias"), call.tensors, strict=False)), exact


def said_of(given: dict[str, Tensor]) -> str:
    return tritongemm.explain("scaled_mm", **given).splitlines()[0]


def assert_right(one: Problem, out: Tensor, exact: Tensor) -> None:
    assert verify.deviation(out.view(exact.shape), exact) <= registry.get(Family, one.family).tolerance(one)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(("m", "kind"), [(16, "exact"), (17, "range"), (64, "exact"), (3, ""), (65, ""), (777, "")])
def test_every_granularity_is_right_in_and_outside_of_ranges(name: str, m: int, kind: str) -> None:
    one = PROBLEMS[name]
    kind = kind or ("near" if serves_other_m(replace(one, m=m), ARCH) else "fallback")
    given, exact = operands(one, m)
    assert said_of(given).startswith(f"{kind}: ")
    for seed in range(2):
        given, exact = operands(one, m, seed)
        assert_right(one, tritongemm.scaled_mm(**given), exact)
    turned = given | {"b": given["b"].t()}
    turned["scale_b"] = given["scale_b"].t() if given["scale_b"].dim() == 2 else given["scale_b"]
    assert_right(one, tritongemm.scaled_mm(**turned), exact)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_graph_replays_on_new_operands(name: str) -> None:
    one = PROBLEMS[name]
    for m in (16, 40, 3):
        given, _ = operands(one, m)
        tritongemm.scaled_mm(**given)
        graph, out = graph_of(tritongemm.scaled_mm, **given)
        other, exact = operands(one, m, seed=5)
        for key, tensor in other.items():
            given[key].copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(one, out, exact)


@pytest.mark.parametrize("name", PROBLEMS)
def test_one_compiled_graph_serves_every_m(name: str) -> None:
    one = PROBLEMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: tritongemm.scaled_mm(**given) * 2, fullgraph=True, dynamic=True)
    for m in (16, 40, 100):
        given, exact = operands(one, m)
        out = compiled(given)
        assert_right(one, out / 2, exact)


def test_threads_have_launches_of_their_own() -> None:
    cases = [(one, *operands(one, 16)) for one in PROBLEMS.values()]

    def work(_: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for one, given, exact in cases:
                    assert_right(one, tritongemm.scaled_mm(**given), exact)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_bad_operands_are_refused_before_the_launch() -> None:
    if not PROBLEMS:
        pytest.skip("no scaled kernels here")
    given, exact = operands(next(iter(PROBLEMS.values())), 16)
    one = next(iter(PROBLEMS.values()))
    with pytest.raises(InputError, match="scale_b is on cpu"):
        tritongemm.scaled_mm(**(given | {"scale_b": given["scale_b"].cpu()}))
    with pytest.raises(InputError, match=r"scale_a is torch\.float32"):
        tritongemm.scaled_mm(**(given | {"scale_a": torch.ones(7, device="cuda")}))
    if TARGET.fp8 != "none":
        other = torch.float8_e4m3fn if TARGET.fp8 == "fnuz" else torch.float8_e4m3fnuz
        a, b = (torch.zeros(rows, K, device="cuda").to(other) for rows in (16, N))
        with pytest.raises(InputError, match="the fp8 encoding of"):
            tritongemm.scaled_mm(a, b, torch.ones(16, device="cuda"), torch.ones(N, device="cuda"))
    assert_right(one, tritongemm.scaled_mm(**given), exact)


def test_a_librarys_algorithm_serves() -> None:
    """An algorithm of the vendor's library for factors of rows, which none of its own choice is."""
    one = next((p for name, p in PROBLEMS.items() if name.startswith(f"row, {FP8}, bias none")), None)
    if one is None:
        pytest.skip("no fp8 here")
    here = replace(one, m=48, n=512)
    family = registry.get(Family, here.family)
    for backend in registry.every(Backend):
        if not isinstance(backend, LibraryBackend) or backend.baseline or not backend.supports(here, TARGET):
            continue
        given = family.make_inputs(here, "cuda") | {"c": torch.empty(48, 512, dtype=torch.bfloat16, device="cuda")}
        configs = backend.list_algorithms(here, given, 4)
        if not configs:
            continue
        tritongemm.load([record(here, configs[-1], winner=backend.name)])
        named, exact = operands(here, 48)
        if said_of(named).startswith("exact"):
            assert_right(here, tritongemm.scaled_mm(**named), exact)
            return
    pytest.skip("no library here has an algorithm that can be called")


# --- Quantisation -----------------------------------------------------------------------------------------------------


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(m + k)
    x = torch.randn(m, k, generator=generator, device="cuda") * torch.logspace(-4, 2, m, device="cuda")[:, None]
    x[m // 2] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", TYPES)
def test_quantisation_is_right(name: str, dtype: torch.dtype) -> None:
    wanted = torch.int8 if name == "int8" else own_fp8(torch.device("cuda", 0))
    for m, k in ((1, 128), (3, 129), (9, 7168), (257, 1000), (64, 4096), (5, 20000)):
        x = activations(m, k, dtype) if m > 1 else torch.randn(1, k, device="cuda").to(dtype)
        for granularity_, layouts in (("tensor", ("rows",)), ("row", ("rows",)), ("block", ("rows", "groups", "tma"))):
            for layout in layouts:
                q, scale = tritongemm.quantize(x, granularity_, wanted, layout)
                expected_q, expected = by_torch(x, granularity_, wanted, layout)
                assert scale.stride() == expected.stride() and scale.shape == expected.shape
                assert torch.equal(scale, expected)  # both divide as IEEE 754 rounds
                scaling = Scaling(rows=0) if granularity_ == "tensor" else Scaling()
                scaling = Scaling(depth=128) if granularity_ == "block" else scaling
                factors = spread(scale, scaling, m, k).double().expand(m, k)
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
@pytest.mark.parametrize("m", [16, 40, 3])
def test_a_layer_quantises_for_the_kernel_that_serves_it(form: str, m: int) -> None:
    if TARGET.fp8 == "none":
        pytest.skip("no fp8 here")
    x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
    w, scale = tritongemm.quantize(torch.randn(N, K, device="cuda"), "row")
    scale = scale[:, 0]
    scaling = Scaling()
    if form == "block":
        scale, scaling = torch.rand(N // 128, K // 128, device="cuda") + 0.5, Scaling(rows=128, depth=128)
    exact = x.double() @ (w.double() * spread(scale, scaling, N, K)).T
    out = tritongemm.linear_fp8(x, w, scale)
    assert verify.deviation(out, exact) < QUANTISED
    compiled = torch.compile(tritongemm.linear_fp8, fullgraph=True, dynamic=True)
    assert verify.deviation(compiled(x, w, scale), exact) < QUANTISED


def test_patched_transformers_layers_are_right() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if TARGET.fp8 != "fn":
        pytest.skip("transformers' layers are OCP fp8")
    layer = fp8.FP8Linear(K, N, block_size=(128, 128)).cuda()
    layer.weight.copy_(torch.randn(N, K, device="cuda"))
    layer.weight_scale_inv.copy_(torch.rand(N // 128, K // 128, device="cuda") + 0.5)
    model = torch.nn.Sequential(layer)
    patched = tritongemm.patch(model)
    if not any("a8w8_blockscale" in one.key for one in PROBLEMS.values()):
        assert isinstance(patched.left, dict)
        pytest.skip("no kernels with factors along K here")
    assert patched.patched == ("0",)
    x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
    weight = layer.weight.double() * spread(layer.weight_scale_inv, Scaling(rows=128, depth=128), N, K)
    assert verify.deviation(model(x), x.double() @ weight.T) < QUANTISED
    patched.undo()


def test_refusals_are_reported() -> None:
    """A kernel that can't be launched costs its own size alone."""
    one = next(iter(PROBLEMS.values()), None)
    if one is None:
        pytest.skip("no scaled kernels here")
    strange = replace(one, m=77)
    with pytest.warns(UserWarning, match="PyTorch computes 1 of"):
        tritongemm.load([record(strange, replace(TILE, block_m=4096, block_n=4096))])
    given, exact = operands(strange, 77)
    assert said_of(given).startswith("fallback")
    assert_right(strange, tritongemm.scaled_mm(**given), exact)
