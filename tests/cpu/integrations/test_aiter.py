"""The names of AITER's functions, over `mm`."""

import subprocess
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tritongemm.core.errors import InputError
from tritongemm.integrations.aiter import fused_moe, gemm_a16w16, tgemm


def test_they_compute_what_aiters_do() -> None:
    x, w, bias = torch.randn(3, 5, 16), torch.randn(8, 16), torch.randn(8)
    torch.testing.assert_close(tgemm.mm(x, w, bias), torch.nn.functional.linear(x, w, bias))
    torch.testing.assert_close(gemm_a16w16(x, w, None, torch.float32), x @ w.T)
    assert gemm_a16w16(x, w, otype=torch.float64).dtype == torch.float64


def test_scales_are_scaled_mms() -> None:
    x, w = (torch.randn(rows, 16).to(torch.float8_e4m3fn) for rows in (2, 8))
    exact = (x.float() * 2) @ w.float().T
    two = torch.tensor([2.0])
    torch.testing.assert_close(tgemm.mm(x, w, None, torch.float32, two), exact)
    torch.testing.assert_close(tgemm.mm(x, w, otype=torch.float32, scale_b=two), exact)
    assert tgemm.mm(x, w, None, None, two, two, None).dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"^scale_c: results are not scaled"):
        tgemm.mm(x, w, scale_a=two, scale_c=two)


def test_importing_them_brings_no_torch() -> None:
    code = "import sys, tritongemm.integrations.aiter; print([m for m in ('torch', 'yaml') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_a_mixture_by_aiters_names() -> None:
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(4, 16), torch.randn(3, 8, 16), torch.randn(3, 16, 4)
    weights, ids = torch.rand(4, 2), torch.randint(0, 3, (4, 2))
    found = fused_moe(x, w1, w2, weights, ids, activation="ActivationType.Gelu")
    assert torch.equal(found, tritongemm.fused_moe(x, w1, w2, weights, ids, "gelu"))
    with pytest.raises(InputError, match="doweight_stage1"):
        fused_moe(x, w1, w2, weights, ids, doweight_stage1=True)


def test_a_mixture_with_aiters_further_arguments() -> None:
    torch.manual_seed(0)
    x, weights, ids = torch.randn(4, 128), torch.rand(4, 2), torch.randint(0, 3, (4, 2))
    w1, w2 = (torch.randn(3, rows, 128).to(torch.float8_e4m3fn) for rows in (256, 128))
    of_w1, of_w2 = torch.rand(3, 256), torch.rand(3, 128)
    given = x, w1, w2, weights, ids
    layer: Callable[..., Tensor] = partial(fused_moe, *given)
    wanted = tritongemm.fused_moe(*given, "silu", of_w1, of_w2)
    says_nothing = {"a1_scale": None, "splitk": 2, "hidden_pad": 0, "gate_mode": "separated", "dtype": torch.float32}
    named = {"w1_scale": of_w1[..., None], "w2_scale": of_w2[..., None]}
    assert torch.equal(layer(**named, **says_nothing), wanted)
    one = torch.rand(3, 1)
    wide = one.expand(3, 256).contiguous(), one.expand(3, 128).contiguous()
    for of_expert in (one[:, 0], one, one[..., None]):
        found = layer(w1_scale=of_expert, w2_scale=of_expert)
        assert torch.equal(found, tritongemm.fused_moe(*given, "silu", *wide))
    for other in (
        {"a1_scale": torch.ones(1)},
        {"bias1": torch.ones(3, 256)},
        {"dtype": torch.float16},
        {"hidden_pad": 8},
    ):
        with pytest.raises(InputError, match=f"{next(iter(other))} is not served"):
            layer(**named, **other)
    w1.is_shuffled = True
    with pytest.raises(InputError, match="w1 is shuffled"):
        layer(**named)


class Activation(IntEnum):
    """As a Python enumeration of AITER's would be; its members print as their numbers."""

    Silu = 0
    Gelu = 1


def test_a_mixture_is_called_as_aiter_calls_its_own() -> None:
    torch.manual_seed(0)
    given = torch.randn(4, 128), torch.randn(3, 256, 128), torch.randn(3, 128, 128), torch.rand(4, 2)
    ids = torch.randint(0, 3, (4, 2))
    wanted = tritongemm.fused_moe(*given, ids, "gelu")
    after: tuple[Any, ...] = (None, 0, False, None, None, None, None, None, None, 0, torch.float32, 0, 0, None, None)
    for activation in (Activation.Gelu, 1, "gelu"):
        assert torch.equal(fused_moe(*given, ids, None, activation, *after[1:]), wanted)
    with pytest.raises(InputError, match="bias2 is not served"):
        fused_moe(*given, ids, None, 1, *after[1:-1], torch.ones(3, 128))
    with pytest.raises(InputError, match="activation is '2'"):
        fused_moe(*given, ids, None, 2)
    with pytest.raises(TypeError, match="22 arguments are given; AITER's fused_moe has 21"):
        fused_moe(*given, ids, None, 1, *after[1:], None)


def test_powers_of_two_of_one_group_along_k_are_no_factors_of_rows() -> None:
    w1, w2 = torch.randn(3, 64, 32).to(torch.float8_e4m3fn), torch.randn(3, 32, 32).to(torch.float8_e4m3fn)
    given = torch.randn(4, 32), w1, w2, torch.rand(4, 2), torch.randint(0, 3, (4, 2))
    powers = [torch.full((3, w.shape[1], 1), 120, dtype=torch.uint8) for w in (w1, w2)]
    found = fused_moe(*given, w1_scale=powers[0], w2_scale=powers[1])
    assert torch.equal(found, tritongemm.fused_moe(*given, "silu", *powers))
