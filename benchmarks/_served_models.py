"""The models of `served_model.py`: classes of transformers with random weights, in bf16, and their fp8 twins."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tritongemm.serving import served_layers

_LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
# By name: the class of transformers without its ending, and the widths of Llama 3 8B, Qwen 2.5 7B, Qwen 3 30B-A3B and
# Mixtral 8x7B.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "qwen2": (
        "Qwen2",
        {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
         "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    ),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}),
}  # fmt: skip
FP8 = "-fp8"
BLOCK = 128


def names() -> list[str]:
    """What --model can be."""
    return sorted(name + ending for name in MODELS for ending in ("", FP8))


def make_model(name: str, layers: int, vocabulary: int, device: str = "cuda", **widths: Any) -> Any:
    """The model of random weights in bf16; of a name that ends in ``-fp8`` what its fp8 twin is made of."""
    import transformers

    kind, usual = MODELS[name.removesuffix(FP8)]
    config = getattr(transformers, f"{kind}Config")(
        **{**usual, **widths}, num_hidden_layers=layers, vocab_size=vocabulary
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            made = getattr(transformers, f"{kind}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return made.eval()


def to_fp8(model: Any) -> Any:
    """A copy whose linear layers and experts, but for the LM head, are transformers' own of fp8 in blocks."""
    from transformers.integrations import finegrained_fp8
    from transformers.utils.quantization_config import FineGrainedFP8Config

    twin = copy.deepcopy(model)
    config = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))
    finegrained_fp8.replace_with_fp8_linear(twin, modules_to_not_convert=["lm_head"], quantization_config=config)
    for name, module in twin.named_modules():
        if served_layers.is_fp8_layer(module):
            pairs = [("weight", "weight_scale_inv")]
        elif type(module).__name__ == "FP8Experts":
            pairs = [(part, f"{part}_scale_inv") for part in ("gate_up_proj", "down_proj")]
        else:
            continue
        former = model.get_submodule(name)
        for part, scale in pairs:
            q, factors = quantise_weight(getattr(former, part).detach())
            setattr(module, part, nn.Parameter(q, requires_grad=False))
            setattr(module, scale, nn.Parameter(factors, requires_grad=False))
        if getattr(former, "bias", None) is not None:
            module.bias = nn.Parameter(former.bias.detach().clone(), requires_grad=False)
    return twin.eval()


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [..., N, K] in fp8, and the factors of its blocks."""
    *_, n, k = weight.shape
    padded = nn.functional.pad(weight, (0, -k % BLOCK, 0, -n % BLOCK)).float()
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    factors = (blocks.abs().amax((-3, -1), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(1e-12)
    q = (blocks / factors).flatten(-2).flatten(-3, -2)[..., :n, :k].to(torch.float8_e4m3fn)
    return q.contiguous(), factors.squeeze((-3, -1)).contiguous()


def serve_all(model: nn.Module) -> None:
    """Give a model's fp8 layers and experts the classes of `tritongemm.patch`, with rows or without.

    So they run where transformers' own kernels are missing, and a capture sees them.
    """
    for module in model.modules():
        if served_layers.is_fp8_layer(module):
            module.__class__ = served_layers.served_class(served_layers.ServedFP8Linear, type(module))
        elif served_layers.is_mixture(module):
            module.__class__ = served_layers.served_class(served_layers.ServedExperts, type(module))


def restore(model: nn.Module) -> None:
    """Undo `serve_all`."""
    for module in model.modules():
        if isinstance(module, served_layers.ServedExperts):
            module.__class__ = type(module).__mro__[2]
        elif isinstance(module, served_layers.ServedFP8Linear):
            module.__class__ = type(module).__mro__[1]
