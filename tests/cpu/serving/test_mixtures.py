from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support import ROOT, emulated, forked
from tests.support.kernel_cases import GFX942, SM90
from tests.support.lent_processes import LentProcess
from tests.support.linear_layers import record
from tests.support.mixtures import EXPERTS, FP4, FP8, HIDDEN, INNER, SHUFFLED, TOKENS, TOPK, Mixture, one_by_one
from tests.support.nouns import Config, Groups, InputError, Patch, Problem, Resolution, Scaling, each, heavy, refuses
from tests.support.products import product
from tritongemm.build import expert_kernels
from tritongemm.integrations import aiter
from tritongemm.operations import mixture_steps
from tritongemm.operations.contract import Reading
from tritongemm.operations.grouped import GROUPED, Grouped, grouped
from tritongemm.operations.grouped_operands import GroupedOperands
from tritongemm.operations.microscaling import FORMATS
from tritongemm.operations.mixture import MIXTURE, MixtureOperands
from tritongemm.serving import mixtures
from tritongemm.serving.mixtures import MoeKernels

INT8 = torch.int8


def test_a_mixture_of_integers_asks_for_its_rows_and_odd_addresses_are_copied() -> None:
    reported: list[tuple[Any, ...]] = []

    class Watched(MoeKernels):
        def _run(self, choose: Any, asked: tuple[Any, ...], operands: dict[str, Tensor]) -> bool:
            reported.append((asked[-2], operands["x"].stride(0), operands["x"].data_ptr() % 16))
            return True

    wide = torch.randn(5, 80)
    order = torch.arange(10, dtype=torch.int32)
    for x in (wide[:, :32], wide[:, 1:33]):
        Watched(None, {}).gather(x, order, 2, "", torch.float32)  # type: ignore[arg-type]
    assert reported == [(80, 80, 0), (32, 32, 0)]
    q1, q2 = torch.ones(4, 96, 64, dtype=INT8), torch.ones(4, 64, 48, dtype=INT8)
    ids = torch.zeros(5, 2, dtype=torch.int64)
    given = torch.ones(5, 64, dtype=torch.bfloat16), q1, q2, torch.ones(5, 2), ids, "silu"
    tuned = [product("a8w8", 10, n, k, "int8", groups=Groups(4)) for n, k in ((96, 64), (64, 48))]
    steps = MIXTURE.products(MixtureOperands(*given, torch.ones(4, 96), torch.ones(4, 64)))
    read = [operation.read(checked) for operation, checked in steps]
    assert [one.problems[0] for one in read if isinstance(one, Reading)] == tuned
    beside = [[helper.constants for helper, _ in expert_kernels.kernels_for(one, SM90)] for one in tuned]
    assert all(sum(constants.get("MODE") == 5 for constants in each) == 8 for each in beside)  # four routes beside
    blocks = replace(tuned[0], family="a8w8_blockscale").scaled((Scaling(depth=128), Scaling(rows=128, depth=128)))
    assert not list(expert_kernels.kernels_for(blocks, SM90))


def random_mixture(experts: int, hidden: int, inner: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Tokens, weights, and shares and ids of three experts of each token, of which some are no expert."""
    torch.manual_seed(0)
    loud = torch.logspace(-3, 3, 7, base=2.0)[:, None]  # so that each row has a factor of its own
    w = torch.randn(experts, 2 * inner, hidden) / hidden**0.5, torch.randn(experts, hidden, inner) / inner**0.5
    return torch.randn(7, hidden) * loud, w, torch.rand(7, 3), torch.randint(-1, experts + 1, (7, 3))


@each("activation", ["silu", "gelu"])
def test_a_mixture_is_the_sum_of_its_experts(activation: str) -> None:
    x, w, weights, ids = random_mixture(5, 32, 24)
    assert mixtures.steps_for(x.requires_grad_()) is mixture_steps
    found = tritongemm.fused_moe(x, *w, weights, ids, activation)
    exact = one_by_one(x, w, weights, ids, activation)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-3)
    gradients = [torch.autograd.grad(one.sum(), x)[0] for one in (found, exact)]  # PyTorch's
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@each(("mode", "dtype"), [("row", FP8), ("row", INT8), ("block", FP8)])
@each("activation", ["silu", "gelu"])
def test_quantised_experts_are_those_of_float64(mode: str, dtype: torch.dtype, activation: str) -> None:
    """Tokens, and what is activated, are rounded with factors of their own, and nothing else is."""
    x, (w1, w2), weights, ids = random_mixture(5, 128, 128)
    depth = 1 if mode == "row" else 128  # columns of a factor
    numbers, factors, entire = [], [], []
    for w in (w1 * torch.rand(5, 256, 1), w2):
        blocks = w.view(5, w.shape[1] // depth, depth, 1, 128)
        factor = blocks.abs().amax((2, 4), keepdim=True) / (127 if dtype == INT8 else 448)
        q = (blocks / factor).round() if dtype == INT8 else blocks / factor
        numbers.append(q.view(w.shape).to(dtype))
        factors.append(factor[..., 0, 0].squeeze(2) if mode == "row" else factor[:, :, 0, :, 0])
        entire.append((q.to(dtype).double() * factor).view(w.shape))

    def rounded(row: Tensor) -> Tensor:
        q, factor = tritongemm.quantize(row[None].float(), mode, dtype)
        return (q.double() * factor)[0]

    s1, s2 = (one.flatten(1) if mode == "row" else one for one in factors)
    found = tritongemm.fused_moe(x, numbers[0], numbers[1], weights, ids, activation, s1, s2)
    exact, unrounded = (one_by_one(x, entire, weights, ids, activation, how) for how in (rounded, torch.Tensor.double))
    assert (found - exact).norm() / exact.norm() < 1e-5 < 1e-3 < (unrounded - exact).norm() / exact.norm()
    if mode == "row":
        given = x, numbers[0], numbers[1], weights, ids, None, activation
        assert torch.equal(aiter.fused_moe(*given, w1_scale=factors[0], w2_scale=factors[1]), found)


KERNELS_AND_PYTORCH = """
import torch
from tritongemm.build import expert_kernels
from tritongemm.codegen.modules import run_text
from tritongemm.operations import mixture_steps
from tritongemm.build import few_expert_kernels
from tritongemm.operations.mixture import MIXTURE, CheckedMixture, MixtureOperands
from tritongemm.operations.mixture_steps import ExpertBias
from tritongemm.serving.mixtures import MoeKernels

class Interpreted(MoeKernels):
    def _run(self, choose, asked, operands):
        helper, given = choose(*asked)
        assert list(operands) == list(helper.pointers) and list(given.numbers) == list(helper.signature)[len(operands):]
        module = run_text(helper.source, "experts")
        getattr(module, helper.name)[given.grid](*operands.values(), *given.numbers.values(), **helper.constants)
        return True

def spread(w, scale, mode):
    each = scale[..., None] if mode == "row" else scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return w.float() * each

def checked_mixture(mode, dtype, tokens, topk, experts, hidden, inner, activation):
    w = [torch.randn(experts, n, k) for n, k in ((2 * inner, hidden), (hidden, inner))]
    shapes = [w.shape[:2] if mode == "row" else (experts, w.shape[1] // 128, w.shape[2] // 128) for w in w]
    scales = [torch.rand(shape) if mode else None for shape in shapes]
    w = [(9 * one).to(dtype) if mode else one * one.shape[2] ** -0.5 for one in w]
    ids = torch.randint(-1, experts + 1, (tokens, topk))
    given = torch.randn(tokens, hidden + 3)[:, :hidden], *w, torch.rand(tokens, topk), ids, activation, *scales
    return CheckedMixture(MixtureOperands(*given), mode)

torch.manual_seed(0)
moe_kernels = Interpreted(None, {})
expert_kernels._SORTED_AT_A_TIME = 16, 64
for tokens, topk, experts, k in ((3, 2, 5, 1152), (9, 4, 9, 384)):
    ids = torch.randint(-1, experts + 1, (tokens, topk))
    ours, theirs = moe_kernels.sort(ids, experts), mixture_steps.sort(ids, experts)
    for one, other in zip(ours, theirs):
        assert torch.equal(one.long(), other.long())
    order, place, ends = ours
    assert all(map(torch.equal, moe_kernels.route(torch.ones(tokens, k), ids, experts, "", torch.float32)[1], ours))
    x = torch.randn(tokens, k)
    x[0, 3], x[1] = float("nan"), 0.0
    x[2, 5] = float("inf")
    for mode, dtype in (("row", torch.int8), ("", torch.float32), ("row", torch.float8_e4m3fn),
                        ("block", torch.float8_e4m3fn)):
        if dtype != torch.int8:  # whose factors, not whose numbers, say what is no number
            x[0, 3] = x[2, 5] = 1.0
        for make in (lambda steps: steps.gather(x, order, topk, mode, dtype),
                     lambda steps: steps.route(x, ids, experts, mode, dtype)[0],
                     lambda steps: steps.activate(torch.cat([x, x], 1), "silu", mode, dtype, run=8),
                     lambda steps: steps.activate(torch.cat([x, x], 1), "gelu", mode, dtype),
                     lambda steps: steps.activate(torch.cat([x, -x], 1), "silu", mode, dtype)):
            (q, s), (r, t) = make(moe_kernels), make(mixture_steps)
            assert (s is None) == (t is None) and (s is None or s.shape == t.shape and s.stride() == t.stride())
            there = ~t.isnan() if dtype == torch.int8 else slice(None)
            apart = 0.13 if dtype == torch.float8_e4m3fn else 1e-5
            near = torch.isclose(q[there].float(), r[there].float(), rtol=apart, atol=1e-4)
            least = 0.999 if dtype == torch.int8 else 0.95 if mode else 0.9999  # the interpreter truncates fp8
            assert near.float().mean() > least, (mode, dtype)
            if s is not None:
                torch.testing.assert_close(s, t, equal_nan=True)
                if dtype == torch.int8:
                    each = len(t) // tokens
                    assert t.isnan().sum() == 2 * each and (t == 1).sum() >= each
    y, weights = torch.randn(tokens * topk, k), torch.rand(tokens, topk)
    if ends[-1] < y.shape[0]:
        y[ends[-1]:] = float("nan")
    torch.testing.assert_close(moe_kernels.combine(y, place, ends, weights, torch.float32),
                               mixture_steps.combine(y, place.long(), ends, weights, torch.float32))
    h, values, of_expert = 9 * torch.randn(tokens * topk, 2 * k), torch.randn(experts, 2 * k), slice(int(ends[-1]))
    bias, last = ExpertBias(values, ids, order), ExpertBias(values[:, :k].contiguous(), ids, order)
    for name in ("silu", "clamped_swiglu"):
        (q, _), (r, _) = (steps.activate(h, name, "", torch.float32, bias) for steps in (moe_kernels, mixture_steps))
        torch.testing.assert_close(q[of_expert], r[of_expert])
    torch.testing.assert_close(moe_kernels.combine(y, place, ends, weights, torch.float32, last),
                               mixture_steps.combine(y, place.long(), ends, weights, torch.float32, last))

def alone(mode, dtype, tokens, topk, experts, hidden, inner, activation):
    checked = checked_mixture(mode, dtype, tokens, topk, experts, hidden, inner, activation)
    given = checked.given
    few = moe_kernels.compute_few(checked)
    pairs = (given.w1, given.w1_scale), (given.w2, given.w2_scale)
    wide = [w.float() if scale is None else spread(w, scale, mode) for w, scale in pairs]
    plain = CheckedMixture(given._replace(w1=wide[0], w2=wide[1], w1_scale=None, w2_scale=None), "")
    torch.testing.assert_close(few, MIXTURE.fallback(plain), rtol=1e-3, atol=1e-4)

moe_kernels._rows_are_alone = lambda checked: True
few_expert_kernels.FIRST, few_expert_kernels.SECOND = (few_expert_kernels.Tile(n, 128, 1, n > 2) for n in (2, 4))
few_expert_kernels.FIRST_OF_FP8 = few_expert_kernels.Tile(2, 128, 1)
few_expert_kernels.SECOND_OF_BYTES = few_expert_kernels.Tile(4, 128, 1, 1)
alone("", torch.float32, 3, 3, 4, 21, 13, "silu")
alone("", torch.float32, 1, 2, 3, 200, 150, "gelu")
alone("row", torch.int8, 2, 2, 3, 130, 9, "clamped_swiglu")
few_expert_kernels._FIRST, few_expert_kernels._SECOND = (32, 128, 1), (64, 128, 1)  # of many columns
alone("block", torch.float8_e4m3fn, 2, 3, 3, 384, 128, "silu")
print("alike")
"""


@pytest.mark.heavy  # `test_all_its_kernels_give_the_same` runs these kernels too
def test_kernels_and_pytorch_do_the_same_between_the_products(interpreter: LentProcess) -> None:
    ran = forked.interpreted(interpreter, ["-c", KERNELS_AND_PYTORCH], ROOT)
    assert ran.stdout == "alike\n", ran.stderr[-3000:]


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_beside_the_products_do_so_on_an_emulated_gpu(arch: str, tmp_path: Path) -> None:
    emulated.run_helpers(tmp_path, arch)


def test_two_kernels_compute_a_mixture_of_which_a_row_names_one_row_a_program(monkeypatch: Patch) -> None:
    x, w1, w2 = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((2, 64), (4, 96, 64), (4, 64, 48)))
    given = MixtureOperands(x, w1, w2, torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64))
    tiles, alone = Config("grouped_tma", 16, 64, 128), Config("grouped_gemv", 1, 4, 256)
    of = product("dense", 16, 144, 256, "bf16", groups=Groups(4))

    def asked(operands: MixtureOperands, *configs: Config, kind: str = "near") -> bool:
        found = iter([Resolution(kind, "", record=record(of, one)) for one in configs])
        stand_in = SimpleNamespace(ask=lambda *product: SimpleNamespace(resolution=next(found)))
        monkeypatch.setattr(mixtures, "default_dispatcher", lambda: stand_in)
        return MoeKernels(None, {})._rows_are_alone(MIXTURE.check(operands))  # type: ignore[arg-type]

    assert asked(given, alone, alone) and asked(given, tiles, alone) and not asked(given, tiles, tiles)
    assert not asked(given, alone, alone, kind="library")
    more = given._replace(x=x.repeat(6, 1), topk_weights=torch.ones(12, 3), topk_ids=given.topk_ids.repeat(6, 1))
    assert not asked(more, alone, alone) and not asked(given._replace(w2_bias=torch.ones(4, 64)), alone, alone)


def tuned(dtype: torch.dtype, n: int, k: int, layout: str) -> Problem:
    """The problem that a table has for a product of a mixture with powers of two."""
    family, scales = f"{'a4w4' if dtype == FP4 else 'a8w8'}_blockscale", "mx_shuffled" if layout else "mx"
    return product(family, TOKENS * TOPK, n, k, FORMATS[dtype], scales, groups=Groups(EXPERTS))


@each("layout", ["", SHUFFLED])
@each("dtype", [FP8, torch.float8_e5m2, FP4])
def test_it_is_the_sum_of_its_experts(dtype: torch.dtype, layout: str, monkeypatch: Patch) -> None:
    """Whatever serves: with powers of two along K, and those of activations in the order of the weights'."""
    asked: list[object] = []

    def run(operation: Grouped, operands: GroupedOperands) -> Tensor:
        reading = GROUPED.read(operands._replace(out_dtype=torch.bfloat16))
        asked.append(reading.problems[0] if isinstance(reading, Reading) else reading)
        return grouped(operands)

    monkeypatch.setattr(Grouped, "fallback", run)
    mixture = Mixture.make(dtype, layout)
    found, exact = mixture.compute(), mixture.exact()
    assert (found - exact).norm() / exact.norm() < 1e-5
    assert asked == [tuned(dtype, 2 * INNER, HIDDEN, layout), tuned(dtype, HIDDEN, INNER, layout)]


@pytest.mark.parametrize("dtype", ["fp4", heavy("fp8")])
def test_all_its_kernels_give_the_same(interpreter: LentProcess, tmp_path: Path, dtype: str) -> None:
    ran = forked.interpreted(interpreter, ["-m", "tests.support.run_mixture", str(tmp_path), dtype], ROOT)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    assert float(ran.stdout.split()[1]) < 1e-5, ran.stdout


def test_what_does_not_belong_together_is_refused() -> None:
    mixture = Mixture.make(FP4, "")
    (w1, w2), (scale1, scale2) = mixture.w, mixture.scales
    fp8 = Mixture.make(FP8, "")
    wrong = (
        ({"scales": (scale1[..., :-1], scale2)}, r"w1_scale must be e8m0 \(3, 148, 4\), not torch.uint8 \(3, 148, 3\)"),
        ({"scales": (scale1, scale2.float())}, r"w2_scale must be e8m0 \(3, 106, 3\), not torch.float32"),
        ({"scales": (torch.full_like(scale1, 255), scale2)}, "w1_scale holds NaN"),
        ({"layout": "spiral"}, "scale_layout is 'spiral'; powers of two of experts are stored in rows, e8m0_32x8"),
        ({"layout": SHUFFLED}, r"w1_scale must be e8m0 \(3, 160, 8\)"),
        ({"w": (w1[..., :-1], w2)}, "of fp4 with two numbers a byte along K"),
        ({"w": (w1, w2[..., :-1])}, r"wants a w2 \(3, 106, 37\)"),
        ({"w": (w1, fp8.w[1])}, "wants a w2"),
        ({"w": (fp8.w[0].view(torch.float8_e4m3fnuz), fp8.w[1].view(torch.float8_e4m3fnuz))}, "OCP's fp8 and fp4"),
    )
    for changes, says in wrong:
        refuses(says, replace(mixture, **changes).compute)
    floats = [torch.ones(3, w.shape[1]) for w in fp8.w]
    with pytest.raises(InputError, match="it is of factors that are powers of two"):
        replace(fp8, scales=(floats[0], floats[1]), layout=SHUFFLED).compute()


def test_aiters_name_takes_it_and_a_library_has_kernels_for_types_that_are_converted() -> None:
    mixture = Mixture.make(FP4, "")
    found = aiter.fused_moe(
        mixture.x, *mixture.w, mixture.weights, mixture.ids, activation="ActivationType.Silu",
        w1_scale=mixture.scales[0], w2_scale=mixture.scales[1],
    )  # fmt: skip
    assert torch.equal(found, mixture.compute())
    fp8, fp4 = (tuned(dtype, HIDDEN, INNER, SHUFFLED) for dtype in (FP8, FP4))
    counts = {
        (p.a.dtype, t.name): len(list(expert_kernels.kernels_for(p, t))) for p in (fp8, fp4) for t in (SM90, GFX942)
    }
    assert counts["fp8e4m3fn", "gfx942"] == counts["fp8e4m3fn", "sm90"] - 8  # gather, route, and activations
    assert counts["fp4e2m1", "gfx942"] == counts["fp4e2m1", "sm90"] == counts["fp8e4m3fn", "sm90"]
    gather, _ = expert_kernels.choose_gather("bf16", "fp4e2m1", "mx_shuffled", 5, INNER, INNER, 2)
    assert "r // 32 * (32 * groups)" in gather.source and gather.signature["scale_ptr"] == "*u8"


@pytest.mark.parametrize(
    ("gated", "plain", "invariant", "wanted"),
    [(1.1, 1.0, False, "silu_mul"), (1.3, 1.0, False, ""), (1.0, 1.0, True, ""), (1.0, None, False, "")],
)
def test_gate_and_up_are_activated_by_their_product_where_its_row_is_not_slower(
    monkeypatch: pytest.MonkeyPatch, gated: float, plain: float | None, invariant: bool, wanted: str
) -> None:
    """Than the row of the product alone by more than a step takes; not where rows must be invariant."""
    x, w1, w2 = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((2, 64), (4, 96, 64), (4, 64, 48)))
    given = MixtureOperands(x, w1, w2, torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64))

    def ask(operation: Any, operands: GroupedOperands) -> Any:
        reading = operation.read(operands)
        seconds = gated if operands.act else plain
        of = (
            None
            if seconds is None
            else record(reading.problems[0], Config("grouped", 16, 64, 64), seconds=seconds * 1e-5)
        )
        return SimpleNamespace(resolution=Resolution("exact" if of else "fallback", "", record=of))

    stand_in = SimpleNamespace(ask=ask, wants_invariant_rows=invariant)
    monkeypatch.setattr(mixtures, "default_dispatcher", lambda: stand_in)
    assert MoeKernels(None, {}).act_of(MIXTURE.check(given)) == wanted  # type: ignore[arg-type]
    monkeypatch.setattr(mixtures, "steps_for", lambda *_: MoeKernels(None, {}))  # type: ignore[arg-type]
    assert [operands.act for _, operands in mixtures.list_products(MIXTURE.check(given))] == [wanted, ""]
    assert not MoeKernels(None, {}).act_of(MIXTURE.check(given._replace(activation="clamped_swiglu")))  # type: ignore[arg-type]
