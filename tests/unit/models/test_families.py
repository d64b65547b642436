"""All families: sizes of published models, names in both directions, refusals, and tensors that are no parameter."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from vime.data.tiny_model import TINY_FAMILIES, TinyShape, tiny_config
from vime.errors import ConfigError, DataError
from vime.facts.model import Latent
from vime.models.base import Join, Llama3Scaling, YarnScaling, is_carried, unknown_names
from vime.models.registry import FAMILIES, family_of
from vime.models.tensors import tensor_sizes

GLM_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN2, 7_615_616_512),  # Qwen2.5-7B
        (LLAMA, 8_030_261_248),  # Llama-3.1-8B
        (GLM_AIR, 106_852_245_504),  # GLM-4.5-Air, as transformers 5.19 counts it
        (DEEPSEEK, 671_026_404_352),  # DeepSeek-V3, without the router's bias
    ],
    ids=["qwen2", "llama", "glm4_moe", "deepseek_v3"],
)
def test_a_known_model_has_its_known_size(config: dict[str, Any], parameters: int) -> None:
    assert family_of(config).shape(config).parameters == parameters


def shapes() -> list[TinyShape]:
    plain = TinyShape(320)
    mixture = replace(plain, layers=3, experts=8, tied=False)
    return [
        replace(plain, family="qwen2", hidden=128),
        *(replace(plain, family=family) for family in ("qwen3", "llama")),
        replace(plain, family="llama", tied=False),
        replace(mixture, family="qwen3"),
        *(replace(mixture, family=family) for family in ("glm4_moe", "deepseek_v3")),
        replace(mixture, family="glm4_moe", qk_norm=True, dense_layers=2, shared_experts=0),
        replace(mixture, family="deepseek_v3", q_rank=0, dense_layers=0, shared_experts=2),
    ]


@pytest.mark.parametrize("tiny", shapes(), ids=lambda s: f"{s.family}-{s.experts}")
def test_every_tensor_has_a_name_here_and_there(tiny: TinyShape) -> None:
    """Of all tensors of a folder: sizes add up to the count, names go to Megatron's and back, none is unknown."""
    config = tiny_config(tiny)
    family = family_of(config)
    shape = family.shape(config)
    sizes = dict(tensor_sizes(family, config))
    assert sum(prod(s) for n, s in sizes.items() if not n.endswith("correction_bias")) == shape.parameters
    assert unknown_names(sizes, family.table, shape) == []
    parts: dict[str, set[int]] = {}
    for name in sizes:
        row, megatron, position = family.table.to_megatron(name)
        assert family.table.to_hf(megatron) == (row, family.table.to_hf(megatron)[1])
        assert family.table.to_hf(megatron)[1][position] == name
        parts.setdefault(megatron, set()).add(position)
    for megatron, positions in parts.items():
        assert positions == set(range(len(family.table.to_hf(megatron)[0].names))), megatron


def test_every_family_has_a_tiny_model() -> None:
    assert {family.name for family in FAMILIES} == set(TINY_FAMILIES)
    with pytest.raises(DataError, match="no tiny model of the family opt"):
        tiny_config(TinyShape(320, family="opt"))
    with pytest.raises(DataError, match="models of the family glm4_moe have experts"):
        tiny_config(TinyShape(320, family="glm4_moe"))
    with pytest.raises(DataError, match="hidden / heads = 16 wide, not 32"):
        tiny_config(TinyShape(320, family="qwen2"))


def test_layers_for_multi_token_prediction_are_carried_and_others_are_not_known() -> None:
    shape = family_of(GLM_AIR).shape(GLM_AIR)
    assert (shape.layers, shape.frozen_layers) == (46, 1)
    names = ["model.layers.46.eh_proj.weight", "model.layers.47.eh_proj.weight", "model.layers.45.eh_proj.weight"]
    assert [is_carried(name, shape) for name in names] == [True, False, False]
    known = "model.layers.45.mlp.experts.127.up_proj.weight"
    table = family_of(GLM_AIR).table
    assert unknown_names([*names, known, known.replace("127", "128"), "lm_head.bias"], table, shape) == [
        *names[1:],
        known.replace("127", "128"),
        "lm_head.bias",
    ]


# ---- what a config means


def test_glm_is_read() -> None:
    family = family_of(GLM_AIR)
    shape, values, rotary = family.shape(GLM_AIR), family.transformer_values(GLM_AIR), family.rotary(GLM_AIR)
    assert (shape.dense_layers, shape.expert_layers, shape.shared_ffn, shape.ffn) == (1, 45, 1408, 10944)
    assert (rotary.percent, rotary.base) == (0.5, 1e6)
    assert family.rotary({**GLM_AIR, "rope_parameters": {"rope_theta": 5, "partial_rotary_factor": 0.25}}).percent == 0.25
    assert values["moe_layer_freq"] == [0] + [1] * 45
    assert values["moe_router_score_function"] == "sigmoid"
    assert (values["moe_router_enable_expert_bias"], values["moe_router_bias_update_rate"]) == (True, 0.0)
    assert (values["add_qkv_bias"], values["qk_layernorm"], values["layernorm_epsilon"]) == (True, False, 1e-5)
    assert "moe_router_num_groups" not in values
    assert family.transformer_values({**GLM_AIR, "use_qk_norm": True})["qk_layernorm"] is True
    row, names = family.table.to_hf("decoder.layers.3.mlp.router.expert_bias")
    assert (row.is_buffer, names) == (True, ("model.layers.3.mlp.gate.e_score_correction_bias",))


def test_deepseek_is_read() -> None:
    family = family_of(DEEPSEEK)
    shape, values = family.shape(DEEPSEEK), family.transformer_values(DEEPSEEK)
    assert shape.latent == Latent(kv_rank=512, q_rank=1536, plain=128, rotary=64, value=128)
    assert (shape.head_dim, shape.value_dim, shape.kv_heads) == (192, 128, 128)
    assert (values["moe_router_num_groups"], values["moe_router_group_topk"]) == (8, 4)
    assert values["moe_router_topk_scaling_factor"] == 2.5
    assert (values["rope_type"], values["rotary_scaling_factor"], values["mscale_all_dim"]) == ("yarn", 40.0, 1.0)
    assert family.rotary(DEEPSEEK).scaling == YarnScaling(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    plain = {**DEEPSEEK, "rope_scaling": None, "q_lora_rank": None}
    assert family.transformer_values(plain)["rope_type"] == "rope"
    assert family.transformer_values(plain)["q_lora_rank"] is None


def test_llama_is_read() -> None:
    family = family_of(LLAMA)
    assert family.rotary(LLAMA).scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert family.shape(LLAMA).head_dim == 128
    assert family.rotary({**LLAMA, "rope_scaling": None}).scaling is None


def test_qwen2_has_a_joined_bias() -> None:
    family = family_of(QWEN2)
    row, names = family.table.to_hf("decoder.layers.1.self_attention.linear_qkv.bias")
    assert (row.join, row.tp_dim) == (Join.QKV, 0)
    assert names == tuple(f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv")


# ---- what is refused


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2, {"head_dim": 64}, "head_dim to 64; only 128"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp"),
        (GLM_AIR, {"norm_topk_prob": False}, "norm_topk_prob"),
        (GLM_AIR, {"num_experts_per_tok": 1}, "does not normalise"),
        (GLM_AIR, {"n_routed_experts": None}, "n_routed_experts"),
        (GLM_AIR, {"first_k_dense_replace": 46}, "leaves none of 46 layers"),
        (DEEPSEEK, {"topk_group": 2}, "scores a group by its best"),
        (DEEPSEEK, {"n_group": 7}, "n_group 7"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK, {"num_key_value_heads": 64}, "num_key_value_heads"),
        (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)(.|\n)*fp8_cast_bf16"),
        (QWEN2, {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
    ],
)
def test_unsupported_settings_are_named(config: dict[str, Any], change: dict[str, Any], words: str) -> None:
    changed = {**config, **change}
    with pytest.raises(ConfigError, match=words):
        family_of(changed).transformer_values(changed)


def test_a_router_that_the_engine_would_read_otherwise_is_refused() -> None:
    without = {key: value for key, value in DEEPSEEK.items() if key != "topk_method"}
    with pytest.raises(ConfigError, match=r'no topk_method(.|\n)*"topk_method": "noaux_tc"'):
        family_of(without).shape(without)


@pytest.mark.parametrize(
    ("config", "scaling", "words"),
    [
        (QWEN2, {"type": "yarn", "factor": 4.0}, "yarn rotary scaling; qwen2 takes default"),
        (LLAMA, {"rope_type": "linear", "factor": 2.0}, "llama takes default or llama3"),
        (LLAMA, {"rope_type": "llama3", "factor": 8.0}, "has no original_max_position_embeddings"),
        (DEEPSEEK, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "mscale 0 and mscale_all_dim 0"),
        (
            DEEPSEEK,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
            "attention_factor 1.5",
        ),
    ],
)
def test_unsupported_rotary_scaling_is_refused(config: dict[str, Any], scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        family_of(config).rotary({**config, "rope_scaling": scaling})
