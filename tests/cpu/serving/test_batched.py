"""`bmm`: PyTorch's results, what a call's strides mean, and calls on stand-ins of a GPU's kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.cpu.serving.conftest import Gpu
from tests.support.linear_layers import TILE, StandInKernel, attach_device, record, run_on_cpu, stand_in_device
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.config import Config
from tritongemm.core.launch import Launch, StridePlaces
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.core.support import Support
from tritongemm.numerics import verify
from tritongemm.operations.batched import BATCHED, BatchOperands
from tritongemm.operations.contract import Strides
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import KernelBackend
from tritongemm.search_spaces import loader
from tritongemm.serving.launching import OperandCall
from tritongemm.system import settings

BF16 = ("bf16",) * 3
SM90 = loader.load_target("sm90")


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="cuda:0")


def exact(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    product = a.double() @ b.double()
    return product if bias is None else product + (bias.double()[:, None] if bias.dim() == 2 else bias.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("added", [None, (7,), (3, 7), (3, 1, 7)])
def test_pytorch_computes_what_no_kernel_does(dtype: torch.dtype, added: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)

    def make(*shape: int) -> Tensor:
        entire = torch.randint(-99, 99, shape, dtype=dtype) if dtype == torch.int8 else None
        return torch.randn(shape, dtype=dtype) if entire is None else entire

    a, b = make(3, 5, 9), make(3, 7, 9).transpose(1, 2)
    bias = None if added is None else make(*added).to(torch.int32 if dtype == torch.int8 else dtype)
    found = tritongemm.bmm(a, b, bias)
    assert found.dtype == (torch.int32 if dtype == torch.int8 else dtype)
    wanted = exact(a, b, None if bias is None else bias.view(-1, 7) if bias.dim() > 1 else bias)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-1)
    if dtype == torch.int8:
        assert torch.equal(found.double(), wanted)
    out = torch.empty_like(found)
    assert tritongemm.bmm(a, b, bias, out=out) is out and torch.equal(out, found)
    wide = tritongemm.bmm(a[:, :, :8], b[:1, :8].expand(3, 8, 7), out_dtype=torch.float32)
    assert wide.dtype == torch.float32 and torch.allclose(wide.double(), exact(a[:, :, :8], b[:1, :8]), rtol=1e-5)


def test_scales_of_each_product() -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(-99, 99, s, dtype=torch.int8) for s in ((3, 5, 9), (3, 9, 7)))
    scale_a, scale_b = (torch.randint(-8, 9, s).float().exp2() for s in ((3, 5, 1), (3, 1, 7)))
    found = tritongemm.scaled_bmm(a, b, scale_a, scale_b, out_dtype=torch.float32)
    wanted = exact(a, b) * scale_a.double() * scale_b.double()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    again = tritongemm.scaled_bmm(a, b, scale_a[..., 0], scale_b[:, 0], torch.ones(7), out_dtype=torch.float32)
    torch.testing.assert_close(again.double(), wanted + 1, rtol=1e-6, atol=1e-6)


def factors(*shape: int) -> Tensor:
    """Powers of two far apart, so that one in a wrong place shows."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).float().exp2() * 1.25


def eight_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("batch", "m", "n", "k"), [(3, 5, 300, 390), (2, 4, 4, 512), (2, 1, 130, 100)])
def test_scales_along_k_of_each_product(
    dtype: torch.dtype, by_columns: bool, batch: int, m: int, n: int, k: int
) -> None:
    groups = -(-k // 128)
    a, w = eight_bits(dtype, batch, m, k), eight_bits(dtype, batch, n, k)
    of_a, of_w = factors(batch, m, groups), factors(batch, n if by_columns else -(-n // 128), groups)
    wide_w = of_w.double().repeat_interleave(128, 2)[..., :k]
    wide_w = wide_w if by_columns else wide_w.repeat_interleave(128, 1)[:, :n]
    wide_a = of_a.double().repeat_interleave(128, 2)[..., :k]
    wanted = (a.double() * wide_a) @ (w.double() * wide_w).mT
    turned_a, turned_w = of_a.mT.contiguous().mT, of_w.mT.contiguous()
    for scale_a in (of_a, turned_a):
        for scale_b in (of_w.mT, turned_w):
            for b in (w.mT, w.mT.contiguous()):
                for bias in (None, torch.arange(n).float(), torch.arange(batch * n).float().view(batch, n)):
                    found = tritongemm.scaled_bmm(a, b, scale_a, scale_b, bias, torch.float32)
                    added = 0 if bias is None else bias.double().view(-1, 1, n)
                    assert verify.deviation(found, wanted + added) < 1e-5
    out = torch.empty(batch, m, n)
    one = of_a[:1].expand(batch, m, groups)
    assert tritongemm.scaled_bmm(a, w.mT, one, of_w.mT, None, torch.float32, out=out) is out
    entire = (a.double() * wide_a[:1]) @ (w.double() * wide_w).mT
    assert verify.deviation(out, entire) < 1e-5


def test_batches_of_nothing_have_empty_results() -> None:
    a, b = eight_bits(torch.int8, 2, 0, 256), eight_bits(torch.int8, 2, 256, 7)
    assert tritongemm.scaled_bmm(a, b, torch.ones(2, 0), torch.ones(2, 7)).shape == (2, 0, 7)


def test_strides_of_a_call(gpu: Gpu) -> None:
    _, empty = gpu
    dense = BATCHED.read(BatchOperands(empty(4, 16, 64), empty(4, 32, 64).transpose(1, 2)))
    assert not isinstance(dense, Support) and dense.problems == (
        Problem(16, 32, 64, *matrices(*BF16, layout="TN"), batch=4),
    )
    assert dense.moved(dense.problems[0]) == {}
    # As a model's heads are stored: [tokens, heads, K], read head by head, written so too.
    heads, shared = strided((4, 16, 64), (96, 4 * 96, 1)), empty(64, 32).expand(4, 64, 32)
    out = empty(16, 4, 32).transpose(0, 1)
    view = BATCHED.read(BatchOperands(heads, shared, empty(32), out=out))
    assert not isinstance(view, Support)
    one, own = view.problems
    assert (one.shared, own.shared, one.bias, one.b.row_major) == ("b", "", "n", True)
    moved = {"a": Strides(4 * 96, 96), "bias": Strides(0, 0), "c": Strides(4 * 32, 32)}
    assert view.moved(one) == moved and view.moved(own) == moved | {"b": Strides(32, 0)}
    single = BATCHED.read(BatchOperands(empty(1, 1, 64), empty(1, 64, 32), empty(32)))
    assert not isinstance(single, Support) and single.problems[0].kind == "one" and not single.moved(single.problems[0])
    for a, why in (
        (strided((4, 16, 64), (2048, 128, 2)), "a has strides"),
        (empty(1, 1, 64).expand(4, 16, 64), "a has strides"),
        (empty(1, 16, 64).expand(4, 16, 64), "all products are the same one"),
        (empty(4, 16, 64, dtype=torch.complex64), "no kernels for torch.complex64"),
    ):
        refused = BATCHED.read(BatchOperands(a, shared))
        assert isinstance(refused, Support) and why in refused.reason


def test_a_tuned_row_serves_and_others_do_not(gpu: Gpu) -> None:
    dispatcher, empty = gpu
    tuned = Problem(16, 32, 64, *matrices(*BF16, layout="TN"), batch=4)
    assert dispatcher.load([record(tuned), record(replace(tuned, m=8, batch=1, bias="m"))]) == 1
    assert not dispatcher.weights, "a layer has no row"
    attach_device(dispatcher, {tuned: StandInKernel()})
    weights = empty(4, 32, 64).transpose(1, 2)

    def kind(a: Tensor, b: Tensor, **more: Any) -> str:
        return str(dispatcher.ask(BATCHED, BATCHED.check(BatchOperands(a, b, **more))).resolution)

    assert kind(empty(4, 16, 64), weights).startswith("exact: tile")
    assert "was never tuned" in kind(empty(4, 17, 64), weights)
    assert "was never tuned" in kind(empty(4, 16, 64), empty(4, 64, 32))
    assert "reads dense operands alone; a have other strides" in kind(empty(16, 4, 64).transpose(0, 1), weights)
    assert dispatcher.run(empty(16, 64), empty(32, 64), None, None).shape == (16, 32)


def test_factors_of_each_product_are_as_far_apart(gpu: Gpu) -> None:
    """A kernel for factors of its own reads those that all products share, and those further apart."""
    _, empty = gpu
    a, b = empty(4, 16, 640, dtype=torch.int8), empty(4, 256, 640, dtype=torch.int8).mT
    of_a = torch.empty_strided((4, 16, 5), (160, 5, 1), device="cuda:0")
    of_b = empty(2, 5, dtype=torch.float32).expand(4, 2, 5).mT
    found = BATCHED.read(BATCHED.check(BatchOperands(a, b, None, torch.bfloat16, of_a, of_b)))
    assert not isinstance(found, Support)
    (own,) = found.problems
    assert own.scales == "block_rows" and own.family == "a8w8_blockscale"
    assert found.moved(own) == {"scale_a": Strides(0, 160), "scale_b": Strides(0, 0)}


def test_addresses_reach_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)
    seen: dict[str, int] = {}
    launched: list[int] = []

    class Kernel(StandInKernel):
        def prepare(self, device: Any) -> PatchedLaunch:
            names = ("a", "b", "c", "bias", "scale_a", "scale_b")
            return PatchedLaunch({n: lambda at, n=n: seen.update({n: at}) for n in names}, launched.append)  # type: ignore[misc]

    a, b, bias = torch.zeros(2, 4, 8), torch.zeros(2, 8, 4), torch.zeros(2, 4)

    def ready(*given: Any, **named: Any) -> OperandCall:
        operands = BatchOperands(*given, **named)
        reading = BATCHED.read(BATCHED.check(operands))
        assert not isinstance(reading, Support)
        otherwise = BATCHED.make_fallback(operands)
        return OperandCall(Kernel(), stand_in_device(), BATCHED, operands, reading, otherwise)

    operands = BatchOperands(a, b, bias)
    call = ready(*operands)
    found = call(*operands)
    assert found.shape == (2, 4, 4) and launched == [0]
    assert seen == {"a": a.data_ptr(), "b": b.data_ptr(), "c": found.data_ptr(), "bias": bias.data_ptr()}
    q, w = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scales, out = (torch.ones(2, 4), torch.ones(2, 4)), torch.empty(2, 4, 4)
    operands = BatchOperands(q, w, None, torch.float32, *scales, out=out)
    assert ready(*operands)(*operands) is out
    assert (seen["scale_a"], seen["scale_b"], seen["c"]) == (*(s.data_ptr() for s in scales), out.data_ptr())
    odd = torch.arange(65.0)[1:].view(2, 4, 8)  # no address of 16 bytes: PyTorch computes
    assert torch.equal(call(*BatchOperands(odd, b)._replace(bias=bias)), torch.bmm(odd, b)) and len(launched) == 2
    # Vectors that have to be copied are copied at each call.
    wide = torch.arange(16.0).view(2, 8)
    for added, in_place in ((wide[:, :4], True), (wide[:, None, 4:], True), (wide[:, ::2], False)):
        call, seen["bias"] = ready(a, b, added), 0
        for changed in (added, added + 1):
            assert call(*BatchOperands(a, b, changed)).shape == (2, 4, 4)
            assert (seen["bias"] == changed.data_ptr()) == in_place or changed is not added


@pytest.fixture(scope="module")
def launches() -> dict[str, tuple[Problem, Config, Launch]]:
    """Compiled launches of a template with pointers and of one with descriptors."""
    problem = Problem(16, 32, 64, *matrices(*BF16, layout="TN"), batch=4)
    triton, pool = registry.get(KernelBackend, "triton"), BuildPool(ArtifactCache(settings.cache_folder()), 1)
    configs = [replace(TILE, split_k=1), Config("tma", 64, 32, 32, num_warps=4, num_stages=2)]
    jobs = [triton.compile_job(config, problem, SM90) for config in configs]
    built = {a.config.template: a for a in pool.stream(jobs)}
    pool.close()
    return {c.template: (problem, c, triton.launch(built[c.template], problem, SM90)) for c in configs}  # type: ignore[misc]


def test_a_launch_on_operands_that_are_stored_otherwise(launches: dict[str, tuple[Problem, Config, Launch]]) -> None:
    triton, (problem, config, launch) = registry.get(KernelBackend, "triton"), launches["tile"]
    values = [p.value for p in launch.params if p.kind in ("i32", "i64")]
    assert values == [16, 32, 64, 64, 64, 32, 1, 16 * 64, 32 * 64, 16 * 32] and launch.grid == (1, 1, 4)
    places = triton.stride_places(config, problem)
    assert isinstance(places, StridePlaces)
    moved = places.move(launch, {"a": (4 * 96, 96), "b": (64, 0), "c": (4 * 32, 32)})
    assert isinstance(moved, Launch)
    assert [p.value for p in moved.params if p.kind in ("i32", "i64")] == [16, 32, 64, 384, 64, 128, 1, 96, 0, 32]
    assert replace(moved, params=launch.params) == launch
    odd = places.move(launch, {"a": (4 * 72, 72)})
    assert isinstance(odd, Support) and "batch_a of 72 is no multiple of 16" in odd.reason
    far = places.move(launch, {"a": (1 << 28, 64)})
    assert isinstance(far, Support) and "32 bits" in far.reason
    problem, config, launch = launches["tma"]
    maps = [p.shape for p in launch.params if p.kind == "tma"]
    assert maps == [(4 * 16, 64), (4 * 32, 64)]
    refused = triton.stride_places(config, problem)
    assert isinstance(refused, Support) and "describes dense operands" in refused.reason


@pytest.mark.parametrize("m", [1, 3, 16])
def test_one_binary_serves_a_range_of_m(m: int) -> None:
    """Strides of a batch are multiples of M, which the compiler must not assume."""
    triton = registry.get(KernelBackend, "triton")
    problems = [Problem(each, 24, 40, *matrices(*BF16, layout="TN"), batch=4) for each in (m, 64)]
    one, other = (triton.compile_job(replace(TILE, split_k=1), p, SM90) for p in problems)
    assert one.digest == other.digest


@pytest.mark.parametrize("wanted", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_results_of_eight_bits_are_saturated(wanted: torch.dtype) -> None:
    """As tuned kernels write them, in each of PyTorch's ways; NaN stays one where the type has it."""
    a, b = torch.eye(4, 16)[None], torch.zeros(1, 16, 2)
    limits = torch.iinfo(wanted) if wanted == torch.int8 else torch.finfo(wanted)
    b[0, :4, 0], b[0, :4, 1] = torch.tensor([1e6, -1e6, 3.0, -3.0]), float("nan")
    right = [limits.max, limits.min, 3, -3]
    ends = torch.tensor([4], dtype=torch.int32)
    found = (
        tritongemm.bmm(a, b, out_dtype=wanted)[0],
        tritongemm.mm(a[0], b[0].mT, out_dtype=wanted),
        tritongemm.grouped_mm(a[0], b, ends, out_dtype=wanted),
        tritongemm.grouped_mm(a, b, ends, out_dtype=wanted)[0],
    )
    for one in found:
        assert one.dtype == wanted and one.float()[:, 0].tolist() == right
        assert wanted == torch.int8 or bool(one.float()[:, 1].isnan().all())
    many = torch.full((1, 4, 16), 100, dtype=torch.int8)
    assert bool((tritongemm.bmm(many, -many.mT, out_dtype=wanted).double() == max(-160000, limits.min)).all())
