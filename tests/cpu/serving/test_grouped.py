"""`grouped_mm` and `fused_moe` without a GPU: what PyTorch computes, what is refused, which record would serve."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tritongemm
from tests.support import ROOT, forked
from tests.support.kernel_cases import SM90
from tests.support.lent_processes import LentProcess
from tests.support.linear_layers import StandInKernel, record, stand_in_kernels
from tests.support.tables import each
from tritongemm.build import expert_kernels
from tritongemm.core.config import Config
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.scaling import Scaling
from tritongemm.core.served_call import Resolution
from tritongemm.core.support import Support
from tritongemm.integrations import aiter
from tritongemm.operations import mixture_steps
from tritongemm.operations.contract import Reading
from tritongemm.operations.grouped import GROUPED, GroupedOperands
from tritongemm.operations.mixture import MIXTURE, MixtureOperands
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving import mixtures
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.mixtures import MoeKernels
from tritongemm.serving.record_table import RecordTable

COUNTS = (5, 0, 9, 2)
OCP, INT8 = "fp8e4m3fn", torch.int8


def problem(family: str, room: int = 0, m: int = sum(COUNTS), counts: tuple[int, ...] = COUNTS) -> Problem:
    dtypes = (OCP, OCP, "bf16") if family != "dense" else ("fp32",) * 3
    made: Problem = registry.get(Family, family).problem(
        Problem(
            m,
            144,
            256,
            *matrices(*dtypes, layout="TN"),
            groups=Groups(4, room=room, spread="captured" if counts else "uniform", counts=counts),
        )
    )
    return made


def test_the_record_of_the_next_larger_m_serves() -> None:
    def tuned(m: int, counts: tuple[int, ...] = (), **changes: Any) -> Record:
        return record(problem("a8w8", 0, m, counts), Config("grouped", 16, 32, 64), **changes)

    def serving(*records: Record) -> DeviceKernels:
        loaded = {r.problem: StandInKernel() for r in records if r.winner == "triton"}
        device = stand_in_kernels(RecordTable(records))
        device.loaded = {p: kernel for p, kernel in loaded.items() if p in {r.problem for r in records if not r.m_from}}
        device.loaded_ranges = {r.problem: loaded[r.problem] for r in records if r.m_from}
        device.binders = {(r.problem, r.m_from): (lambda m: StandInKernel()) for r in records}
        return device

    def served(device: DeviceKernels, m: int) -> int:
        found = device.find_near(problem("a8w8", 0, m, ()))
        assert not isinstance(found, Support), str(found)
        return found.row.record.problem.m

    records = [tuned(8), tuned(64), tuned(sum(COUNTS), COUNTS), tuned(256)]
    device = serving(*records)
    wanted = {1: 8, 9: 16, 16: 16, 17: 64, 100: 256, 1000: 256}
    assert {m: served(device, m) for m in wanted} == wanted
    assert isinstance(device.find_near(problem("dense", 0, 8, ())), Support)
    ranged = serving(*(replace(r, m_from=r.problem.m // 2) for r in records))
    assert served(ranged, 9) == 16
    alone = serving(replace(tuned(8), config=Config("grouped_gemv", 1, 4, 256)))
    assert served(alone, 32) == 8 and "for 32 rows at most" in str(alone.find_near(problem("a8w8", 0, 33, ())))
    # A row whose kernel can't be launched there leaves the call to the next one, but for PyTorch's own product.
    device.binders[records[3].problem, 0] = lambda m: Support("another binary")
    assert served(device, 1000) == 64
    lost = serving(tuned(8), tuned(64, winner="torch"))
    assert served(lost, 3) == 8 and "PyTorch's own product won there" in str(lost.find_near(problem("a8w8", 0, 65, ())))


def test_kernels_read_dense_rows_of_groups() -> None:
    ends = torch.tensor([[5, 0], [5, 0], [14, 0], [16, 0]], dtype=torch.int32)[:, 0]
    assert not ends.is_contiguous()
    operands = GroupedOperands(torch.randn(16, 32), torch.randn(4, 8, 32).mT, ends, None, None, torch.float32)
    read = GROUPED.tensors(operands)
    assert read["offsets"].is_contiguous() and torch.equal(read["offsets"], ends)


def test_tokens_at_odd_addresses_are_copied_before_their_stride_is_read() -> None:
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


def test_a_gradient_is_pytorchs() -> None:
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(4, 16, requires_grad=True), torch.randn(3, 8, 16), torch.randn(3, 16, 4)
    weights, ids = torch.rand(4, 2), torch.randint(0, 3, (4, 2))
    assert mixtures.steps_for(x) is mixture_steps
    (found,) = torch.autograd.grad(tritongemm.fused_moe(x, w1, w2, weights, ids).sum(), x)
    (exact,) = torch.autograd.grad(experts_one_by_one(x, w1, w2, weights, ids).sum(), x)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def experts_one_by_one(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, gelu: bool = False) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            if 0 <= expert < w1.shape[0]:
                gate, up = (w1[expert] @ x[token]).chunk(2)
                act = functional.gelu(gate) if gelu else functional.silu(gate)
                out[token] += weight * (w2[expert] @ (act * up))
    return out


@each("activation", ["silu", "gelu"])
def test_a_mixture_is_the_sum_of_its_experts(activation: str) -> None:
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(7, 32), torch.randn(5, 48, 32), torch.randn(5, 32, 24)
    weights, ids = torch.rand(7, 3), torch.randint(-1, 6, (7, 3))
    found = tritongemm.fused_moe(x, w1, w2, weights, ids, activation)
    torch.testing.assert_close(
        found, experts_one_by_one(x, w1, w2, weights, ids, activation == "gelu"), rtol=1e-4, atol=1e-3
    )


@each("mode", ["row", "block"])
def test_quantised_experts_are_close(mode: str) -> None:
    torch.manual_seed(0)
    x, weights, ids = torch.randn(6, 128), torch.rand(6, 2), torch.randint(0, 4, (6, 2))
    w1, w2 = torch.randn(4, 256, 128) / 12, torch.randn(4, 128, 128) / 12
    packed = [quantised(w, mode) for w in (w1, w2)]
    (q1, s1), (q2, s2) = packed
    found = tritongemm.fused_moe(x, q1, q2, weights, ids, "silu", s1, s2)
    exact = experts_one_by_one(x, w1, w2, weights, ids)
    assert (found - exact).norm() / exact.norm() < 0.1


@each("activation", ["silu", "gelu"])
def test_experts_of_integers_are_those_of_float64(activation: str) -> None:
    """Tokens, and what is activated, are rounded to int8 with a factor for each row, and nothing else is."""
    torch.manual_seed(0)
    loud = torch.logspace(-3, 3, 7, base=2.0, dtype=torch.float64)[:, None]  # so that each row has a factor of its own
    x, weights, ids = (torch.randn(7, 128) * loud).float(), torch.rand(7, 3), torch.randint(-1, 6, (7, 3))
    w1, w2 = (torch.randn(5, *shape) * torch.rand(5, shape[0], 1) for shape in ((192, 128), (128, 96)))
    (q1, s1), (q2, s2) = ((integers(w).to(INT8), factors(w).float()) for w in (w1, w2))
    found = tritongemm.fused_moe(x, q1, q2, weights, ids, activation, s1[..., 0], s2[..., 0])
    exact, unrounded = torch.zeros(2, 7, 128, dtype=torch.float64)
    for token, expert, weight in zip(range(7), ids.tolist(), weights.tolist(), strict=True):
        for one, share in zip(expert, weight, strict=True):
            if 0 <= one < 5:
                first, second = q1[one].double() * s1[one], q2[one].double() * s2[one]
                for out, to_int8 in ((exact, True), (unrounded, False)):
                    gate, up = (first @ stepped(x[token].double(), to_int8)).chunk(2)
                    act = functional.gelu(gate) if activation == "gelu" else functional.silu(gate)
                    out[token] += share * (second @ stepped(act * up, to_int8))
    assert (found - exact).norm() / exact.norm() < 1e-5 < 1e-3 < (unrounded - exact).norm() / exact.norm()
    as_aiter = aiter.fused_moe(x, q1, q2, weights, ids, activation=activation, w1_scale=s1, w2_scale=s2)
    assert torch.equal(as_aiter, found)


def stepped(row: Tensor, to_int8: bool) -> Tensor:
    """The numbers of a row as int8 holds them, or as they are."""
    return integers(row) * factors(row) if to_int8 else row


def factors(rows: Tensor) -> Tensor:
    """The largest absolute value of each row over that of int8."""
    return rows.abs().amax(-1, keepdim=True).double() / 127


def integers(rows: Tensor) -> Tensor:
    """Rows over their factors, rounded."""
    return (rows.double() / factors(rows)).round()


def test_a_mixture_of_integers_asks_for_the_rows_of_its_family() -> None:
    q1, q2 = torch.ones(4, 96, 64, dtype=INT8), torch.ones(4, 64, 48, dtype=INT8)
    ids = torch.zeros(5, 2, dtype=torch.int64)
    given = torch.ones(5, 64, dtype=torch.bfloat16), q1, q2, torch.ones(5, 2), ids, "silu"
    operands = MixtureOperands(*given, torch.ones(4, 96), torch.ones(4, 64))
    read = [operation.read(checked) for operation, checked in MIXTURE.products(operands)]
    asked = [one.problems[0] for one in read if isinstance(one, Reading)]
    family = registry.get(Family, "a8w8")
    tuned = [
        family.problem(Problem(10, n, k, *matrices("int8", c="bf16", layout="TN"), groups=Groups(4)))
        for n, k in ((96, 64), (64, 48))
    ]
    assert asked == tuned
    beside = [[helper.constants for helper, _ in expert_kernels.kernels_for(one, SM90)] for one in tuned]
    assert all(sum(constants.get("MODE") == 5 for constants in each) == 8 for each in beside)  # four routes beside
    blocks = replace(tuned[0], family="a8w8_blockscale").scaled((Scaling(depth=128), Scaling(rows=128, depth=128)))
    assert not list(expert_kernels.kernels_for(blocks, SM90))


def quantised(w: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    if mode == "row":
        scale = w.abs().amax(-1) / 448
        return (w / scale[..., None]).to(torch.float8_e4m3fn), scale
    scale = w.view(w.shape[0], w.shape[1] // 128, 128, -1, 128).abs().amax((2, 4)) / 448
    wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return (w / wide).to(torch.float8_e4m3fn), scale


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


def test_kernels_and_pytorch_do_the_same_between_the_products(interpreter: LentProcess) -> None:
    ran = forked.interpreted(interpreter, ["-c", KERNELS_AND_PYTORCH], ROOT)
    assert ran.stdout == "alike\n", ran.stderr[-3000:]
    assert mixture_steps.sort.__doc__


def test_two_kernels_compute_a_mixture_of_which_a_row_names_one_row_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w1, w2 = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((2, 64), (4, 96, 64), (4, 64, 48)))
    given = MixtureOperands(x, w1, w2, torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64))
    tiles, alone = Config("grouped_tma", 16, 64, 128), Config("grouped_gemv", 1, 4, 256)

    def asked(operands: MixtureOperands, *configs: Config, kind: str = "near") -> bool:
        found = iter([Resolution(kind, "", record=record(problem("dense"), one)) for one in configs])
        stand_in = SimpleNamespace(ask=lambda *product: SimpleNamespace(resolution=next(found)))
        monkeypatch.setattr(mixtures, "default_dispatcher", lambda: stand_in)
        return MoeKernels(None, {})._rows_are_alone(MIXTURE.check(operands))  # type: ignore[arg-type]

    assert asked(given, alone, alone) and asked(given, tiles, alone) and not asked(given, tiles, tiles)
    assert not asked(given, alone, alone, kind="library")
    more = given._replace(x=x.repeat(6, 1), topk_weights=torch.ones(12, 3), topk_ids=given.topk_ids.repeat(6, 1))
    assert not asked(more, alone, alone)
    assert not asked(given._replace(w2_bias=torch.ones(4, 64)), alone, alone)
