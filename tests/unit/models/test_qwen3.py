"""The Qwen3 family: sizes by hand, refusals, and its name table in both directions."""

from __future__ import annotations

import json

import pytest

from vime.errors import ConfigError
from vime.models.base import Join
from vime.models.qwen3 import FAMILY
from vime.models.registry import family_of, read_shape

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}


def test_parameters_are_counted_tensor_by_tensor():
    q, kv, o, norms = 12 * 4, 2 * (6 * 4), 4 * 12, 2 * 3
    layer = q + kv + o + norms + 3 * (6 * 4) + 2 * 4
    assert FAMILY.shape(CONFIG).parameters == 10 * 4 + 2 * layer + 4
    assert FAMILY.shape({**CONFIG, "tie_word_embeddings": False}).parameters == 2 * 10 * 4 + 2 * layer + 4


def test_a_known_model_has_its_known_size():
    config = {
        **CONFIG,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert FAMILY.shape(config).parameters == 596_049_920  # Qwen3-0.6B


def test_rope_theta_is_found_in_both_places():
    legacy = {k: v for k, v in CONFIG.items() if k != "rope_parameters"} | {"rope_theta": 5000, "rope_scaling": None}
    assert FAMILY.rotary(legacy).base == 5000.0
    assert FAMILY.rotary(CONFIG).base == 1e6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_unsupported_settings_are_named(change, words):
    with pytest.raises(ConfigError, match=words):
        FAMILY.shape({**CONFIG, **change})


@pytest.mark.parametrize("rope", [{"rope_theta": 1e6, "rope_type": "yarn"}, {"rope_type": "default"}])
def test_unsupported_rotary_settings_are_refused(rope):
    with pytest.raises(ConfigError, match=r"yarn|rope_theta"):
        FAMILY.rotary({**CONFIG, "rope_parameters": rope})


def test_names_map_forth_and_back():
    row, names = FAMILY.table.to_hf("decoder.layers.1.self_attention.linear_qkv.weight", layer_offset=4)
    assert row.join is Join.QKV
    assert names == tuple(f"model.layers.5.self_attn.{x}_proj.weight" for x in "qkv")
    for position, name in enumerate(names):
        assert FAMILY.table.to_megatron(name) == (row, "decoder.layers.5.self_attention.linear_qkv.weight", position)


def test_unknown_names_are_errors():
    with pytest.raises(ConfigError, match=r"mlp\.router\.weight"):
        FAMILY.table.to_hf("decoder.layers.0.mlp.router.weight")
    with pytest.raises(ConfigError, match=r"lm_head\.bias"):
        FAMILY.table.to_megatron("lm_head.bias")


def test_an_unsupported_architecture_lists_the_supported_ones():
    with pytest.raises(ConfigError, match=r"OPTForCausalLM(.|\n)*Qwen3ForCausalLM"):
        family_of({"architectures": ["OPTForCausalLM"]})


def test_read_shape_explains_a_missing_folder(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_shape(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_shape(tmp_path).layers == 2
