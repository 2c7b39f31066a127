"""Every public product under torch.compile, complete, with fake tensors and on the device meta: one table over all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tritongemm
from tritongemm.core.errors import InputError
from tritongemm.integrations import aiter

B, M, N, K, G = 2, 5, 48, 256, 3
FP8, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
SHUFFLED = "shuffled_16x16"
NUMBERS = torch.Generator().manual_seed(0)


def q(*shape: int, dtype: torch.dtype = FP8) -> Tensor:
    return torch.randint(-5, 6, shape, generator=NUMBERS).float().to(dtype)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=NUMBERS).to(dtype)


def factors(*shape: int) -> Tensor:
    return 2.0 ** torch.randint(-10, 11, shape, generator=NUMBERS).float()


def powers(*shape: int) -> Tensor:
    return (127 + torch.randint(-10, 11, shape, generator=NUMBERS)).to(torch.uint8)


def fp4(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=NUMBERS).to(torch.uint8)


def out(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


ENDS, COUNTS = (torch.tensor(numbers, dtype=torch.int32) for numbers in ((2, 2, 5), (2, 0, 5)))
CHOSEN = (torch.rand(M, 2), torch.randint(-1, G + 1, (M, 2)))
MIXTURE = (x(M, 128), q(G, 256, 128), q(G, 128, 128), *CHOSEN, "silu")
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "scaled_mm": (tritongemm.scaled_mm, (q(M, K), q(N, K), factors(M), factors(N))),
    "scaled_mm blocks": (tritongemm.scaled_mm, (q(2, M, K), q(N, K), factors(2 * M, 2), factors(1, 2))),
    "scaled_mm int8": (tritongemm.scaled_mm, (q(M, K, dtype=INT8), q(N, K, dtype=INT8), factors(M), factors(N))),
    "scaled_mm mx": (tritongemm.scaled_mm, (fp4(M, K // 2), fp4(N, K // 2), powers(M, 8), powers(N, 8))),
    "bmm": (tritongemm.bmm, (x(B, M, K), x(B, K, N), x(B, 1, N))),
    "scaled_bmm": (tritongemm.scaled_bmm, (q(B, M, K), q(B, K, N), factors(B, M), factors(B, N))),
    "scaled_bmm mx": (tritongemm.scaled_bmm, (q(B, M, K), q(B, N, K).mT, powers(B, M, 8), powers(B, 8, N))),
    "grouped_mm": (tritongemm.grouped_mm, (x(M, K), x(G, N, K).mT, ENDS)),
    "grouped_mm masked": (tritongemm.grouped_mm, (x(G, M, K), x(G, N, K).mT, COUNTS)),
    "grouped_mm blocks": (tritongemm.grouped_mm, (q(M, K), q(G, N, K).mT, ENDS, factors(M, 2), factors(G, 1, 2))),
    "grouped_mm mx": (tritongemm.grouped_mm, (q(M, K), q(G, N, K).mT, ENDS, powers(M, 8), powers(G, N, 8))),
    "fused_moe": (tritongemm.fused_moe, (x(M, 128), x(G, 256, 128), x(G, 128, 128), *CHOSEN, "gelu")),
    "fused_moe rows": (tritongemm.fused_moe, (*MIXTURE, factors(G, 256), factors(G, 128))),
    "fused_moe int8": (
        tritongemm.fused_moe,
        (x(M, 128), q(G, 256, 128, dtype=INT8), q(G, 128, 128, dtype=INT8), *CHOSEN, "silu", x(G, 256), x(G, 128)),
    ),
    "fused_moe mx": (tritongemm.fused_moe, (*MIXTURE, powers(G, 256, 4), powers(G, 128, 4))),
    "quantize": (tritongemm.quantize, (x(M, K), "block", None, "tma")),
    "quantize mx": (tritongemm.quantize, (x(M, K), "mx", torch.uint8, "e8m0_32x8")),
    "linear_fp8": (tritongemm.linear_fp8, (x(M, K, dtype=BF16), q(N, K), factors(1, 2))),
    "gemm_a8w8": (aiter.gemm_a8w8, (q(M, K), q(N, K), factors(M, 1), factors(1, N), x(1, N))),
    "gemm_a8w8_bpreshuffle": (
        aiter.gemm_a8w8_bpreshuffle,
        (q(M, K), tritongemm.pack_weight(q(N, K), SHUFFLED), factors(M, 1), factors(N)),
    ),
    "gemm_a8w8_blockscale": (aiter.gemm_a8w8_blockscale, (q(M, K), q(N, K), factors(M, 2), factors(1, 2))),
    "gemm_a8w8_blockscale_bpreshuffle": (
        aiter.gemm_a8w8_blockscale_bpreshuffle,
        (q(M, K), tritongemm.pack_weight(q(N, K), SHUFFLED), factors(M, 2), factors(1, 2)),
    ),
    "gemm_a4w4": (
        aiter.gemm_a4w4,
        (fp4(M, K // 2), tritongemm.pack_weight(fp4(N, K // 2), SHUFFLED), powers(32, 8), powers(64, 8), out(M, N)),
    ),
    "batched_gemm_bf16": (aiter.batched_gemm_bf16, (x(B, M, K, dtype=BF16), x(B, N, K, dtype=BF16), out(B, M, N))),
    "batched_gemm_bf16_CK": (aiter.batched_gemm_bf16_CK, (x(B, M, K, dtype=BF16), x(B, N, K, dtype=BF16))),
    "batched_gemm_a8w8": (
        aiter.batched_gemm_a8w8,
        (q(B, M, K, dtype=INT8), q(B, N, K, dtype=INT8), factors(B, M, 1), factors(B, 1, N), out(B, M, N)),
    ),
    "batched_gemm_a8w8_blockscale": (
        aiter.batched_gemm_a8w8_blockscale,
        (q(B, M, K), q(B, N, K), factors(B, M, 2), factors(B, 1, 2), out(B, M, N)),
    ),
}


def parts(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", CALLS)
def test_it_is_compiled_in_one_graph(name: str) -> None:
    """Without a break in the graph, and with an operation of ours in it, which may launch a tuned kernel."""
    call, given = CALLS[name]
    wanted = parts(call(*given))
    seen: list[str] = []

    def watch(graph: torch.fx.GraphModule, _: object) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda *operands: call(*operands), fullgraph=True, backend=watch)
    for found, one in zip(parts(compiled(*given)), wanted, strict=True):
        torch.testing.assert_close(found.float(), one.float(), rtol=1e-2, atol=1e-2)
    assert any(target.startswith("tritongemm.") for target in seen), seen


@pytest.mark.parametrize("name", CALLS)
def test_results_have_their_shapes_without_numbers(name: str) -> None:
    call, given = CALLS[name]
    wanted = [(t.shape, t.dtype, t.stride()) for t in parts(call(*given))]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in given]
        assert [(t.shape, t.dtype, t.stride()) for t in parts(call(*fake))] == wanted
    meta = [one.to("meta") if isinstance(one, Tensor) else one for one in given]
    assert [(t.shape, t.dtype) for t in parts(call(*meta))] == [one[:2] for one in wanted]


def test_memory_for_another_result_is_refused_there_too() -> None:
    a, b = x(B, M, K), x(B, K, N)
    with FakeTensorMode() as mode, pytest.raises(InputError, match=r"out is torch.float32 \(2, 5, 49\)"):
        fake = [mode.from_tensor(t) for t in (a, b, torch.empty(B, M, N + 1))]
        tritongemm.bmm(fake[0], fake[1], out=fake[2])
    with FakeTensorMode() as mode, pytest.raises(InputError, match="powers of two can be in rows, e8m0_32x8"):
        torch.ops.tritongemm.quantize(mode.from_tensor(a), "mx", FP8, "spiral")


@pytest.mark.parametrize(("granularity", "layout"), [("row", "rows"), ("block", "tma"), ("mx", "e8m0_32x8")])
def test_how_many_rows_are_quantised_may_depend_on_values(granularity: str, layout: str) -> None:
    """A tracer knows no number for the rows of ``x[mask]``; whether there are any is seen when they are quantised."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        some = mode.from_tensor(torch.ones(6, 256))
        rows = some[mode.from_tensor(torch.ones(6, dtype=torch.bool))]
        q, scale = tritongemm.quantize(rows, granularity, torch.float8_e4m3fn, layout)
    assert q.shape[1] == 256 and scale.dim() == 2
    q, scale = torch.ops.tritongemm.quantize(torch.ones(0, 256), granularity, torch.float8_e4m3fn, layout)
    assert q.shape == (0, 256) and scale.shape[0] == 0
    with pytest.raises(InputError, match=r"\(256, 0\)"):
        torch.ops.tritongemm.quantize(torch.ones(256, 0), granularity, torch.float8_e4m3fn, layout)
