"""vLLM's general plug-in: a table of TRITONGEMM_CONFIG serves its linear layers, plain or fp8, and mixtures of experts.

vLLM asks `dispatch_unquantized_gemm` for a function when a layer is made, which answers with one of two functions of
`vllm.model_executor.layers.utils`. The plug-in, which vLLM calls in each process before, puts others in their places.
What vLLM compiles of plain layers stays as it is, and is served as `compiled` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tritongemm.integrations import loaded_model, process, vllm_fp8, vllm_gates, vllm_moe, vllm_w4, vllm_w4_experts
from tritongemm.integrations.process import define_linear, is_hooked, plain, replace
from tritongemm.operations.torch_products import torch_linear
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import TunedCalls
from tritongemm.system import settings

_LAYER = "plain linear layer"


def register() -> None:
    """Serve vLLM's layers in this process, or capture what they multiply; the entry point. It may be called again.

    Without TRITONGEMM_CONFIG and TRITONGEMM_CAPTURE nothing is imported or changed. A layer whose N and K no row has,
    and one with another ``--linear-backend``, is computed as without us; so are, under VLLM_BATCH_INVARIANT, all but
    linear layers, plain or fp8, with a row that states its order of additions.
    """
    digest = process.start_serving("vllm")
    if not (digest or process.captures()):
        return
    hooks: dict[str, tuple[Callable[[], None], bool]] = {
        process.EVERY_LAYER: (partial(_name_graphs, digest), True),
        _LAYER: (_hook_layers if digest else _hook_counted, True),
        vllm_fp8.SERVED: (vllm_fp8.hook, process.serves_scales()),
        vllm_w4.SERVED: (_hook_four_bits, process.serves_four_bits()),
        vllm_moe.SERVED: (vllm_moe.hook, process.serves_experts()),
        **{
            f"{vllm_w4_experts.SERVED} ({name})": (partial(vllm_w4_experts.hook, name), process.serves_four_bits())
            for name in vllm_w4_experts.METHODS
        },
        "loaded model": (partial(_hook_loading, bool(digest)), True),
    }
    if settings.server_invariant():
        hooks = {
            process.EVERY_LAYER: (partial(_name_graphs, digest), True),
            _LAYER: (_hook_invariant, bool(digest)),
            vllm_fp8.SERVED: (partial(vllm_fp8.hook, True), process.serves_scales(True)),
            "loaded model": (partial(_hook_loading, True), bool(digest)),
        }
    process.install("vLLM", {name: hook for name, (hook, wanted) in hooks.items() if wanted})


def _name_graphs(digest: str) -> None:
    """Make the key of graphs with an operation of ours another than the key of those without one.

    Raises:
        Refusal: results must not depend on the batch, and no row is made for that.
    """
    from vllm import envs

    if settings.server_invariant() and not default_dispatcher().invariant_weights:
        raise process.Refusal("VLLM_BATCH_INVARIANT is set, and no row states its order (tune --invariant)")
    # The key of vLLM's compile cache holds the value of each variable in this list. Variables in it are also copied to
    # the workers that Ray starts.
    traced = (
        process.serves_gates()
        or process.serves_four_bits()
        or settings.server_invariant()
        or torch.version.hip is not None
    )
    envs.environment_variables["TRITONGEMM_CONFIG"] = lambda: digest + "capture" * process.captures() if traced else ""


def _hook_layers() -> None:
    """Put hooks before vLLM's functions, which compute what no row holds for."""
    from vllm.model_executor.layers import utils

    own: dict[str, Callable[..., Tensor]] = {
        "default_unquantized_gemm": torch_linear,
        "rocm_unquantized_gemm": utils.rocm_unquantized_gemm_impl,
    }
    if any(is_hooked(getattr(utils, name)) for name in own):
        return
    for name, compute in own.items():
        calls = TunedCalls(default_dispatcher(), compute)
        # Inductor calls the product of the first function by name, and serves it so.
        traced = None if compute is torch_linear else define_linear("vllm_rocm_linear", calls)
        replace("vLLM", _LAYER, {utils: name}, _make_read(calls, traced))


def _make_read(calls: TunedCalls, traced: Callable[..., Tensor] | None) -> Callable[..., Any]:
    def read(own: Any, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return process.find_linear(calls, traced, x, weight, bias)

    return read


def _hook_counted() -> None:
    """Have a capture see what layers multiply outside compiled code, as routers and shared experts in vLLM's operators.

    A class of parameters that was there before the capture computes PyTorch's functions itself, uncounted.
    """
    from vllm.model_executor.layers import utils

    def read(own: Any, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return partial(own.func, layer, x, plain(weight), plain(bias))

    if not is_hooked(utils.default_unquantized_gemm):
        replace("vLLM", _LAYER, {utils: "default_unquantized_gemm"}, read)


def _hook_invariant() -> None:
    """Put a hook before the function by which vLLM computes plain layers where the batch must not matter."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    name, original = "linear_batch_invariant", linear.linear_batch_invariant
    if is_hooked(original):
        return
    calls = TunedCalls(default_dispatcher(), original)
    operation = define_linear("vllm_invariant_linear", calls)

    def read(own: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if not process.serves_invariantly(plain(weight), True):
            return None
        return process.find_linear(calls, operation, x, weight, bias)

    replace("vLLM", _LAYER, {linear: name, vocab_parallel_embedding: name}, read)


def _hook_four_bits() -> None:
    """Serve vLLM's layers of four bits by tuned kernels."""
    from vllm.model_executor.kernels import linear

    vllm_w4.hook(linear)


def _hook_loading(serves: bool) -> None:
    """Load kernels, and log which layers they serve, when vLLM has loaded a model; have a capture see its gates."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if is_hooked(BaseModelLoader.load_model):
        return

    def read(own: Any, *arguments: Any, **named: Any) -> Any:
        invariant = settings.server_invariant()  # its layers have an operation
        adapts = any(process.attribute(one, "lora_config") for one in (*arguments, *named.values()))

        def load() -> nn.Module:
            model: nn.Module = own()
            gates = not (invariant or adapts)
            if gates and process.captures():
                vllm_gates.count(model)
            if serves:
                loaded_model.prepare(model, not invariant, invariant, gates)
            return model

        return load

    replace("vLLM", "model", {BaseModelLoader: "load_model"}, read)
