from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.cpu.serving.conftest import Gpu
from tests.support.linear_layers import TILE, StandInKernel, attach_device, record, run_on_cpu, stand_in_device
from tests.support.nouns import ArtifactCache, BuildPool, Config, Launch, Patch, Support, each, load_target, registry
from tritongemm.core.launch import StridePlaces
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.numerics import verify
from tritongemm.operations.batched import BATCHED, BatchOperands
from tritongemm.operations.contract import Strides
from tritongemm.plugins.contracts import KernelBackend
from tritongemm.serving.launching import OperandCall
from tritongemm.system import settings

BF16 = ("bf16",) * 3
SM90 = load_target("sm90")


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="cuda:0")


def eight_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@each("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_pytorch_computes_what_no_kernel_does(dtype: torch.dtype) -> None:
    a, b = eight_bits(dtype, 3, 5, 9), eight_bits(dtype, 3, 7, 9).mT
    wide = torch.int32 if dtype == torch.int8 else dtype
    for added in ((7,), (3, 7), (3, 1, 7)):
        bias = eight_bits(wide, *added)
        found, out = tritongemm.bmm(a, b, bias), torch.empty(3, 5, 7, dtype=wide)
        exact = a.double() @ b.double() + bias.double().view(-1, 1, 7)
        assert found.dtype == wide and verify.deviation(found, exact) <= (2**-7 if dtype == torch.bfloat16 else 1e-6)
        assert tritongemm.bmm(a, b, bias, out=out) is out and torch.equal(out, found)
    shared = tritongemm.bmm(a, b[:1].expand(3, 9, 7), out_dtype=torch.float32)
    assert shared.dtype == torch.float32 and verify.deviation(shared, a.double() @ b[:1].double()) < 1e-5


def test_strides_of_a_call(gpu: Gpu) -> None:
    _, empty = gpu
    dense = BATCHED.read(BatchOperands(empty(4, 16, 64), empty(4, 32, 64).transpose(1, 2)))
    assert not isinstance(dense, Support) and dense.problems == (
        Problem(16, 32, 64, *matrices(*BF16, layout="TN"), batch=4),
    )
    assert dense.moved(dense.problems[0]) == {}
    # As a model's heads are stored: [tokens, heads, K], read head by head, written so too.
    heads, shared = strided((4, 16, 64), (96, 4 * 96, 1)), empty(64, 32).expand(4, 64, 32)
    view = BATCHED.read(BatchOperands(heads, shared, empty(32), out=empty(16, 4, 32).transpose(0, 1)))
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


def test_vectors_that_have_to_be_copied_are_copied_at_each_call(monkeypatch: Patch) -> None:
    """And memory for the result is written in place."""
    run_on_cpu(monkeypatch)
    seen: dict[str, int] = {}

    class Kernel(StandInKernel):
        def prepare(self, device: Any) -> PatchedLaunch:
            names = ("a", "b", "c", "bias", "scale_a", "scale_b")
            return PatchedLaunch({n: lambda at, n=n: seen.update({n: at}) for n in names}, lambda _: None)  # type: ignore[misc]

    a, b, out, wide = torch.zeros(2, 4, 8), torch.zeros(2, 8, 4), torch.empty(2, 4, 4), torch.arange(16.0).view(2, 8)
    for added, in_place in ((wide[:, :4], True), (wide[:, None, 4:], True), (wide[:, ::2], False)):
        operands = BatchOperands(a, b, added, out=out)
        reading = BATCHED.read(BATCHED.check(operands))
        assert not isinstance(reading, Support)
        call = OperandCall(BATCHED, operands, reading, BATCHED.make_fallback(operands), Kernel(), stand_in_device())
        for changed in (added, added + 1):
            seen["bias"] = 0
            assert call(*operands._replace(bias=changed)) is out and seen["c"] == out.data_ptr()
            assert (seen["bias"] == changed.data_ptr()) == in_place or changed is not added


def test_strides_that_no_kernel_reads_are_explained(gpu: Gpu) -> None:
    dispatcher, empty = gpu
    tuned = Problem(16, 32, 64, *matrices(*BF16, layout="TN"), batch=4)
    assert dispatcher.load([record(tuned), record(replace(tuned, m=8, batch=1, bias="m"))]) == 1
    assert not dispatcher.weights, "a layer has no row"
    attach_device(dispatcher, {tuned: StandInKernel()})
    operands = BatchOperands(empty(16, 4, 64).transpose(0, 1), empty(4, 32, 64).transpose(1, 2))
    assert "reads dense operands alone; a have other strides" in str(dispatcher.ask(BATCHED, operands).resolution)


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
    assert [p.shape for p in launch.params if p.kind == "tma"] == [(4 * 16, 64), (4 * 32, 64)]
    refused = triton.stride_places(config, problem)
    assert isinstance(refused, Support) and "describes dense operands" in refused.reason


def test_one_binary_serves_a_range_of_m() -> None:
    """Strides of a batch are multiples of M, which the compiler must not assume."""
    triton = registry.get(KernelBackend, "triton")
    problems = [Problem(m, 24, 40, *matrices(*BF16, layout="TN"), batch=4) for m in (1, 3, 16, 64)]
    assert len({triton.compile_job(replace(TILE, split_k=1), p, SM90).digest for p in problems}) == 1


@each("wanted", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
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
