import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritongemm
from tests.support.nouns import cases, each, refuses
from tests.support.operation_calls import CALLS, QUANTISED, Rows, parts

M, N, K = 3, 32, 256
ONE, INT8, INT32, FP8 = torch.ones, torch.int8, torch.int32, torch.float8_e4m3fn
NO_NUMBERS = (float("nan"), float("inf"), -float("inf"))


def q(*shape: int) -> Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


@each("name", CALLS)
def test_no_rows_give_an_empty_result(name: str) -> None:
    """One of the type and extents that rows give, also where a tracer asks; a factor of all numbers is there, as 1."""
    of_five, none = (parts(CALLS[name](Rows(rows))()) for rows in (5, 0))
    with FakeTensorMode() as mode:
        call = CALLS[name](Rows(0))
        traced = parts(call(*map(mode.from_tensor, call.tensors)))
    for some, empty, fake in zip(of_five, none, traced, strict=True):
        extents = [0 if size in (5, 6, 10, 32) else size for size in some.shape]  # rows, with factors, of rows, padded
        assert list(empty.shape) == extents == list(fake.shape) and empty.dtype == some.dtype == fake.dtype
        assert not empty.numel() or bool((empty == 1).all())
    if name in QUANTISED:
        assert none[1].numel() == (name == "quantize tensor")


@each("value", NO_NUMBERS)
@each("factors", [ONE(1), ONE(N), ONE(1, 2), torch.full((N, K // 32), 127, dtype=torch.uint8)])
def test_activations_that_are_no_numbers_make_their_row_of_a_layer_nan(value: float, factors: Tensor) -> None:
    """As on a GPU, where no program waits to look at them: one token must not end the batch of a server."""
    x = ONE(4, K)
    x[1, 5] = value
    for dtype in (FP8, INT8) if factors.dtype == torch.float32 else (FP8,):
        found = tritongemm.linear_fp8(x, ONE(N, K).to(dtype), factors)
        assert found.isnan().any(1).tolist() == [False, True, False, False] and bool(found[1].isnan().all())


@each("value", NO_NUMBERS)
@each("name", ["fused_moe", "fused_moe rows", "fused_moe int8", "fused_moe blocks"])
def test_tokens_that_are_no_numbers_make_their_own_result_nan(value: float, name: str) -> None:
    call = CALLS[name](Rows(4, wide=torch.float32))
    x, w1, w2, weights, ids, *scales = call.tensors
    x = x.clone()
    x[1, 5], ids = value, torch.zeros_like(ids)
    finite = call(x, w1, w2, weights, ids, *scales).isfinite()
    assert finite.all(1).tolist() == [True, False, True, True] and not finite[1].any()


def powers(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


@cases(
    ({"scale_a": ONE(1, 2)}, "scale_a is"),
    ({"scale_a": ONE(0, 3)}, "scale_a is"),
    ({"scale_b": ONE(N, 3)}, "scale_b is"),
    ({"bias": ONE(N + 1)}, "bias is"),
    ({"b": q(N, K + 1)}, "b is"),
    ({"order_b": "backwards"}, "no weight layout"),
    ({"b": q(0, K), "scale_b": ONE(0, 2)}, "is empty: there is nothing to multiply"),
    ({"a": q(0, 0), "b": q(N, 0), "scale_a": ONE(0, 0), "scale_b": ONE(N, 0)}, "is empty: there is nothing"),
)
def test_what_does_not_belong_together_is_named_without_rows_too(changes: dict[str, Tensor], says: str, /) -> None:
    given = {"a": q(0, K), "b": q(N, K), "scale_a": ONE(0, 2), "scale_b": ONE(N, 2)}
    assert tritongemm.scaled_mm(**given).shape == (0, N)
    refuses(says, tritongemm.scaled_mm, **given | changes)


def test_no_tokens_no_k_mixed_types_and_sums_beyond_int32() -> None:
    bias = ONE(N).requires_grad_()
    tritongemm.scaled_mm(q(0, K), q(N, K), ONE(0), ONE(N), bias).sum().backward()
    assert bias.grad is not None and not bias.grad.any()
    for x, w in ((ONE(M, 0), ONE(N, 0)), (q(M, 0), q(N, 0)), (q(M, 0).to(INT8), q(N, 0).to(INT8))):
        assert tritongemm.mm(x, w).shape == (M, N) and not tritongemm.mm(x, w).any()
    for of_a, of_b in ((ONE(2, M), ONE(2, N)), (ONE(2, M, 0), ONE(2, 0, 1)), (powers(2, M, 0), powers(2, 0, N))):
        none = tritongemm.scaled_bmm(q(2, M, 0), q(2, 0, N), of_a, of_b)
        assert none.shape == (2, M, N) and not none.any()
    half = torch.full((3, 4), 0.5)
    assert bool((tritongemm.mm(ONE(2, 4).to(INT8), half, None, torch.float32) == 2).all())
    assert bool((tritongemm.mm(half, ONE(2, 4).to(INT8)) == 2).all())
    a = torch.full((1, 140_000), 127, dtype=INT8)
    ends, right = torch.ones(1, dtype=INT32), 140_000 * 127 * 127 - 2**32
    products = tritongemm.mm(a, a), tritongemm.bmm(a[None], a.mT[None]), tritongemm.grouped_mm(a, a.mT[None], ends)
    assert [int(one) for one in products] == [right] * 3


@each("factors", [ONE(N), ONE(1), ONE(1, 2), powers(N, 8)])
@each("tokens", [(0,), (2, 0)])
def test_a_layer_of_no_tokens_has_no_rows(factors: Tensor, tokens: tuple[int, ...]) -> None:
    out = tritongemm.linear_fp8(ONE(*tokens, K), q(N, K), factors, ONE(N), torch.bfloat16)
    assert out.shape == (*tokens, N) and out.dtype == torch.bfloat16
    refuses("bias is", tritongemm.linear_fp8, ONE(*tokens, K), q(N, K), factors, ONE(N + 1))


@cases(((0, M, 2), (0, 2, 1)), ((0, M, 2), (0, 2, 128)), ((0, M), (0, 128)), ((0, M, 1), (0, 1, 128)))
def test_a_batch_of_no_products_is_empty(of_a: tuple[int, ...], of_b: tuple[int, ...], /) -> None:
    assert tritongemm.scaled_bmm(q(0, M, K), q(0, K, 128), ONE(of_a), ONE(of_b)).shape == (0, M, 128)
    refuses("scale_a is", tritongemm.scaled_bmm, q(0, M, K), q(0, K, 128), ONE(0, M, 3), ONE(of_b))


@each("bias", [torch.arange(4.0), torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 1, 4)])
def test_a_product_without_k_is_its_bias(bias: Tensor) -> None:
    out = tritongemm.scaled_bmm(q(2, M, 0), q(2, 0, 4), ONE(2, M), ONE(2, 4), bias)
    assert torch.equal(out.float(), bias.view(-1, 1, 4).expand(2, M, 4))
    assert not tritongemm.scaled_bmm(q(2, M, 0), q(2, 0, 4), ONE(2, M), ONE(2, 4)).any()


def test_groups_may_have_no_rows_and_a_step_no_token() -> None:
    """A router may give an expert nothing."""
    weights, ends = ONE(4, K, N), torch.zeros(4, dtype=INT32)
    assert tritongemm.grouped_mm(ONE(0, K), weights, ends).shape == (0, N)
    assert tritongemm.grouped_mm(ONE(M, K), weights, ends + torch.tensor([0, M, M, M], dtype=INT32)).shape == (M, N)
    codes = [powers(*shape) for shape in ((0, 64), (2, 8, 64), (0, 4), (2, 8, 4))]
    assert tritongemm.grouped_mm(codes[0], codes[1].mT, ends[:2], *codes[2:]).shape == (0, 8)


@each(("n", "k"), [(16, 2048), (64, 8192), (17, 2048)])
def test_factors_of_blocks_are_no_factors_of_rows(n: int, k: int) -> None:
    """[1, K / 128] of a weight that has as many rows."""
    x, w, scale = torch.randn(5, k), torch.randn(n, k).to(FP8), torch.rand(1, k // 128) + 0.1
    right = x.double() @ (w.double() * scale.double().repeat_interleave(128, 1)).T
    assert (tritongemm.linear_fp8(x, w, scale) - right).norm() < 0.05 * right.norm()


@each("masked", [False, True])
def test_groups_without_factors_are_summed_as_wide_as_their_result(masked: bool) -> None:
    """Integers of eight bits overflow in eight bits, and bfloat16 has few digits of a float32 result."""
    call = CALLS["grouped_mm masked" if masked else "grouped_mm"](Rows(M))
    a, b, _ = call.tensors
    ends = torch.full((3,), M, dtype=INT32)
    out = call(torch.full(a.shape, 100, dtype=INT8), torch.full(b.shape, -99, dtype=INT8), ends)
    assert out.dtype == INT32 and bool((out == -9900 * K).all())
    exact = a.double() @ (b.double() if masked else b[0].double())
    assert (call(a, b, ends, out_dtype=torch.float32) - exact).abs().max() < 1e-3
    assert call(a.to(FP8), b.to(FP8), ends).dtype == torch.float16
    assert tritongemm.mm(q(M, K), q(N, K), None, FP8).dtype == FP8
