"""Stand-ins of the servers' modules with Triton kernels for fp8 in blocks: the names and parameters of vLLM 0.33 and
SGLang 0.5.23. They read what they are given by its strides, as the kernels do, and compute in float64."""

import math
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

BLOCK = 128
VLLM_PRODUCT = "vllm.model_executor.layers.quantization.utils.fp8_utils"
VLLM_EXPERTS = "vllm.model_executor.layers.fused_moe.fused_moe"
SGLANG_PRODUCT = "sglang.kernels.ops.gemm.fp8_kernel"
SGLANG_EXPERTS = "sglang.kernels.ops.moe.fused_moe_triton_kernels"
PRODUCT = (
    "A B C As Bs M N K group_n group_k stride_am stride_ak stride_bk stride_bn stride_cm stride_cn stride_As_m "
    "stride_As_k stride_Bs_k stride_Bs_n BLOCK_SIZE_M BLOCK_SIZE_N BLOCK_SIZE_K GROUP_SIZE_M"
)


class Kernel:
    """A function as ``triton.jit`` decorates it; `launches` has the grid, arguments and options of each."""

    def __init__(self, fn: Callable[..., None], compute: Callable[..., None]) -> None:
        self.fn, self._compute = fn, compute
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**given: Any) -> None:
            self.launches.append((grid, given))
            self._compute(**{name: value for name, value in given.items() if name not in ("num_warps", "num_stages")})

        return launch


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's modules, to be imported until the test ends; by their names."""
    return _install(
        monkeypatch,
        {
            VLLM_PRODUCT: {"_w8a8_triton_block_scaled_mm": Kernel(_taking(PRODUCT), _product)},
            VLLM_EXPERTS: {"invoke_fused_moe_triton_kernel": _launch_vllms},
        },
    )


def install_sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Have a stand-in of SGLang's kernels be imported, as `install_vllm` does for vLLM."""
    masked = f"{PRODUCT} needs_masking"
    plain = Kernel(_taking(masked), _product)
    hopper = Kernel(_taking(f"{masked} SWAP_AB SPLIT_K", SWAP_AB=False, SPLIT_K=1), _product)
    modules: dict[str, dict[str, Any]] = {
        SGLANG_PRODUCT: {
            "select_w8a8_block_fp8_matmul_kernel": lambda M, N, META: plain,
            "_w8a8_block_fp8_matmul": plain,
            "_w8a8_block_fp8_matmul_hopper": hopper,
            "_reduce_block_fp8_split_k": Kernel(_taking("Parts Out ELEMENTS SPLITS BLOCK"), _added),
        },
        SGLANG_EXPERTS: {"invoke_fused_moe_kernel": _launch_sglangs},
    }
    return _install(monkeypatch, modules)


def _install(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, members in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in made:
                made[name] = ModuleType(name)
                made[name].__spec__, made[name].__path__ = ModuleSpec(name, None, origin="stand-in"), []
                monkeypatch.setitem(sys.modules, name, made[name])
        vars(made[path]).update(members)
    return made


def _taking(names: str, **defaults: Any) -> Callable[..., None]:
    """A function of these parameters, of which alone it is asked."""

    def function(**given: Any) -> None: ...

    kind = Parameter.KEYWORD_ONLY
    parameters = [Parameter(name, kind, default=defaults.get(name, Parameter.empty)) for name in names.split()]
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return function


def _product(**given: Any) -> None:
    """A product, or the sums of its splits, of operands with any strides."""
    m, n, k, split = given["M"], given["N"], given["K"], given.get("SPLIT_K", 1)
    a = _at(given["A"], (m, k), given["stride_am"], given["stride_ak"])
    b = _at(given["B"], (k, n), given["stride_bk"], given["stride_bn"])
    groups, columns = -(-k // given["group_k"]), -(-n // given["group_n"])
    of_a = _at(given["As"], (m, groups), given["stride_As_m"], given["stride_As_k"])
    of_b = _at(given["Bs"], (groups, columns), given["stride_Bs_k"], given["stride_Bs_n"])
    left = a * of_a.repeat_interleave(BLOCK, 1)[:, :k]
    right = b * of_b.repeat_interleave(BLOCK, 0)[:k].repeat_interleave(BLOCK, 1)[:, :n]
    deep = math.ceil(math.ceil(k / given["BLOCK_SIZE_K"]) / split) * given["BLOCK_SIZE_K"]
    parts = [left[:, i * deep : (i + 1) * deep] @ right[i * deep : (i + 1) * deep] for i in range(split)]
    assert given["C"].stride()[-2:] == (given["stride_cm"], given["stride_cn"])
    given["C"].copy_(torch.stack(parts) if split > 1 else parts[0])


def _added(Parts: Tensor, Out: Tensor, ELEMENTS: int, SPLITS: int, BLOCK: int) -> None:
    assert Parts.shape[0] == SPLITS and Out.numel() == ELEMENTS and BLOCK
    Out.copy_(Parts.sum(0))


def _at(tensor: Tensor, shape: tuple[int, int], *strides: int) -> Tensor:
    return tensor.as_strided(shape, strides).double()


def _launch_vllms(
    A: Tensor, B: Tensor, C: Tensor, A_scale: Tensor, B_scale: Tensor, topk_weights: Tensor | None,
    sorted_token_ids: Tensor | None, expert_ids: Tensor, num_tokens_post_padded: Tensor, mul_routed_weight: bool,
    top_k: int, config: dict[str, int], compute_type: Any, use_fp8_w8a8: bool, use_int8_w8a8: bool,
    use_int8_w8a16: bool, use_int4_w4a16: bool, per_channel_quant: bool, block_shape: list[int] | None = None,
    B_bias: Tensor | None = None,
) -> None:  # fmt: skip
    assert use_fp8_w8a8 and not (use_int8_w8a8 or use_int8_w8a16 or use_int4_w4a16 or per_channel_quant)
    assert block_shape == [BLOCK, BLOCK] and str(compute_type) == "bf16" and topk_weights is None
    _experts(A, B, C, A_scale, B_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, top_k, config)


def _launch_sglangs(
    A: Tensor, B: Tensor, bias: Tensor | None, C: Tensor, A_scale: Tensor, B_scale: Tensor, B_zp: Tensor | None,
    topk_weights: Tensor, topk_ids: Tensor, sorted_token_ids: Tensor, expert_ids: Tensor,
    num_tokens_post_padded: Tensor, mul_routed_weight: bool, top_k: int, config: dict[str, int], compute_type: Any,
    use_fp8_w8a8: bool, use_int8_w8a8: bool, use_int8_w8a16: bool, use_int4_w4a16: bool, per_channel_quant: bool,
    block_shape: list[int] | None = None, no_combine: bool = False, a_use_tma: bool = False, b_use_tma: bool = False,
    c_sorted: bool = False, filter_expert: bool = True,
) -> None:  # fmt: skip
    assert bias is None and B_zp is None and topk_ids.numel() == A.shape[0] * top_k
    assert topk_weights.stride(1) == 1 and sorted_token_ids.stride(0) == 1
    _experts(A, B, C, A_scale, B_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, top_k, config)


def _experts(
    a: Tensor, b: Tensor, c: Tensor, of_a: Tensor, of_b: Tensor, rows: Tensor | None, experts: Tensor, used: Tensor,
    top_k: int, config: Mapping[str, int],
) -> None:  # fmt: skip
    """The rows of each block times the expert of the block; a number that is none of a row is passed over."""
    block, (_, n, k) = config["BLOCK_SIZE_M"], b.shape
    assert c.shape == (a.shape[0], top_k, n) and b.stride(2) == 1
    assert experts.dtype == used.dtype == torch.int32 and used.item() % block == 0
    for place in range(int(used) // block):
        mine = torch.tensor([place]) if rows is None else rows[place * block : (place + 1) * block].long()
        mine = mine[mine < a.shape[0]]
        expert = int(experts[place])
        left = a[mine].double() * of_a[mine].double().repeat_interleave(BLOCK, 1)[:, :k]
        spread = of_b[expert].double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        c[mine, 0] = (left @ (b[expert].double() * spread).T).to(c.dtype)
