"""Products of no rows, no K and no batch, and of types that PyTorch has no product for, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritongemm
from tests.support import no_rows
from tests.support.no_rows import Rows, tensors
from tritongemm.core.errors import InputError

M, N, K = 3, 32, 256
ONE, INT8, INT32 = torch.ones, torch.int8, torch.int32


def q(*shape: int) -> Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def powers(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


@pytest.mark.parametrize("name", no_rows.CALLS)
def test_no_rows_give_an_empty_result(name: str) -> None:
    """One of the type and extents that rows give, also where a tracer asks; a factor of all numbers is there, as 1."""
    call = no_rows.CALLS[name]
    of_three, found = tensors(call(Rows(5))), tensors(call(Rows(0)))
    with FakeTensorMode():
        traced = tensors(call(Rows(0)))
    for some, none, fake in zip(of_three, found, traced, strict=True):
        extents = [0 if size in (5, 10, 32) else size for size in some.shape]  # rows, rows of rows, padded rows
        assert list(none.shape) == extents == list(fake.shape) and none.dtype == some.dtype == fake.dtype
        assert not none.numel() or bool((none == 1).all())
    if name in no_rows.QUANTISED:
        assert found[1].numel() == (name == "quantize tensor")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scale_a": ONE(1, 2)}, "scale_a is"),
        ({"scale_a": ONE(0, 3)}, "scale_a is"),
        ({"scale_b": ONE(N, 3)}, "scale_b is"),
        ({"bias": ONE(N + 1)}, "bias is"),
        ({"b": q(N, K + 1)}, "b is"),
        ({"order_b": "backwards"}, "no weight layout"),
        ({"b": q(0, K), "scale_b": ONE(0, 2)}, "is empty: there is nothing to multiply"),
        ({"a": q(0, 0), "b": q(N, 0), "scale_a": ONE(0, 0), "scale_b": ONE(N, 0)}, "is empty: there is nothing"),
    ],
)
def test_what_does_not_belong_together_is_named_without_rows_too(changes: dict[str, Tensor], says: str) -> None:
    given = {"a": q(0, K), "b": q(N, K), "scale_a": ONE(0, 2), "scale_b": ONE(N, 2)}
    assert tritongemm.scaled_mm(**given).shape == (0, N)
    with pytest.raises(InputError, match=says):
        tritongemm.scaled_mm(**(given | changes))


def test_a_layer_trains_on_a_step_of_no_tokens() -> None:
    bias = ONE(N).requires_grad_()
    tritongemm.scaled_mm(q(0, K), q(N, K), ONE(0), ONE(N), bias).sum().backward()
    assert bias.grad is not None and not bias.grad.any()


def test_no_columns_are_named_and_no_k_gives_zeros_where_mm_has_them() -> None:
    with pytest.raises(InputError, match=r"b \(0, 256\) is empty"):
        tritongemm.linear_fp8(ONE(M, K), q(0, K), ONE(0))
    for x, w in ((ONE(M, 0), ONE(N, 0)), (q(M, 0), q(N, 0)), (q(M, 0).to(INT8), q(N, 0).to(INT8))):
        assert tritongemm.mm(x, w).shape == (M, N) and not tritongemm.mm(x, w).any()
    for of_a, of_b in ((ONE(2, M), ONE(2, N)), (ONE(2, M, 0), ONE(2, 0, 1)), (powers(2, M, 0), powers(2, 0, N))):
        none = tritongemm.scaled_bmm(q(2, M, 0), q(2, 0, N), of_a, of_b)
        assert none.shape == (2, M, N) and not none.any()


def test_explain_says_why_no_kernel_serves_no_rows() -> None:
    said = tritongemm.explain("scaled_mm", q(0, K), q(N, K), ONE(0), ONE(N))
    assert said.startswith("fallback: ")


@pytest.mark.parametrize("factors", [ONE(N), ONE(1), ONE(1, 2), powers(N, 8)], ids=["row", "one", "block", "mx"])
@pytest.mark.parametrize("tokens", [(0,), (2, 0)])
def test_a_layer_of_no_tokens_has_no_rows(factors: Tensor, tokens: tuple[int, ...]) -> None:
    out = tritongemm.linear_fp8(ONE(*tokens, K), q(N, K), factors, ONE(N), torch.bfloat16)
    assert out.shape == (*tokens, N) and out.dtype == torch.bfloat16
    with pytest.raises(InputError, match="bias is"):
        tritongemm.linear_fp8(ONE(*tokens, K), q(N, K), factors, ONE(N + 1))


@pytest.mark.parametrize(
    ("of_a", "of_b"), [((0, M, 2), (0, 2, 1)), ((0, M, 2), (0, 2, 128)), ((0, M), (0, 128)), ((0, M, 1), (0, 1, 128))]
)
def test_a_batch_of_no_products_is_empty(of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    out = tritongemm.scaled_bmm(q(0, M, K), q(0, K, 128), ONE(of_a), ONE(of_b))
    assert out.shape == (0, M, 128)
    with pytest.raises(InputError, match="scale_a is"):
        tritongemm.scaled_bmm(q(0, M, K), q(0, K, 128), ONE(0, M, 3), ONE(of_b))


@pytest.mark.parametrize("bias", [torch.arange(4.0), torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 1, 4)])
def test_a_product_without_k_is_its_bias(bias: Tensor) -> None:
    out = tritongemm.scaled_bmm(q(2, M, 0), q(2, 0, 4), ONE(2, M), ONE(2, 4), bias)
    assert torch.equal(out.float(), bias.view(-1, 1, 4).expand(2, M, 4))
    assert not tritongemm.scaled_bmm(q(2, M, 0), q(2, 0, 4), ONE(2, M), ONE(2, 4)).any()


@pytest.mark.parametrize(
    ("a", "w"),
    [
        (ONE(2, 4).to(INT8), torch.full((3, 4), 0.5)),
        (ONE(2, 4).to(INT32), torch.full((3, 4), 0.5)),
        (ONE(2, 4) * 1j, torch.full((3, 4), 0.5)),
        (ONE(2, 4), torch.full((3, 4), 0.5) * 1j),
    ],
)
def test_mixed_types_whose_product_would_be_cut_are_named(a: Tensor, w: Tensor) -> None:
    types = f"the operands are {a.dtype} and {w.dtype}"
    with pytest.raises(InputError, match=types):
        tritongemm.mm(a, w)
    with pytest.raises(InputError, match=types):
        tritongemm.bmm(a[None], w.mT[None])


def test_mixed_types_whose_result_holds_the_product_are_computed() -> None:
    half = torch.full((3, 4), 0.5)
    assert bool((tritongemm.mm(ONE(2, 4).to(INT8), half, None, torch.float32) == 2).all())
    assert bool((tritongemm.mm(half, ONE(2, 4).to(INT8)) == 2).all())


def test_sums_beyond_int32_go_round_as_those_of_kernels_do() -> None:
    a = torch.full((1, 140_000), 127, dtype=INT8)
    ends, right = torch.ones(1, dtype=INT32), 140_000 * 127 * 127 - 2**32
    products = tritongemm.mm(a, a), tritongemm.bmm(a[None], a.mT[None]), tritongemm.grouped_mm(a, a.mT[None], ends)
    assert [int(one) for one in products] == [right] * 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: tritongemm.mm(ONE(2, 4), ONE(3, 4), None, "x"),
        lambda: tritongemm.bmm(ONE(1, 2, 4), ONE(1, 4, 3), None, "x"),
    ],
    ids=["mm", "bmm"],
)  # fmt: skip
def test_a_result_of_no_type_is_named(call: Callable[[], Tensor]) -> None:
    with pytest.raises(InputError, match="out_dtype is 'x'; give a dtype"):
        call()


def test_factors_in_an_order_have_its_shape() -> None:
    with pytest.raises(InputError, match=r"scale_a is .* it may be \(32, 8\) in e8m0 .* in the layout e8m0_32x8"):
        tritongemm.scaled_mm(q(5, K), q(N, K), powers(5, 8), powers(N, 8), scale_layout="e8m0_32x8")
    with pytest.raises(InputError, match=r"scale_b is .* it may be \(8, 64\) in e8m0 .* in the layout e8m0_32x8"):
        tritongemm.scaled_bmm(q(2, 5, K), q(2, K, 33), powers(2, 32, 8), powers(2, 8, 33), scale_layout="e8m0_32x8")
    with pytest.raises(InputError, match=r"strides \(7, 1\); of each product it may be one for .* \(5, 8\) in e8m0"):
        tritongemm.scaled_bmm(q(2, 5, K), q(2, K, N), ONE(2, 7), ONE(2, N))
