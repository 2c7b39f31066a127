"""Backend: vLLM's own Triton kernels for fp8 in blocks, which its tables of tiles set, where vLLM is installed."""

from functools import partial

from tritongemm.backends import _expert_blocks, _server_kernels
from tritongemm.core.config import Config
from tritongemm.core.operands import Call, Operands
from tritongemm.core.problem import Problem

_PRODUCT = ("vllm.model_executor.layers.quantization.utils.fp8_utils", "_w8a8_triton_block_scaled_mm")
_EXPERTS = ("vllm.model_executor.layers.fused_moe.fused_moe", "invoke_fused_moe_triton_kernel")
_SPARSITY = 4  # With this ratio of experts to rows, vLLM gives each row a block of its own.


class VllmBackend(_server_kernels.ServerBackend):
    """vLLM's kernels of one product and of experts."""

    summary = "vLLM's own Triton kernels of fp8 in blocks, where vLLM is installed; by its name and with --for vllm"
    top = "vllm"
    dtypes = ("fp8e4m3fn", "fp8e4m3fnuz")

    def _product(self, problem: Problem, operands: Operands, config: Config) -> Call:
        grid = (_server_kernels.tiles(problem, config),)
        return _server_kernels.launcher(
            _server_kernels.find(*_PRODUCT), grid, _server_kernels.product_arguments(problem, operands), config
        )

    def _of_experts(self, problem: Problem, operands: Operands, config: Config) -> Call:
        launch = _server_kernels.find(*_EXPERTS)
        few = problem.m * _SPARSITY <= problem.group_count
        order = _expert_blocks.one_row_each if few else _expert_blocks.aligned
        blocks = order(operands["offsets"], problem.m, config.block_m)
        given = _server_kernels.expert_arguments(problem, operands, config) | {
            "topk_weights": None,
            "sorted_token_ids": blocks.rows,
            "expert_ids": blocks.experts,
            "num_tokens_post_padded": blocks.used,
        }
        return partial(launch, **_server_kernels.bound(launch, given))
