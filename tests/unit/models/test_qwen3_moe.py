"""The Qwen3 mixture-of-experts family: sizes by hand, refusals, and its name table in both directions."""

from __future__ import annotations

import pytest

from vime.errors import ConfigError
from vime.models.base import Join
from vime.models.qwen3_moe import FAMILY
from vime.models.registry import family_of

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "moe_intermediate_size": 5,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}
PUBLISHED = {
    **CONFIG,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def test_parameters_are_counted_tensor_by_tensor():
    attention = 12 * 4 + 2 * (6 * 4) + 4 * 12 + 2 * 3
    layer = attention + 3 * 3 * (5 * 4) + 3 * 4 + 2 * 4
    shape = family_of(CONFIG).shape(CONFIG)
    assert shape.parameters == 2 * 10 * 4 + 2 * layer + 4
    assert (shape.experts, shape.experts_per_token, shape.expert_ffn, shape.ffn) == (3, 2, 5, 0)


def test_a_known_model_has_its_known_size():
    assert FAMILY.shape(PUBLISHED).parameters == 30_532_122_624  # Qwen3-30B-A3B


def test_the_number_of_experts_is_found_under_both_names():
    renamed = {k: v for k, v in CONFIG.items() if k != "num_experts"} | {"num_local_experts": 3}
    assert FAMILY.shape(renamed) == FAMILY.shape(CONFIG)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts": None}, "num_experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"num_experts_per_tok": 4}, "4 of 3 experts"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_unsupported_settings_are_named(change, words):
    with pytest.raises(ConfigError, match=words):
        FAMILY.shape({**CONFIG, **change})


def test_the_router_follows_the_config():
    values = FAMILY.transformer_values(CONFIG)
    assert values["moe_router_pre_softmax"] is False
    assert FAMILY.transformer_values({**CONFIG, "norm_topk_prob": False})["moe_router_pre_softmax"] is True
    assert values["moe_router_dtype"] == "fp32"
    assert values["moe_router_load_balancing_type"] == "none"
    assert (values["num_moe_experts"], values["moe_router_topk"], values["moe_ffn_hidden_size"]) == (3, 2, 5)


def test_expert_names_map_forth_and_back():
    name = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    row, names = FAMILY.table.to_hf(name, layer_offset=4, expert_offset=8)
    assert (row.join, row.is_expert) == (Join.GATE_UP, True)
    assert names == tuple(f"model.layers.5.mlp.experts.10.{part}_proj.weight" for part in ("gate", "up"))
    for position, name in enumerate(names):
        there = "decoder.layers.5.mlp.experts.local_experts.10.linear_fc1.weight"
        assert FAMILY.table.to_megatron(name) == (row, there, position)


def test_offsets_of_experts_leave_other_names_alone():
    row, names = FAMILY.table.to_hf("decoder.layers.1.mlp.router.weight", layer_offset=1, expert_offset=8)
    assert (row.is_expert, names) == (False, ("model.layers.2.mlp.gate.weight",))


def test_there_is_no_dense_feed_forward():
    with pytest.raises(ConfigError, match="linear_fc1"):
        FAMILY.table.to_hf("decoder.layers.0.mlp.linear_fc1.weight")
