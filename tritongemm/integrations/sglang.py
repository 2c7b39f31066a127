"""SGLang's general plug-in: a table of TRITONGEMM_CONFIG serves its linear layers, plain or fp8, its output
layer and its mixtures of experts.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tritongemm.integrations import loaded_model, process, sglang_fp8, sglang_moe, sglang_w4, sglang_w4_experts
from tritongemm.integrations.process import attribute, define_linear, plain, serves_weight
from tritongemm.operations.torch_products import torch_linear
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import TunedCalls, WrittenCalls

_PLAIN = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"
_OPTIONAL = ("apply_with_addend", "apply_into", "load_model", "fp8_scaled_mm")  # what some versions or GPUs lack
_OUTPUT = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
_LOADING = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_OWN = "tritongemm."

Hook = Callable[..., Any]  # SGLang calls it around its own function: hook(function, its arguments)


def register() -> None:
    """Make SGLang ask us before it computes its layers, or count what they multiply; the entry point.

    SGLang applies the hooks when all plug-ins have registered theirs. Without TRITONGEMM_CONFIG and TRITONGEMM_CAPTURE
    nothing is imported or changed. A second call does nothing.
    """
    serves = bool(process.start_serving("sglang"))
    if not (serves or process.captures()):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scales = process.serves_scales()
    hooks: tuple[tuple[str, str, Callable[[], Hook], bool], ...] = (
        ("plain linear layers", f"{_PLAIN}.apply", make_hook, serves),
        ("plain linear layers with an addend", f"{_PLAIN}.apply_with_addend", make_hook_of_addend, serves),
        ("plain linear layers that write to given memory", f"{_PLAIN}.apply_into", make_hook_into, serves),
        ("output layer", _OUTPUT, make_hook_of_output, serves),
        ("fp8 layers", sglang_fp8.METHOD, sglang_fp8.make_hook, scales),
        ("fp8 layers in blocks of compressed-tensors", sglang_fp8.SCHEME, sglang_fp8.make_hook_of_scheme, scales),
        ("fp8 layers with a factor per row", sglang_fp8.ROWS, sglang_fp8.make_hook_of_rows, scales),
        ("mixtures of experts", sglang_moe.TARGET, sglang_moe.make_hook, process.serves_experts()),
        *((*hook, process.serves_four_bits()) for hook in (*sglang_w4.hooks(), *sglang_w4_experts.hooks())),
        ("layers before the first call of a size", _LOADING, _make_hook_of_loading, serves),
    )

    def install(target: str, make: Callable[[], Hook]) -> None:
        if not any(hook.__module__.startswith(_OWN) for _, hook, *_ in HookRegistry._hooks.get(target, ())):
            owner, _, name = target.rpartition(".")
            if hasattr(pkgutil.resolve_name(owner), name) or name not in _OPTIONAL:
                hook = make()
                process.require_parameters(pkgutil.resolve_name(target), hook)
                HookRegistry.register(target, hook, HookType.AROUND)

    process.install("SGLang", {name: partial(install, target, make) for name, target, make, wanted in hooks if wanted})


def make_hook() -> Hook:
    """Return the hook of linear layers: ``hook(original, method, layer, x, bias)``.

    A layer that no row holds for is given to the method itself; while SGLang computes in a way that must not depend on
    the batch, so is each layer without a row that states its order.
    """
    from sglang.srt import batch_invariant_ops

    calls = TunedCalls(default_dispatcher(), _apply_method, _in_graphs())
    operation = define_linear("sglang_linear", calls)

    def read(own: Any, method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        weight = plain(layer.weight)
        return process.find_linear(calls, operation, x, weight, bias) if _serves_now(weight) else None

    def serve(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Any:
        weight = layer._parameters.get("weight")
        if weight is None or batch_invariant_ops.is_batch_invariant_mode_enabled():
            return None
        return calls.launch(x, weight, bias)

    return process.make_layer_hook("SGLang", "plain linear layer", read, serve=serve)


def make_hook_of_addend() -> Hook:
    """Return the hook of layers that add a matrix: ``hook(original, method, layer, x, addend, bias)``."""
    calls = TunedCalls(default_dispatcher(), torch_linear, _in_graphs())

    def read(own: Any, method: Any, layer: Any, x: Tensor, addend: Tensor, bias: Tensor | None = None) -> Any:
        weight = plain(layer.weight)
        if torch.compiler.is_compiling() or not _serves_now(weight):
            return None
        compute = process.find_linear(calls, None, x, weight, bias)
        return None if compute is None else lambda: compute().add_(addend)

    return process.make_hook("SGLang", "plain linear layer with an addend", read)


def make_hook_into() -> Hook:
    """Return the hook of layers that write to given memory: ``hook(original, method, layer, x, output, bias)``."""
    calls = WrittenCalls(default_dispatcher(), torch_linear, _in_graphs())

    def read(own: Any, method: Any, layer: Any, x: Tensor, output: Tensor, bias: Tensor | None = None) -> Any:
        weight, bias = plain(layer.weight), plain(bias)
        if torch.compiler.is_compiling() or x.dim() != 2 or not _serves_now(weight):
            return None
        return lambda: output if calls.write(x, weight.t(), bias, output) else own()

    return process.make_hook("SGLang", "plain linear layer that writes to given memory", read)


def make_hook_of_output() -> Hook:
    """Return the hook of the output layer: ``hook(original, processor, hidden_states, lm_head, …)``."""
    from sglang.srt.layers import logits_processor

    calls = WrittenCalls(default_dispatcher(), torch_linear, _in_graphs())

    def read(
        own: Any, processor: Any, hidden_states: Tensor, lm_head: Any, *_: Any, out: Tensor | None = None, **__: Any
    ) -> Any:
        weight = plain(attribute(lm_head, "weight"))
        if (
            torch.compiler.is_compiling()
            or not isinstance(weight, Tensor)
            or not serves_weight(weight)
            or not hidden_states.is_cuda
            or hidden_states.dtype != weight.dtype
            or (out is not None and out.shape != (hidden_states.shape[0], weight.shape[0]))
            or attribute(lm_head, "set_lora") is not None
            or processor.use_fp32_lm_head
            or attribute(processor, "use_fp32_lm_head_output")
            or processor.rl_on_policy_target is not None
            or logits_processor.should_apply_lm_head_quant_method(lm_head, attribute(lm_head, "quant_method"))
            or not _serves_now(weight)
        ):
            return None
        if out is not None:
            return lambda: out if calls.write(hidden_states, weight.t(), None, out) else own()
        return process.find_linear(calls, None, hidden_states, weight, None)

    return process.make_hook("SGLang", "output layer", read)


def _in_graphs() -> Callable[[int], bool] | None:
    """Return what says whether calls will come often: those that graphs are captured of; prompts have any length."""
    try:
        from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
    except ImportError:
        return None
    return lambda rows: get_is_capture_mode()


def _serves_now(weight: Tensor) -> bool:
    """Return whether a layer may be served, while SGLang's results may depend on the batch, or must not."""
    from sglang.srt import batch_invariant_ops

    return process.serves_invariantly(weight, batch_invariant_ops.is_batch_invariant_mode_enabled())


def _make_hook_of_loading() -> Hook:
    def prepare(runner: Any) -> None:
        invariant = bool(attribute(attribute(runner, "server_args"), "enable_deterministic_inference"))
        loaded_model.prepare(attribute(runner, "model"), False, invariant)  # its layers have operations

    known = process.guarded("SGLang", "model", prepare)

    def load(original: Hook, runner: Any, *arguments: Any, **named: Any) -> Any:
        result = original(runner, *arguments, **named)
        known(runner)
        return result

    return load


def _apply_method(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Apply SGLang's own method in our operation; it needs only the layer's weight."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    method: Any = UnquantizedLinearMethod
    result: Tensor = method.apply.__wrapped__(method(), SimpleNamespace(weight=w), x, bias)
    return result
