import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_configs import without_transformers  # noqa: F401
from tests.support.nouns import Defaults, InputError, Patch, cases, refuses
from tritongemm.operations.served_problems import is_layer, layer_problem
from tritongemm.workloads.architectures import ARCHITECTURES
from tritongemm.workloads.model_sizes import DEFAULT_TOKENS, ModelSizes, from_model

QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 8,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_size": 16384, "mlp_bias": False,
    "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126, "num_key_value_heads": 8,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = LLAMA_405B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
}  # fmt: skip
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "torch_dtype": "bfloat16",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8"},
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_hidden_layers": 27, "q_lora_rank": None, "vocab_size": 102400,
    "num_nextn_predict_layers": None, "quantization_config": None,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
QWEN15_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 2, "hidden_size": 2048, "num_experts": 60,
    "intermediate_size": 5632, "mlp_only_layers": [1], "moe_intermediate_size": 1408, "num_attention_heads": 16,
    "num_hidden_layers": 24, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "num_local_experts": 128, "torch_dtype": "bfloat16", "vocab_size": 201088,
}  # fmt: skip


def sizes_of(folder: Path, config: object, tp: int = 1, tokens: tuple[int, ...] = (16,)) -> ModelSizes:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return from_model(folder, tp, tokens, Defaults())


def layers_of(folder: Path, config: object, tp: int = 1) -> dict[str, tuple[int, int, float, str]]:
    """(N, K, count, bias) of each layer, by the last parts of its name."""
    named = [(row, caller) for row in sizes_of(folder, config, tp).rows for caller in row.callers]
    assert len({caller for _, caller in named}) == len(named)
    return {
        caller.removeprefix("layers.*."): (row.problem.n, row.problem.k, row.count, row.problem.bias)
        for row, caller in named
    }


def test_layers_of_models_whose_heads_are_not_their_width_are_as_aiter_ships_them(tmp_path: Path) -> None:
    assert layers_of(tmp_path, QWEN3_32B, 8) == {
        "self_attn.qkv_proj": (1280, 5120, 64, "none"),
        "self_attn.o_proj": (5120, 1024, 64, "none"),
        "mlp.gate_up_proj": (6400, 5120, 64, "none"),
        "mlp.down_proj": (5120, 3200, 64, "none"),
        "lm_head": (18992, 5120, 1, "none"),
    }
    entire = layers_of(tmp_path, QWEN3_32B)
    assert entire["self_attn.qkv_proj"][:2] == (10240, 5120) and entire["self_attn.o_proj"][:2] == (5120, 8192)
    found = [layer[:2] for layer in layers_of(tmp_path, LLAMA_70B, 8).values()]
    assert found[:4] == [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)]
    rows = {row.callers: row.count for row in sizes_of(tmp_path, QWEN15_MOE).rows}
    assert rows["layers.*.mlp.down_proj", "layers.*.mlp.shared_expert.down_proj"] == 24


OF_4_HEADS = LLAMA_70B | {"num_key_value_heads": 4}  # of k and v


@cases(
    (LLAMA_405B, 8, "lm_head", (16032, 16384, 1, "none")),
    (LLAMA_405B | {"vocab_size": 128257}, 8, "lm_head", (16033, 16384, 1, "none")),
    (OF_4_HEADS, 8, "self_attn.qkv_proj", ((8 + 2) * 128, 8192, 80, "none")),
    (OF_4_HEADS, 2, "self_attn.qkv_proj", ((32 + 4) * 128, 8192, 80, "none")),
    (OF_4_HEADS | {"num_key_value_heads": None}, 1, "self_attn.qkv_proj", (3 * 8192, 8192, 80, "none")),
    (QWEN2_7B, 1, "self_attn.qkv_proj", (4608, 3584, 28, "n")),
    (QWEN2_7B, 1, "self_attn.o_proj", (3584, 3584, 28, "none")),
    (DEEPSEEK_V2_LITE, 1, "self_attn.q_proj", (3072, 2048, 27, "none")),  # which is not compressed
    (DEEPSEEK_V2_LITE, 1, "self_attn.kv_a_proj_with_mqa", (576, 2048, 27, "none")),
    (DEEPSEEK_V2_LITE, 1, "mlp.shared_experts.gate_up_proj", (5632, 2048, 26, "none")),
)
def test_layers_of_known_models(config: dict[str, Any], tp: int, name: str, expected: Any, /, tmp_path: Path) -> None:
    assert layers_of(tmp_path, config, tp)[name] == expected


def test_rows_are_those_that_mm_asks_for(tmp_path: Path) -> None:
    rows = sizes_of(tmp_path, QWEN3_32B, 8, (1, 77)).rows
    assert rows[1].problem == layer_problem((77, 1280, 5120), ("bf16", "bf16", "bf16"), "none")
    assert all(is_layer(row.problem) and row.operation == "linear" for row in rows)
    assert [row.problem.m for row in rows] == [1, 77] * 5


def test_biases_are_those_of_the_model_and_one_gpu_adds_that_of_a_sum(tmp_path: Path) -> None:
    """The others call the product without it."""
    llama = layers_of(tmp_path, LLAMA_70B | {"attention_bias": True, "mlp_bias": True})
    assert {layer[3] for name, layer in llama.items() if name != "lm_head"} == {"n"} and llama["lm_head"][3] == "none"
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS | {"num_local_experts": 0}))
    rows = from_model(tmp_path, 8, (1,), Defaults(), every_bias=True).rows
    assert {(row.problem.bias, row.count) for row in rows} == {("none", 36), ("n", 36), ("none", 1), ("n", 1)}
    assert len(rows) == 10
    rows = sizes_of(tmp_path, GPT_OSS, 8).rows
    found = {(row.callers[0], row.problem.bias) for row in rows if "self_attn" in row.callers[0]}
    qkv, o = "layers.*.self_attn.qkv_proj", "layers.*.self_attn.o_proj"
    assert found == {(qkv, "n"), (o, "n"), (o, "none")}


def test_nested_models_and_mixtures_of_experts(tmp_path: Path) -> None:
    found = sizes_of(tmp_path, GEMMA3_4B)
    assert [(row.problem.n, row.problem.k) for row in found.rows] == [
        (4096, 2560), (2560, 2048), (20480, 2560), (2560, 10240), (262208, 2560),
    ]  # fmt: skip
    assert [row.count for row in found.rows] == [34, 34, 34, 34, 1]
    assert found.remarks == (f"{tmp_path}/config.json: the vision part of the model is not listed",)
    mixtral = layers_of(tmp_path, MIXTRAL, 2)
    assert mixtral["mlp.gate"] == (8, 4096, 32, "none") and "mlp.gate_up_proj" not in mixtral
    qwen = layers_of(tmp_path, QWEN15_MOE | {"shared_expert_intermediate_size": 20480})
    assert qwen["mlp.gate"] == (60, 2048, 11, "none"), "every second layer, but for the one that is named"
    assert qwen["mlp.gate_up_proj"] == (11264, 2048, 13, "none")
    assert qwen["mlp.shared_expert_gate"] == (1, 2048, 11, "none")
    assert qwen["mlp.shared_expert.down_proj"] == (2048, 20480, 11, "none") and qwen["self_attn.qkv_proj"][3] == "n"
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in QWEN15_MOE.items()}
    assert layers_of(tmp_path, renamed) == layers_of(tmp_path, QWEN15_MOE)
    assert layers_of(tmp_path, GPT_OSS)["mlp.router"] == (128, 2880, 36, "n")


def test_deepseek_v3_and_gpus_that_can_not_share_a_model(tmp_path: Path) -> None:
    assert layers_of(tmp_path, DEEPSEEK_V3, 8) == {
        "self_attn.fused_qkv_a_proj": (2112, 7168, 61, "none"), "self_attn.q_b_proj": (3072, 1536, 61, "none"),
        "self_attn.kv_b_proj": (4096, 512, 61, "none"), "self_attn.o_proj": (7168, 2048, 61, "none"),
        "mlp.gate_up_proj": (4608, 7168, 3, "none"), "mlp.down_proj": (7168, 2304, 3, "none"),
        "mlp.gate": (256, 7168, 58, "none"), "mlp.shared_experts.gate_up_proj": (512, 7168, 58, "none"),
        "mlp.shared_experts.down_proj": (7168, 256, 58, "none"), "lm_head": (16160, 7168, 1, "none"),
    }  # fmt: skip
    remarks = " ".join(sizes_of(tmp_path, DEEPSEEK_V3, 8).remarks)
    assert "256 experts of 58 layers are grouped products, (N, K) = (512, 7168) and (7168, 256)" in remarks
    assert "kv_b_proj" in remarks and "num_nextn_predict_layers" in remarks and "quantised (fp8)" in remarks
    refuses("qkv_proj has 64 heads, which 3 GPUs can't share; choose another --tp", sizes_of, tmp_path, LLAMA_70B, 3)
    refuses("has 6 heads, which 4 GPUs", sizes_of, tmp_path, LLAMA_70B | {"num_key_value_heads": 6}, 4)
    with pytest.raises(InputError, match="gate_up_proj has 28671 columns, which 2 GPUs"):
        sizes_of(tmp_path, LLAMA_70B | {"intermediate_size": 28671}, 2)


def test_what_is_multiplied(tmp_path: Path) -> None:
    """The model's dtype, where the command line names none; of scaled operands it is the result's."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))

    def dtypes(given: Defaults) -> str:
        return from_model(tmp_path, 8, DEFAULT_TOKENS, given).rows[0].problem.dtypes

    assert dtypes(Defaults()) == "bf16" and dtypes(Defaults.of("fp16")) == "fp16"
    assert dtypes(Defaults(family="a8w8")) == "fp8e4m3fn-fp8e4m3fn-bf16"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B | {"torch_dtype": None, "dtype": "float16"}))
    assert dtypes(Defaults()) == "fp16" and dtypes(Defaults(family="a8w8")).endswith("-fp16")


@cases(
    ("", "line 1: it is not JSON"),
    ('{"architectures": [', "line 1: it is not JSON"),
    ("[1, 2]", r"must hold a map of keys, not \[1, 2\]"),
    ("[" * 100_000, "nested too deeply"),
    ('{"vocab_size": ' + "9" * 5000 + "}", "config.json: "),
    ('{"vocab_size": 1, "vocab_size": 2}', "the key 'vocab_size' is there twice"),
    ({}, "architectures names none; without the package transformers these are known: .*LlamaForCausalLM"),
    ({"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
     "names 'Qwen3_5MoeForConditionalGeneration'; without the package transformers these are known: DeepseekV2.*"
     r"pip install 'tritongemm\[models\]' .* tritongemm capture"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
    ({"architectures": [[]]}, "architectures must be a list of names"),
    (LLAMA_70B | {"hidden_size": None}, "there is no hidden_size, which the sizes of LlamaForCausalLM follow from"),
    (LLAMA_70B | {"hidden_size": "8192"}, "hidden_size must be a whole number from 1 to 2147483647, not '8192'"),
    (LLAMA_70B | {"hidden_size": 8192.0}, "hidden_size must be a whole number"),
    (LLAMA_70B | {"hidden_size": True}, "hidden_size must be a whole number"),
    (LLAMA_70B | {"hidden_size": -8192}, "hidden_size must be a whole number"),
    (LLAMA_70B | {"hidden_size": 8193}, "hidden_size 8193 is no multiple of num_attention_heads 64"),
    (LLAMA_70B | {"head_dim": 2**31 - 1}, r"layers.\*.self_attn.qkv_proj would have N = "),
    (LLAMA_70B | {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, not 1000000000"),
    (LLAMA_70B | {"attention_bias": "no"}, "attention_bias must be true or false, not 'no'"),
    (LLAMA_70B | {"torch_dtype": 7}, "torch_dtype must be text, not 7"),
    (LLAMA_70B | {"torch_dtype": "posit"}, "config.json: unknown dtype 'posit'"),
    (LLAMA_70B | {"torch_dtype": None}, "there is neither torch_dtype nor dtype; name one with -dtype_a"),
    (LLAMA_70B | {"quantization_config": []}, "quantization_config must be a map"),
    (GEMMA3_4B | {"text_config": 3}, "text_config must be a map, not 3"),
    (GEMMA3_4B | {"text_config": {}}, "there is no num_hidden_layers in text_config"),
    (QWEN15_MOE | {"mlp_only_layers": "1"}, "mlp_only_layers must be a list of whole numbers"),
    (QWEN15_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1"),
    (DEEPSEEK_V3 | {"v_head_dim": None}, "there is no v_head_dim"),
    (QWEN15_MOE | {"num_experts": None}, "does not say how many experts there are"),
    (MIXTRAL | {"num_experts": 16}, "says in several ways how many experts there are"),
    (LLAMA_70B | {"num_local_experts": 8}, "num_local_experts = 8 changes the sizes in a way that is not"),
    (LLAMA_70B | {"kv_lora_rank": 512}, "kv_lora_rank = 512 changes the sizes"),
    (LLAMA_70B | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types = .* changes the sizes"),
    (GEMMA3_4B | {"text_config": {"model_type": "mistral4"}}, "of model_type 'mistral4', which is not known"),
)  # fmt: skip
def test_what_a_file_may_do_wrong(config: object, complaint: str, /, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        sizes_of(tmp_path, config)
    assert str(tmp_path / "config.json") in str(caught.value) and len(str(caught.value)) < 1000


def test_no_file_and_a_downloaded_model_by_its_name(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    refuses(r"config\.json: there is no such file", from_model, tmp_path, 1, (1,), Defaults())
    with pytest.raises(
        InputError, match=r"no such folder with a model's config\.json, and no downloaded model of that name"
    ):
        from_model(tmp_path / "absent", 1, (1,), Defaults())
    model, revision = tmp_path / "hub" / "models--Qwen--Qwen3-32B", "0123456789" * 4
    (snapshot := model / "snapshots" / revision).mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_32B))
    (model / "refs").mkdir()
    for said, found in ((revision + "\n", True), (f"../snapshots/{revision}", False), ("main", False)):
        (model / "refs" / "main").write_text(said)
        if found:
            assert len(from_model(Path("Qwen/Qwen3-32B"), 8, (1,), Defaults()).rows) == 5
        else:
            with pytest.raises(InputError, match=f"no downloaded model of that name in {tmp_path}/hub"):
                from_model(Path("Qwen/Qwen3-32B"), 8, (1,), Defaults())


_WRONG = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))
_KEYS = sorted({*QWEN15_MOE, *DEEPSEEK_V3, "head_dim", "text_config", "dtype", "qkv_bias", "vision_config"})


@settings(max_examples=60, deadline=None)
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    changes=st.dictionaries(st.sampled_from(_KEYS), _WRONG, max_size=3),
    tp=st.integers(1, 16),
)
def test_any_value_is_used_or_refused(
    tmp_path_factory: pytest.TempPathFactory, architecture: str, changes: dict[str, Any], tp: int
) -> None:
    config = QWEN15_MOE | DEEPSEEK_V3 | MIXTRAL | {"architectures": [architecture]} | changes
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    try:
        found = sizes_of(folder, config, tp)
    except InputError as error:
        assert "config.json" in str(error)
    else:
        assert found.rows and all(is_layer(row.problem) for row in found.rows)
