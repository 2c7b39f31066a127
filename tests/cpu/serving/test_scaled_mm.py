from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.cpu.serving.conftest import Gpu
from tests.support.linear_layers import TILE, StandInKernel, attach_device, record
from tests.support.nouns import Patch, Problem, Scaling, cases, each, verify
from tests.support.products import product
from tritongemm.codegen import template_facts
from tritongemm.integrations import aiter
from tritongemm.operations import scaled
from tritongemm.operations.scaled import TorchScaled
from tritongemm.operations.scaled_operands import ScaledOperands, read_product
from tritongemm.serving.loaded_tables import LoadReport, read_table

FP8, ONE = torch.float8_e4m3fn, torch.ones
M, N, K = 16, 256, 640


def problem(family: str, m: int, n: int, k: int, bias: str = "none") -> Problem:
    return product(family, m, n, k, "fp8e4m3fn", bias=bias)


def quantised(m: int, n: int, k: int, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    return tuple((torch.randn(r, k, generator=generator) * 20).to(dtype) for r in (m, n))


def factors(*shape: int) -> Tensor:
    """Powers of two far apart, so that one in a wrong place shows."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=generator).float().exp2() * 1.25


def test_factors_of_one_operand_and_bytes_of_fp4() -> None:
    """Four factors of a weight [4, 512] in one row are for its rows, or for groups along K."""
    a, w = quantised(3, 4, 512)
    of_w = factors(1, 4)
    for scale_a, depth, wide_w in (
        (factors(3, 4), 128, of_w.repeat_interleave(128, 1)),
        (factors(3, 1), 512, of_w.t()),
    ):
        exact = (a.double() * scale_a.double().repeat_interleave(depth, 1)) @ (w.double() * wide_w.double()).T
        assert verify.deviation(tritongemm.scaled_mm(a, w, scale_a, of_w, out_dtype=torch.float32), exact) < 1e-5
    a, w = torch.full((2, 16), 0x21, dtype=torch.uint8), torch.full((3, 16), 0x72, dtype=torch.uint8)
    exact = 16 * (0.5 * 1.0 + 1.0 * 6.0)  # the low half of a byte comes first
    for scale_a, scale_w in ((torch.ones(2), torch.ones(3)), (torch.full((2, 1), 127), torch.full((3, 1), 127))):
        of_a, of_w = (s if s.is_floating_point() else s.to(torch.uint8) for s in (scale_a, scale_w))
        assert bool((tritongemm.scaled_mm(a, w, of_a, of_w, out_dtype=torch.float32) == exact).all())


@each("dtype", [FP8, torch.float8_e4m3fnuz, torch.int8])
def test_shapes_of_one_factor_and_of_one_for_each_row(dtype: torch.dtype) -> None:
    a, w = quantised(4, 6, 32, dtype)
    scale_a, scale_b = factors(4, 1), factors(6, 1)
    exact = tritongemm.scaled_mm(a, w, scale_a, scale_b)
    assert exact.dtype == torch.bfloat16
    for of_a in (scale_a, scale_a[:, 0]):
        for of_b in (scale_b, scale_b[:, 0], scale_b.reshape(1, -1)):
            assert torch.equal(tritongemm.scaled_mm(a, w, of_a, of_b), exact)
    assert torch.equal(tritongemm.scaled_mm(a.view(2, 2, 32), w, scale_a, scale_b).view(4, 6), exact)
    one = torch.tensor(2.0)
    assert torch.equal(tritongemm.scaled_mm(a, w, one, scale_b), tritongemm.scaled_mm(a, w, one.repeat(4), scale_b))
    exact = tritongemm.scaled_mm(a, w, one, one)
    assert torch.equal(tritongemm.scaled_mm(a, w, one.view(1, 1), one.view(1)), exact)


@pytest.fixture
def gpu(gpu: Gpu) -> Gpu:
    return gpu[0], partial(gpu[1], dtype=torch.float32)


def say(*operands: Any, **named: Any) -> str:
    return tritongemm.explain("scaled_mm", *operands, **named).splitlines()[0]


def test_a_record_serves_the_call_that_its_scales_say(gpu: Gpu) -> None:
    dispatcher, empty = gpu
    rows, blocks = problem("a8w8", 16, 256, 512, "n"), problem("a8w8_blockscale", 16, 256, 512)
    dense = replace(rows, family="dense", bias="m").scaled((None, None))
    assert dispatcher.load([record(rows), record(blocks), record(dense)]) == 2
    assert set(dispatcher.scaled_weights) == {(256, 512)} and dispatcher.weights == frozenset()
    kernels = attach_device(dispatcher, {rows: StandInKernel(), blocks: StandInKernel()})
    a, w, bias = empty(16, 512, dtype=FP8), empty(256, 512, dtype=FP8), empty(256, dtype=torch.bfloat16)
    of_rows, of_blocks = (empty(16, 1), empty(256)), (empty(4, 16).t(), empty(2, 4))
    assert say(a, w.t(), of_rows[0], empty(1, 256), bias).startswith("exact")
    assert "kernels take torch.bfloat16" in say(a, w, *of_rows, empty(256))
    how = 'w [N, K], scale_a as quantize(a, "block", layout="groups") or pack_scales(scale_a, "groups") stores it'
    of_rows_of_blocks = say(a, w, empty(16, 4), of_blocks[1])
    assert of_rows_of_blocks.startswith("fallback") and f"{blocks.key} was, which serves scaled_mm" in of_rows_of_blocks
    assert how in of_rows_of_blocks
    assert str(LoadReport(read_table([record(blocks)]), kernels)).endswith(f"; 1 of them with {how[10:]}")
    assert say(a, w, *of_blocks, order_b="shuffled_16x16").startswith("fallback")
    assert say(empty(0, 512, dtype=FP8), w, empty(4, 0).t(), of_blocks[1]) == "fallback: an operand is empty"
    padded = torch.empty_strided((256, 512), (520, 1), dtype=FP8, device="cuda:0")
    assert "kernels take a dense weight" in say(a, padded, *of_rows)


def test_a_shuffled_weight_is_served_by_a_record_of_ours(gpu: Gpu, monkeypatch: Patch) -> None:
    """AITER's names find a kernel that Triton made for B in their order, and no other."""
    dispatcher, empty = gpu
    rows, blocks = (
        product(family, 16, 256, 512, "fp8e4m3fn", order="shuffled_16x16") for family in ("a8w8", "a8w8_blockscale")
    )
    assert dispatcher.load([record(rows), record(blocks)]) == 2
    attach_device(dispatcher, {rows: StandInKernel(), blocks: StandInKernel()})
    a, w = empty(16, 512, dtype=FP8), empty(256, 512, dtype=FP8)
    of_rows, of_blocks = (empty(16, 1), empty(256)), (empty(4, 16).t(), empty(2, 4))
    for factors_of in (of_rows, of_blocks):
        assert say(a, w, *factors_of, order_b="shuffled_16x16").startswith(f"exact: {TILE.name}")
        assert say(a, w, *factors_of).startswith("fallback")
    monkeypatch.setattr(tritongemm, "scaled_mm", lambda x, w, a, b, bias, out_dtype, **named: say(x, w, a, b, **named))
    assert aiter.gemm_a8w8_bpreshuffle(a, w, *of_rows).startswith("exact")
    assert aiter.gemm_a8w8_blockscale_bpreshuffle(a, w, empty(16, 4), of_blocks[1]).startswith("exact")


def test_one_row_is_read_as_whichever_layout_was_tuned(gpu: Gpu) -> None:
    """Of one row, factors in rows and in groups are the same memory."""
    dispatcher, empty = gpu
    known = problem("a8w8_blockscale", 1, 256, 512)
    known = replace(
        known, a=known.a._replace(scaling=Scaling(depth=128, layout="groups")), b=known.b._replace(order="plain")
    )
    dispatcher.load([record(known)])
    attach_device(dispatcher, {known: StandInKernel()})
    a, w = empty(1, 512, dtype=FP8), empty(256, 512, dtype=FP8)
    assert say(a, w, empty(1, 4), empty(2, 4)).startswith("exact")
    dispatcher.load([replace(record(known), winner="torch")])
    attach_device(dispatcher)
    assert say(a, w, empty(1, 4), empty(2, 4)).startswith(f"library: torch won the tuning of {known.key}")


def test_generated_kernels_call_the_factors_by_these_names() -> None:
    arguments = template_facts.arguments(template_facts.kernel_template("tile"), problem("a8w8", 16, 256, 512))
    assert {"a", "b", "c", "scale_a", "scale_b"} <= {name for name, _ in arguments.values()}


def test_memory_padded_for_the_copy_engine_is_known_by_its_strides() -> None:
    """DeepGEMM's factors: M-major, each group's rows padded to 16 bytes."""
    a, w = quantised(5, 128, 256)
    product = read_product(ScaledOperands(a, w, torch.ones(2, 8).t()[:5], torch.ones(1, 2)))
    assert product.scalings_a == (Scaling(depth=128, layout="groups", pad=(4, 1)),)
    assert read_product(ScaledOperands(a[:4], w, torch.ones(2, 4).t(), torch.ones(1, 2))).scalings_a == (
        Scaling(depth=128, layout="groups"),
        Scaling(depth=128, layout="groups", pad=(4, 1)),
    )


# --- What PyTorch's own products are given ----------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: Patch) -> list[tuple[Any, ...]]:
    """The factors of each call of PyTorch's products: shapes and strides."""
    calls: list[tuple[Any, ...]] = []

    def scaled_mm(a: Tensor, b: Tensor, of_a: Tensor, *others: Any, **named: Any) -> Tensor:
        of_b = next(other for other in others if isinstance(other, Tensor))
        calls.append((tuple(of_a.shape), of_a.stride(), tuple(of_b.shape), of_b.stride()))
        if of_b.numel() == 1:
            raise RuntimeError("there is no such product")
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm, raising=False)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    return calls


def compute(scale_a: Tensor, scale_w: Tensor, m: int = M) -> None:
    a, w = torch.zeros(m, K).to(FP8), torch.zeros(N, K).to(FP8)
    call = TorchScaled(read_product(ScaledOperands(a, w, scale_a, scale_w)))
    for _ in range(2):
        found = call(a, w, scale_a, scale_w)
        assert found.shape == (m, N) and found.is_contiguous()


ROWS = ((M, 1), (1, 1), (1, N), (1, 1))
OF_W = ((8, 2), (1, 8))  # 5 groups, padded to 8


@cases(
    (M, ONE(M, 1), ONE(N), ROWS),
    (M, ONE(1), ONE(N, 1), ROWS),
    (M, ONE(5, M).t(), ONE(2, 5), ((M, 5), (1, M), *OF_W)),
    (M, ONE(M, 5), ONE(N, 5), ((M, 5), (1, M), (N, 5), (1, N))),
    # cuBLASLt has products with factors along K of multiples of four rows.
    *((m, ONE(m, 5), ONE(2, 5), ((up, 5), (1, up), *OF_W)) for m, up in ((1, 4), (13, 16), (M, M))),
)
def test_factors_are_stored_as_pytorch_wants_them(
    m: int, scale_a: Tensor, scale_w: Tensor, wanted: tuple[Any, ...], /, asked: list[tuple[Any, ...]]
) -> None:
    asked.clear()
    compute(scale_a, scale_w, m)
    assert asked == [wanted] * 2


def test_what_pytorch_refused_it_is_not_asked_for_again(asked: list[tuple[Any, ...]]) -> None:
    compute(ONE(()), ONE(()))
    assert len(asked) == 3, "once with factors, and for each product of plain numbers"


def test_older_pytorch_is_given_no_padding(asked: list[tuple[Any, ...]], monkeypatch: Patch) -> None:
    monkeypatch.setattr(scaled, "_Scaled", None)
    compute(ONE(M, 5), ONE(2, 5))
    assert asked == [((M, 5), (1, M), (5, 2), (1, 8))] * 2


def test_factors_of_one_operand_along_k_are_no_product_of_pytorchs(asked: list[tuple[Any, ...]]) -> None:
    compute(ONE(M), ONE(2, 5))
    assert not asked
