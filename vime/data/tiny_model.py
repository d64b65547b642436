"""Builds tiny random Qwen3 folders in Hugging Face format, tokenizer included; needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import DataError

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
class Qwen3Shape:
    """Sizes of a Qwen3: dense, or with `experts` a mixture of them in every layer, each `ffn` wide.

    vLLM's host attention accepts a `head_dim` of 32 or 64 (16 and 24 are refused).
    """

    vocab_size: int
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


def save_qwen3(directory: Path, shape: Qwen3Shape, *, seed: int = 0) -> int:
    """Write `config.json`, `generation_config.json` and `model.safetensors` (float32). Returns the number of parameters.

    Matrices are normal with `init_std`, norms are ones, as in the family's own initialisation.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise DataError("building a model folder needs safetensors and numpy", fix="pip install 'vime[train]'") from error
    directory.mkdir(parents=True, exist_ok=True)
    weights = _qwen3_weights(shape, seed)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    _write_json(directory / "config.json", qwen3_config(shape))
    _write_json(directory / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    return sum(int(w.size) for w in weights.values())


def _qwen3_weights(shape: Qwen3Shape, seed: int) -> dict[str, np.ndarray]:
    import numpy as np

    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return generator.normal(0.0, shape.init_std, (rows, columns)).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    return {name: matrix(*size) if len(size) == 2 else ones(*size) for name, size in qwen3_sizes(shape)}


def qwen3_sizes(shape: Qwen3Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor; one-dimensional ones are norms."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if shape.experts:
            yield f"{prefix}.mlp.gate.weight", (shape.experts, hidden)
        for mlp in [f"{prefix}.mlp.experts.{i}" for i in range(shape.experts)] or [f"{prefix}.mlp"]:
            yield f"{mlp}.gate_proj.weight", (shape.ffn, hidden)
            yield f"{mlp}.up_proj.weight", (shape.ffn, hidden)
            yield f"{mlp}.down_proj.weight", (hidden, shape.ffn)
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def qwen3_config(shape: Qwen3Shape, *, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` of a shape."""
    return {
        **_architecture(shape),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "initializer_range": shape.init_std,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": dtype,
    }


def _architecture(shape: Qwen3Shape) -> dict[str, Any]:
    if not shape.experts:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
