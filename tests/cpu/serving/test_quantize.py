"""`quantize` and `linear_fp8`: PyTorch's operations against float64, kernels in Triton's interpreter and compiled."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.cpu.serving.conftest import Gpu
from tests.support import ROOT, forked
from tests.support.lent_processes import LentProcess
from tests.support.linear_layers import attach_device, record, run_on_cpu
from tests.support.tables import each
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.helpers import compile_helper, launch_helper
from tritongemm.build.quantization_kernels import Quantization, choose_kernel, choose_kernels
from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.helper_kernel import PARTS
from tritongemm.core.scaling import GRANULARITIES, Scaling
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.hip_ext.binaries import code_object
from tritongemm.numerics import verify
from tritongemm.operations.factors import spread
from tritongemm.operations.scaled_operands import ScaledOperands, read_product
from tritongemm.search_spaces import loader
from tritongemm.serving import quantize as quantization
from tritongemm.serving.linear_fp8 import AS_IT_IS, BlockOperands, find_layout
from tritongemm.system import settings

TYPES = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
SCALINGS = {"tensor": Scaling(rows=0), "row": Scaling(), "block": Scaling(depth=128)}


def activations(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers with outliers, rows of very different sizes, and one of zeros."""
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-5, 3, m)[:, None]
    x[:, k // 2] *= 100
    x[m // 2] = 0
    return x.to(dtype)


def assert_quantised(x: Tensor, q: Tensor, scale: Tensor, granularity: str) -> None:
    """Each number is within half a step of its own, and the largest of a factor is the type's largest."""
    m, k = x.shape
    name = next(d.name for d in DTYPES.values() if getattr(torch, d.torch, None) == q.dtype)
    dtype = DTYPES[name]
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


def test_layouts_hold_the_same_factors() -> None:
    x = activations(5, 300)
    q, rows = tritongemm.quantize(x, "block")
    strides = {"rows": (3, 1), "groups": (1, 5), "tma": (1, 8)}
    for layout, wanted in strides.items():
        other, scale = tritongemm.quantize(x, "block", layout=layout)
        assert scale.stride() == wanted and torch.equal(scale, rows) and torch.equal(other.float(), q.float())
    assert tritongemm.quantize(x.view(1, 5, 300))[0].shape == (1, 5, 300)


def with_no_numbers(m: int, k: int) -> Tensor:
    """Activations of which the last three rows have a NaN, infinity and minus infinity."""
    x = activations(m, k)
    x[[-3, -2, -1], [0, k - 1, k // 3]] = torch.tensor([float("nan"), float("inf"), -float("inf")]).to(x)
    return x


@each("dtype", TYPES)
@each("granularity", SCALINGS)
def test_a_factor_of_what_is_no_number_is_nan(granularity: str, dtype: torch.dtype) -> None:
    """int8 has no NaN: without this one in a token would count as zero."""
    x = with_no_numbers(7, 300)
    q, scale = tritongemm.quantize(x, granularity, dtype)
    padded = torch.nn.functional.pad(x, (0, 84)).view(7, 3, 128).isfinite().all(-1)
    finite = {"tensor": padded.all().view(1, 1), "row": padded.all(1, keepdim=True), "block": padded}[granularity]
    assert torch.equal(scale.isnan(), ~finite) and bool(scale[finite].isfinite().all())
    values = q.float() * spread(scale, SCALINGS[granularity], 7, 300)
    assert torch.equal(values.isfinite(), spread(finite, SCALINGS[granularity], 7, 300).bool().expand(7, 300))


def test_zeros_and_tiny_numbers_have_factors_that_divide() -> None:
    x = torch.zeros(2, 256)
    x[1] = 1e-44
    for granularity in SCALINGS:
        q, scale = tritongemm.quantize(x, granularity)
        assert bool((q.float() == 0).all() | (scale[-1] > 0).all()) and bool(scale.isfinite().all())
        assert bool(q.float().isfinite().all())


def test_kernels_are_right_in_the_interpreter(interpreter: LentProcess) -> None:
    ran = forked.interpreted(interpreter, ["-m", "tests.support.run_quantisation"], ROOT)
    assert ran.stdout == "alike\n", ran.stderr[-3000:]


@pytest.mark.parametrize("m", [1, 300])
def test_one_factor_for_all_takes_two_kernels(m: int) -> None:
    target, cache = loader.load_target("sm90"), ArtifactCache(settings.cache_folder())
    made = choose_kernels(Quantization(m, 7168, "bf16", "fp8e4m3fn", "tensor", (1, 1)))
    launches = [launch_helper(compile_helper(h, target, cache), h, given, target) for h, given in made]
    names = [[p.value for p in launch.params if p.kind == "pointer" and p.value] for launch in launches]
    assert names == [["x", "part"], ["x", "q", "scale", "part"]]
    blocks = -(-m * 7168 // 4096)
    assert [launch.grid[0] for launch in launches] == [min(PARTS, blocks), blocks]


@pytest.mark.parametrize(("arch", "dtype"), [("sm90", "fp8e4m3fn"), ("gfx942", "fp8e4m3fnuz")])
def test_kernels_compile_ahead_of_time(arch: str, dtype: str) -> None:
    target, cache = loader.load_target(arch), ArtifactCache(settings.cache_folder())
    helper, given = choose_kernel(Quantization(13, 7168, "bf16", dtype, "block", (1, 13)))
    built = compile_helper(helper, target, cache)
    launch = launch_helper(built, helper, given, target)
    assert built.spills == 0 and launch.grid == (2, 56, 1) and len(launch.read_code()) > 1000
    assert [p.value for p in launch.params] == ["x", "q", "scale", 13, 7168, 1, 13, "", ""]
    assert code_object.read(launch.read_code())[0].symbol == launch.symbol
    again, _ = choose_kernel(Quantization(99, 7168, "bf16", dtype, "block", (56, 1)))
    assert compile_helper(again, target, cache).seconds == built.seconds, "the binary serves every M and layout"
    with pytest.raises(InputError, match="can't be launched on"):
        _, too_many = choose_kernel(Quantization(1, 2**23 * 128, "bf16", dtype, "block", (1, 1)))
        launch_helper(built, helper, too_many, target)


def test_a_launch_is_given_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("layout", "m", "strides"), [("groups", 16, (1, 16)), ("rows", 16, (4, 1)), ("tma", 5, (1, 8))]
)
def test_factors_are_stored_as_the_tuned_kernel_reads_them(
    layout: str, m: int, strides: tuple[int, int], gpu: Gpu
) -> None:
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
