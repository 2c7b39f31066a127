import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.nouns import Defaults, InputError, Patch, cases
from tritongemm.workloads import meta_model
from tritongemm.workloads.architectures import ARCHITECTURES
from tritongemm.workloads.layer_weights import OUTER_NAMES, join_weights
from tritongemm.workloads.model_config import ModelConfig
from tritongemm.workloads.model_layers import ModelLayers, list_known_weights, list_layers
from tritongemm.workloads.model_sizes import from_model

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_hidden_layers": 2, "num_experts_per_tok": 8, "num_local_experts": 128, "vocab_size": 151936,
}  # fmt: skip
MISTRAL_4 = {
    "model_type": "mistral4", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 2, "vocab_size": 131072,
    "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 0,
}  # fmt: skip
# One config for all known architectures; keys that a class does not know count for nothing there.
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 100, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
SMALL_LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 40,
    "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip


BAMBA = SMALL | {
    "architectures": ["BambaForCausalLM"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
}  # fmt: skip


def config_of(values: dict[str, Any]) -> ModelConfig:
    nested = values.get("text_config")
    return ModelConfig(Path("config.json"), nested if isinstance(nested, dict) else values, values, {})


def layers_of(values: dict[str, Any], tp: int = 1) -> dict[str, tuple[int, int, int, int]]:
    found = list_layers(config_of(values), tp, lambda name: False).layers
    return {one.name.removeprefix("layers.*."): (one.n, one.k, one.groups, n) for one, n in found.items()}


def test_what_transformers_writes_and_language_models_of_another_type(tmp_path: Path) -> None:
    assert layers_of(BAMBA | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}) == layers_of(BAMBA)
    found = layers_of(QWEN3_MOE, 8)
    assert found == {
        "self_attn.qkv_proj": ((4 + 2) * 128, 2048, 1, 2), "self_attn.o_proj": (2048, 512, 1, 2),
        "mlp.experts.gate_up_proj": (192, 2048, 128, 2), "mlp.experts.down_proj": (2048, 96, 128, 2),
        "mlp.gate": (128, 2048, 1, 2), "lm_head": (18992, 2048, 1, 1),
    }  # fmt: skip
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "text_config": MISTRAL_4}
    found = layers_of(values, 4)
    assert found["self_attn.fused_qkv_a_proj"] == (1024 + 256 + 64, 4096, 1, 2)
    assert found["mlp.experts.gate_up_proj"] == (1024, 4096, 128, 2) and "mlp.gate_up_proj" not in found
    (tmp_path / "config.json").write_text(json.dumps(values))
    remarks = " ".join(from_model(tmp_path, 1, (1,), Defaults()).remarks)
    assert re.search(r"outside the language model are not listed: 168 of model.vision_tower, 3 of model.multi", remarks)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_table_agrees_with_the_models(name: str) -> None:
    """Names, sizes, biases, experts and what is not quantised: all of them."""
    known = ARCHITECTURES[name]
    values: dict[str, Any] = SMALL | (SMALL_LATENT if known.latent else {})
    if known.experts and not known.latent:
        number = "num_experts" if name == "Qwen2MoeForCausalLM" else "num_local_experts"
        values |= {number: 6, "num_experts_per_tok": 2}
        values |= {key: 40 for key in ("moe_intermediate_size",) if known.experts.width == key}
        values |= {"shared_expert_intermediate_size": 48} if known.experts.shared_gate else {}
    if "Conditional" in name:
        tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        values = {"text_config": values | {"model_type": known.nested}, "vision_config": tower}
    config = config_of({"architectures": [name], **values})
    built = meta_model.read_meta_model(config, meta_model.find_class(config))
    joined = [
        {each.name: (each.n, each.k, each.bias, each.groups, each.chosen, each.kept) for each in join_weights(weights)}
        for weights in (built.weights, list_known_weights(config, known).weights)
    ]
    assert joined[0] == joined[1] and len(joined[0]) > 10


@cases(
    ({"architectures": ["pipeline"]}, "names 'pipeline'; the installed transformers has no such class"),
    ({"architectures": ["_" + "x" * 300]}, "tritongemm capture records"),
    (QWEN3_MOE | {"hidden_size": "wide"}, r"transformers [\d.]+ can't build Qwen3MoeForCausalLM: .*hidden_size"),
    (BAMBA | {"time_step_limit": "all"}, "BambaForCausalLM: .*'time_step_limit'.*'all'"),
    (QWEN3_MOE | {"num_hidden_layers": 10**7}, "num_hidden_layers must be at most 20000, not 10000000"),
    (QWEN3_MOE | {"kv_lora_rank": 512}, "kv_lora_rank = 512 changes the sizes in a way that is not"),
    (SMALL | {"architectures": ["Gemma3ForConditionalGeneration"]}, "does not read hidden_size = 64 where"),
)  # fmt: skip
def test_what_can_not_be_built(values: dict[str, Any], complaint: str, /) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        layers_of(values)
    assert "config.json" in str(caught.value) and ("tritongemm capture" in str(caught.value)) != (
        "at most" in complaint
    )


def test_a_file_selects_no_code(monkeypatch: Patch) -> None:
    """Kernels of the hub, code beside the file, and the network are out of reach, whatever it says."""
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    hostile = {
        "attn_implementation": "someone/kernel", "_attn_implementation_internal": "someone/kernel",
        "experts_implementation": "someone/kernel", "auto_map": {"AutoModelForCausalLM": "evil--code.Model"},
        "quantization_config": {"quant_method": "gptq"}, "_name_or_path": "someone/model", "trust_remote_code": True,
    }  # fmt: skip
    assert layers_of(QWEN3_MOE | hostile) == layers_of(QWEN3_MOE)


# Values without which the default config of a class describes no model.
_NEEDED: dict[str, dict[str, Any]] = {
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        },
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
    "MinistralForCausalLM": {"head_dim": 128},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
}  # fmt: skip
# Classes that are refused or listed in part, and why.
_EXCEPT = {
    "DbrxForCausalLM": "transformers can't build it from its own config",
    "Gemma3nForConditionalGeneration": "its tower needs timm; the language model alone is listed",
    "Gemma4AssistantForCausalLM": "it has no config without that of another model",
    "LongcatFlashForCausalLM": "it has experts without work, which a server does not multiply by",
}
# Classes that read images, with default configs that describe no model.
_REFUSED_WITH_IMAGES = {
    f"{name}ForConditionalGeneration"
    for name in ("Chameleon", "CohereCompass", "DeepseekOcr2", "Emu3", "Granite4Vision", "HunYuanVL", "Qwen4Exp")
} | {"DiffusionGemmaForBlockDiffusion"}
_NO_MATRIX = re.compile(r"A_log|scale|query|D|.*bias.*|latents|.*embed.*|time_mix.*|mm_input.*|mask_emb|.*_ape")


def _count_elements(model: Any, remarks: str) -> int:
    """Elements of all matrices of a model but for those that look up, normalise or convolve, and those in remarks."""
    total = 0
    for name, module in model.named_modules(remove_duplicate=False):
        is_outside = f" of {'.'.join(name.split('.')[:2])}" in remarks
        if not is_outside and not re.search("Embed|Conv[123]d|Norm|Convolution|ParameterList", type(module).__name__):
            for key, each in module.named_parameters(recurse=False):
                generic = re.sub(r"\.\d+(?=\.)", ".*", f"{OUTER_NAMES.sub('', name)}.{key}")
                is_named = f"{generic} [" in remarks or (
                    ".experts." in generic and f"{generic.rpartition('.')[0]}:" in remarks
                )
                if each.dim() > 1 and not _NO_MATRIX.fullmatch(key) and not is_named:
                    total += each.numel()
    return total


def _default_values(name: str) -> dict[str, Any]:
    import transformers

    config = getattr(transformers, name).config_class(**_NEEDED.get(name, {}))
    return {**json.loads(json.dumps(config.to_dict(), default=str)), "architectures": [name]}


def _names(mapping: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, mapping).values()
    return sorted({name for names in found for name in ([names] if isinstance(names, str) else names)})


def _list(name: str) -> ModelLayers:
    return list_layers(config_of(_default_values(name)), 1, lambda name: False)


@pytest.mark.heavy
def test_every_model_of_transformers_is_listed_to_the_last_element() -> None:
    wrong = {}
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for name in _names("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"):
        try:
            found = _list(name)
            with torch.device("meta"):
                class_ = getattr(transformers, name)
                model = class_(class_.config_class.from_dict(_default_values(name)))
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
            continue
        remarks = " ".join(found.left_out)
        listed = sum(one.n * one.k * one.groups * count for one, count in found.layers.items())
        expected = _count_elements(model, remarks)
        if listed != expected:
            wrong[name] = f"{listed} of {expected}: {listed - expected}"
    assert set(wrong) == set(_EXCEPT), json.dumps(wrong, indent=1)


@pytest.mark.heavy
def test_the_language_model_of_every_model_with_images_is_listed() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    refused = {}
    for name in _names("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        try:
            found = _list(name)
        except Exception as error:
            refused[name] = str(error)
            continue
        assert any("layers.*" in one.name or "layer.*" in one.name or "block" in one.name for one in found.layers), name
        assert not any(re.search("vision|visual|image", one.name) for one in found.layers), name
    assert set(refused) == _REFUSED_WITH_IMAGES, json.dumps(refused, indent=1)
