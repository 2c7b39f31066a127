"""What PyTorch's own scaled products are given, on stand-ins of them: its order of factors, and one refusal."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tritongemm.operations import scaled
from tritongemm.operations.scaled import TorchScaled
from tritongemm.operations.scaled_operands import ScaledOperands, read_product

M, N, K = 16, 256, 640
FP8 = torch.float8_e4m3fn


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
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


def computed(scale_a: Tensor, scale_w: Tensor) -> TorchScaled:
    a, w = torch.zeros(M, K).to(FP8), torch.zeros(N, K).to(FP8)
    call = TorchScaled(read_product(ScaledOperands(a, w, scale_a, scale_w)))
    for _ in range(2):
        assert call(a, w, scale_a, scale_w).shape == (M, N)
    return call


ROWS = ((M, 1), (1, 1), (1, N), (1, 1))
BLOCKS = ((M, 5), (1, M), (8, 2), (1, 8))  # 5 groups, padded to 8


@pytest.mark.parametrize(
    ("scale_a", "scale_w", "wanted"),
    [
        (torch.ones(M, 1), torch.ones(N), ROWS),
        (torch.ones(1), torch.ones(N, 1), ROWS),
        (torch.ones(M, 5), torch.ones(2, 5), BLOCKS),
        (torch.ones(5, M).t(), torch.ones(2, 5), BLOCKS),
        (torch.ones(M, 5), torch.ones(N, 5), ((M, 5), (1, M), (N, 5), (1, N))),
    ],
)
def test_factors_are_stored_as_pytorch_wants_them(
    asked: list[tuple[Any, ...]], scale_a: Tensor, scale_w: Tensor, wanted: tuple[Any, ...]
) -> None:
    computed(scale_a, scale_w)
    assert asked == [wanted] * 2


@pytest.mark.parametrize("rows", [1, 13, 16])
def test_rows_are_padded_for_the_library(asked: list[tuple[Any, ...]], rows: int) -> None:
    """CuBLASLt has products with factors along K of multiples of four rows."""
    a, w = torch.zeros(rows, K).to(FP8), torch.zeros(N, K).to(FP8)
    scale_a, scale_w = torch.ones(rows, 5), torch.ones(2, 5)
    call = TorchScaled(read_product(ScaledOperands(a, w, scale_a, scale_w)))
    for _ in range(2):
        found = call(a, w, scale_a, scale_w)
        assert found.shape == (rows, N) and found.is_contiguous()
    padded = -(-rows // 4) * 4
    assert asked == [((padded, 5), (1, padded), *BLOCKS[2:])] * 2


def test_older_pytorch_is_given_no_padding(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "_Scaled", None)
    computed(torch.ones(M, 5), torch.ones(2, 5))
    assert asked == [((M, 5), (1, M), (5, 2), (1, 8))] * 2


def test_what_pytorch_refused_it_is_not_asked_for_again(asked: list[tuple[Any, ...]]) -> None:
    computed(torch.ones(()), torch.ones(()))
    assert len(asked) == 3, "once with factors, and for each product of plain numbers"


def test_factors_of_one_operand_along_k_are_no_product_of_pytorchs(asked: list[tuple[Any, ...]]) -> None:
    computed(torch.ones(M), torch.ones(2, 5))
    assert not asked
