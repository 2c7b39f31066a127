"""`fused_moe` of OCP MX: results by PyTorch and by kernels in the interpreter, rows asked for, what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support import ROOT, forked, mixtures
from tests.support.kernel_cases import GFX942, SM90
from tests.support.lent_processes import LentProcess
from tests.support.mixtures import FP4, FP8, HIDDEN, INNER, SHUFFLED, Mixture
from tests.support.tables import each
from tritongemm.build import expert_kernels
from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.integrations import aiter
from tritongemm.operations.contract import Reading
from tritongemm.operations.grouped import GROUPED, Grouped, GroupedOperands, grouped
from tritongemm.operations.microscaling import FORMATS
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family


def tuned(dtype: torch.dtype, n: int, k: int, layout: str) -> Problem:
    """The problem that a table has for a product of such a mixture."""
    family, name = "a4w4_blockscale" if dtype == FP4 else "a8w8_blockscale", FORMATS[dtype]
    made: Problem = registry.get(Family, family).problem(
        Problem(
            mixtures.TOKENS * mixtures.TOPK,
            n,
            k,
            *matrices(name, c="bf16", layout="TN"),
            groups=Groups(mixtures.EXPERTS),
        ),
        "mx_shuffled" if layout else "mx",
    )
    return made


@each("layout", ["", SHUFFLED])
@each("dtype", [FP8, torch.float8_e5m2, FP4])
def test_it_is_the_sum_of_its_experts(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("dtype", ["fp4", pytest.param("fp8", marks=pytest.mark.heavy)])
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
        with pytest.raises(InputError, match=says):
            replace(mixture, **changes).compute()
    floats = [torch.ones(3, w.shape[1]) for w in fp8.w]
    with pytest.raises(InputError, match="it is of factors that are powers of two"):
        replace(fp8, scales=(floats[0], floats[1]), layout=SHUFFLED).compute()


def test_a_library_has_its_kernels_where_the_target_converts_to_its_type() -> None:
    fp8, fp4 = (tuned(dtype, HIDDEN, INNER, SHUFFLED) for dtype in (FP8, FP4))
    counts = {
        (p.a.dtype, t.name): len(list(expert_kernels.kernels_for(p, t))) for p in (fp8, fp4) for t in (SM90, GFX942)
    }
    assert counts["fp8e4m3fn", "gfx942"] == counts["fp8e4m3fn", "sm90"] - 8  # gather, route, and activations
    assert counts["fp4e2m1", "gfx942"] == counts["fp4e2m1", "sm90"] == counts["fp8e4m3fn", "sm90"]
    gather, _ = expert_kernels.choose_gather("bf16", "fp4e2m1", "mx_shuffled", 5, INNER, INNER, 2)
    assert "r // 32 * (32 * groups)" in gather.source and gather.signature["scale_ptr"] == "*u8"


def test_aiters_name_takes_it_too() -> None:
    mixture = Mixture.make(FP4, "")
    found = aiter.fused_moe(
        mixture.x, *mixture.w, mixture.weights, mixture.ids, activation="ActivationType.Silu",
        w1_scale=mixture.scales[0], w2_scale=mixture.scales[1],
    )  # fmt: skip
    assert torch.equal(found, mixture.compute())
    assert tritongemm.fused_moe.__doc__
