"""What a tracer can't see of a product: its gradients are those of the call itself, and wrong operands are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tritongemm
from tritongemm.core.errors import InputError

M, N, K, GROUPS = 5, 16, 32, 3
NUMBERS = torch.Generator().manual_seed(1)
ENDS = torch.tensor([2, 2, M], dtype=torch.int32)
CHOSEN = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=NUMBERS)


def q(*shape: int) -> Tensor:
    return x(*shape).to(torch.float8_e4m3fn)


A, W, BATCH_A, BATCH_B, EXPERTS = q(M, K), q(N, K), q(2, M, K), q(2, K, N), q(GROUPS, K, N)
OF_A, OF_W, X = x(M).abs(), x(N).abs(), x(M, K)
OF_BATCH, OF_EXPERTS = OF_A.expand(2, M), OF_W.expand(GROUPS, N)

# What is differentiated, and the shapes of what wants a gradient.
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "scaled_mm": (lambda bias: tritongemm.scaled_mm(A, W, OF_A, OF_W, bias, torch.float32), ((N,),)),
    "scaled_bmm": (
        lambda bias: tritongemm.scaled_bmm(BATCH_A, BATCH_B, OF_BATCH, OF_W.expand(2, N), bias, torch.float32),
        ((N,),),
    ),
    "linear_fp8": (lambda bias: tritongemm.linear_fp8(X, W, OF_W, bias), ((N,),)),
    "bmm": (tritongemm.bmm, ((2, M, K), (2, K, N), (N,))),
    "grouped_mm": (lambda a, b: tritongemm.grouped_mm(a, b, ENDS), ((M, K), (GROUPS, K, N))),
    "grouped_mm of scales": (
        lambda s: tritongemm.grouped_mm(A, EXPERTS, ENDS, s, OF_EXPERTS, torch.float32), ((M,),),
    ),
    "fused_moe": (
        lambda a, w1, w2, chosen: tritongemm.fused_moe(a, w1, w2, chosen, CHOSEN),
        ((M, K), (GROUPS, 2 * N, K), (GROUPS, K, N), (M, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_they_are_those_of_the_call_itself(name: str) -> None:
    call, shapes = CALLS[name]
    leaves = [x(*shape).requires_grad_() for shape in shapes]
    wanted = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    torch._dynamo.reset()
    result = torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves)
    for found, right in zip(torch.autograd.grad(result.square().sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_a_gradient_that_there_is_not_is_refused() -> None:
    """Activations are quantised, so that theirs would be zero."""
    given = x(M, K).requires_grad_()
    torch._dynamo.reset()
    result = torch.compile(lambda a: tritongemm.linear_fp8(a, W, OF_W), backend="aot_eager")(given)
    with pytest.raises(InputError, match=r"linear_fp8 has no gradient .* torch.no_grad\(\)"):
        result.sum().backward()


def test_quantised_activations_want_none() -> None:
    torch._dynamo.reset()
    given = x(M, K).requires_grad_()
    pair = torch.compile(lambda a: tritongemm.quantize(a, "row"), backend="aot_eager", fullgraph=True)(given)
    assert not any(one.requires_grad for one in pair)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: tritongemm.scaled_mm(A, t(W), OF_A, OF_W),
        lambda t: tritongemm.scaled_bmm(BATCH_A, t(BATCH_B), OF_BATCH, OF_W.expand(2, N)),
        lambda t: tritongemm.linear_fp8(X, W, OF_W, t(OF_W)),
        lambda t: tritongemm.grouped_mm(X, t(EXPERTS).float(), ENDS),
        lambda t: tritongemm.fused_moe(X, t(torch.ones(GROUPS, N, K)), torch.ones(GROUPS, K, N // 2), X[:, :2], CHOSEN),
        lambda t: tritongemm.mm(X, t(W).float()),
    ],
    ids=["scaled_mm", "scaled_bmm", "linear_fp8", "grouped_mm", "fused_moe", "mm"],
)
def test_operands_that_are_apart_are_refused(call: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> None:
    """A tracer sees no check of the call itself, and what is compiled has no numbers on meta."""
    torch._dynamo.reset()
    with pytest.raises(Exception, match="operands are on cpu and meta; move them"):
        torch.compile(lambda: call(lambda t: t.to("meta")), backend="eager", fullgraph=True)()


def bare(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="meta")


def bytes_of(*shape: int) -> Tensor:
    return bare(*shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("scaled_mm", (bytes_of(M, K), bytes_of(K), OF_A, OF_W), "row-major, or its transposed view"),
        ("scaled_mm", (bytes_of(M, K), bytes_of(N, K + 1), OF_A, OF_W), "row-major, or its transposed view"),
        ("grouped_mm", (bare(M, K), bare(K, N), ENDS, None, None, torch.float32), r"must be \[M, K\] or"),
        ("grouped_mm", (bare(K), bare(2, K, N), ENDS, None, None, torch.float32), r"a \(32,\) and b"),
        ("grouped_mm", (bare(M, K), bare(2, K + 1, N), ENDS, None, None, torch.float32), r"must be \[M, K\] or"),
        ("grouped_mm", (bare(3, M, K), bare(2, K, N), ENDS, None, None, torch.float32), r"must be \[M, K\] or"),
        ("fused_moe", (bare(K), bare(2, N, K), bare(2, K, N // 2), OF_A, ENDS, "silu", None, None), "x .* w1 .* must"),
        ("fused_moe", (bare(M, K), bare(2, N, K), bare(2), OF_A, ENDS, "silu", None, None), "x .* w1 .* must be"),
        ("fused_moe", (bare(M, K), bare(2, N, K), bare(2, K, N), OF_A, ENDS, "silu", None, None), "wants a w2"),
        ("linear_fp8", (bare(M, K), bytes_of(K), OF_W, None, torch.float32), r"must be \[..., K\] and \[N, K\]"),
        ("linear_fp8", (bare(M, K), bytes_of(N, K), OF_W, None, torch.float32), r"must be \[..., K\] and \[N, K\]"),
        ("bmm", (bare(M, K), bare(K, N)), r"must be \[B, M, K\] and \[B, K, N\]"),
        ("bmm", (bare(2, M, K), bare(3, K, N)), r"must be \[B, M, K\] and \[B, K, N\]"),
        ("mm", (bare(M, K), bare(K)), r"must be \[..., K\] and \[N, K\]"),
        ("mm", (bare(M, K), bare(N, K + 1)), r"must be \[..., K\] and \[N, K\]"),
    ],
)
def test_shapes_that_do_not_belong_together_are_named(name: str, given: tuple[object, ...], says: str) -> None:
    given = tuple(one.to("meta") if isinstance(one, Tensor) else one for one in given)
    with pytest.raises(InputError, match=says):
        getattr(torch.ops.tritongemm, name)(*given)
