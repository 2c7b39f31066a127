"""A call of every public product, of AITER's names and of `quantize` with any number of rows of A, 0 included."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tritongemm
from tritongemm.core.integers import round_up
from tritongemm.integrations import aiter

B, N, K, GROUPS = 2, 256, 256, 3
INT8, BF16 = torch.int8, torch.bfloat16
SHUFFLED, SHUFFLED_SCALES, SCALE_ROWS = "shuffled_16x16", "e8m0_32x8", 32


@dataclass(frozen=True)
class Rows:
    """Operands of ones, of a number of rows; those of one shape and type are one tensor.

    Attributes:
        m: rows of A.
        device: of the operands.
        fp8: the type of eight bits that is multiplied there.
        made: the operands that there are.
    """

    m: int
    device: str = "cpu"
    fp8: torch.dtype = torch.float8_e4m3fn
    made: dict[Any, Tensor] = field(default_factory=dict)

    def x(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """Numbers of 16 bits or more."""
        return self._full(1, shape, dtype)

    def f(self, *shape: int) -> Tensor:
        """Scale factors in float32."""
        return self._full(1, shape, torch.float32)

    def q(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of eight bits."""
        return self._full(1, shape, dtype or self.fp8)

    def p(self, *shape: int) -> Tensor:
        """Powers of two, or bytes of fp4."""
        return self._full(127, shape, torch.uint8)

    def ends(self) -> Tensor:
        """Groups that have no rows: their ends, and their numbers of rows."""
        return self._full(0, (GROUPS,), torch.int32)

    def shuffled(self, w: Tensor) -> Tensor:
        """A weight in AITER's order."""
        key = "shuffled", w.shape, w.dtype
        if key not in self.made:
            self.made[key] = tritongemm.pack_weight(w, SHUFFLED)
        return self.made[key]

    @property
    def routing(self) -> tuple[Tensor, Tensor]:
        """Weights and ids of the experts of each token."""
        return self.f(self.m, 2), self._full(0, (self.m, 2), torch.int64)

    @property
    def padded(self) -> int:
        """Rows of powers of two in AITER's order."""
        return round_up(self.m, SCALE_ROWS)

    def _full(self, value: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = value, shape, dtype
        if key not in self.made:
            self.made[key] = torch.full(shape, float(value), device=self.device).to(dtype)
        return self.made[key]


Call = Callable[[Rows], Any]

PLAIN: dict[str, Call] = {
    "mm": lambda r: tritongemm.mm(r.x(r.m, K), r.x(N, K), r.x(N)),
    "mm of rows of rows": lambda r: tritongemm.mm(r.x(2, r.m, K), r.x(N, K)),
    "mm fp8": lambda r: tritongemm.mm(r.q(r.m, K), r.q(N, K)),
    "mm int8": lambda r: tritongemm.mm(r.q(r.m, K, dtype=INT8), r.q(N, K, dtype=INT8)),
    "bmm": lambda r: tritongemm.bmm(r.x(B, r.m, K), r.x(B, K, N), r.x(B, 1, N)),
    "bmm out": lambda r: tritongemm.bmm(r.x(B, r.m, K), r.x(B, K, N), out=r.x(B, r.m, N)),
    "grouped_mm": lambda r: tritongemm.grouped_mm(r.x(r.m, K), r.x(GROUPS, K, N), r.ends()),
    "grouped_mm masked": lambda r: tritongemm.grouped_mm(r.x(GROUPS, r.m, K), r.x(GROUPS, K, N), r.ends()),
    "grouped_mm int8": lambda r: tritongemm.grouped_mm(
        r.q(r.m, K, dtype=INT8), r.q(GROUPS, K, N, dtype=INT8), r.ends()
    ),
    "fused_moe": lambda r: tritongemm.fused_moe(
        r.x(r.m, K), r.x(GROUPS, 2 * N, K), r.x(GROUPS, K, N), *r.routing
    ),
    "gemm_a16w16": lambda r: aiter.gemm_a16w16(r.x(r.m, K), r.x(N, K)),
    "batched_gemm_bf16": lambda r: aiter.batched_gemm_bf16(r.x(B, r.m, K), r.x(B, N, K), r.x(B, r.m, N)),
    "batched_gemm_bf16_CK": lambda r: aiter.batched_gemm_bf16_CK(r.x(B, r.m, K), r.x(B, N, K)),
}  # fmt: skip

SCALED: dict[str, Call] = {
    "scaled_mm rows": lambda r: tritongemm.scaled_mm(r.q(r.m, K), r.q(N, K), r.f(r.m), r.f(N), r.x(N)),
    "scaled_mm columns": lambda r: tritongemm.scaled_mm(r.q(r.m, K), r.q(N, K), r.f(r.m, 1), r.f(N, 1)),
    "scaled_mm one factor": lambda r: tritongemm.scaled_mm(r.q(r.m, K), r.q(N, K), r.f(1), r.f(1)),
    "scaled_mm blocks": lambda r: tritongemm.scaled_mm(r.q(r.m, K), r.q(N, K), r.f(r.m, 2), r.f(2, 2)),
    "scaled_mm M-major": lambda r: tritongemm.scaled_mm(r.q(r.m, K), r.q(N, K), r.f(2, r.m).t(), r.f(2, 2)),
    "scaled_mm of rows of rows": lambda r: tritongemm.scaled_mm(r.q(2, r.m, K), r.q(N, K), r.f(2 * r.m), r.f(N)),
    "scaled_mm int8": lambda r: tritongemm.scaled_mm(
        r.q(r.m, K, dtype=INT8), r.q(N, K, dtype=INT8), r.f(r.m), r.f(N), None, torch.float32
    ),
    "scaled_mm mx": lambda r: tritongemm.scaled_mm(r.q(r.m, K), r.q(N, K), r.p(r.m, 8), r.p(N, 8)),
    "scaled_mm fp4": lambda r: tritongemm.scaled_mm(
        r.p(r.m, K // 2), r.p(N, K // 2), r.p(r.padded, 8), r.p(N, 8), scale_layout=SHUFFLED_SCALES
    ),
    "scaled_bmm rows": lambda r: tritongemm.scaled_bmm(r.q(B, r.m, K), r.q(B, K, N), r.f(B, r.m), r.f(B, N)),
    "scaled_bmm blocks": lambda r: tritongemm.scaled_bmm(r.q(B, r.m, K), r.q(B, K, N), r.f(B, r.m, 2), r.f(B, 2, 2)),
    "scaled_bmm mx": lambda r: tritongemm.scaled_bmm(r.q(B, r.m, K), r.q(B, K, N), r.p(B, r.m, 8), r.p(B, 8, N)),
    "scaled_bmm out": lambda r: tritongemm.scaled_bmm(
        r.q(B, r.m, K), r.q(B, K, N), r.f(B, r.m), r.f(B, N), out=r.x(B, r.m, N)
    ),
    "grouped_mm rows": lambda r: tritongemm.grouped_mm(
        r.q(r.m, K), r.q(GROUPS, N, K).mT, r.ends(), r.f(r.m), r.f(GROUPS, N)
    ),
    "grouped_mm blocks": lambda r: tritongemm.grouped_mm(
        r.q(r.m, K), r.q(GROUPS, N, K).mT, r.ends(), r.f(r.m, 2), r.f(GROUPS, 2, 2)
    ),
    "grouped_mm mx": lambda r: tritongemm.grouped_mm(
        r.q(r.m, K), r.q(GROUPS, N, K).mT, r.ends(), r.p(r.padded, 8), r.p(GROUPS, N, 8), scale_layout=SHUFFLED_SCALES
    ),
    "grouped_mm masked rows": lambda r: tritongemm.grouped_mm(
        r.q(GROUPS, r.m, K), r.q(GROUPS, N, K).mT, r.ends(), r.f(GROUPS, r.m), r.f(GROUPS, N)
    ),
    "linear_fp8 rows": lambda r: tritongemm.linear_fp8(r.x(r.m, K), r.q(N, K), r.f(N), r.x(N)),
    "linear_fp8 blocks": lambda r: tritongemm.linear_fp8(r.x(2, r.m, K), r.q(N, K), r.f(2, 2)),
    "linear_fp8 mx": lambda r: tritongemm.linear_fp8(r.x(r.m, K), r.q(N, K), r.p(N, 8)),
    "linear_fp8 beside bf16": lambda r: tritongemm.linear_fp8(
        r.x(r.m, K), r.q(N, K), r.f(N), unquantized=r.x(N, K)
    ),
    "fused_moe rows": lambda r: tritongemm.fused_moe(
        r.x(r.m, K), r.q(GROUPS, 2 * N, K), r.q(GROUPS, K, N), *r.routing, "silu", r.f(GROUPS, 2 * N), r.f(GROUPS, K)
    ),
    "fused_moe int8": lambda r: tritongemm.fused_moe(
        r.x(r.m, K), r.q(GROUPS, 2 * N, K, dtype=INT8), r.q(GROUPS, K, N, dtype=INT8), *r.routing, "silu",
        r.f(GROUPS, 2 * N), r.f(GROUPS, K),
    ),
    "fused_moe blocks": lambda r: tritongemm.fused_moe(
        r.x(r.m, K), r.q(GROUPS, 2 * N, K), r.q(GROUPS, K, N), *r.routing, "silu", r.f(GROUPS, 4, 2), r.f(GROUPS, 2, 2)
    ),
    "gemm_a16w16 scaled": lambda r: aiter.gemm_a16w16(r.q(r.m, K), r.q(N, K), scale_a=r.f(1), scale_b=r.f(1)),
    "gemm_a8w8": lambda r: aiter.gemm_a8w8(r.q(r.m, K), r.q(N, K), r.f(r.m, 1), r.f(1, N), r.x(1, N)),
    "gemm_a8w8_bpreshuffle": lambda r: aiter.gemm_a8w8_bpreshuffle(
        r.q(r.m, K), r.shuffled(r.q(N, K)), r.f(r.m, 1), r.f(1, N)
    ),
    "gemm_a8w8_blockscale": lambda r: aiter.gemm_a8w8_blockscale(r.q(r.m, K), r.q(N, K), r.f(r.m, 2), r.f(2, 2)),
    "gemm_a8w8_blockscale_bpreshuffle": lambda r: aiter.gemm_a8w8_blockscale_bpreshuffle(
        r.q(r.m, K), r.shuffled(r.q(N, K)), r.f(r.m, 2), r.f(2, 2), out=r.x(r.m, N)
    ),
    "gemm_a4w4": lambda r: aiter.gemm_a4w4(
        r.p(r.m, K // 2), r.shuffled(r.p(N, K // 2)), r.p(256, 8), r.p(N, 8)
    ),
    "batched_gemm_a8w8": lambda r: aiter.batched_gemm_a8w8(
        r.q(B, r.m, K), r.q(B, N, K), r.f(B, r.m, 1), r.f(B, 1, N), r.x(B, r.m, N)
    ),
    "batched_gemm_a8w8_CK": lambda r: aiter.batched_gemm_a8w8_CK(
        r.q(B, r.m, K), r.q(B, N, K), r.f(B, r.m, 1), r.f(B, 1, N)
    ),
    "batched_gemm_a8w8_blockscale": lambda r: aiter.batched_gemm_a8w8_blockscale(
        r.q(B, r.m, K), r.q(B, N, K), r.f(B, r.m, 2), r.f(B, 2, 2), r.x(B, r.m, N)
    ),
}  # fmt: skip

QUANTISED: dict[str, Call] = {
    "quantize tensor": lambda r: tritongemm.quantize(r.x(r.m, K), "tensor"),
    "quantize rows": lambda r: tritongemm.quantize(r.x(2, r.m, K), "row"),
    "quantize rows int8": lambda r: tritongemm.quantize(r.x(r.m, K), "row", INT8),
    "quantize blocks": lambda r: tritongemm.quantize(r.x(r.m, K), "block"),
    "quantize blocks M-major": lambda r: tritongemm.quantize(r.x(r.m, K), "block", None, "groups"),
    "quantize blocks tma": lambda r: tritongemm.quantize(r.x(r.m, K), "block", None, "tma"),
    "quantize mx": lambda r: tritongemm.quantize(r.x(r.m, K), "mx", torch.float8_e4m3fn),
    "quantize fp4": lambda r: tritongemm.quantize(r.x(r.m, K), "mx", torch.uint8, SHUFFLED_SCALES),
}
CALLS = PLAIN | SCALED | QUANTISED


def tensors(found: Any) -> tuple[Tensor, ...]:
    """A result, or the parts of a pair."""
    return found if isinstance(found, tuple) else (found,)
