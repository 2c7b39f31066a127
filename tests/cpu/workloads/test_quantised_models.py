"""Sizes of models whose weights are fp8 in blocks, and of mixtures of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tritongemm.core.errors import InputError
from tritongemm.formats import Defaults
from tritongemm.workloads.model_sizes import ModelSizes, from_model

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536, "num_experts_per_tok": 8,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16", "v_head_dim": 128,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "vocab_size": 129280,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "num_experts_per_tok": 4, "num_local_experts": 128, "torch_dtype": "bfloat16", "vocab_size": 201088,
}  # fmt: skip


def sizes_of(folder: Path, config: object, defaults: Defaults | None = None) -> ModelSizes:
    (folder / "config.json").write_text(json.dumps(config))
    return from_model(folder, 8, (1, 16), defaults or Defaults())


def test_layers_of_a_model_in_blocks_are_of_that_family(tmp_path: Path) -> None:
    found = sizes_of(tmp_path, DEEPSEEK_V3)
    keys = {row.callers[0].removeprefix("layers.*."): row.problem.key for row in found.rows if row.problem.m == 16}
    fp8 = "fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale"
    assert keys["self_attn.fused_qkv_a_proj"] == f"16x2112x7168_{fp8}"
    assert keys["mlp.gate"] == "16x256x7168_bf16_TN" and keys["lm_head"] == "16x16160x7168_bf16_TN"
    (remark,) = (text for text in found.remarks if "in blocks" in text)
    assert remark.endswith("family a8w8_blockscale, but for layers.*.mlp.gate, lm_head")


def test_a_layer_that_the_file_leaves_out_is_not_quantised(tmp_path: Path) -> None:
    left_out = DEEPSEEK_V3["quantization_config"] | {"modules_to_not_convert": ["model.layers.0.self_attn.o_proj"]}
    found = sizes_of(tmp_path, DEEPSEEK_V3 | {"quantization_config": left_out})
    families = {row.callers[0]: row.problem.family for row in found.rows}
    assert families["layers.*.self_attn.o_proj"] == "dense"
    assert families["layers.*.self_attn.q_b_proj"] == "a8w8_blockscale"


@pytest.mark.parametrize("said", [Defaults("bf16"), Defaults(family="a8w8")])
def test_the_users_word_goes_before_the_files(tmp_path: Path, said: Defaults) -> None:
    found = sizes_of(tmp_path, DEEPSEEK_V3, said)
    assert {row.problem.family for row in found.rows} == {said.family}
    assert any("quantised (fp8)" in text for text in found.remarks)


def test_blocks_of_other_sizes_are_named(tmp_path: Path) -> None:
    config = DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}
    assert any("quantised (fp8)" in text for text in sizes_of(tmp_path, config).remarks)
    wrong = DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128"}}
    with pytest.raises(InputError, match="weight_block_size must be a list of whole numbers"):
        sizes_of(tmp_path, wrong)


def test_experts_are_products_of_groups(tmp_path: Path) -> None:
    """The rows of a call are those of all tokens' experts."""
    rows = [row for row in sizes_of(tmp_path, DEEPSEEK_V3).rows if row.problem.groups > 1]
    assert [(r.problem.m, r.problem.n, r.problem.k) for r in rows] == [
        (8, 512, 7168), (128, 512, 7168), (8, 7168, 256), (128, 7168, 256),
    ]  # fmt: skip
    assert {(r.problem.groups, r.count, r.operation) for r in rows} == {(256, 58, "grouped_mm")}
    assert rows[0].callers == ("layers.*.mlp.experts.gate_up_proj",)


def test_experts_with_biases_are_named(tmp_path: Path) -> None:
    found = sizes_of(tmp_path, GPT_OSS)
    assert all(row.problem.groups == 1 for row in found.rows)
    assert any("128 experts of 36 layers are grouped products" in text for text in found.remarks)
