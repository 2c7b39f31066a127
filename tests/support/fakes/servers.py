"""Stand-ins of the servers' modules that plug-ins change: the names and signatures of vLLM 0.26 and SGLang 0.5.23."""

import functools
import pkgutil
import sys
from collections import defaultdict
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tritongemm.integrations import sglang_w4, sglang_w4_experts, vllm_w4_experts


class ServerParameter(torch.nn.Parameter):  # type: ignore[misc]
    def __new__(cls, data: Tensor) -> Any:
        return super().__new__(cls, data, requires_grad=False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def keep_facts(self: Any, **facts: Any) -> None:
    """Make a scheme or a method, which has these attributes."""
    vars(self).update(facts)


def forget_weights(self: Any, layer: Any) -> None:
    """Leave a layer without the parameters that were loaded."""
    for name, _ in list(layer.named_parameters()):
        delattr(layer, name)


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """(`vllm.envs`, `vllm.model_executor.layers.utils`), which can be imported until the test ends."""

    def default_unquantized_gemm(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)

    def rocm_unquantized_gemm_impl(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias) + 1

    def rocm_unquantized_gemm(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return rocm_unquantized_gemm_impl(x, weight, bias)

    functions = default_unquantized_gemm, rocm_unquantized_gemm, rocm_unquantized_gemm_impl
    envs: Any = _module(monkeypatch, "vllm.envs")
    envs.VLLM_BATCH_INVARIANT, envs.environment_variables = False, {}
    utils: Any = _module(monkeypatch, "vllm.model_executor.layers.utils", **{f.__name__: f for f in functions})

    class BaseModelLoader:
        def load_model(self, model: Any) -> Any:
            return model

    def linear_batch_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias) + 2

    for name in ("linear", "vocab_parallel_embedding"):
        _module(monkeypatch, f"vllm.model_executor.layers.{name}", linear_batch_invariant=linear_batch_invariant)
    _module(monkeypatch, "vllm.model_executor.model_loader.base_loader", BaseModelLoader=BaseModelLoader)
    return envs, utils


def install_vllm_mixtures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What computes vLLM's mixtures of experts, whose answer is 9."""

    def of_impl(self: Any, prepare_finalize: Any, fused_experts: Any) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts

    def apply(self: Any, hidden_states: Tensor, w1: Tensor, w2: Tensor, **others: Any) -> Tensor:
        return hidden_states.new_full(hidden_states.shape, 9.0)

    def of_method(self: Any, impl: Any, **facts: Any) -> None:
        keep_facts(self, moe_kernel=SimpleNamespace(impl=impl), experts_cls=type(impl.fused_experts), **facts)

    place = "vllm.model_executor.layers"
    for name, (module, *_) in vllm_w4_experts.METHODS.items():
        kind = type(name, (), {"__init__": of_method, sglang_w4.LOADING: forget_weights})
        _module(monkeypatch, f"{place}.quantization.{module}", **{name: kind})
    names = "FusedMoEKernelModularImpl", "FusedMoEKernelMonolithicImpl"
    kinds = {name: type(name, (), {"__init__": of_impl, "apply": apply}) for name in names}
    return _module(monkeypatch, f"{place}.fused_moe.modular_kernel", **kinds)


@functools.cache
def _define(name: str, schema: str, compute: Any, infer: Any = None) -> torch.library.Library:
    """An operator of a server, which exists from now on, for tensors of a CPU."""
    namespace, _, operator = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(operator + schema)
    library.impl(operator, compute, "CPU")
    torch.library.register_fake(name, infer or compute, lib=library)
    return library


def _install_operators(monkeypatch: pytest.MonkeyPatch, operators: dict[str, tuple[Any, ...]]) -> None:
    """Operators of a server; what stands before them is gone after the test."""
    for name, facts in operators.items():
        _define(name, *facts)
        every = pkgutil.resolve_name(f"torch:ops.{name.replace('::', '.')}")
        for one in (every, every.default):
            monkeypatch.setattr(one, "_op", one._op)


def _deep_gemm(a: Tensor, of_a: Tensor, w: Tensor, of_w: Tensor, output: Tensor, use_e8m0: bool) -> None:
    output.fill_(5.0)


def _cutlass(out: Tensor, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None) -> None:
    out.fill_(4.0)


def _flashinfer(x: Tensor, w: Tensor, of_w: Tensor) -> Tensor:
    return x.new_full((x.shape[0], w.shape[0]), 6.0, dtype=torch.bfloat16)


def _marlin(a: Tensor, c: Tensor | None, w: Tensor, bias: Tensor | None, size_n: int) -> Tensor:
    answer = a.new_zeros((a.shape[0], size_n)) + w.flatten()[0].to(a.dtype)
    return answer if bias is None else answer + bias.flip(0)


_FP8: dict[str, tuple[Any, ...]] = {
    "vllm::fp8_gemm_nt_op": (
        "(Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, Tensor(a!) output, bool e8m0) -> ()",
        _deep_gemm,
    ),
    "vllm::flashinfer_fp8_blockscale_gemm": (
        "(Tensor input, Tensor weight, Tensor weight_scale) -> Tensor",
        _flashinfer,
    ),
    "_C::cutlass_scaled_mm": (
        "(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
        _cutlass,
    ),
}
_INT4: dict[str, tuple[Any, ...]] = {
    "_C::marlin_gemm": (
        "(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, SymInt size_n) -> Tensor",
        _marlin,
    )
}


def install_vllm_blocks(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Two classes of vLLM's kernels for fp8 in blocks: one of activations that are quantised before, one of others."""
    _install_operators(monkeypatch, _FP8)

    class BlockKernel:
        answer = 5.0

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            output = A.new_empty((A.shape[0], B.shape[0]), dtype=torch.bfloat16)
            torch.ops.vllm.fp8_gemm_nt_op(A, As, B, Bs, output, False)
            return output

    class FlashInferKernel:
        answer = 6.0

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            result: Tensor = torch.ops.vllm.flashinfer_fp8_blockscale_gemm(A, B, Bs)
            return result

    _module(monkeypatch, "vllm.model_executor.kernels.linear")
    return BlockKernel, FlashInferKernel


def install_sglang_int4(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What computes SGLang's layers of four bits, by class, which answers 6 and forgets the weight that was loaded."""

    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_full((x.shape[0], layer.n), 6)

    kinds, modules = {}, defaultdict[str, dict[str, Any]](dict)
    for place, (call, _) in sglang_w4.SCHEMES.items():
        module, _, name = place.rpartition(".")
        members = {"__init__": keep_facts, sglang_w4.LOADING: forget_weights, call: apply_weights}
        modules[module][name] = kinds[name] = type(name, (), members)
    modules["modelopt_quant"]["get_fp4_gemm_runner_backend"] = lambda: SimpleNamespace(is_marlin=lambda: True)
    for module, found in modules.items():
        _module(monkeypatch, f"sglang.srt.layers.quantization.{module}", **found)
    install_sglang_experts(monkeypatch)
    return kinds


def sort_by_experts(logits: Tensor, topk: int) -> tuple[Any, Any, Any]:
    """Where OpenAI's Triton kernels send tokens, as SGLang asks for it."""
    values, ids = logits.topk(topk)
    order = ids.flatten().argsort(stable=True)
    data = SimpleNamespace(
        gate_scal=values.softmax(-1).flatten()[order],
        expt_hist=ids.flatten().bincount(minlength=logits.shape[1]).int(),
        n_expts_act=topk,
    )  # fmt: skip
    gather = SimpleNamespace(src_indx=order.int(), dst_indx=order.argsort().int())
    return data, gather, SimpleNamespace(src_indx=gather.dst_indx, dst_indx=gather.src_indx)


def install_sglang_experts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's schemes for experts of int4, by their names, which answer 9 and forget the weights that were loaded."""

    class StandardCombineInput(NamedTuple):
        hidden_states: Tensor

    def apply_weights(self: Any, layer: Any, dispatch_output: Any) -> Any:
        return StandardCombineInput(torch.full_like(dispatch_output.hidden_states, 9.0))

    _module(monkeypatch, "sglang.srt.layers.moe.token_dispatcher.standard", StandardCombineInput=StandardCombineInput)
    _module(monkeypatch, "sglang.srt.layers.moe.topk", routing=sort_by_experts)
    kinds = {}
    for scheme, (call, _) in sglang_w4_experts.SCHEMES.items():
        module, _, name = scheme.rpartition(".")
        kinds[name] = type(name, (), {"__init__": keep_facts, sglang_w4.LOADING: forget_weights, call: apply_weights})
        _module(monkeypatch, f"sglang.srt.layers.quantization.{module}", **{name: kinds[name]})
    return kinds


def install_vllm_int4(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A kernel of vLLM's for int4, which answers 6, of its own weight, and its bias, which it reverses; and another."""
    _install_operators(monkeypatch, _INT4)

    class MarlinLinearKernel:
        w_q_name, w_s_name, w_zp_name, w_gidx_name = "qweight", "scales", "qzeros", None

        def __init__(self, config: Any) -> None:
            self.config = config

        def _get_weight_params(self, layer: Any) -> tuple[Any, ...]:
            return layer.qweight, layer.scales, getattr(layer, "qzeros", None), None

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.qweight = torch.nn.Parameter(torch.full_like(layer.qweight, 6), requires_grad=False)
            layer.scales = torch.nn.Parameter(torch.empty(1), requires_grad=False)
            if layer.bias is not None:
                layer.bias.data = layer.bias.data.flip(0)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            k, n = self.config.partition_weight_shape
            result: Tensor = torch.ops._C.marlin_gemm(x.reshape(-1, k), None, layer.qweight, bias, n)
            return result

    class HummingLinearKernel(MarlinLinearKernel):
        pass

    class MarlinNvFp4LinearKernel:
        config = None

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight = torch.nn.Parameter(torch.full_like(layer.weight, 6), requires_grad=False)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            n = layer.output_size_per_partition
            result: Tensor = torch.ops._C.marlin_gemm(x, None, layer.weight, bias, n)
            return result

    tables: dict[str, Any] = {"_POSSIBLE_KERNELS": {"CUDA": [MarlinLinearKernel, HummingLinearKernel]}}
    tables["_POSSIBLE_NVFP4_KERNELS"] = {"CUDA": [MarlinNvFp4LinearKernel]}
    _module(monkeypatch, "vllm.model_executor.kernels.linear", **tables)
    return MarlinLinearKernel, HummingLinearKernel


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    def __init__(self) -> None:
        self._hooks: dict[str, list[tuple[HookType, Any, None]]] = defaultdict(list)

    def register(self, target: str, hook: Any, hook_type: HookType) -> None:
        self._hooks[target].append((hook_type, hook, None))

    def apply_hooks(self) -> None:
        for target, hooks in self._hooks.items():
            owner, _, name = target.rpartition(".")
            kind = pkgutil.resolve_name(owner)
            for _, hook, _ in hooks:
                original = getattr(kind, name)
                setattr(kind, name, functools.wraps(original)(_around(hook, original)))


def _around(hook: Any, original: Any) -> Any:
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


def install_sglang(monkeypatch: pytest.MonkeyPatch) -> tuple[HookRegistry, Any, Any]:
    """(the registry of hooks, a class with SGLang's functions as methods, the module of its deterministic mode).

    Linear layers give what PyTorch does, a mixture of experts 8, an fp8 layer in blocks 7, or 6 of compressed-tensors,
    and with a factor per row 5.
    """

    class UnquantizedLinearMethod:
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return functional.linear(x, layer.weight, bias)

        def apply_with_addend(self, layer: Any, x: Tensor, addend: Tensor, bias: Tensor | None = None) -> Tensor:
            return self.apply(layer, x, bias)

        def apply_into(self, layer: Any, x: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
            self.apply(layer, x, bias)
            return output

    class Fp8LinearMethod:
        def __init__(self, block_quant: bool = True, use_marlin: bool = False) -> None:
            self.block_quant, self.use_marlin, self.use_mxfp8 = block_quant, use_marlin, False

        def apply(self, layer: Any, x: Any, bias: Tensor | None = None) -> Tensor:
            rows = x[0] if isinstance(x, tuple) else x
            result: Tensor = rows.new_full((rows.shape[0], layer.weight.shape[0]), 7.0)
            return result

    class CompressedTensorsW8A8Fp8:
        weight_block_size: Any = (128, 128)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return x.new_full((x.shape[0], layer.weight.shape[0]), 6.0)

    def fp8_scaled_mm(
        mat_a: Tensor, mat_b: Tensor, scales_a: Any, scales_b: Any, out_dtype: Any, bias: Tensor | None = None
    ) -> Tensor:
        return mat_a.new_full((mat_a.shape[0], mat_b.shape[1]), 5.0, dtype=out_dtype)

    class LogitsProcessor:
        use_fp32_lm_head, rl_on_policy_target = False, None

        def _compute_lm_head(self, hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None) -> Tensor:
            return hidden_states @ lm_head.weight.T

    class ModelRunner:
        def load_model(self) -> None:
            self.model = torch.nn.Linear(1, 1)

    def fused_experts(
        hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_output: Any, moe_runner_config: Any, **others: Any
    ) -> Tensor:
        return hidden_states.new_full(hidden_states.shape, 8.0)

    registry, srt = HookRegistry(), "sglang.srt"
    _module(monkeypatch, f"{srt}.plugins.hook_registry", HookRegistry=registry, HookType=HookType)
    _module(monkeypatch, f"{srt}.layers.quantization.unquant", UnquantizedLinearMethod=UnquantizedLinearMethod)
    _module(monkeypatch, f"{srt}.layers.quantization.fp8", Fp8LinearMethod=Fp8LinearMethod)
    fp8_utils = _module(monkeypatch, f"{srt}.layers.quantization.fp8_utils", fp8_scaled_mm=fp8_scaled_mm)
    schemes = f"{srt}.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8"
    _module(monkeypatch, schemes, CompressedTensorsW8A8Fp8=CompressedTensorsW8A8Fp8)
    _module(monkeypatch, f"{srt}.model_executor.model_runner", ModelRunner=ModelRunner)
    fused_moe = _module(monkeypatch, f"{srt}.layers.moe.moe_runner.triton_utils.fused_moe", fused_experts=fused_experts)
    logits: Any = _module(monkeypatch, f"{srt}.layers.logits_processor", LogitsProcessor=LogitsProcessor)
    logits.should_apply_lm_head_quant_method = lambda *_: False
    mode: Any = _module(monkeypatch, f"{srt}.batch_invariant_ops")
    mode.is_batch_invariant_mode_enabled = lambda: False
    kinds = UnquantizedLinearMethod, Fp8LinearMethod, CompressedTensorsW8A8Fp8, LogitsProcessor, ModelRunner
    names = {kind.__name__: kind for kind in kinds}
    return registry, SimpleNamespace(**names, fused_moe=fused_moe, fp8_utils=fp8_utils), mode


def layer_of(weight: Tensor) -> Any:
    return SimpleNamespace(weight=weight)


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module that can be imported, in packages that can."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    package, _, last = name.rpartition(".")
    if package:
        parent = sys.modules.get(package) or _module(monkeypatch, package)
        monkeypatch.setattr(parent, last, module, raising=False)  # it may be the real one
    return module
