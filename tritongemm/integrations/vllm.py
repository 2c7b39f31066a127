"""vLLM's general plug-in: a table of TRITONGEMM_CONFIG serves its linear layers, plain or fp8 in blocks.

vLLM asks `dispatch_unquantized_gemm` for a function when a layer is made, which answers with one of two functions of
`vllm.model_executor.layers.utils`. The plug-in, which vLLM calls in each process before, puts others in their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritongemm.integrations.process import LOG, OpaqueOperation, serves_weight, speak_through, start_serving
from tritongemm.operations.torch_products import torch_linear
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import LinearFunction, TunedCalls

ServerGemm = Callable[..., Tensor]  # of a layer, x, its weight and a bias


def register() -> None:
    """Serve vLLM's linear layers, plain or fp8 in blocks, in this process; the entry point. It may be called again.

    Without TRITONGEMM_CONFIG nothing is imported or changed. A layer whose N and K no row has, and one with another
    ``--linear-backend``, is computed as without us; so is everything under VLLM_BATCH_INVARIANT.
    """
    digest = start_serving()
    if not digest:
        return
    from vllm import envs
    from vllm.model_executor.layers import utils

    speak_through("vllm")
    try:
        _hook(envs, utils, digest)
        _hook_blocks(envs)
    except AttributeError as error:
        LOG.error("this vLLM is not as the plug-in knows it (%s); nothing is served by tuned kernels", error)


def _hook(envs: Any, utils: Any, digest: str) -> None:
    """Replace vLLM's functions by ours, which call the replaced one where no row holds for a call.

    Raises:
        AttributeError: vLLM has not what is replaced; nothing was.
    """
    if envs.VLLM_BATCH_INVARIANT:
        LOG.warning("VLLM_BATCH_INVARIANT is set: tuned kernels differ from batch to batch, so none is served")
        return
    default, rocm, compute_rocm = (
        utils.default_unquantized_gemm,
        utils.rocm_unquantized_gemm,
        utils.rocm_unquantized_gemm_impl,
    )
    # The key of vLLM's compile cache holds the value of each variable in this list, and a graph with our operation is
    # another one. Variables in it are also copied to the workers that Ray starts.
    envs.environment_variables["TRITONGEMM_CONFIG"] = lambda: digest
    if default.__module__ != __name__:
        utils.default_unquantized_gemm = _make_gemm(default, "vllm_linear", torch_linear)
        utils.rocm_unquantized_gemm = _make_gemm(rocm, "vllm_rocm_linear", compute_rocm)


def _hook_blocks(envs: Any) -> None:
    """Serve vLLM's fp8 layers in blocks by tuned kernels, where a row has scales.

    Raises:
        AttributeError: vLLM has not what is wrapped.
    """
    if envs.VLLM_BATCH_INVARIANT or not default_dispatcher().scaled_weights:
        return
    from vllm.model_executor.kernels import linear

    from tritongemm.integrations import vllm_fp8

    if vllm_fp8.__name__ not in vars(linear):  # It stays there as long as vLLM's own kernels.
        kept = vllm_fp8.hook(linear)
        setattr(linear, vllm_fp8.__name__, kept)


def _make_gemm(original: ServerGemm, name: str, compute: LinearFunction) -> ServerGemm:
    """Return the replacement of one of vLLM's functions.

    Args:
        original: vLLM's function.
        name: of the opaque operation.
        compute: what vLLM's function computes by, without the layer; it computes what no row holds for in the
            operation.
    """
    calls = TunedCalls(default_dispatcher(), compute)
    operation = OpaqueOperation(name, calls)

    def served_gemm(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not serves_weight(weight) or not x.is_cuda:
            return original(layer, x, weight, bias)
        if torch.compiler.is_compiling():
            result: Tensor = operation.call(x, weight, bias)
            return result
        call = calls.find(x, weight, bias)
        return original(layer, x, weight, bias) if call is None else call(x, weight, bias, None)

    return served_gemm
