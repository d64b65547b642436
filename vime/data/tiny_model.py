"""Builds tiny random model folders in Hugging Face format, tokenizer included; needs neither torch nor transformers.

Every family that vime trains can be made; a family's own keys of `config.json` are in `_ARCHITECTURES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import DataError
from vime.models.registry import family_of
from vime.models.tensors import Sized, tensor_sizes

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

PAD, TURN_START, SEPARATOR, TURN_END = "<|pad|>", "<|im_start|>", "<|sep|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, SEPARATOR, TURN_END)
"""Ids 0 to 3 of every tokenizer built here; `<|im_end|>` ends a response."""
PAD_ID, EOS_ID = SPECIAL_TOKENS.index(PAD), SPECIAL_TOKENS.index(TURN_END)

QUESTION_TEMPLATE = TURN_START + "{prompt}" + SEPARATOR
"""The `data.template` that fits these tokenizers."""

CHAT_TEMPLATE = (
    "{%- for turn in messages -%}"
    "{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a model. With `experts` the layers after the first `dense_layers` have a mixture, each expert `ffn` wide.

    vLLM's host attention accepts a `head_dim` of 32 or 64 (16 and 24 are refused). `shared_experts`, `dense_layers`,
    `frozen_layers` (for multi-token prediction), `groups` (of experts) and `qk_norm` are read by glm4_moe and deepseek_v3
    (which has no qk_norm), the ranks by deepseek_v3: there half of `head_dim` is rotary and a value is as large as its other
    half; `q_rank` 0 leaves queries uncompressed. `rotary_factor` above 1 stretches the positions of llama (as Llama 3.1 does)
    and deepseek_v3 (YaRN).
    """

    vocab_size: int
    family: str = "qwen3"
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 128
    tied: bool = True
    max_positions: int = 2048
    init_std: float = 0.02
    experts: int = 0
    experts_per_token: int = 2
    rope_theta: float = 10000.0
    shared_experts: int = 1
    dense_layers: int = 1
    frozen_layers: int = 1
    groups: int = 1
    qk_norm: bool = False
    kv_rank: int = 64
    q_rank: int = 48
    rotary_factor: float = 1.0


def byte_tokenizer() -> Tokenizer:
    """One token per byte after the four special tokens: 260 entries, no merges, nothing to train."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    entries = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _finish(tokenizer)


def phrase_tokenizer(texts: Iterable[str], *, max_entries: int = 384) -> Tokenizer:
    """A byte-level BPE trained on `texts` that merges across words but keeps digits single.

    Few templates with many numbers become very short: a `chain_sum` question of 68 characters is 7 tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=max_entries,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finish(tokenizer)


def _finish(tokenizer: Tokenizer) -> Tokenizer:
    from tokenizers import AddedToken, decoders

    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_length: int = 2048) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", config)


def save_tiny(directory: Path, shape: TinyShape, *, seed: int = 0) -> int:
    """Write `config.json`, `generation_config.json` and `model.safetensors` (float32). Returns the number of parameters.

    Matrices and biases are normal with `init_std`, norms are ones. Layers for multi-token prediction are written and not
    counted. Raises ConfigError for sizes that the family does not take.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise DataError("building a model folder needs safetensors and numpy", fix="pip install 'vime[train]'") from error
    config = tiny_config(shape)
    family = family_of(config)
    parameters, layers = family.shape(config).parameters, family.shape(config).frozen_layers
    directory.mkdir(parents=True, exist_ok=True)
    sizes = [*tensor_sizes(family, config), *(_frozen_sizes(shape, config) if layers else ())]
    save_file(_drawn(sizes, shape, seed), str(directory / "model.safetensors"), metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    return parameters


def _drawn(sizes: Iterable[Sized], shape: TinyShape, seed: int) -> dict[str, np.ndarray]:
    import numpy as np

    generator = np.random.default_rng(seed)

    def drawn(name: str, size: tuple[int, ...]) -> np.ndarray:
        if len(size) == 1 and not name.endswith("bias"):
            return np.ones(size, dtype=np.float32)
        return generator.normal(0.0, shape.init_std, size).astype(np.float32)

    return {name: drawn(name, size) for name, size in sizes}


def tiny_sizes(shape: TinyShape) -> Iterator[Sized]:
    """(Hugging Face name, shape) of every tensor that is trained."""
    config = tiny_config(shape)
    return tensor_sizes(family_of(config), config)


def _frozen_sizes(shape: TinyShape, config: Mapping[str, Any]) -> Iterator[Sized]:
    """Tensors of the layer for multi-token prediction: those of a last layer, and what joins it to the others."""
    layer, last = f"model.layers.{shape.layers}.", f"model.layers.{shape.layers - 1}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{layer}{name}.weight", (shape.hidden,)
    yield f"{layer}eh_proj.weight", (shape.hidden, 2 * shape.hidden)
    for name in ("embed_tokens", "shared_head.head"):
        yield f"{layer}{name}.weight", (shape.vocab_size, shape.hidden)
    for name, size in tensor_sizes(family_of(config), config):
        if name.startswith(last):
            yield layer + name.removeprefix(last), size


def tiny_config(shape: TinyShape, *, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` of a shape. Raises DataError for a family that is not there."""
    family = "qwen3_moe" if shape.family == "qwen3" and shape.experts else shape.family
    if family not in _ARCHITECTURES:
        raise DataError(f"no tiny model of the family {family}", fix=f"choose one of: {', '.join(_ARCHITECTURES)}")
    if _ARCHITECTURES[family] in (_glm4_moe, _deepseek_v3) and not shape.experts:
        raise DataError(f"models of the family {family} have experts", fix="say how many, for example 8")
    return {
        **_ARCHITECTURES[family](shape),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "initializer_range": shape.init_std,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "attention_dropout": 0.0,
        "use_cache": True,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": dtype,
    }


def _grouped_heads(shape: TinyShape) -> dict[str, Any]:
    return {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}


def _qwen3(shape: TinyShape) -> dict[str, Any]:
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {**kind, **_grouped_heads(shape), "attention_bias": False}


def _qwen3_moe(shape: TinyShape) -> dict[str, Any]:
    return {
        **_qwen3(shape),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2(shape: TinyShape) -> dict[str, Any]:
    if shape.hidden != shape.heads * shape.head_dim:
        what = f"a head of qwen2 is hidden / heads = {shape.hidden / shape.heads:g} wide, not {shape.head_dim}"
        raise DataError(what, fix=f"set hidden to {shape.heads * shape.head_dim}")
    kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {**kind, "num_key_value_heads": shape.kv_heads, "use_sliding_window": False}


def _llama(shape: TinyShape) -> dict[str, Any]:
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
    if shape.rotary_factor > 1:
        scaling = {"rope_type": "llama3", "factor": shape.rotary_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        kind |= {"rope_scaling": {**scaling, "original_max_position_embeddings": shape.max_positions // 4}}
    return {**kind, **_grouped_heads(shape)}


def _shared_mixture(shape: TinyShape) -> dict[str, Any]:
    return {
        "n_routed_experts": shape.experts,
        "n_shared_experts": shape.shared_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.ffn,
        "first_k_dense_replace": shape.dense_layers,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": shape.groups,
        "topk_group": max(1, shape.experts_per_token // 2) if shape.groups > 1 else 1,
        "num_nextn_predict_layers": shape.frozen_layers,
        "attention_bias": False,
    }


def _glm4_moe(shape: TinyShape) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **_shared_mixture(shape),
        **_grouped_heads(shape),
        "attention_bias": True,
        "use_qk_norm": shape.qk_norm,
        "partial_rotary_factor": 0.5,
    }


def _deepseek_v3(shape: TinyShape) -> dict[str, Any]:
    half = shape.head_dim // 2
    kind: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_shared_mixture(shape),
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_rank or None,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.head_dim - half,
        "qk_rope_head_dim": half,
        "v_head_dim": shape.head_dim - half,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    if shape.rotary_factor > 1:
        scaling = {"type": "yarn", "factor": shape.rotary_factor, "beta_fast": 32, "beta_slow": 1}
        scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": shape.max_positions // 4}
        kind["rope_scaling"] = scaling
    return kind


_ARCHITECTURES: Mapping[str, Callable[[TinyShape], dict[str, Any]]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "llama": _llama,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
}
TINY_FAMILIES = tuple(_ARCHITECTURES)
"""Families of which a tiny model can be made."""


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
