import json
from pathlib import Path
from typing import Any

from tests.cpu.workloads import test_model_sizes as model_sizes
from tests.support.model_configs import without_transformers  # noqa: F401
from tests.support.nouns import Defaults, cases, each, refuses
from tritongemm.workloads.model_sizes import ModelSizes, from_model

DEEPSEEK_V3: dict[str, Any] = model_sizes.DEEPSEEK_V3 | {
    "num_experts_per_tok": 8, "num_nextn_predict_layers": None,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
GPT_OSS = model_sizes.GPT_OSS | {"num_experts_per_tok": 4}


def sizes_of(folder: Path, config: object, defaults: Defaults | None = None) -> ModelSizes:
    (folder / "config.json").write_text(json.dumps(config))
    return from_model(folder, 8, (1, 16), defaults or Defaults())


def test_layers_of_a_model_in_blocks_are_of_that_family(tmp_path: Path) -> None:
    found = sizes_of(tmp_path, DEEPSEEK_V3)
    keys = {row.callers[0].removeprefix("layers.*."): row.problem.key for row in found.rows if row.problem.m == 16}
    fp8 = "fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_blockscale"
    assert keys["self_attn.fused_qkv_a_proj"] == f"16x2112x7168_{fp8}"
    assert keys["mlp.gate"] == "16x256x7168_bf16_TN" and keys["lm_head"] == "16x16160x7168_bf16_TN"
    assert found.remarks[-1].endswith("fp8 (fp8), family a8w8_blockscale, but for layers.*.mlp.gate, lm_head")
    assert not any("cut blocks" in remark for remark in found.remarks)
    cut = from_model(tmp_path, 32, (1,), Defaults()).remarks
    assert any("down_proj: parts of K cut blocks of 128 that share a factor, which" in remark for remark in cut)
    # The family by name is the same, with factors as they are asked for.
    named = sizes_of(tmp_path, DEEPSEEK_V3, Defaults(family="a8w8_blockscale", scales="block_tma"))
    assert {row.problem.key.removesuffix("_block_tma") for row in named.rows} == {row.problem.key for row in found.rows}
    assert "a8w8_blockscale --scales block_tma, but for" in named.remarks[-1]


def test_a_layer_that_the_file_leaves_out_is_not_quantised(tmp_path: Path) -> None:
    """It counts for itself, and is not joined with quantised ones."""
    names = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj"]
    left_out = DEEPSEEK_V3["quantization_config"] | {"modules_to_not_convert": names}
    found = sizes_of(tmp_path, DEEPSEEK_V3 | {"quantization_config": left_out})
    counts = {(row.callers[0].removeprefix("layers.*."), row.problem.family): row.count for row in found.rows}
    assert counts["self_attn.o_proj", "dense"] == 1 and counts["self_attn.o_proj", "a8w8_blockscale"] == 60
    assert counts["mlp.gate_up_proj", "a8w8_blockscale"] == 2
    assert counts["mlp.up_proj", "dense"] == counts["mlp.gate_proj", "a8w8_blockscale"] == 1


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 2, "num_key_value_heads": 8, "torch_dtype": "bfloat16", "vocab_size": 1000,
}  # fmt: skip


def compressed(kind: str, strategies: tuple[str, str], **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategies[0], "symmetric": True, "block_structure": None}
    inputs = {"num_bits": 8, "type": kind, "strategy": strategies[1], "symmetric": True, "dynamic": True}
    if strategies[0] == "block":
        weights["block_structure"], inputs["group_size"] = [128, 128], 128
    group = {"weights": weights | changes, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def int4(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    group = {"weights": weights | changes, "input_activations": None, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}
INT4, NVFP4 = "bf16-int4-bf16_TN_a16w4", "bf16-fp4e2m1-bf16_TN_a16w4_weight_16"
FP8, BY_TENSOR = "fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8", "fp8e4m3fn-fp8e4m3fn-bf16_TN_a8w8_tensor"


@cases(
    (compressed("float", ("block", "group")), f"{FP8}_blockscale"),
    (compressed("float", ("channel", "token")), FP8),
    (compressed("float", ("tensor", "tensor")), BY_TENSOR),
    (compressed("int", ("channel", "token")), "int8-int8-bf16_TN_a8w8"),
    (compressed("int", ("block", "group")), "bf16_TN"),
    (compressed("float", ("block", "group"), block_structure=[64, 64]), "bf16_TN"),
    (compressed("float", ("channel", "token"), num_bits=4), "bf16_TN"),
    (compressed("int", ("channel", "token"), symmetric=False), "bf16_TN"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, BY_TENSOR),
    ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, BY_TENSOR),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, NVFP4),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "bf16_TN"),
    (int4(type="float", strategy="tensor_group", group_size=16), NVFP4),
    (compressed("float", ("tensor_group", "tensor_group"), num_bits=4, group_size=16), NVFP4),
    (int4(type="float", strategy="tensor_group", group_size=32), "bf16_TN"),
    ({"quant_method": "fbgemm_fp8"}, FP8),
    ({"quant_method": "fp8", "activation_scheme": "static"}, BY_TENSOR),
    (int4(), f"{INT4}_weight_128"),
    (int4(strategy="channel"), f"{INT4}_weight_128"),
    (int4(group_size=16), "bf16_TN"),
    (int4(actorder="group"), "bf16_TN"),
    (int4(type="float"), "bf16_TN"),
    (int4(type="float", group_size=32), "bf16-fp4e2m1-bf16_TN_a16w4_weight_mx"),
    (GPTQ, f"{INT4}_weight_64"),
    (GPTQ | {"desc_act": True}, "bf16_TN"),
    (GPTQ | {"bits": 8}, "bf16_TN"),
    (GPTQ | {"dynamic": {"+:.*mlp.*": {"bits": 8}}}, "bf16_TN"),
    (GPTQ | {"lm_head": True}, "bf16_TN"),
    (AWQ, f"{INT4}_weight_128"),
    (AWQ | {"zero_point": True}, f"{INT4}_weight_128_zeros"),
    (int4(symmetric=False, group_size=96), f"{INT4}_weight_32_zeros"),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "bf16_TN"),
)
def test_quantised_as_tools_write_it(quantised: dict[str, Any], key: str, /, tmp_path: Path) -> None:
    found = sizes_of(tmp_path, LLAMA | {"quantization_config": quantised})
    keys = {row.callers[0]: row.problem.key.partition("_")[2] for row in found.rows}
    assert keys.pop("lm_head") == "bf16_TN" and set(keys.values()) == {key}
    assert ("the sizes are right, but" in found.remarks[-1]) == (key == "bf16_TN")


@each("place", ["text_config", "compression_config", "hf_quant_config.json", "quantize_config.json"])
def test_what_is_quantised_may_stand_elsewhere(tmp_path: Path, place: str) -> None:
    """In a nested text part, under an older key, or in a file of an older tool beside the model's."""
    values = {key: value for key, value in GPTQ.items() if place[:5] != "quant" or key != "quant_method"}
    gemma: dict[str, Any] = model_sizes.GEMMA3_4B
    nested = gemma | {"text_config": gemma["text_config"] | {"quantization_config": values}}
    if place.endswith(".json"):
        (tmp_path / place).write_text(json.dumps(values))
    found = sizes_of(tmp_path, nested if place == "text_config" else LLAMA | {place: values})
    assert {row.problem.family for row in found.rows} == {"a16w4", "dense"}


def test_factors_of_int4_and_blocks_of_other_sizes(tmp_path: Path) -> None:
    found = sizes_of(tmp_path, LLAMA | {"torch_dtype": "float16", "quantization_config": GPTQ})
    keys = {row.problem.key.partition("_")[2] for row in found.rows}
    assert keys == {"fp16_TN", "fp16-int4-fp16_TN_a16w4_weight_64_fp16"}
    assert "its weights are int4 (gptq), family a16w4 --scales weight_64" in found.remarks[-1]
    config = DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}
    assert any("quantised (fp8)" in text for text in sizes_of(tmp_path, config).remarks)
    wrong = DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": "lm_head"}}
    refuses("modules_to_not_convert must be a list of names", sizes_of, tmp_path, wrong)
    wrong = LLAMA | {"quantization_config": AWQ | {"dynamic": ["mlp"]}}
    refuses("dynamic must be a map", sizes_of, tmp_path, wrong)


@each("pattern", ["re:.*self_attn.*", "*.self_attn*", "re:model[.]layers[.]\\d+[.]self_attn", "self_attn"])
def test_ignored_modules_are_named_in_several_ways(tmp_path: Path, pattern: str) -> None:
    ways = [compressed("float", ("channel", "token")) | {"ignore": [pattern]}]
    dynamic: dict[str, Any] = {"dynamic": {f"-:{pattern[3:]}": {}, "lm_head": {}}}
    ways += [GPTQ | dynamic, AWQ | dynamic] if pattern.startswith("re:") else []
    for quantised in ways:
        rows = sizes_of(tmp_path, LLAMA | {"quantization_config": quantised}).rows
        assert {"self_attn" in row.callers[0] for row in rows if row.problem.family == "dense"} == {True, False}
        assert not any("self_attn" in row.callers[0] for row in rows if row.problem.family != "dense")


@each("pattern", ["re:(a+)+$", "re:" + "x" * 300, "*" * 50, "re:["])
def test_an_expression_can_not_stop_the_run(tmp_path: Path, pattern: str) -> None:
    quantised = compressed("float", ("channel", "token")) | {"ignore": [pattern]}
    refuses("quantization_config ignores", sizes_of, tmp_path, LLAMA | {"quantization_config": quantised})


@each("said", [Defaults.of("bf16"), Defaults(family="a8w8")])
def test_the_users_word_goes_before_the_files(tmp_path: Path, said: Defaults) -> None:
    found = sizes_of(tmp_path, DEEPSEEK_V3, said)
    assert {row.problem.family for row in found.rows} == {said.family}
    assert any("quantised (fp8)" in text for text in found.remarks)


def test_experts_are_products_of_groups_without_their_biases(tmp_path: Path) -> None:
    """The rows of a call are those of all tokens' experts."""
    rows = [row for row in sizes_of(tmp_path, DEEPSEEK_V3).rows if row.problem.groups is not None]
    assert [(r.problem.m, r.problem.n, r.problem.k) for r in rows] == [
        (8, 512, 7168), (128, 512, 7168), (8, 7168, 256), (128, 7168, 256),
    ]  # fmt: skip
    assert {(r.problem.group_count, r.count, r.operation) for r in rows} == {(256, 58, "grouped_mm")}
    assert rows[0].callers == ("layers.*.mlp.experts.gate_up_proj",)
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": names}
    found = sizes_of(tmp_path, GPT_OSS | {"quantization_config": quantised})
    experts = {row.problem.key for row in found.rows if row.problem.m == 64}
    fp4 = "bf16-fp4e2m1-bf16_TN_groups128_a16w4_weight_mx"
    assert experts == {f"64x720x2880_{fp4}", f"64x2880x360_{fp4}"}
    assert {row.problem.family for row in found.rows if not row.problem.groups} == {"dense"}
