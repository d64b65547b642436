"""Random Qwen3 folders of real shapes, made in place: weights drawn on the device, a tokenizer whose words are numbers.

Token i is the word "i", so that a response's text is its token ids and a grader can look at them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD_ID, EOS_ID = 0, 3


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3: dense, or with `experts` a mixture of them in every layer, each `ffn` wide."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float = 1e6
    max_positions: int = 4096
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 0


SHAPES = {
    "tiny": Shape(256, 4, 4, 2, 64, 512, 2048),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151936),
    "4b": Shape(2560, 36, 32, 8, 128, 9728, 151936),
    "tiny-moe": Shape(256, 4, 4, 2, 64, 128, 2048, experts=16, experts_per_token=4),
    "30b-a3b": Shape(2048, 48, 32, 4, 128, 768, 151936, tied=False, experts=128, experts_per_token=8),
}
"""Those with a size for a name are the published Qwen3-0.6B, 1.7B, 4B (all with a tied head) and 30B-A3B.

30B-A3B takes 61 GB of disk and of host memory in 16 bits.
"""


def write_model(folder: Path, shape: Shape, *, device: str, dtype: str, seed: int = 0, std: float = 0.02) -> int:
    """Write config, tokenizer and `model.safetensors`; returns the number of parameters."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    weights: dict[str, Any] = {}
    for name, size in sizes_of(shape):
        if len(size) == 1:
            weights[name] = torch.ones(size, dtype=kind)
        else:
            drawn = torch.empty(size, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)
            weights[name] = drawn.to(kind).cpu()
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(shape, dtype, std), indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}) + "\n")
    _write_tokenizer(folder, shape)
    return sum(weight.numel() for weight in weights.values())


def write_prompts(path: Path, vocab: int, *, rows: int, tokens: int, seed: int = 0) -> None:
    """Prompts of `tokens` random numbers below `vocab`: token ids where the tokenizer is one of `write_model`'s."""
    rng = random.Random(seed)
    texts = (" ".join(str(rng.randrange(EOS_ID + 1, vocab)) for _ in range(tokens)) for _ in range(rows))
    path.write_text("".join(json.dumps({"prompt": text, "label": ""}) + "\n" for text in texts))


def sizes_of(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
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
        yield "lm_head.weight", (shape.vocab, hidden)


def config_of(shape: Shape, dtype: str, std: float = 0.02) -> dict[str, Any]:
    """The `config.json` of a shape."""
    return {
        **_architecture(shape),
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "initializer_range": std,
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


def _architecture(shape: Shape) -> dict[str, Any]:
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


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    names = {PAD_ID: "<|pad|>", EOS_ID: "<|end|>"}
    words = {names.get(i, str(i)): i for i in range(shape.vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token=names[PAD_ID]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": names[EOS_ID],
        "pad_token": names[PAD_ID],
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
