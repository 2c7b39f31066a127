"""vLLM's Marlin and Machete, called as its layers call them. Both read a weight as GPTQ has it, int32 [K / 8, N]."""

from collections.abc import Callable
from typing import Any

from tritongemm.backends._server_kernels import bound, find
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import Scaling

_OPERATIONS, _TYPES = "vllm._custom_ops", "vllm.scalar_type"
_UTILITIES = "vllm.model_executor.layers.quantization.utils.marlin_utils"
_BITS = 4


def marlin(problem: Problem, operands: Operands, weight: Tensor) -> Callable[[], Tensor]:
    """Return a call that computes C of bytes [N, K / 2] by Marlin.

    Raises:
        UnavailableError: vLLM does not load, or has another interface than expected.
        RuntimeError, ValueError: Marlin has no such product.
    """
    import torch

    scaling, factors, zeros, kind = _factors(problem, operands)
    a, sizes, groups = operands["a"], {"size_k": problem.k, "size_n": problem.n}, factors.shape[0]
    nothing = torch.empty(0, dtype=torch.int32, device=a.device)
    zero_points = find(_UTILITIES, "marlin_zero_points")
    repack, permute = find(_OPERATIONS, "gptq_marlin_repack"), find(_UTILITIES, "marlin_permute_scales")
    words = weight.view(torch.int32).t().contiguous()
    given: dict[str, Any] = {
        "a": a, "c": operands["c"], "b_bias": None, "a_scales": None, "global_scale": None, "g_idx": nothing,
        "perm": nothing,
        "b_q_weight": repack(words, nothing, num_bits=_BITS, **sizes),
        "b_scales": permute(factors, group_size=scaling.depth, **sizes),
        "b_zeros": nothing if zeros is None else zero_points(zeros, groups, problem.n, _BITS),
        "workspace": find(_UTILITIES, "marlin_make_workspace_new")(a.device), "b_q_type": kind,
        "size_m": problem.m, **sizes, "is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True,
        "is_zp_float": False,
    }  # fmt: skip
    multiply = find(_OPERATIONS, "marlin_gemm")
    arguments = bound(multiply, given)
    return lambda: multiply(**arguments)


def machete(problem: Problem, operands: Operands, weight: Tensor) -> Callable[[], Tensor]:
    """Return a call that computes C of bytes [N, K / 2] by Machete; errors are those of `marlin`."""
    import torch

    scaling, factors, zeros, kind = _factors(problem, operands)
    a, multiply = operands["a"], find(_OPERATIONS, "machete_mm")
    types = {"a_type": a.dtype, "b_type": kind, "group_scales_type": a.dtype}
    given = {
        "a": a, "b_q": find(_OPERATIONS, "machete_prepack_B")(weight.view(torch.int32).t(), **types),
        "b_type": kind, "b_group_scales": factors, "b_group_size": scaling.depth,
        "b_group_zeros": None if zeros is None else (-factors * zeros.to(a.dtype)).contiguous(),
    }  # fmt: skip
    arguments = bound(multiply, given)
    return lambda: multiply(**arguments)


def _factors(problem: Problem, operands: Operands) -> tuple[Scaling, Tensor, Tensor | None, Any]:
    """Return the granularity, factors and zero points from 0 on [groups, N], if any, and vLLM's name of the type."""
    scaling, given = problem.b.scaling, operands["scale_b"]
    if scaling is None:
        raise ValueError("a weight without factors")
    types = find(_TYPES, "scalar_types")
    if not scaling.zeros:
        return scaling, given, None, types.uint4b8
    return scaling, given[:, 0].contiguous(), (given[:, 1].int() + 8).contiguous(), types.uint4
