"""What a plan learns of the models that training roles beside the actor hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vime.cli.prepare import require_models
from vime.config.schema import Config
from vime.errors import ConfigError
from vime.planning.needs import needs_from


def model(folder: Path, *, layers: int = 2, vocab: int = 50) -> Path:
    folder.mkdir()
    sizes = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = {"architectures": ["Qwen3ForCausalLM"], **sizes, **heads, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def configured(folder: Path, **others: Path) -> Config:
    own: dict[str, Any] = {"path": model(folder / "policy"), **others}
    return Config.model_validate(
        {
            "run": {"dir": folder},
            "model": own,
            "data": {"path": folder / "d.jsonl"},
            "schedule": {"num_steps": 1},
            "algorithm": {"kind": "distill"},
        }
    )


def test_a_role_s_own_model_is_planned_with_its_own_sizes(tmp_path: Path) -> None:
    needs = needs_from(configured(tmp_path, teacher=model(tmp_path / "teacher", layers=6)))
    assert {task: shape.layers for task, shape in needs.models.items()} == {"teacher": 6}
    assert needs.uses == {"teacher"}


def test_without_models_of_their_own_roles_hold_the_policy(tmp_path: Path) -> None:
    assert needs_from(configured(tmp_path)).models == {}


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a vocabulary of 60 entries, model\.path one of 50: their token ids differ"):
        needs_from(configured(tmp_path, teacher=model(tmp_path / "teacher", vocab=60)))


def test_a_run_needs_the_weights_of_every_role(tmp_path: Path) -> None:
    config = configured(tmp_path, teacher=model(tmp_path / "teacher"))
    for name in ("policy", "teacher"):
        (tmp_path / name / "tokenizer.json").touch()
    (tmp_path / "policy" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"teacher .* has no weights"):
        require_models(config)
    (tmp_path / "teacher" / "model.safetensors").touch()
    require_models(config)
