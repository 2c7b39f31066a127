import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.cpu.serving.conftest import Gpu
from tests.support import ROOT, forked
from tests.support.lent_processes import LentProcess
from tests.support.linear_layers import attach_device, record, run_on_cpu
from tests.support.nouns import ArtifactCache, InputError, Patch, PatchedLaunch, Scaling, each, load_target, refuses
from tritongemm.build.helpers import compile_helper, launch_helper
from tritongemm.build.quantization_kernels import Quantization, choose_kernel, choose_kernels
from tritongemm.core.dtypes import DTYPES
from tritongemm.core.helper_kernel import PARTS
from tritongemm.core.scaling import GRANULARITIES
from tritongemm.hip_ext.binaries import code_object
from tritongemm.numerics import verify
from tritongemm.numerics.scale_factors import scale_places
from tritongemm.operations.factors import spread
from tritongemm.operations.scaled_operands import ScaledOperands, read_product
from tritongemm.serving import quantize as quantization
from tritongemm.serving.linear_fp8 import AS_IT_IS, COPIED, BlockOperands, copy_factors, find_layout
from tritongemm.system import settings

TYPES = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SCALINGS = {"tensor": Scaling(rows=0), "row": Scaling(), "block": Scaling(depth=128)}


def activations(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers with outliers, rows of very different sizes, and one of zeros."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)) * torch.logspace(-6, 6, m)[:, None]
    x[:, k // 2] *= 100
    x[m // 2] = 0
    return x.to(dtype)


def assert_quantised(x: Tensor, q: Tensor, scale: Tensor, granularity: str) -> None:
    """Each number is within half a step of its own, and the largest of a factor is the type's largest."""
    m, k = x.shape
    dtype = DTYPES[next(d.name for d in DTYPES.values() if getattr(torch, d.torch, None) == q.dtype)]
    factors = spread(scale, SCALINGS[granularity], m, k).double().expand(m, k)
    assert bool((factors > 0).all()) and bool(factors.isfinite().all())
    back = q.double() * factors
    exact = x.double()
    smallest = factors * (1.0 if dtype.is_integer else 2.0**-9)  # a step where numbers are spaced evenly
    step = torch.maximum(exact.abs() * dtype.epsilon, smallest)
    assert bool(((back - exact).abs() <= step * 0.50001).all())
    assert bool((q.double()[x == 0] == 0).all()) and float(q.double().abs().max()) == dtype.maximum


@each("dtype", TYPES)
@each("granularity", SCALINGS)
def test_pytorchs_operations_are_right(granularity: str, dtype: torch.dtype) -> None:
    for (m, k), given in itertools.product(((1, 128), (7, 300), (3, 129)), (torch.bfloat16, torch.float32)):
        x = activations(m, k, given)
        if m == 1:
            x = torch.randn(1, k).to(given)
        q, scale = tritongemm.quantize(x, granularity, dtype)
        assert scale.shape == {"tensor": (1, 1), "row": (m, 1), "block": (m, -(-k // 128))}[granularity]
        assert_quantised(x, q, scale, granularity)


@each("dtype", TYPES)
@each("granularity", SCALINGS)
def test_a_factor_of_what_is_no_number_is_nan(granularity: str, dtype: torch.dtype) -> None:
    """int8 has no NaN: without this one in a token would count as zero."""
    x = activations(7, 300)
    x[[-3, -2, -1], [0, 299, 100]] = torch.tensor([float("nan"), float("inf"), -float("inf")]).to(x)
    q, scale = tritongemm.quantize(x, granularity, dtype)
    padded = torch.nn.functional.pad(x, (0, 84)).view(7, 3, 128).isfinite().all(-1)
    finite = {"tensor": padded.all().view(1, 1), "row": padded.all(1, keepdim=True), "block": padded}[granularity]
    assert torch.equal(scale.isnan(), ~finite) and bool(scale[finite].isfinite().all())
    values = q.float() * spread(scale, SCALINGS[granularity], 7, 300)
    assert torch.equal(values.isfinite(), spread(finite, SCALINGS[granularity], 7, 300).bool().expand(7, 300))


def test_zeros_ties_and_what_is_no_number() -> None:
    x = torch.zeros(2, 256)
    x[1] = 1e-44
    for granularity in SCALINGS:
        q, scale = tritongemm.quantize(x, granularity)
        assert bool((q.float() == 0).all() | (scale[-1] > 0).all()) and bool(scale.isfinite().all())
        assert bool(q.float().isfinite().all())
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.75, 6.0] + [0.0] * 22)[None]
    q, powers = tritongemm.quantize(x, "mx", torch.uint8)
    assert powers.item() == 127 and numbers(q)[0, :10].tolist() == [0, 1, 1, 2, 2, 4, 4, -4, -1, 6]
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40], x[2, :] = float("nan"), float("inf"), 1e-42
    for dtype in LARGEST:
        q, powers = tritongemm.quantize(x, "mx", dtype)
        assert [powers[0, 0], powers[1, 1]] == [255, 255] and powers[0, 1] < 128
        assert powers[2, 0] == 0 and bool(numbers(q)[2].isfinite().all())


def test_kernels_are_right_in_the_interpreter(interpreter: LentProcess) -> None:
    ran = forked.interpreted(interpreter, ["-m", "tests.support.run_quantisation"], ROOT)
    assert ran.stdout == "alike\n", ran.stderr[-3000:]


@pytest.mark.parametrize("m", [1, 300])
def test_one_factor_for_all_takes_two_kernels(m: int) -> None:
    target, cache = load_target("sm90"), ArtifactCache(settings.cache_folder())
    made = choose_kernels(Quantization(m, 7168, "bf16", "fp8e4m3fn", "tensor", (1, 1)))
    launches = [launch_helper(compile_helper(h, target, cache), h, given, target) for h, given in made]
    names = [[p.value for p in launch.params if p.kind == "pointer" and p.value] for launch in launches]
    assert names == [["x", "part"], ["x", "q", "scale", "part"]]
    blocks = -(-m * 7168 // 4096)
    assert [launch.grid[0] for launch in launches] == [min(PARTS, blocks), blocks]


IN_AITERS_ORDER = scale_places("e8m0_32x8")


@pytest.mark.parametrize(
    ("arch", "asked", "grid"),
    [
        ("sm90", Quantization(13, 7168, "bf16", "fp8e4m3fn", "block", (1, 13)), (2, 56, 1)),
        ("gfx942", Quantization(13, 7168, "bf16", "fp8e4m3fnuz", "block", (1, 13)), (2, 56, 1)),
        ("sm90", Quantization(13, 7168, "bf16", "fp8e4m3fn", "mx", (32, 224), IN_AITERS_ORDER), (4, 28, 1)),
        ("gfx942", Quantization(13, 7168, "bf16", "fp4e2m1", "mx", (32, 224), IN_AITERS_ORDER), (4, 28, 1)),
    ],
)
def test_kernels_compile_ahead_of_time(arch: str, asked: Quantization, grid: tuple[int, ...]) -> None:
    target, cache = load_target(arch), ArtifactCache(settings.cache_folder())
    helper, given = choose_kernel(asked)
    built = compile_helper(helper, target, cache)
    launch = launch_helper(built, helper, given, target)
    assert built.spills == 0 and launch.grid == grid and len(launch.read_code()) > 1000
    assert [p.value for p in launch.params] == ["x", "q", "scale", 13, 7168, *asked.strides, "", ""]
    assert code_object.read(launch.read_code())[0].symbol == launch.symbol
    again, _ = choose_kernel(replace(asked, m=99, strides=(56, 1)))
    assert compile_helper(again, target, cache).seconds == built.seconds, "the binary serves every M and layout"


def test_more_programs_than_a_launch_has_are_refused() -> None:
    target, cache = load_target("sm90"), ArtifactCache(settings.cache_folder())
    helper, given = choose_kernel(Quantization(1, 2**23 * 128, "bf16", "fp8e4m3fn", "block", (1, 1)))
    refuses("can't be launched on", launch_helper, compile_helper(helper, target, cache), helper, given, target)


def test_a_launch_is_given_every_address(monkeypatch: Patch) -> None:
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    at: dict[str, int] = {}
    launched: list[dict[str, int]] = []
    setters: dict[str, Callable[[int], None]] = {
        name: lambda address, name=name: at.__setitem__(name, address)  # type: ignore[misc]
        for name in ("x", "q", "scale", "part")
    }
    prepared = PatchedLaunch(setters, lambda stream: launched.append(dict(at)))
    launch = quantization._Launch([prepared], -1, "block", torch.int8, "tma")
    x = torch.zeros(5, 256)
    q, scale = launch(x)
    assert launched == [{"x": x.data_ptr(), "q": q.data_ptr(), "scale": scale.data_ptr()}]
    assert q.shape == x.shape and q.dtype == torch.int8 and scale.stride() == (1, 8)
    launched.clear()
    first = PatchedLaunch({name: setters[name] for name in ("x", "part")}, prepared.launch)
    q, scale = quantization._Launch([first, prepared], -1, "tensor", torch.int8, "rows")(x)
    assert launched[0] == launched[1] and launched[0]["part"] not in (0, q.data_ptr(), scale.data_ptr())
    assert scale.shape == (1, 1)


SCALES = {
    "tensor": lambda n, k: torch.tensor(0.5),
    "row": lambda n, k: torch.rand(n) + 0.5,
    "block": lambda n, k: torch.rand(-(-n // 128), -(-k // 128)) + 0.5,
}


@each("dtype", [torch.float8_e4m3fn, torch.int8])
@each("form", SCALES)
def test_a_layer_is_right_within_its_quantisation(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 384), tritongemm.quantize(torch.randn(200, 384), "tensor", dtype)[0]
    scale, bias = SCALES[form](200, 384), torch.randn(200)
    scaling = Scaling(rows=128, depth=128) if form == "block" else SCALINGS[form]
    weight = w.double() * spread(scale, scaling, 200, 384)
    exact = x.double() @ weight.T + bias
    out = tritongemm.linear_fp8(x, w, scale, bias)
    assert out.shape == (2, 3, 200) and out.dtype == torch.float32
    assert verify.deviation(out.view(6, -1), exact.view(6, -1)) < 0.2


@pytest.mark.parametrize(
    ("layout", "m", "strides"), [("groups", 16, (1, 16)), ("rows", 16, (4, 1)), ("tma", 5, (1, 8)), ("tma", 1, (1, 4))]
)
def test_factors_are_stored_as_tuned_kernels_read_them(layout: str, m: int, strides: tuple[int, int], gpu: Gpu) -> None:
    dispatcher, empty = gpu
    scaling, _ = GRANULARITIES[{"groups": "block", "rows": "block_rows", "tma": "block_tma"}[layout]]
    x, w, scale = empty(m, 512), empty(256, 512, dtype=torch.float8_e4m3fn), empty(2, 4, dtype=torch.float32)
    factors, q = torch.empty_strided((m, 4), strides, device="cuda:0"), empty(m, 512, dtype=w.dtype)
    one = next(iter(read_product(ScaledOperands(q, w, factors, scale)).problems()))
    assert one.a.scaling == scaling
    dispatcher.load([record(one)])
    attach_device(dispatcher, {one: SimpleNamespace()})
    assert find_layout(BlockOperands(x, w, scale), near=True) == layout
    assert find_layout(BlockOperands(q, w, scale, factors), near=False) == AS_IT_IS
    assert find_layout(BlockOperands(empty(3, 512), w, scale), near=True) is None
    dense = torch.empty_strided((m, 4), (1, m), device="cuda:0")  # as CUTLASS takes them
    assert find_layout(BlockOperands(q, w, scale, dense), near=False) == {"groups": AS_IT_IS, "tma": COPIED}.get(layout)


def test_padded_factors_are_copied_for_rows_of_dense_ones(gpu: Gpu) -> None:
    """DeepGEMM's at an odd M; the copy has the strides that the row's kernel reads."""
    dispatcher, empty = gpu
    q, w, scale = (
        empty(*size, dtype=kind)
        for size, kind in (((3, 512), torch.float8_e4m3fn), ((256, 512), torch.float8_e4m3fn), ((2, 4), torch.float32))
    )
    dense, padded = (torch.empty_strided((3, 4), (1, across), device="cuda:0") for across in (3, 4))
    one = next(iter(read_product(ScaledOperands(q, w, dense, scale)).problems()))
    dispatcher.load([record(one)])
    attach_device(dispatcher, {one: SimpleNamespace()})
    assert find_layout(BlockOperands(q, w, scale, padded), near=False) == COPIED
    host = ScaledOperands(q, w, torch.empty_strided((3, 4), (1, 4)), scale)
    assert copy_factors(host).scale_a.stride() == (1, 3) and copy_factors(copy_factors(host)).scale_a.stride() == (1, 4)


# --- Powers of two along K --------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LARGEST = {torch.uint8: 6.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def numbers(q: Tensor) -> Tensor:
    if q.dtype != torch.uint8:
        return q.double()
    return torch.cat((E2M1, -E2M1))[torch.stack((q & 15, q >> 4), -1).flatten(-2).long()].double()


@each("dtype", LARGEST)
@each(("m", "k"), [(1, 32), (7, 300), (33, 96)])
def test_powers_are_the_least_that_hold_their_numbers(dtype: torch.dtype, m: int, k: int) -> None:
    x = activations(m, k, torch.float32)
    q, powers = tritongemm.quantize(x, "mx", dtype)
    groups = -(-k // 32)
    assert powers.shape == (m, groups) and powers.dtype == torch.uint8 and q.dtype == dtype
    padded = torch.nn.functional.pad(x, (0, -k % 32)).view(m, groups, 32).double()
    largest, factors = padded.abs().amax(-1), (powers.double() - 127).exp2()
    some = largest > 0
    assert bool((largest[some] <= LARGEST[dtype] * factors[some]).all())
    assert bool((2 * largest[some] > LARGEST[dtype] * factors[some]).all()) and bool((powers[~some] == 127).all())
    exact = (padded / factors[..., None]).view(m, -1)[:, :k]
    if dtype == torch.uint8:
        apart = (exact[..., None].abs() - E2M1.double()).abs().amin(-1)
        assert torch.equal((numbers(q).abs() - exact.abs()).abs(), apart) and bool((numbers(q) * exact >= 0).all())
    else:
        assert torch.equal(numbers(q), exact.to(dtype).double())


@each("dtype", LARGEST)
def test_layouts_hold_the_same_powers(dtype: torch.dtype) -> None:
    x = activations(33, 300, torch.float32)
    q, rows = tritongemm.quantize(x, "mx", dtype)
    other, shuffled = tritongemm.quantize(x, "mx", dtype, "e8m0_32x8")
    assert shuffled.shape == (64, 16) and torch.equal(q.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(tritongemm.pack_scales(rows), shuffled)
    assert torch.equal(tritongemm.unpack_scales(shuffled, 33, 10), rows)
    assert tritongemm.quantize(x.view(3, 11, 300), "mx", dtype)[0].shape[:2] == (3, 11)


def test_pytorchs_own_types_and_orders_of_weights() -> None:
    fp4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
    q, _ = tritongemm.quantize(activations(3, 64), "mx", fp4)
    assert q.dtype == fp4 and q.shape == (3, 32)
    packed = tritongemm.pack_scales(torch.full((3, 2), 130, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert packed.dtype == torch.float8_e8m0fnu and packed.shape == (32, 8)
    w = torch.randint(0, 256, (32, 64), dtype=torch.uint8)
    packed = tritongemm.pack_weight(w)
    assert not torch.equal(packed, w) and torch.equal(tritongemm.unpack_weight(packed), w)
    for wrong, says in (
        (w[:, ::2], "dense and row-major"),
        (torch.zeros(30, 64, dtype=torch.uint8), "N a multiple of 16"),
        (torch.zeros(32, 64, dtype=torch.int16), "w is torch.int16"),
    ):
        refuses(says, tritongemm.pack_weight, wrong)
    refuses("there are", tritongemm.pack_weight, w, "sideways")
    with pytest.raises(InputError, match=r"scales are \(3, 8\); 3 x 8 in the order e8m0_32x8 are \(32, 8\)"):
        tritongemm.unpack_scales(torch.zeros(3, 8, dtype=torch.uint8), 3, 8)
    refuses("e8m0", tritongemm.pack_scales, torch.zeros(3, 8))


@each("dtype", LARGEST)
@each("layout", ["", "e8m0_32x8"])
def test_products_of_what_was_quantised(dtype: torch.dtype, layout: str) -> None:
    x, w = activations(7, 320, torch.float32), torch.randn(48, 320)
    (a, of_a), (b, of_b) = (tritongemm.quantize(t, "mx", dtype, layout or "rows") for t in (x, w))
    result = tritongemm.scaled_mm(a, b, of_a, of_b, scale_layout=layout)
    of_x, of_w = (tritongemm.quantize(t, "mx", dtype)[1].double() for t in (x, w))
    left, right = (
        numbers(q) * (powers - 127).exp2().repeat_interleave(32, 1)[:, :320] for q, powers in ((a, of_x), (b, of_w))
    )
    assert verify.deviation(result, left @ right.T) < 0.01
    of_a[0, 0] = 255
    refuses("scale_a holds NaN", tritongemm.scaled_mm, a, b, of_a, of_b, scale_layout=layout)


@each("rows", [1, 5, 8])
def test_float_factors_are_stored_as_a_layout_says(rows: int) -> None:
    x = torch.randn(rows, 300)
    q, plain = tritongemm.quantize(x, "block")
    for layout, strides in {"rows": (3, 1), "groups": (1, rows), "tma": (1, -(-rows // 4) * 4)}.items():
        same, wanted = tritongemm.quantize(x, "block", layout=layout)
        assert wanted.stride() == strides and torch.equal(same.float(), q.float())
        packed = tritongemm.pack_scales(plain, layout)
        assert torch.equal(packed, wanted) and packed.stride() == wanted.stride()
        back = tritongemm.unpack_scales(packed, rows, 3, layout)
        assert torch.equal(back, plain) and back.is_contiguous()
    refuses("in the layout tma they are float32", tritongemm.pack_scales, plain.double(), "tma")
    refuses("not 2 x 9", tritongemm.unpack_scales, plain, 2, 9, "groups")


@each("dtype", LARGEST)
def test_a_linear_layer_of_mx_quantises_its_activations_so(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 3, 330), torch.randn(45, 330) * torch.logspace(-3, 3, 330)
    q, powers = tritongemm.quantize(w, "mx", dtype)
    rows, of_rows = tritongemm.quantize(x, "mx", dtype)
    found = tritongemm.linear_fp8(x, q, powers, torch.ones(45))
    assert torch.equal(found, tritongemm.scaled_mm(rows, q, of_rows, powers, torch.ones(45), torch.float32))
    assert tritongemm.explain("linear_fp8", x, q, powers).startswith("quantised: ")
