"""vLLM's general plug-in: a table of TRITONGEMM_CONFIG serves its linear layers, plain or fp8, and mixtures of experts.

vLLM asks `dispatch_unquantized_gemm` for a function when a layer is made, which answers with one of two functions of
`vllm.model_executor.layers.utils`. The plug-in, which vLLM calls in each process before, puts others in their places.
What vLLM compiles of plain layers stays as it is, and is served as `compiled` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from tritongemm.integrations import loaded_model, process
from tritongemm.integrations.process import define_linear, plain, serves_weight
from tritongemm.operations.torch_products import torch_linear
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import TunedCalls
from tritongemm.system import settings

ServerGemm = Callable[..., Tensor]  # of a layer, x, its weight and a bias


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
        "plain linear layer": (_hook_layers if digest else _hook_counted, True),
        "fp8 layer in blocks": (_hook_blocks, process.serves_scales()),
        "fp8 layer with a factor per row or tensor": (_hook_rows, process.serves_scales()),
        "int4 layer": (_hook_int4, process.serves_four_bits()),
        "mixture of experts": (_hook_mixtures, process.serves_experts()),
        "mixture of mxfp4": (_hook_mxfp4, process.serves_four_bits()),
        "compiled layer": (_hook_loading, bool(digest)),
    }
    if settings.server_invariant():
        hooks = {
            process.EVERY_LAYER: (partial(_name_graphs, digest), True),
            "plain linear layer": (_hook_invariant, bool(digest)),
            "fp8 layer in blocks": (partial(_hook_blocks, True), process.serves_scales(True)),
            "fp8 layer with a factor per row or tensor": (partial(_hook_rows, True), process.serves_scales(True)),
            "compiled layer": (_hook_loading, bool(digest)),
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
        process.serves_scales()
        or process.serves_gates()
        or process.serves_four_bits()
        or settings.server_invariant()
        or torch.version.hip is not None
    )
    envs.environment_variables["TRITONGEMM_CONFIG"] = lambda: (digest or "capture") if traced else ""


def _hook_layers() -> None:
    """Replace vLLM's functions by ours, which call the replaced one where no row holds for a call."""
    from vllm.model_executor.layers import utils

    default, rocm, compute_rocm = (
        utils.default_unquantized_gemm,
        utils.rocm_unquantized_gemm,
        utils.rocm_unquantized_gemm_impl,
    )
    if default.__module__ != __name__:
        utils.default_unquantized_gemm = _make_gemm(default, TunedCalls(default_dispatcher(), torch_linear))
        calls = TunedCalls(default_dispatcher(), compute_rocm)
        utils.rocm_unquantized_gemm = _make_gemm(rocm, calls, define_linear("vllm_rocm_linear", calls))


def _hook_counted() -> None:
    """Have a capture see what layers multiply outside compiled code, as routers and shared experts in vLLM's operators.

    A class of parameters that was there before the capture computes PyTorch's functions itself, uncounted.
    """
    from vllm.model_executor.layers import utils

    original = utils.default_unquantized_gemm
    if original.__module__ == __name__:
        return

    def counted(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return original(layer, x, plain(weight), plain(bias))

    process.require_parameters(original, counted)
    utils.default_unquantized_gemm = counted


def _hook_invariant() -> None:
    """Replace the function by which vLLM computes plain layers where the batch must not matter."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    original = linear.linear_batch_invariant
    if original.__module__ != __name__:
        calls = TunedCalls(default_dispatcher(), original)
        replaced = _make_invariant(original, calls, define_linear("vllm_invariant_linear", calls))
        linear.linear_batch_invariant = vocab_parallel_embedding.linear_batch_invariant = replaced


def _make_invariant(
    original: Callable[..., Tensor], calls: TunedCalls, operation: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return the replacement, which serves layers with a row that states its order; arguments as of `_make_gemm`."""

    def served_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, bias = plain(weight), plain(bias)
        if not x.is_cuda or not process.serves_invariantly(weight, True):
            return original(x, weight, bias)
        return operation(x, weight, bias) if torch.compiler.is_compiling() else calls(x, weight, bias)

    process.require_parameters(original, served_linear)
    return served_linear


def _hook_rows(invariant: bool = False) -> None:
    """Serve vLLM's fp8 layers with a factor per row or tensor by tuned kernels."""
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass

    from tritongemm.integrations import vllm_fp8_rows

    vllm_fp8_rows.hook(cutlass, invariant)


def _hook_blocks(invariant: bool = False) -> None:
    """Serve vLLM's fp8 layers in blocks by tuned kernels."""
    from vllm.model_executor.kernels import linear

    from tritongemm.integrations import vllm_fp8

    vllm_fp8.hook(linear, invariant)


def _hook_int4() -> None:
    """Serve vLLM's layers of int4 by tuned kernels."""
    from vllm.model_executor.kernels import linear

    from tritongemm.integrations import vllm_w4

    vllm_w4.hook(linear)


def _hook_mxfp4() -> None:
    """Serve gpt-oss's mixtures in vLLM by tuned kernels."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.quantization import mxfp4

    from tritongemm.integrations import vllm_mxfp4

    vllm_mxfp4.hook(mxfp4, modular_kernel)


def _hook_mixtures() -> None:
    """Serve vLLM's mixtures of experts by tuned kernels."""
    from vllm.model_executor.layers.fused_moe import modular_kernel

    from tritongemm.integrations import vllm_moe

    vllm_moe.hook(modular_kernel)


def _hook_loading() -> None:
    """Load kernels, and log which layers they serve, when vLLM has loaded a model."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model
    if original.__module__ == __name__:
        return

    @wraps(original)
    def load(*arguments: Any, **named: Any) -> nn.Module:
        model: nn.Module = original(*arguments, **named)
        invariant = settings.server_invariant()  # its layers have an operation
        adapts = any(process.attribute(one, "lora_config") for one in (*arguments, *named.values()))
        loaded_model.prepare(model, not invariant, invariant, gates=not (invariant or adapts))
        return model

    load.__module__ = __name__
    BaseModelLoader.load_model = load


def _make_gemm(original: ServerGemm, calls: TunedCalls, operation: Callable[..., Tensor] | None = None) -> ServerGemm:
    """Return the replacement of one of vLLM's functions.

    Args:
        original: vLLM's function.
        calls: of tuned kernels.
        operation: what torch.compile traces; None for vLLM's function, whose product Inductor calls by name.
    """

    def served_gemm(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, bias = plain(weight), plain(bias)
        if not serves_weight(weight) or not x.is_cuda:
            return original(layer, x, weight, bias)
        if torch.compiler.is_compiling():
            traced: Tensor = operation(x, weight, bias) if operation else original(layer, x, weight, bias)
            return traced
        call = calls.find(x, weight, bias)
        return original(layer, x, weight, bias) if call is None else call(x, weight, bias, None)

    process.require_parameters(original, served_gemm)
    return served_gemm
