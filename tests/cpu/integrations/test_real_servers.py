"""The hooks of both plug-ins on the real modules of the servers, where these can be imported."""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from tritongemm.integrations import process, sglang, sglang_moe, vllm, vllm_moe


@pytest.mark.servers
def test_the_real_vllm(config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    modular: Any = pytest.importorskip("vllm.model_executor.layers.fused_moe.modular_kernel", exc_type=ImportError)
    from vllm import envs
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.experts import triton_cutlass_moe, triton_deep_gemm_moe, triton_moe
    from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    kind, names = modular.FusedMoEKernelModularImpl, ("default_unquantized_gemm", "rocm_unquantized_gemm")
    for owner, name in ((kind, "apply"), (BaseModelLoader, "load_model"), *((utils, name) for name in names)):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    assert set(inspect.signature(kind.apply).parameters) == {"self", *vllm_moe._ARGUMENTS}
    vllm.register()
    vllm_moe.hook()
    assert process.is_hooked(kind.apply) and process.is_hooked(BaseModelLoader.load_model)
    own = {name for module in (triton_moe, triton_deep_gemm_moe, triton_cutlass_moe) for name in vars(module)}
    assert set(vllm_moe.EXPERTS) <= own and vllm_moe._PREPARES in vars(no_dp_ep)
    plain = FusedMoEQuantConfig.make()
    assert (plain.quant_dtype, plain.w1_scale, plain.w2_scale) == (None, None, None)
    assert all(getattr(plain, name) is None for name in vllm_moe._GATES)
    assert not [r for r in caplog.records if r.name == "tritongemm"]


@pytest.mark.servers
def test_the_real_sglang(config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    hooks = pytest.importorskip("sglang.srt.plugins.hook_registry", exc_type=ImportError)
    pytest.importorskip("sglang.srt.model_executor.model_runner", exc_type=ImportError)
    monkeypatch.setenv("TRITONGEMM_CAPTURE", str(config.parent / "sizes.yaml"))
    hooks.HookRegistry.reset()
    sglang.register()
    places = [place for place, registered in hooks.HookRegistry._hooks.items() if registered]
    hooks.HookRegistry.reset()
    assert not [r for r in caplog.records if r.name == "tritongemm"] and len(places) >= 6
    taken = {place: list(inspect.signature(pkgutil.resolve_name(place)).parameters) for place in places}
    assert taken[sglang_moe.TARGET][:5] == ["hidden_states", "w1", "w2", "topk_output", "moe_runner_config"]
    assert {"b1", "a1_q", *sglang_moe._FACTORS} <= set(taken[sglang_moe.TARGET])
    assert taken[sglang._OUTPUT][:3] == ["self", "hidden_states", "lm_head"]
