"""Random Qwen3 folders of real shapes, made in place: weights drawn on the device, a tokenizer whose words are numbers.

Token i is the word "i", so that a response's text is its token ids and a grader can look at them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from vime.data.tiny_model import EOS_ID, PAD_ID, TinyShape, tiny_config, tiny_sizes


def _shape(vocab: int, hidden: int, layers: int, heads: tuple[int, int], head_dim: int, ffn: int, **more: Any) -> TinyShape:
    """`heads` is (queries, keys and values)."""
    sizes = {"hidden": hidden, "layers": layers, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "ffn": ffn}
    return TinyShape(vocab, **sizes, max_positions=4096, rope_theta=1e6, **more)


SHAPES = {
    "tiny": _shape(2048, 256, 4, (4, 2), 64, 512),
    "2m": _shape(2048, 192, 4, (4, 2), 64, 512),
    "17m": _shape(2048, 512, 5, (8, 4), 64, 1536),
    "0.1b": _shape(32000, 768, 12, (12, 4), 64, 2304),
    "0.6b": _shape(151936, 1024, 28, (16, 8), 128, 3072),
    "1.7b": _shape(151936, 2048, 28, (16, 8), 128, 6144),
    "4b": _shape(151936, 2560, 36, (32, 8), 128, 9728),
    "tiny-moe": _shape(2048, 256, 4, (4, 2), 64, 128, experts=16, experts_per_token=4),
    "30b-a3b": _shape(151936, 2048, 48, (32, 4), 128, 768, tied=False, experts=128, experts_per_token=8),
}
"""From 0.6b on, those with a size for a name are the published Qwen3-0.6B, 1.7B, 4B (all with a tied head) and 30B-A3B.

30B-A3B takes 61 GB of disk and of host memory in 16 bits.
"""


def write_model(folder: Path, shape: TinyShape, *, device: str, dtype: str, seed: int = 0) -> int:
    """Write config, tokenizer and `model.safetensors`; returns the number of parameters."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    weights: dict[str, Any] = {}
    for name, size in tiny_sizes(shape):
        if len(size) == 1:
            weights[name] = torch.ones(size, dtype=kind)
        else:
            drawn = torch.empty(size, dtype=torch.float32, device=device).normal_(0.0, shape.init_std, generator=generator)
            weights[name] = drawn.to(kind).cpu()
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(tiny_config(shape, dtype=dtype), indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}) + "\n")
    _write_tokenizer(folder, shape)
    return sum(weight.numel() for weight in weights.values())


def write_prompts(path: Path, vocab: int, *, rows: int, tokens: int, seed: int = 0) -> None:
    """Prompts of `tokens` random numbers below `vocab`: token ids where the tokenizer is one of `write_model`'s."""
    rng = random.Random(seed)
    texts = (" ".join(str(rng.randrange(EOS_ID + 1, vocab)) for _ in range(tokens)) for _ in range(rows))
    path.write_text("".join(json.dumps({"prompt": text, "label": ""}) + "\n" for text in texts))


def _write_tokenizer(folder: Path, shape: TinyShape) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    names = {PAD_ID: "<|pad|>", EOS_ID: "<|end|>"}
    words = {names.get(i, str(i)): i for i in range(shape.vocab_size)}
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
