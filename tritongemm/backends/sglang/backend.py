"""Backend: SGLang's own Triton kernels for fp8 in blocks, which its tables of tiles set, where SGLang is installed."""

from collections.abc import Mapping
from functools import partial

from tritongemm.backends import _expert_blocks, _server_kernels
from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv
from tritongemm.core.operands import Call, Operands
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target

_PRODUCTS = "sglang.kernels.ops.gemm.fp8_kernel"
_CHOOSE, _HOPPERS, _ADD = (
    "select_w8a8_block_fp8_matmul_kernel",
    "_w8a8_block_fp8_matmul_hopper",
    "_reduce_block_fp8_split_k",
)
_EXPERTS = ("sglang.kernels.ops.moe.fused_moe_triton_kernels", "invoke_fused_moe_kernel")
_ADDED = 256  # elements of C that a program adds up
_HOPPER = {"split_k": (1, 2, 4, 8), "swap_ab": (0, 1)}


class SglangBackend(_server_kernels.ServerBackend):
    """SGLang's kernels of one product and of experts."""

    summary = "SGLang's own Triton kernels of fp8 in blocks, where SGLang is installed; by its name and --for sglang"
    top = "sglang"
    dtypes = ("fp8e4m3fn",)

    def _fields(self, problem: Problem, target: Target) -> Mapping[str, tuple[int, ...]]:
        return _HOPPER if target.name == "sm90" and problem.kind == "one" else {}

    def _product(self, problem: Problem, operands: Operands, config: Config) -> Call:
        masks = {"needs_masking": problem.k % config.block_k != 0}
        if config.split_k == 1 and not config.option("swap_ab"):
            kernel = _server_kernels.find(_PRODUCTS, _CHOOSE)(problem.m, problem.n, _server_kernels.row(config))
            given = _server_kernels.product_arguments(problem, operands) | masks
            return _server_kernels.launcher(kernel, (_server_kernels.tiles(problem, config),), given, config)
        return self._hoppers(problem, operands, config, masks)

    def _hoppers(self, problem: Problem, operands: Operands, config: Config, masks: Mapping[str, object]) -> Call:
        """Return a call of the kernel that can swap operands and split K, and of the one that adds up splits."""
        import torch

        kernel, split, c = _server_kernels.find(_PRODUCTS, _HOPPERS), config.split_k, operands["c"]
        sums = c if split == 1 else torch.empty((split, problem.m, problem.n), device=c.device, dtype=torch.float32)
        given = {**_server_kernels.product_arguments(problem, operands, sums), **masks}
        given |= {"SWAP_AB": bool(config.option("swap_ab")), "SPLIT_K": split}
        multiply = _server_kernels.launcher(kernel, (_server_kernels.tiles(problem, config), split), given, config)
        if split == 1:
            return multiply
        add, count = _server_kernels.find(_PRODUCTS, _ADD), problem.m * problem.n
        arguments = _server_kernels.bound(
            add.fn, {"Parts": sums, "Out": c, "ELEMENTS": count, "SPLITS": split, "BLOCK": _ADDED}
        )

        def call() -> None:
            multiply()
            add[(cdiv(count, _ADDED),)](**arguments)

        return call

    def _of_experts(self, problem: Problem, operands: Operands, config: Config) -> Call:
        import torch

        launch, device = _server_kernels.find(*_EXPERTS), operands["a"].device
        blocks = _expert_blocks.aligned(operands["offsets"], problem.m, config.block_m)
        given = _server_kernels.expert_arguments(problem, operands, config) | {
            "bias": None,
            "B_zp": None,
            "topk_weights": torch.ones((problem.m, 1), device=device),
            "topk_ids": _expert_blocks.experts_of_rows(operands["offsets"], problem.m).unsqueeze(1),
            "sorted_token_ids": blocks.rows,
            "expert_ids": blocks.experts,
            "num_tokens_post_padded": blocks.used,
        }
        return partial(launch, **_server_kernels.bound(launch, given))
