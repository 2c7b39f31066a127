"""Backend: vLLM's own Triton kernels for fp8 in blocks, which its tables of tiles set, where vLLM is installed."""

from functools import partial

from tritongemm.backends import _expert_blocks
from tritongemm.backends._server_kernels import (
    ServerBackend,
    bound,
    expert_arguments,
    find,
    launcher,
    product_arguments,
    tiles,
)
from tritongemm.core.config import Config
from tritongemm.core.operands import Call, Operands
from tritongemm.core.problem import Problem

_PRODUCT = ("vllm.model_executor.layers.quantization.utils.fp8_utils", "_w8a8_triton_block_scaled_mm")
_EXPERTS = ("vllm.model_executor.layers.fused_moe.fused_moe", "invoke_fused_moe_triton_kernel")
_SPARSITY = 4  # With this ratio of experts to rows, vLLM gives each row a block of its own.


class VllmBackend(ServerBackend):
    """vLLM's kernels of one product and of experts."""

    summary = "vLLM's own Triton kernels of fp8 in blocks, where vLLM is installed; by its name and with --for vllm"
    top = "vllm"
    dtypes = ("fp8e4m3fn", "fp8e4m3fnuz")

    def _product(self, problem: Problem, operands: Operands, config: Config) -> Call:
        grid = (tiles(problem, config),)
        return launcher(find(*_PRODUCT), grid, product_arguments(problem, operands), config)

    def _of_experts(self, problem: Problem, operands: Operands, config: Config) -> Call:
        launch = find(*_EXPERTS)
        few = problem.m * _SPARSITY <= problem.group_count
        order = _expert_blocks.one_row_each if few else _expert_blocks.aligned
        blocks = order(operands["offsets"], problem.m, config.block_m)
        given = expert_arguments(problem, operands, config) | {
            "topk_weights": None,
            "sorted_token_ids": blocks.rows,
            "expert_ids": blocks.experts,
            "num_tokens_post_padded": blocks.used,
        }
        return partial(launch, **bound(launch, given))
