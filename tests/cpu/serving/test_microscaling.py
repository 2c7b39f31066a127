"""`quantize` with powers of two along K, orders of scales and weights as users convert them, and products of both."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support.tables import each
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.helpers import compile_helper, launch_helper
from tritongemm.build.quantization_kernels import Quantization, choose_kernel
from tritongemm.core.errors import InputError
from tritongemm.numerics import verify
from tritongemm.numerics.scale_factors import scale_places
from tritongemm.search_spaces import loader

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LARGEST = {torch.uint8: 6.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def activations(m: int, k: int) -> Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)) * torch.logspace(-6, 6, m)[:, None]
    x[:, k // 2] *= 100
    x[m // 2] = 0
    return x


def numbers(q: Tensor) -> Tensor:
    if q.dtype != torch.uint8:
        return q.double()
    halves = torch.stack((q & 15, q >> 4), -1).flatten(-2)
    return torch.cat((E2M1, -E2M1))[halves.long()].double()


@each("dtype", LARGEST)
@each(("m", "k"), [(1, 32), (7, 300), (33, 96)])
def test_powers_are_the_least_that_hold_their_numbers(dtype: torch.dtype, m: int, k: int) -> None:
    x = activations(m, k)
    q, powers = tritongemm.quantize(x, "mx", dtype)
    groups = -(-k // 32)
    assert powers.shape == (m, groups) and powers.dtype == torch.uint8 and q.dtype == dtype
    padded = torch.nn.functional.pad(x, (0, -k % 32)).view(m, groups, 32).double()
    largest, factors = padded.abs().amax(-1), (powers.double() - 127).exp2()
    some = largest > 0
    assert bool((largest[some] <= LARGEST[dtype] * factors[some]).all())
    assert bool((2 * largest[some] > LARGEST[dtype] * factors[some]).all())
    assert bool((powers[~some] == 127).all())
    exact = (padded / factors[..., None]).view(m, -1)[:, :k]
    if dtype == torch.uint8:
        apart = (exact[..., None].abs() - E2M1.double()).abs().amin(-1)
        assert torch.equal((numbers(q).abs() - exact.abs()).abs(), apart) and bool((numbers(q) * exact >= 0).all())
    else:
        assert torch.equal(numbers(q), exact.to(dtype).double())


def test_ties_go_to_the_even_number_and_signs_stay() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.75, 6.0] + [0.0] * 22)[None]
    q, powers = tritongemm.quantize(x, "mx", torch.uint8)
    assert powers.item() == 127
    assert numbers(q)[0, :10].tolist() == [0, 1, 1, 2, 2, 4, 4, -4, -1, 6]


def test_what_is_no_number_says_so_and_tiny_ones_are_zero() -> None:
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40], x[2, :] = float("nan"), float("inf"), 1e-42
    for dtype in LARGEST:
        q, powers = tritongemm.quantize(x, "mx", dtype)
        assert [powers[0, 0], powers[1, 1]] == [255, 255] and powers[0, 1] < 128
        assert powers[2, 0] == 0 and bool(numbers(q)[2].isfinite().all())


@each("dtype", LARGEST)
def test_layouts_hold_the_same_powers(dtype: torch.dtype) -> None:
    x = activations(33, 300)
    q, rows = tritongemm.quantize(x, "mx", dtype)
    other, shuffled = tritongemm.quantize(x, "mx", dtype, "e8m0_32x8")
    assert shuffled.shape == (64, 16) and torch.equal(q.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(tritongemm.pack_scales(rows), shuffled)
    assert torch.equal(tritongemm.unpack_scales(shuffled, 33, 10), rows)
    assert tritongemm.quantize(x.view(3, 11, 300), "mx", dtype)[0].shape[:2] == (3, 11)


def test_pytorchs_own_types() -> None:
    fp4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
    q, _ = tritongemm.quantize(activations(3, 64), "mx", fp4)
    assert q.dtype == fp4 and q.shape == (3, 32)
    powers = torch.full((3, 2), 130, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    packed = tritongemm.pack_scales(powers)
    assert packed.dtype == torch.float8_e8m0fnu and packed.shape == (32, 8)


def test_weights_go_into_an_order_and_back() -> None:
    w = torch.randint(0, 256, (32, 64), dtype=torch.uint8)
    packed = tritongemm.pack_weight(w)
    assert not torch.equal(packed, w) and torch.equal(tritongemm.unpack_weight(packed), w)
    for wrong, says in (
        (w[:, ::2], "dense and row-major"),
        (torch.zeros(30, 64, dtype=torch.uint8), "N a multiple of 16"),
        (torch.zeros(32, 64, dtype=torch.int16), "w is torch.int16"),
    ):
        with pytest.raises(InputError, match=says):
            tritongemm.pack_weight(wrong)
    with pytest.raises(InputError, match="there are"):
        tritongemm.pack_weight(w, "sideways")
    with pytest.raises(InputError, match=r"scales are \(3, 8\); 3 x 8 in the order e8m0_32x8 are \(32, 8\)"):
        tritongemm.unpack_scales(torch.zeros(3, 8, dtype=torch.uint8), 3, 8)
    with pytest.raises(InputError, match="e8m0"):
        tritongemm.pack_scales(torch.zeros(3, 8))


@each("dtype", LARGEST)
@each("layout", ["", "e8m0_32x8"])
def test_products_of_what_was_quantised(dtype: torch.dtype, layout: str) -> None:
    x, w = activations(7, 320), torch.randn(48, 320)
    (a, of_a), (b, of_b) = (tritongemm.quantize(t, "mx", dtype, layout or "rows") for t in (x, w))
    result = tritongemm.scaled_mm(a, b, of_a, of_b, scale_layout=layout)
    of_x, of_w = (tritongemm.quantize(t, "mx", dtype)[1].double() for t in (x, w))
    left, right = (
        numbers(q) * (powers - 127).exp2().repeat_interleave(32, 1)[:, :320] for q, powers in ((a, of_x), (b, of_w))
    )
    assert verify.deviation(result, left @ right.T) < 0.01
    of_a[0, 0] = 255
    with pytest.raises(InputError, match="scale_a holds NaN"):
        tritongemm.scaled_mm(a, b, of_a, of_b, scale_layout=layout)


@pytest.mark.parametrize(("arch", "dtype"), [("sm90", "fp8e4m3fn"), ("gfx942", "fp4e2m1")])
def test_kernels_compile_ahead_of_time(arch: str, dtype: str, tmp_path: Path) -> None:
    target, cache = loader.load_target(arch), ArtifactCache(tmp_path)
    helper, given = choose_kernel(Quantization(13, 7168, "bf16", dtype, "mx", (32, 224), scale_places("e8m0_32x8")))
    built = compile_helper(helper, target, cache)
    launch = launch_helper(built, helper, given, target)
    assert built.spills == 0 and launch.grid == (4, 28, 1)
    assert [p.value for p in launch.params] == ["x", "q", "scale", 13, 7168, 32, 224, "", ""]


@each("rows", [1, 5, 8])
def test_float_factors_are_stored_as_a_layout_says(rows: int) -> None:
    """What `quantize` writes, and a product reads."""
    x = torch.randn(rows, 300)
    for layout in ("rows", "groups", "tma"):
        _, wanted = tritongemm.quantize(x, "block", layout=layout)
        _, plain = tritongemm.quantize(x, "block")
        packed = tritongemm.pack_scales(plain, layout)
        assert torch.equal(packed, wanted) and packed.stride() == wanted.stride()
        back = tritongemm.unpack_scales(packed, rows, 3, layout)
        assert torch.equal(back, plain) and back.is_contiguous()
    with pytest.raises(InputError, match="in the layout tma they are float32"):
        tritongemm.pack_scales(plain.double(), "tma")
    with pytest.raises(InputError, match="not 2 x 9"):
        tritongemm.unpack_scales(plain, 2, 9, "groups")


@each("dtype", LARGEST)
def test_a_linear_layer_of_mx_quantises_its_activations_so(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 3, 330), torch.randn(45, 330) * torch.logspace(-3, 3, 330)
    q, powers = tritongemm.quantize(w, "mx", dtype)
    rows, of_rows = tritongemm.quantize(x, "mx", dtype)
    found = tritongemm.linear_fp8(x, q, powers, torch.ones(45))
    assert torch.equal(found, tritongemm.scaled_mm(rows, q, of_rows, powers, torch.ones(45), torch.float32))
    assert tritongemm.explain("linear_fp8", x, q, powers).startswith("quantised: ")
