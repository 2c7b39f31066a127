"""Serves SGLang's mixtures of experts where tuned rows hold for both products of a call, else by SGLang's function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.integrations.process import attribute, factors_of_experts, plain
from tritongemm.integrations.process import make_hook as make_server_hook
from tritongemm.operations.mixture import MixtureOperands
from tritongemm.serving import server_calls

TARGET: Final = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts"
_FIRST: Final = ("hidden_states", "w1", "w2", "topk_output", "moe_runner_config")  # parameters of the function
_OTHER_MIXTURES: Final = (
    "no_combine",
    "apply_router_weight_on_input",
    "gemm1_alpha",
    "gemm1_beta",
    "gemm1_clamp_limit",
    "swiglu_limit",
)
FACTOR: Final = "routed_scaling_factor"  # of the sum over a token's experts, in DeepSeek's models
_FACTORS: Final = frozenset({"use_fp8_w8a8", "w1_scale", "w2_scale"})


def make_hook() -> Callable[..., Any]:
    """Return the function that SGLang calls around its own: ``hook(original, hidden_states, w1, w2, topk_output, …)``.

    Mixtures of other kinds are given to the function itself; so are all that torch.compile traces, and all while
    results must not depend on the batch.
    """
    from sglang.srt import batch_invariant_ops

    def read(own: Any, *given: Any, **named: Any) -> Any:
        asked = {**dict(zip(_FIRST, given, strict=False)), **named}
        if len(given) > len(_FIRST) or torch.compiler.is_compiling():
            return None
        x, w1, w2, config = asked["hidden_states"], plain(asked["w1"]), plain(asked["w2"]), asked["moe_runner_config"]
        scales = _scales(w1, w2, x.dtype, {name: value for name, value in asked.items() if name not in _FIRST})
        if (
            scales is None
            or not is_plain(config)
            or not (w1.is_contiguous() and w2.is_contiguous())
            or batch_invariant_ops.is_batch_invariant_mode_enabled()
        ):
            return None
        weights, ids, *_ = asked["topk_output"]
        operands = MixtureOperands(x, w1, w2, weights, ids, "silu", *scales)

        def compute(changed: MixtureOperands) -> Any:
            routed = asked["topk_output"]._replace(topk_ids=changed.topk_ids)
            return own.func(**{**asked, "hidden_states": changed.x, "topk_output": routed})

        return partial(server_calls.mixture_or, operands, compute, attribute(config, FACTOR) or 1.0)

    return make_server_hook("SGLang", "mixture of experts", read)


def is_plain(config: Any) -> bool:
    """Return whether a mixture is gated by SiLU, with nothing but a factor done to its values."""
    return (
        config.activation == "silu"
        and attribute(config, "is_gated", True)
        and not any(attribute(config, name) for name in _OTHER_MIXTURES)
    )


def _scales(
    w1: Tensor, w2: Tensor, dtype: torch.dtype, named: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None] | None:
    """Return the factors of both weights, None for none; None for mixtures neither plain nor fp8 in blocks or rows."""
    given = {name for name, value in named.items() if value is not None and value is not False}
    if not given:
        return (None, None) if w1.dtype == w2.dtype == dtype else None
    if given - _FACTORS not in ({"block_shape"}, {"per_channel_quant"}):
        return None
    in_rows = "per_channel_quant" in given
    of_w1, of_w2 = (factors_of_experts(w, named.get(f"{name}_scale"), in_rows) for name, w in (("w1", w1), ("w2", w2)))
    return None if of_w1 is None or of_w2 is None else (of_w1, of_w2)
