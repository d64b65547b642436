"""A tiny model folder, the set-up of one trainer rank on the host, and such ranks one after the other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vime.config.schema import GrpoSection, OptimizerSection, TrainerSection
from vime.facts.collectives import CollectiveSpec
from vime.facts.memory import MemoryBackend, Tag, TagSemantics
from vime.facts.process import Factory, MegatronAdaptation, Parallel, TrainerRuntime
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample

VOCAB = 50


def write_model(folder: Path, *, tied: bool = True) -> Path:
    """A Qwen3 config without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"kept": "as it is"}')
    return folder


def make_setup(model_path: Path, **changes: Any) -> TrainerSetup:
    """One rank on the host, weights drawn."""
    keeps = TagSemantics(frees=True, preserves=True)
    fields: dict[str, Any] = {
        "model_path": model_path,
        "dtype": "float32",
        "parallel": Parallel(),
        "rank": 0,
        "world": 1,
        "local_rank": 0,
        "master_address": "127.0.0.1",
        "master_port": 0,
        "seed": 1,
        "num_steps": 10,
        "temperature": 1.0,
        "algorithm": GrpoSection(),
        "trainer": TrainerSection(optimizer=OptimizerSection(lr=1e-3, warmup_steps=2)),
        "runtime": TrainerRuntime(Factory("vime.platforms.cpu.trainer_runtime:HostRuntime"), "cpu"),
        "adaptation": MegatronAdaptation(
            norm=Factory("vime.trainer.megatron.attention:RmsNorm"),
            core_attention=Factory("vime.platforms.cpu.attention:HostCoreAttention"),
            optimizer=Factory("vime.platforms.cpu.fused_adam:HostFusedAdam"),
        ),
        "collective": CollectiveSpec("gloo", 60.0, ("sum", "max")),
        "memory": MemoryBackend(
            Factory("vime.memory.storages:StorageMemory"),
            dict.fromkeys((Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER), keeps),
        ),
        "from_scratch_seed": 7,
    }
    return TrainerSetup(**{**fields, **changes})


@pytest.fixture
def supervised() -> list[TrainSample]:
    """Four rows with 31 response tokens, below a vocabulary of 320.

    Without special tokens: transformers gives the padding token's embedding no gradient.
    """
    draw = random.Random(5)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(draw.randrange(4, 320) for _ in range(size))

    return [TrainSample(ids(p), ids(r), (), (1,) * r, None, ()) for p, r in ((3, 5), (1, 9), (4, 1), (2, 16))]


@pytest.fixture
def model_of():
    """`write_model(folder, tied=...)`."""
    return write_model


@pytest.fixture
def setup_of():
    """`make_setup(model_path, **changes)`."""
    return make_setup


@pytest.fixture
def worker_of(tmp_path):
    """Build ranks one after the other, of the actor or of another `task`; each is closed before the next and at the end."""
    from vime.trainer.megatron.tasks import build_rank

    alive: list[Any] = []

    def build(model_path: Path | None = None, **changes: Any) -> Any:
        while alive:
            alive.pop().close()
        alive.append(build_rank(make_setup(model_path or write_model(tmp_path / "model"), **changes)))
        return alive[-1]

    yield build
    while alive:
        alive.pop().close()
