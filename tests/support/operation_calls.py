"""A call of every public product, of AITER's names and of `quantize`, of any number of rows of A: one table."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

import tritongemm
from tritongemm.core.integers import round_up
from tritongemm.integrations import aiter

B, N, K, GROUPS = 2, 128, 256, 3
INT8, BF16 = torch.int8, torch.bfloat16
_TENSOR: Any = object()
SHUFFLED, SHUFFLED_SCALES, SCALE_ROWS = "shuffled_16x16", "e8m0_32x8", 32


@dataclass(frozen=True)
class Rows:
    """Random operands for a number of rows; those of one kind and shape are one tensor, whatever the number of rows."""

    m: int
    device: str = "cpu"
    fp8: torch.dtype = torch.float8_e4m3fn
    wide: torch.dtype = BF16
    made: dict[Any, Tensor] = field(default_factory=dict)

    def x(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of 16 bits or more."""
        return self._made("x", shape, dtype or self.wide)

    def f(self, *shape: int) -> Tensor:
        """Scale factors in float32."""
        return self._made("f", shape, torch.float32)

    def q(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of eight bits."""
        return self._made("q", shape, dtype or self.fp8)

    def p(self, *shape: int) -> Tensor:
        """Powers of two, or bytes of fp4."""
        return self._made("p", shape, torch.uint8)

    def i(self, *shape: int) -> Tensor:
        """Integers of eight bits."""
        return self.q(*shape, dtype=INT8)

    def ends(self) -> Tensor:
        """The ends of groups, of which one is empty; they can be numbers of rows too."""
        return torch.tensor([self.m // 2, self.m // 2, self.m], dtype=torch.int32, device=self.device)

    def shuffled(self, w: Tensor) -> Tensor:
        """A weight in AITER's order."""
        key = "shuffled", w.shape, w.dtype
        if key not in self.made:
            self.made[key] = tritongemm.pack_weight(w, SHUFFLED)
        return self.made[key]

    @property
    def routing(self) -> tuple[Tensor, Tensor]:
        """Weights and ids of the experts of each token, some of which are of no expert."""
        return self.f(self.m, 2), self._made("ids", (self.m, 2), torch.int64)

    @property
    def padded(self) -> int:
        """Rows of powers of two in AITER's order."""
        return round_up(self.m, SCALE_ROWS)

    def _made(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = kind, shape, dtype
        if key not in self.made:
            random = torch.Generator().manual_seed(crc32(repr(key).encode()))
            if kind == "x":
                numbers = torch.randn(shape, generator=random)
            else:
                low, high = {"f": (-8, 9), "q": (-5, 6), "p": (117, 138), "ids": (-1, GROUPS + 1)}[kind]
                numbers = torch.randint(low, high, shape, generator=random).float()
            self.made[key] = (numbers.exp2() if kind == "f" else numbers).to(self.device).to(dtype)
        return self.made[key]


class Call:
    """A function and its arguments; called with tensors, it has them in place of those among its arguments."""

    def __init__(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        self.function, self.given, self.named = function, given, named
        self.tensors = [one for one in (*given, *named.values()) if isinstance(one, Tensor)]
        # A graph that holds a tensor is of it alone, so those are not looked at when other ones are given.
        self._given = [_TENSOR if isinstance(one, Tensor) else one for one in given]
        self._named = {name: _TENSOR if isinstance(one, Tensor) else one for name, one in named.items()}

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    def __call__(self, *tensors: Tensor, **more: Any) -> Any:
        left = iter(tensors or self.tensors)
        given = [next(left) if one is _TENSOR else one for one in self._given]
        named = {name: next(left) if one is _TENSOR else one for name, one in self._named.items()}
        return self.function(*given, **(named | more))


mm, scaled_mm, bmm, scaled_bmm = tritongemm.mm, tritongemm.scaled_mm, tritongemm.bmm, tritongemm.scaled_bmm
grouped_mm, fused_moe, linear_fp8 = tritongemm.grouped_mm, tritongemm.fused_moe, tritongemm.linear_fp8
linear_act, linear_w4, quantize = tritongemm.linear_act, tritongemm.linear_w4, tritongemm.quantize
Make = Callable[[Rows], Call]

PLAIN: dict[str, Make] = {
    "mm": lambda r: Call(mm, r.x(r.m, K), r.x(N, K), r.x(N)),
    "mm of rows of rows": lambda r: Call(mm, r.x(2, r.m, K), r.x(N, K)),
    "mm fp8": lambda r: Call(mm, r.q(r.m, K), r.q(N, K)),
    "mm int8": lambda r: Call(mm, r.i(r.m, K), r.i(N, K)),
    "linear_act": lambda r: Call(linear_act, r.x(r.m, K), r.x(N, K), "gelu", r.x(N)),
    "linear_act in blocks": lambda r: Call(linear_act, r.x(r.m, K), r.x(N, K), "relu_block"),
    "linear_act of gate and up": lambda r: Call(linear_act, r.x(2, r.m, K), r.x(N, K), "silu_mul"),
    "linear_add": lambda r: Call(tritongemm.linear_add, r.x(r.m, K), r.x(N, K), r.x(r.m, N)),
    "linear_act_quantize": lambda r: Call(tritongemm.linear_act_quantize, r.x(r.m, K), r.x(N, K), "gelu"),
    "bmm": lambda r: Call(bmm, r.x(B, r.m, K), r.x(B, K, N), r.x(B, 1, N)),
    "bmm out": lambda r: Call(bmm, r.x(B, r.m, K), r.x(B, K, N), out=r.x(B, r.m, N)),
    "grouped_mm": lambda r: Call(grouped_mm, r.x(r.m, K), r.x(GROUPS, K, N), r.ends()),
    "grouped_mm masked": lambda r: Call(grouped_mm, r.x(GROUPS, r.m, K), r.x(GROUPS, K, N), r.ends()),
    "grouped_mm int8": lambda r: Call(grouped_mm, r.i(r.m, K), r.i(GROUPS, K, N), r.ends()),
    "fused_moe": lambda r: Call(fused_moe, r.x(r.m, K), r.x(GROUPS, 2 * N, K), r.x(GROUPS, K, N), *r.routing),
    "gemm_a16w16": lambda r: Call(aiter.gemm_a16w16, r.x(r.m, K), r.x(N, K)),
    "batched_gemm_bf16": lambda r: Call(aiter.batched_gemm_bf16, r.x(B, r.m, K), r.x(B, N, K), r.x(B, r.m, N)),
    "batched_gemm_bf16_CK": lambda r: Call(
        aiter.batched_gemm_bf16_CK, r.x(B, r.m, K, dtype=BF16), r.x(B, N, K, dtype=BF16)
    ),
}

SCALED: dict[str, Make] = {
    "linear_act rows": lambda r: Call(linear_act, r.q(r.m, K), r.q(N, K), "silu_mul", None, None, r.f(r.m), r.f(N)),
    "linear_act blocks": lambda r: Call(
        linear_act, r.q(r.m, K), r.q(N, K), "gelu_block", scale_a=r.f(r.m, 2), scale_b=r.f(1, 2)
    ),
    "scaled_mm rows": lambda r: Call(scaled_mm, r.q(r.m, K), r.q(N, K), r.f(r.m), r.f(N), r.x(N, dtype=BF16)),
    "scaled_mm columns": lambda r: Call(scaled_mm, r.q(r.m, K), r.q(N, K), r.f(r.m, 1), r.f(N, 1)),
    "scaled_mm one factor": lambda r: Call(scaled_mm, r.q(r.m, K), r.q(N, K), r.f(1), r.f(1)),
    "scaled_mm blocks": lambda r: Call(scaled_mm, r.q(r.m, K), r.q(N, K), r.f(r.m, 2), r.f(1, 2)),
    "scaled_mm M-major": lambda r: Call(scaled_mm, r.q(r.m, K), r.q(N, K), r.f(2, r.m).t(), r.f(1, 2)),
    "scaled_mm of rows of rows": lambda r: Call(scaled_mm, r.q(2, r.m, K), r.q(N, K), r.f(2 * r.m), r.f(N)),
    "scaled_mm int8": lambda r: Call(scaled_mm, r.i(r.m, K), r.i(N, K), r.f(r.m), r.f(N), None, torch.float32),
    "scaled_mm mx": lambda r: Call(scaled_mm, r.q(r.m, K), r.q(N, K), r.p(r.m, 8), r.p(N, 8)),
    "scaled_mm fp4": lambda r: Call(
        scaled_mm, r.p(r.m, K // 2), r.p(N, K // 2), r.p(r.padded, 8), r.p(N, 8), scale_layout=SHUFFLED_SCALES
    ),
    "scaled_bmm rows": lambda r: Call(scaled_bmm, r.q(B, r.m, K), r.q(B, K, N), r.f(B, r.m), r.f(B, N)),
    "scaled_bmm blocks": lambda r: Call(scaled_bmm, r.q(B, r.m, K), r.q(B, K, N), r.f(B, r.m, 2), r.f(B, 2, 1)),
    "scaled_bmm mx": lambda r: Call(scaled_bmm, r.q(B, r.m, K), r.q(B, N, K).mT, r.p(B, r.m, 8), r.p(B, N, 8).mT),
    "scaled_bmm out": lambda r: Call(
        scaled_bmm, r.q(B, r.m, K), r.q(B, K, N), r.f(B, r.m), r.f(B, N), out=r.x(B, r.m, N, dtype=BF16)
    ),
    "grouped_mm rows": lambda r: Call(
        grouped_mm, r.q(r.m, K), r.q(GROUPS, N, K).mT, r.ends(), r.f(r.m), r.f(GROUPS, N)
    ),
    "grouped_mm blocks": lambda r: Call(
        grouped_mm, r.q(r.m, K), r.q(GROUPS, N, K).mT, r.ends(), r.f(r.m, 2), r.f(GROUPS, 1, 2)
    ),
    "grouped_mm mx": lambda r: Call(
        grouped_mm, r.q(r.m, K), r.q(GROUPS, N, K).mT, r.ends(), r.p(r.padded, 8), r.p(GROUPS, N, 8),
        scale_layout=SHUFFLED_SCALES,
    ),
    "grouped_mm masked rows": lambda r: Call(
        grouped_mm, r.q(GROUPS, r.m, K), r.q(GROUPS, N, K).mT, r.ends(), r.f(GROUPS, r.m), r.f(GROUPS, N)
    ),
    "linear_fp8 rows": lambda r: Call(linear_fp8, r.x(r.m, K), r.q(N, K), r.f(N), r.x(N)),
    "linear_fp8 blocks": lambda r: Call(linear_fp8, r.x(2, r.m, K), r.q(N, K), r.f(1, 2)),
    "linear_fp8 mx": lambda r: Call(linear_fp8, r.x(r.m, K), r.q(N, K), r.p(N, 8)),
    "linear_w4 int4": lambda r: Call(linear_w4, r.x(r.m, K, dtype=BF16), r.p(N, K // 2), r.x(2, N, dtype=BF16)),
    "linear_w4 fp4": lambda r: Call(
        linear_w4, r.x(r.m, K, dtype=BF16), r.p(N, K // 2), r.p(N, 8), "halves_32", r.x(N, dtype=BF16)
    ),
    "linear_fp8 beside bf16": lambda r: Call(linear_fp8, r.x(r.m, K), r.q(N, K), r.f(N), None, None, r.x(N, K)),
    "fused_moe rows": lambda r: Call(
        fused_moe, r.x(r.m, K), r.q(GROUPS, 2 * N, K), r.q(GROUPS, K, N), *r.routing, "silu",
        r.f(GROUPS, 2 * N), r.f(GROUPS, K),
    ),
    "fused_moe int8": lambda r: Call(
        fused_moe, r.x(r.m, K), r.i(GROUPS, 2 * N, K), r.i(GROUPS, K, N), *r.routing, "silu",
        r.f(GROUPS, 2 * N), r.f(GROUPS, K),
    ),
    "fused_moe blocks": lambda r: Call(
        fused_moe, r.x(r.m, K), r.q(GROUPS, 2 * N, K), r.q(GROUPS, K, N), *r.routing, "gelu",
        r.f(GROUPS, 2, 2), r.f(GROUPS, 2, 1),
    ),
    "linear_w4 fp8": lambda r: Call(
        linear_w4, r.q(r.m, K), r.p(N, K // 2), r.p(N, 8), scale_x=r.f(r.m, 2), bias=r.x(N, dtype=BF16)
    ),
    "grouped_mm int4": lambda r: Call(
        grouped_mm, r.x(r.m, K, dtype=BF16), r.p(GROUPS, N, K // 2).mT, r.ends(), None, r.x(GROUPS, 2, N, dtype=BF16)
    ),
    "fused_moe int4": lambda r: Call(
        fused_moe, r.x(r.m, K, dtype=BF16), r.p(GROUPS, 2 * N, K // 2), r.p(GROUPS, K, N // 2), *r.routing,
        "clamped_swiglu", r.x(GROUPS, 2, 2 * N, dtype=BF16), r.x(GROUPS, N // 32, K, dtype=BF16),
    ),
    "fused_moe mx": lambda r: Call(
        fused_moe, r.x(r.m, K), r.q(GROUPS, 2 * N, K), r.q(GROUPS, K, N), *r.routing, "silu",
        r.p(GROUPS, 2 * N, 8), r.p(GROUPS, K, 4),
    ),
    "gemm_a16w16 scaled": lambda r: Call(
        aiter.gemm_a16w16, r.q(r.m, K), r.q(N, K), scale_a=r.f(1), scale_b=r.f(1)
    ),
    "gemm_a8w8": lambda r: Call(aiter.gemm_a8w8, r.q(r.m, K), r.q(N, K), r.f(r.m, 1), r.f(1, N), r.x(1, N)),
    "gemm_a8w8_bpreshuffle": lambda r: Call(
        aiter.gemm_a8w8_bpreshuffle, r.q(r.m, K), r.shuffled(r.q(N, K)), r.f(r.m, 1), r.f(1, N)
    ),
    "gemm_a8w8_blockscale": lambda r: Call(
        aiter.gemm_a8w8_blockscale, r.q(r.m, K), r.q(N, K), r.f(r.m, 2), r.f(1, 2)
    ),
    "gemm_a8w8_blockscale_bpreshuffle": lambda r: Call(
        aiter.gemm_a8w8_blockscale_bpreshuffle, r.q(r.m, K), r.shuffled(r.q(N, K)), r.f(r.m, 2), r.f(1, 2),
        out=r.x(r.m, N, dtype=BF16),
    ),
    "gemm_a4w4": lambda r: Call(
        aiter.gemm_a4w4, r.p(r.m, K // 2), r.shuffled(r.p(N, K // 2)), r.p(256, 8), r.p(N, 8)
    ),
    "batched_gemm_a8w8": lambda r: Call(
        aiter.batched_gemm_a8w8, r.q(B, r.m, K), r.q(B, N, K), r.f(B, r.m, 1), r.f(B, 1, N), r.x(B, r.m, N)
    ),
    "batched_gemm_a8w8_CK": lambda r: Call(
        aiter.batched_gemm_a8w8_CK, r.q(B, r.m, K), r.q(B, N, K), r.f(B, r.m, 1), r.f(B, 1, N)
    ),
    "batched_gemm_a8w8_blockscale": lambda r: Call(
        aiter.batched_gemm_a8w8_blockscale, r.q(B, r.m, K), r.q(B, N, K), r.f(B, r.m, 2), r.f(B, 1, 2),
        r.x(B, r.m, N),
    ),
}  # fmt: skip

QUANTISED: dict[str, Make] = {
    "quantize tensor": lambda r: Call(quantize, r.x(r.m, K), "tensor"),
    "quantize rows": lambda r: Call(quantize, r.x(2, r.m, K), "row"),
    "quantize rows int8": lambda r: Call(quantize, r.x(r.m, K), "row", INT8),
    "quantize blocks": lambda r: Call(quantize, r.x(r.m, K), "block"),
    "quantize blocks M-major": lambda r: Call(quantize, r.x(r.m, K), "block", None, "groups"),
    "quantize blocks tma": lambda r: Call(quantize, r.x(r.m, K), "block", None, "tma"),
    "quantize mx": lambda r: Call(quantize, r.x(r.m, K), "mx", torch.float8_e4m3fn),
    "quantize fp4": lambda r: Call(quantize, r.x(r.m, K), "mx", torch.uint8, SHUFFLED_SCALES),
}
CALLS = PLAIN | SCALED | QUANTISED


def parts(found: Any) -> tuple[Tensor, ...]:
    """A result, or the parts of a pair."""
    return found if isinstance(found, tuple) else (found,)
