import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tritongemm
from tests.support.nouns import Defaults, Patch, cases, each, matrices, raising, sizes
from tritongemm.workloads.capturing.product import Product
from tritongemm.workloads.capturing.recorder import decompose
from tritongemm.workloads.capturing.workload_file import Counted, WorkloadFile

FP8 = torch.float8_e4m3fn
SIZES = M, N, K = 16, 256, 512


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(FP8)


def ones(*shape: int, transposed: bool = False) -> torch.Tensor:
    return torch.ones(shape[::-1]).t() if transposed else torch.ones(shape)


def read(scale_a: torch.Tensor, scale_b: torch.Tensor, sizes: tuple[int, int, int]) -> tuple[str, str, str]:
    m, n, k = sizes
    given = fp8(m, k), fp8(n, k).t(), scale_a, scale_b.t(), None
    (found,) = decompose("tritongemm.scaled_mm", tritongemm.scaled_mm, given, {"out_dtype": torch.bfloat16})
    return found.family, found.scales, found.left_out


def test_pytorchs_scaled_products_and_those_of_groups() -> None:
    one, b = torch.ones(()), fp8(N, K).t()
    found = product("_scaled_mm", torch._scaled_mm, fp8(M, K), b, one, one, out_dtype=torch.bfloat16)
    assert (found.family, found.scales, found.one_scale, found.left_out) == ("a8w8", "tensor", True, "")
    assert (found.m, found.n, found.k, found.c.dtype, found.is_layer) == (M, N, K, "bf16", True)
    rows = product("_scaled_mm", torch._scaled_mm, fp8(M, K), b, ones(M, 1), ones(1, N), out_dtype=torch.bfloat16)
    assert (rows.family, rows.scales, rows.one_scale) == ("a8w8", "", False)
    a, b = torch.ones(M, 32, dtype=torch.bfloat16), torch.ones(4, 48, 32, dtype=torch.bfloat16).mT
    found = product("_grouped_mm", torch._grouped_mm, a, b, torch.tensor([4, 8, 8, 16], dtype=torch.int32))
    assert (found.m, found.n, found.k, found.groups, found.left_out) == (M, 48, 32, 4, "")
    assert not found.b.row_major and not found.is_layer
    assert "grouped products of" in product("_grouped_mm", torch._grouped_mm, b.mT, b).left_out
    assert read(ones(1, 1), ones(N), (1, N, K)) == ("a8w8", "", "")
    assert read(ones(1, 4), ones(2, 4), (1, N, K)) == ("a8w8_blockscale", "", "")
    wide = 128 * 128  # where the factors of blocks are as many as the rows
    assert read(ones(256, 128), ones(2, 128), (256, 256, wide))[0] == "a8w8_blockscale"


@each("scale_b", [ones(4, 2).t(), ones(N, 4)])
def test_factors_that_no_family_has_are_named(scale_b: torch.Tensor) -> None:
    family, _, reason = read(ones(M), scale_b, SIZES)
    assert family == "dense" and reason.startswith("scale factors of A for 1 x K (fp32) and of B for ")
    assert reason.endswith(": no family multiplies fp8e4m3fn by fp8e4m3fn with these")


def product(operation: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Product:
    (found,) = decompose(operation, function, args, kwargs)
    return found


def test_our_own_scaled_product_is_not_run_anew() -> None:
    never = raising(AssertionError)
    name = "tritongemm.scaled_mm"
    args = (fp8(2, 8, K), fp8(N, K), ones(16, 4), ones(2, 4))
    weight = product(name, never, *args)
    view = product(name, never, args[0], args[1].t(), args[2], args[3].t())
    assert weight == view and (weight.m, weight.n, weight.family, weight.scales) == (
        16, N, "a8w8_blockscale", "block_rows",
    )  # fmt: skip
    shuffled = product(name, never, *args, order_b="shuffled_16x16")
    assert (shuffled.b.order, shuffled.scales, shuffled.left_out) == ("shuffled_16x16", "block_rows", "")
    assert weight.is_layer and not shuffled.is_layer


def test_rows_state_factors_groups_and_batches(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    plain = Product("_scaled_mm", M, N, K, *matrices("fp8e4m3fn", c="bf16", layout="TN"), family="a8w8")
    others = (Product(**{**plain.__dict__, "scales": "tensor"}), Product(**{**plain.__dict__, "groups": 8}))
    WorkloadFile(path).add([Counted(one, 2, frozenset()) for one in (plain, *others)], False)
    rows = [json.loads(line[2:]) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("- ")]
    assert [row.get("scales") for row in rows] == [None, "tensor", None]
    assert [row.get("groups") for row in rows] == [None, None, 8]
    path.write_text("\n".join(f"- {json.dumps(row)}" for row in rows if "scales" not in row), encoding="utf-8")
    usual, grouped = sizes.from_file(path, Defaults())
    assert usual.problem.key == f"{M}x{N}x{K}_fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8" and grouped.problem.group_count == 8


def test_calls_of_ours_are_counted_once(tmp_path: Path, monkeypatch: Patch) -> None:
    """What they ask PyTorch for is not the program's own."""
    scaled_mm = lambda a, b, scale_a, scale_b: torch.mm(a.float(), b.float().t())
    monkeypatch.setattr(tritongemm, "scaled_mm", scaled_mm, raising=False)
    x, w = torch.zeros(M, K, dtype=FP8), torch.zeros(N, K, dtype=FP8)
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        tritongemm.scaled_mm(x, w, ones(M), ones(N))
    (row,) = sizes.from_file(tmp_path / "shapes.yaml", Defaults())
    assert (row.operation, row.problem.family, row.count) == ("tritongemm.scaled_mm", "a8w8", 1)
    assert tritongemm.scaled_mm is scaled_mm


@cases(
    (ones(3, M), ones(3, 1, N), "a8w8", ""),
    (ones(3, M, 4), ones(3, 2, 4).mT, "a8w8_blockscale", "block_rows"),
    (ones(3, 4, M).mT, ones(3, 2, 4).mT, "a8w8_blockscale", ""),
    (ones(3, 4, M).mT, ones(3, 4, N), "a8w8_blockscale", "group"),
)
def test_a_batch_with_factors_is_one_product(
    scale_a: torch.Tensor, scale_b: torch.Tensor, family: str, scales: str, /, tmp_path: Path
) -> None:
    a, w = fp8(3, M, K), fp8(3, N, K)
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        tritongemm.scaled_bmm(a, w.mT, scale_a, scale_b)
    (row,) = [
        json.loads(line[2:])
        for line in (tmp_path / "shapes.yaml").read_text(encoding="utf-8").splitlines()
        if line.startswith("- ")
    ]
    assert (row["M"], row["N"], row["K"], row["batch"], row["family"]) == (M, N, K, 3, family)
    assert row.get("scales", "") == scales


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


MX = (bytes_of(M, K // 32), bytes_of(N, K // 32))
SHUFFLED = tuple(tritongemm.pack_scales(one) for one in MX)
HALF, WEIGHTS = bytes_of(M, K // 2), bytes_of(3, N, K // 2)  # two numbers of fp4 a byte
ENDS = torch.tensor([4, 4, M], dtype=torch.int32)
X = torch.zeros(M, K, dtype=torch.bfloat16)


@cases(
    (lambda: tritongemm.scaled_mm(fp8(M, K), fp8(N, K), *MX), "a8w8_blockscale", "mx", {}),
    (lambda: tritongemm.scaled_mm(HALF, WEIGHTS[0], *MX), "a4w4_blockscale", "mx", {}),
    (
        lambda: tritongemm.scaled_mm(
            HALF, WEIGHTS[0], *SHUFFLED, scale_layout="e8m0_32x8", order_b="shuffled_16x16"
        ),
        "a4w4_blockscale", None, {"order_b": "shuffled_16x16"},
    ),
    (lambda: tritongemm.linear_fp8(X, WEIGHTS[0], MX[1]), "a4w4_blockscale", "mx", {}),
    (
        lambda: tritongemm.scaled_bmm(
            HALF.expand(3, -1, -1), WEIGHTS.mT, MX[0].expand(3, -1, -1), MX[1].expand(3, -1, -1).mT
        ),
        "a4w4_blockscale", "mx", {"batch": 3},
    ),
    (
        lambda: tritongemm.grouped_mm(HALF, WEIGHTS.mT, ENDS, MX[0], MX[1].expand(3, -1, -1)),
        "a4w4_blockscale", "mx", {"groups": 3},
    ),
)  # fmt: skip
def test_powers_of_two_along_k_are_reported(
    call: Callable[[], torch.Tensor], family: str, scales: str | None, others: dict[str, Any], /, tmp_path: Path
) -> None:
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        call()
    text = (tmp_path / "shapes.yaml").read_text(encoding="utf-8")
    (row,) = [json.loads(line[2:]) for line in text.splitlines() if line.startswith("- ")]
    assert (row["M"], row["N"], row["K"], row["family"], row.get("scales")) == (M, N, K, family, scales)
    assert others.items() <= row.items() and row["count"] == 1
    (size,) = sizes.from_file(tmp_path / "shapes.yaml", Defaults())
    assert size.problem.microscaled and (size.problem.b.order == "plain") == ("order_b" not in row)


def test_our_operations_are_counted_where_compiled_code_calls_them(tmp_path: Path) -> None:
    """A compiled graph calls operations, and no function that a hook could stand in place of."""
    x, none, out = torch.zeros(M, K), None, torch.float32
    mixture = torch.zeros(4, 128, K), torch.zeros(4, K, 64), torch.ones(M, 1), torch.zeros(M, 1, dtype=torch.int64)
    own = torch.ops.tritongemm
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        own.mm(x, torch.zeros(N, K))
        own.scaled_mm(x.to(FP8), fp8(N, K), ones(M), ones(N))
        own.linear_fp8(x, fp8(N, K), ones(2, 4), none, out)
        own.bmm(x[None].expand(2, -1, -1), torch.zeros(2, K, N))
        own.grouped_mm(x, torch.zeros(3, N, K).mT, ENDS, none, none, out)
        own.fused_moe(x, *mixture, "silu", none, none)
    own.mm(x, torch.zeros(N, K))
    rows = sizes.from_file(tmp_path / "shapes.yaml", Defaults())
    reported = [(row.operation.removeprefix("tritongemm."), row.problem.family, row.count) for row in rows]
    assert sorted(reported) == [
        ("bmm", "dense", 1), ("fused_moe", "dense", 1), ("fused_moe", "dense", 1), ("grouped_mm", "dense", 1),
        ("linear_fp8", "a8w8_blockscale", 1), ("mm", "dense", 1), ("scaled_mm", "a8w8", 1),
    ]  # fmt: skip
    assert {row.problem.n for row in rows} == {N, 128, K}
    own = test_our_operations_are_counted_where_compiled_code_calls_them.__name__
    assert {caller for row in rows for caller in row.callers} == {f"{__name__}.{own}"}
