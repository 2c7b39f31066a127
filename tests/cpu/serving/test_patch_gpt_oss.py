"""`patch` on transformers' experts of gpt-oss in mxfp4, whose weights OpenAI's triton_kernels would hold."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.support.linear_layers import record
from tritongemm.core.format_row import Defaults
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.numerics.verify import deviation
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.workloads import sizes

pytestmark = pytest.mark.usefixtures("unloaded")
EXPERTS, HIDDEN, INNER, TOPK = 4, 64, 96, 2
X = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()


def stored(of_k: Tensor) -> Any:
    """What triton_kernels calls a tensor, of [experts, N, along K]: turned, in a layout of its own."""
    layout = SimpleNamespace(unswizzle_data=lambda data: data.flip(0))
    return SimpleNamespace(storage=SimpleNamespace(data=of_k.mT.flip(0), layout=layout))


def mlp_of_mxfp4() -> tuple[nn.Module, nn.Module]:
    """A layer with its experts in mxfp4, and the same in bfloat16, to which transformers dequantises it."""
    # Not for all tests: the import takes seconds, in each process that collects them.
    from transformers import GptOssConfig
    from transformers.integrations import mxfp4
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    extents = {"hidden_size": HIDDEN, "intermediate_size": INNER}
    config = GptOssConfig(num_local_experts=EXPERTS, num_experts_per_tok=TOPK, **extents)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(7)
    exact = GptOssMLP(config).bfloat16()
    experts = mxfp4.Mxfp4GptOssExperts(config)
    for name, n, k in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        blocks = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 127, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        bias = torch.randn(EXPERTS, n, generator=generator)
        del experts._parameters[name]
        setattr(experts, name, stored(blocks.flatten(-2)))
        setattr(experts, f"{name}_precision_config", SimpleNamespace(weight_scale=stored(scales)))
        getattr(experts, f"{name}_bias").data.copy_(bias)
        getattr(exact.experts, name).data.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales))
        getattr(exact.experts, f"{name}_bias").data.copy_(bias)
    for parameter in exact.router.parameters():
        nn.init.normal_(parameter, generator=generator)
    return mxfp4.Mxfp4GptOssMLP(exact.router, experts), exact


def rows(order: str = "plain") -> list[Any]:
    found = []
    for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        operands = matrices("bf16", "fp4e2m1", "bf16", layout="TN", order=order)
        plain = Problem(6 * TOPK, n, k, *operands, groups=Groups(EXPERTS))
        found.append(record(registry.get(Family, "a16w4").problem(plain, "weight_mx")))
    return found


@pytest.mark.parametrize("order", ["plain", "halves_32"])
def test_the_layer_is_that_of_the_same_numbers_in_bfloat16(order: str) -> None:
    layer, exact = mlp_of_mxfp4()
    patched = tritongemm.patch(layer, rows(order))
    assert patched.patched == ("experts",) and layer.experts.w4_order == order
    with torch.no_grad():
        for one in (layer, copy.deepcopy(layer)):
            found, wanted = one(X)[0], exact.double()(X.double())[0]
            assert deviation(found, wanted) < 4e-2  # gate and up are rounded to bfloat16 before they are clamped
    patched.undo()
    assert type(layer.experts).__name__ == "Mxfp4GptOssExperts" and not hasattr(layer.experts, "w4_down")


def test_what_is_not_served_is_named() -> None:
    layer, _ = mlp_of_mxfp4()
    w1, w2 = rows("plain")[0], rows("halves_32")[1]
    patched = tritongemm.patch(layer, [w1, w2])
    assert patched.left == {
        "experts": f"no rows of one order for {EXPERTS} experts of mxfp4 of N={2 * INNER}, K={HIDDEN} and "
        f"N={HIDDEN}, K={INNER}"
    }
    layer.experts.limit = 5.0
    assert tritongemm.patch(layer, rows()).left == {"experts": "its limit is 5.0"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(type(layer.experts), "forward", lambda self, hidden_states, routing_data: None)
        layer.experts.limit = 7.0
        (why,) = tritongemm.patch(layer, rows()).left.values()
        assert why.startswith("its forward takes hidden_states, routing_data; of transformers 5.24 on")
    layer.experts.limit, layer.experts.down_proj = 7.0, nn.Parameter(torch.zeros(1))
    (why,) = tritongemm.patch(layer, rows()).left.values()
    assert why.startswith("its weights are not as OpenAI's triton_kernels keeps them: ")


def test_a_capture_writes_both_products(tmp_path: Path) -> None:
    layer, _ = mlp_of_mxfp4()
    with torch.no_grad(), tritongemm.capture(tmp_path / "sizes.yaml"):
        assert tritongemm.patch(layer, []).patched == ("experts",)
        layer(X)
    written = sizes.from_file(tmp_path / "sizes.yaml", Defaults())
    found = [row.problem for row in written if row.problem.kind == "grouped"]
    assert [(p.group_count, p.n, p.k, p.b.dtype) for p in found] == [
        (EXPERTS, 2 * INNER, HIDDEN, "fp4e2m1"),
        (EXPERTS, HIDDEN, INNER, "fp4e2m1"),
    ]
