"""`patch` on mixtures of experts of transformers: its own classes, bf16 and fp8, with random weights, on the CPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.support.linear_layers import record
from tests.support.served_region import copies
from tritongemm.core.format_row import Defaults
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving import served_layers
from tritongemm.workloads import sizes

pytestmark = pytest.mark.usefixtures("unloaded")
EXPERTS, HIDDEN, INNER, CHOSEN = 4, 128, 128, 2
OCP = "fp8e4m3fn"


def modeling() -> Any:
    """The module of its classes: its import takes seconds, and only who runs these tests needs it."""
    return pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")


def fp8() -> Any:
    return pytest.importorskip("transformers.integrations.finegrained_fp8")


def problem(n: int, k: int, is_fp8: bool = False) -> Problem:
    family = registry.get(Family, "a8w8_blockscale" if is_fp8 else "dense")
    dtypes = (OCP, OCP, "bf16") if is_fp8 else ("bf16",) * 3
    made: Problem = family.problem(Problem(8, n, k, *matrices(*dtypes, layout="TN"), groups=Groups(EXPERTS)))
    return made


def rows(is_fp8: bool = False) -> list[Any]:
    return [record(problem(2 * INNER, HIDDEN, is_fp8)), record(problem(HIDDEN, INNER, is_fp8))]


def config(activation: str = "silu") -> Any:
    made = modeling().Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        hidden_act=activation,
    )  # fmt: skip
    made._experts_implementation = "eager"
    return made


def experts(activation: str = "silu") -> Any:
    torch.manual_seed(0)
    made = modeling().Qwen3MoeExperts(config(activation)).bfloat16()
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.1)
    return made


def fp8_experts(of: Any) -> Any:
    """The same weights in fp8, a factor of 2 ** -8 for each block."""
    made = fp8().FP8Experts(config(), block_size=(128, 128))
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(of, name).detach()
        factors = torch.full((EXPERTS, weight.shape[1] // 128, weight.shape[2] // 128), 2.0**-8)
        setattr(made, name, nn.Parameter((weight.float() * 2**8).to(torch.float8_e4m3fn), requires_grad=False))
        setattr(made, f"{name}_scale_inv", nn.Parameter(factors))
    return made


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.rand(5, EXPERTS).topk(CHOSEN)[1]
    return torch.randn(5, HIDDEN, dtype=torch.bfloat16), ids, torch.rand(5, CHOSEN, dtype=torch.bfloat16)


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_experts_with_rows_are_served_until_that_is_undone() -> None:
    model = nn.ModuleDict({"bf16": experts(), "fp8": fp8_experts(experts()), "other": nn.Linear(8, 8)})
    given, before = tokens(), model.state_dict()
    wanted = model["bf16"](*given).float()
    patched = tritongemm.patch(model, [*rows(), *rows(True)])
    assert patched.patched == ("bf16", "fp8") and patched.left == {"other": "no row for N=8, K=8"}
    assert str(patched).startswith("0 of 3 linear layers and mixtures of experts are served; 2 patched, but on no GPU")
    assert tritongemm.patch(model).left["fp8"] == "served already"
    assert model.state_dict().keys() == before.keys()
    torch.testing.assert_close(model["bf16"](*given).float(), wanted, rtol=0.05, atol=0.1)
    assert (model["fp8"](*given).float() - wanted).norm() < 0.1 * wanted.norm()
    for again in copies(model):
        assert isinstance(again["fp8"], served_layers.ServedExperts)
        for name in ("bf16", "fp8"):
            assert torch.equal(again[name](*given), model[name](*given))
    with patched.paused():
        assert type(model["bf16"]) is modeling().Qwen3MoeExperts
    patched.undo()
    assert type(model["bf16"]) is modeling().Qwen3MoeExperts and type(model["fp8"]) is fp8().FP8Experts


def test_a_gradient_is_transformers_own() -> None:
    served = experts()
    tritongemm.patch(nn.ModuleList([served]), rows())
    x, ids, weights = tokens()
    served(x, ids, weights).float().sum().backward()
    assert served.gate_up_proj.grad is not None and bool(served.gate_up_proj.grad.abs().sum() > 0)


def test_other_experts_are_left_with_the_reason() -> None:
    static = fp8_experts(experts())
    static.activation_scheme = "static"
    replaced, biased = experts(), experts()
    replaced.forward = lambda *_: None
    biased.has_bias = True
    model = nn.ModuleList([experts("relu"), static, replaced, biased, experts()])
    left = tritongemm.patch(model, [*rows()[:1], *rows(True)]).left
    assert left["0"].startswith("its gate is none of silu")
    assert left["1"].startswith("its factors are not dynamic")
    assert left["2"] == "another library replaced its forward" and left["3"] == "its experts have biases"
    assert left["4"] == "no row for 4 experts of N=128, K=128, bf16"


def test_experts_whose_weights_are_stored_otherwise_are_left() -> None:
    """Llama 4's are stored with K first, and take no ids; LongCat-Flash's gate has experts that return tokens."""
    llama = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    longcat = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    of_llama = SimpleNamespace(
        num_local_experts=EXPERTS, intermediate_size=INNER, hidden_size=HIDDEN, hidden_act="silu"
    )
    of_longcat = SimpleNamespace(
        n_routed_experts=EXPERTS, zero_expert_num=2, expert_ffn_hidden_size=INNER, hidden_size=HIDDEN, hidden_act="silu"
    )
    model = nn.ModuleList([llama.Llama4TextExperts(of_llama), longcat.LongcatFlashExperts(of_longcat)]).bfloat16()
    weights = [getattr(layer, name) for layer in model for name in ("gate_up_proj", "down_proj")]
    known = [record(replace(problem(w.shape[1], w.shape[2]), groups=Groups(w.shape[0]))) for w in weights]
    left = tritongemm.patch(model, known).left
    assert left["0"].startswith("its weights are (4, 128, 256) and (4, 128, 128), not [experts, 2 * inner, hidden]")
    assert left["1"].startswith("its weights are (6, 256, 128) and (4, 128, 128)")


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_a_capture_sees_the_products_of_served_experts_and_fp8_layers(tmp_path: Path) -> None:
    model = nn.ModuleDict({"bf16": experts(), "fp8": fp8_experts(experts())})
    tritongemm.patch(model, [*rows(), *rows(True)])
    with tritongemm.capture(tmp_path / "sizes.yaml"):
        for name in ("bf16", "fp8"):
            model[name](*tokens())
        weight = torch.randn(300, 256).to(torch.float8_e4m3fn)
        tritongemm.linear_fp8(torch.randn(2, 3, 256, dtype=torch.bfloat16), weight, torch.rand(3, 2))
        tritongemm.linear_fp8(torch.randn(3, 256, dtype=torch.bfloat16), weight, torch.rand(300))
    captured = [row.problem for row in sizes.from_file(tmp_path / "sizes.yaml", Defaults())]
    assert all(sum(p.groups.counts) == p.m for p in captured if p.groups), "how rows are spread comes with them"
    found = {replace(p, groups=p.groups and Groups(p.groups.count)) for p in captured}
    layers = {
        registry.get(Family, family).problem(Problem(m, 300, 256, *matrices(OCP, c="bf16", layout="TN")))
        for family, m in (("a8w8_blockscale", 6), ("a8w8", 3))
    }
    m = 5 * CHOSEN
    assert found == layers | {row.problem.at(m) for row in (*rows(), *rows(True))}
