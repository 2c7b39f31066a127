"""Every product that is tuned, served on a real GPU: each pair of scale factors, of batches and of groups."""

from dataclasses import replace

import pytest
import torch

import tritongemm
from tests.cpu.contracts.test_served_operations import CASES
from tests.gpu.here import fp8, record, replayed
from tests.support.tuned_calls import make_call
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.hip_ext.machine import Machine
from tritongemm.numerics import epilogues, verify
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, KernelBackend
from tritongemm.serving import added_operations
from tritongemm.serving.dispatcher import Dispatcher

# test_scaled_serving.py has single products with factors in float32.
OTHERS = {
    name: of
    for name, of in CASES.items()
    if of.kind != "one" or "mx" in name or of.a.type.bytes > of.b.type.bytes or of.epilogue != "none"
}


@pytest.mark.parametrize("of", OTHERS.values(), ids=OTHERS)
def test_it_is_served_at_its_own_m_and_at_others(gpu_machine: Machine, dispatcher: Dispatcher, of: Problem) -> None:
    """Eager and captured, by the launch of a tuned kernel."""
    family, target, triton = registry.get(Family, of.family), gpu_machine.target, registry.get(KernelBackend, "triton")
    if "fp8e4m3fn" in (of.a.dtype, of.b.dtype) and of.a.scaling and of.a.scaling.dtype == "fp32":
        of = replace(of, a=of.a._replace(dtype=fp8(target)), b=of.b._replace(dtype=fp8(target)))
    config = Config("grouped" if of.groups else "tile", 16, 64, 128, 1, 1, 4, 2)
    if not family.supports(of, target) or not triton.check(config, of, target):
        pytest.skip(f"{target.name}: {family.supports(of, target) and triton.check(config, of, target)}")
    assert tritongemm.load([record(of, config)]) == 1
    others = [of.at(m) for m in (7, 100) if not of.groups and serves_other_m(of.at(m), target.name)]
    for here in (of, *others):
        call, _, exact = make_call(here, "cuda")
        said = tritongemm.explain(call.name, *call.given, **call.named)
        assert said.startswith("exact: " if here is of and not of.groups else "near: "), said
        outs = [call(), replayed(call)]
        there = ~exact[..., 0].isnan()
        assert all(verify.deviation(out[there], exact[there]) <= family.tolerance(here) for out in outs)
    assert all(type(ready).__name__ in ("OperandCall", "ScaledCall") for ready in dispatcher.calls.table.values())


@pytest.mark.usefixtures("gpu_machine")
def test_gate_and_up_without_a_row_are_a_product_and_a_kernel(dispatcher: Dispatcher) -> None:
    x, w, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in ((3, 5, 256), (2 * 344, 256), (2 * 344,)))
    exact = epilogues.apply("silu_mul", torch.nn.functional.linear(x.double(), w.double(), bias.double()))
    act = tritongemm.linear_act
    outs = [act(x, w, "silu_mul", bias), replayed(act, x, w, "silu_mul", bias)]
    assert all(verify.deviation(out.double(), exact) < 0.03 for out in outs)
    q, factors = tritongemm.linear_act_quantize(x, w[:512], "silu_mul")
    plain = epilogues.apply("silu_mul", torch.nn.functional.linear(x.double(), w[:512].double()))
    assert verify.deviation(q.double() * factors.double().repeat_interleave(128, 1).view(q.shape), plain) < 0.1
    assert any(ready is added_operations._multiply_and_activate for ready in dispatcher.calls.table.values())
