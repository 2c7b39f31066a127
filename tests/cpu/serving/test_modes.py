"""Products with scales, batches and groups inside of PyTorch's modes: autocast, torch.func and torch.jit.trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support.linear_layers import StandInKernel, stand_in_device
from tritongemm.core.errors import InputError
from tritongemm.serving.launching import ScaledCall

M, N, K, GROUPS = 5, 32, 256, 3
FP8 = torch.float8_e4m3fn
ENDS = torch.tensor([1, 3, M], dtype=torch.int32)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(FP8)


A, B = _numbers(M, K), _numbers(N, K)
BATCH_A, BATCH_B, OF_GROUPS = _numbers(GROUPS, M, K), _numbers(GROUPS, K, N), _numbers(GROUPS, N, K).mT
ROWS, COLUMNS = torch.linspace(0.5, 2.0, M), torch.linspace(0.25, 1.0, N)
OF_A, OF_B = ROWS.expand(GROUPS, M).contiguous(), COLUMNS.expand(GROUPS, N).contiguous()
X = torch.ones(M, K)

SCALED: dict[str, Callable[[], Tensor]] = {
    "scaled_mm": lambda: tritongemm.scaled_mm(A, B, ROWS, COLUMNS, None, torch.float32),
    "scaled_mm in blocks": lambda: tritongemm.scaled_mm(
        A, B, torch.ones(M, 2) / 3, torch.ones(1, 2), None, torch.float32
    ),
    "scaled_bmm": lambda: tritongemm.scaled_bmm(BATCH_A, BATCH_B, OF_A, OF_B, None, torch.float32),
    "grouped_mm": lambda: tritongemm.grouped_mm(A, OF_GROUPS, ENDS, ROWS, OF_B, torch.float32),
}


@pytest.mark.parametrize("name", SCALED)
def test_autocast_rounds_no_product_of_eight_bits(name: str) -> None:
    """Factors and numbers of eight bits are multiplied in float32 where no kernel serves; halves would overflow."""
    plain = SCALED[name]()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(SCALED[name](), plain)


@pytest.mark.parametrize(("cast", "wanted"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast_to_other_halves_than_the_results_changes_no_batch(cast: torch.dtype, wanted: torch.dtype) -> None:
    plain = tritongemm.scaled_bmm(BATCH_A, BATCH_B, OF_A, OF_B, None, wanted)
    with torch.autocast("cpu", cast):
        assert torch.equal(tritongemm.scaled_bmm(BATCH_A, BATCH_B, OF_A, OF_B, None, wanted), plain)


def test_products_that_pytorch_can_map_are_mapped() -> None:
    mapped = torch.func.vmap(lambda a, s: tritongemm.scaled_mm(a, B, s, COLUMNS))(BATCH_A, OF_A)
    assert torch.equal(mapped[1], tritongemm.scaled_mm(BATCH_A[1], B, OF_A[1], COLUMNS))
    factors = torch.stack((OF_A, OF_A * 2))
    mapped = torch.func.vmap(lambda s: tritongemm.scaled_bmm(BATCH_A, BATCH_B, s, OF_B))(factors)
    assert torch.equal(mapped[1], tritongemm.scaled_bmm(BATCH_A, BATCH_B, factors[1], OF_B))


@pytest.mark.parametrize(
    ("call", "given", "name"),
    [
        (lambda a: tritongemm.grouped_mm(a, OF_GROUPS.float(), ENDS), torch.ones(2, M, K), "a"),
        (lambda ends: tritongemm.grouped_mm(X, OF_GROUPS.float(), ends), torch.stack((ENDS, ENDS)), "offs"),
        (lambda x: tritongemm.quantize(x, "block", layout="tma")[0].float(), torch.ones(2, M, K), "x"),
        (lambda x: tritongemm.linear_fp8(x, B, COLUMNS), torch.ones(2, M, K), "x"),
        (
            lambda x: tritongemm.fused_moe(
                x, torch.ones(2, 2 * N, K), torch.ones(2, K, N), torch.ones(M, 1), torch.zeros(M, 1, dtype=torch.int32)
            ),
            torch.ones(2, M, K),
            "x",
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_mapped_is_named(call: Callable[[Tensor], Tensor], given: Tensor, name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} is mapped by torch.func.vmap"):
        torch.func.vmap(call)(given)


def test_tensors_without_an_address_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that a kernel serves may come again inside of a transform, whose tensors have no memory of their own."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    kernel, device = StandInKernel(), stand_in_device()
    served = ScaledCall(kernel, device, (M, N), torch.bfloat16, lambda a, *_: a.float() * 2)
    out = torch.func.vmap(lambda a: served(a, B, ROWS, COLUMNS, None, torch.bfloat16))(BATCH_A)
    assert torch.equal(out, BATCH_A.float() * 2)
    monkeypatch.setattr(
        "tritongemm.serving.launching.OperandCall.__call__",
        lambda *_: pytest.fail("no kernel reads what has no address"),
    )
    b = BATCH_B.float()
    out = torch.func.vmap(lambda a: tritongemm.bmm(a, b))(torch.ones(2, GROUPS, M, K))
    assert torch.equal(out[1], torch.ones(GROUPS, M, K) @ b)


def test_jit_traces_have_tensors_for_sizes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda a: tritongemm.scaled_mm(a, B, ROWS, COLUMNS), (A,))
    assert torch.equal(traced(A), tritongemm.scaled_mm(A, B, ROWS, COLUMNS))


@pytest.mark.parametrize("masked", [False, True])
def test_groups_without_factors_are_summed_as_wide_as_their_result(masked: bool) -> None:
    """Integers of eight bits overflow in eight bits, and bfloat16 has few digits of a float32 result."""
    a = torch.full((GROUPS, M, K) if masked else (M, K), 100, dtype=torch.int8)
    b = torch.full((GROUPS, K, N), -99, dtype=torch.int8)
    ends = torch.full((GROUPS,), M, dtype=torch.int32)
    out = tritongemm.grouped_mm(a, b, ends)
    assert out.dtype == torch.int32 and bool((out == -9900 * K).all())
    x, w = _numbers(*a.shape).bfloat16(), OF_GROUPS.bfloat16()
    exact = x.double() @ (w.double() if masked else w[0].double())
    assert (tritongemm.grouped_mm(x, w, ends, out_dtype=torch.float32) - exact).abs().max() < 1e-3
    assert tritongemm.grouped_mm(_numbers(*a.shape), OF_GROUPS, ends).dtype == torch.float16
    assert tritongemm.mm(x[0] if masked else x, w[0].mT, None, FP8).dtype == FP8
