"""Conversion to megatron-core's format and back: bits, interruptions, mismatches, and megatron-core's own reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.config.schema import SftSection
from vime.errors import ConfigError
from vime.testing.tiny_models import make_tiny
from vime.trainer.megatron import convert, folders
from vime.types import TrainSample, UpdateWork

FAMILIES = ("qwen3", "qwen3_moe", "llama", "glm4_moe", "deepseek_v3")


class Stop(Exception):
    """An interruption."""


@pytest.fixture
def conversion_of(setup_of):
    """Conversions one after the other; each is closed before the next and at the end."""
    alive: list[convert.Conversion] = []

    def build(model: Path, **changes: Any) -> convert.Conversion:
        while alive:
            alive.pop().close()
        alive.append(convert.Conversion(setup_of(model, **changes)))
        return alive[-1]

    yield build
    while alive:
        alive.pop().close()


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    for module, name in ((convert, "BATCH_BYTES"), (folders, "MAX_SHARD_BYTES")):
        monkeypatch.setattr(module, name, 200_000)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(first: Path, second: Path) -> bool:
    one, other = tensors(first), tensors(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def quiet(_done: int, _total: int, _last: str) -> None:
    """Nobody watches."""


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_again_bit_for_bit(conversion_of, tmp_path, family):
    model = make_tiny(tmp_path / "hf", family, vocab_size=321)
    seen: list[tuple[int, int]] = []
    conversion = conversion_of(model)
    conversion.to_torch_dist(tmp_path / "there", lambda done, total, _last: seen.append((done, total)))
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 200_000
    conversion.to_hf(tmp_path / "there", tmp_path / "back", quiet)
    assert same(model, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    left = {path.suffix for path in (tmp_path / "there").iterdir()} | {path.suffix for path in (tmp_path / "back").iterdir()}
    assert not left & {".note", ".partial"}


def test_megatron_core_reads_what_was_written(conversion_of, worker_of, tmp_path):
    from megatron.core import dist_checkpointing

    model = make_tiny(tmp_path / "hf", "glm4_moe")
    conversion_of(model).to_torch_dist(tmp_path / "there", quiet)
    conversion_of(model).close()
    worker = worker_of(model)  # Drawn, not read.
    bare = worker._model.bare
    with torch.no_grad():
        loaded: Any = dist_checkpointing.load({"model": bare.sharded_state_dict()}, str(tmp_path / "there"))
        bare.load_state_dict(loaded["model"])
    expected = tensors(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in worker.weights())


def test_a_checkpoint_of_a_run_becomes_a_folder(conversion_of, worker_of, tmp_path):
    """With optimizer state and counters beside the weights."""
    model = make_tiny(tmp_path / "hf", "qwen3_moe")
    worker = worker_of(model, from_scratch_seed=None, algorithm=SftSection())
    sample = TrainSample((5, 6, 7), (8, 9), (), (1, 1), None, ())
    worker.train_step([UpdateWork(((sample,),), num_rollouts=1, num_tokens=2)])
    worker.save(tmp_path / "checkpoint")
    worker.save_hf(tmp_path / "saved")
    worker.close()
    conversion_of(model).to_hf(tmp_path / "checkpoint", tmp_path / "converted", quiet)
    assert same(tmp_path / "saved", tmp_path / "converted")
    assert not same(model, tmp_path / "converted")


@pytest.mark.parametrize("back", [False, True])
def test_an_interrupted_conversion_goes_on_behind_the_last_whole_file(conversion_of, tmp_path, back):
    model = make_tiny(tmp_path / "hf", "qwen3_moe")
    conversion = conversion_of(model)
    conversion.to_torch_dist(tmp_path / "whole", quiet)

    def run(out: Path, report: convert.Report) -> None:
        if back:
            conversion.to_hf(tmp_path / "whole", out, report)
        else:
            conversion.to_torch_dist(out, report)

    def stop(done: int, total: int, _last: str) -> None:
        if done > total / 2:
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(out, stop)
    pattern = "*.safetensors" if back else "*.distcp"
    before = {path.name: path.stat().st_mtime_ns for path in out.glob(pattern)}
    assert len(before) > 1
    run(out, quiet)
    after = {path.name: path.stat().st_mtime_ns for path in out.glob(pattern)}
    assert len(after) > len(before)
    assert {name: after[name] for name in before} == before
    if not back:
        conversion.to_hf(out, tmp_path / "again", quiet)
    assert same(model, out if back else tmp_path / "again")


# ---- refusals


def test_a_folder_of_another_conversion_is_refused(conversion_of, tmp_path):
    """Of another type, or of another model of the same sizes: a file that is there would be taken for one's own."""
    model = make_tiny(tmp_path / "hf", "qwen3")
    conversion = conversion_of(model)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match=r"other holds something else"):
        conversion.to_torch_dist(tmp_path / "other", quiet)

    def stop(_done: int, _total: int, _last: str) -> None:
        raise Stop

    begun, back = tmp_path / "begun", tmp_path / "back"
    with pytest.raises(Stop):
        conversion.to_torch_dist(begun, stop)
    conversion.to_torch_dist(tmp_path / "whole", quiet)
    with pytest.raises(Stop):
        conversion.to_hf(tmp_path / "whole", back, stop)
    twin = make_tiny(tmp_path / "twin", "qwen3", seed=9)
    for folder, dtype in ((model, "bfloat16"), (twin, "float32")):
        other = conversion_of(folder, dtype=dtype)
        with pytest.raises(ConfigError, match=r"begun holds another conversion"):
            other.to_torch_dist(begun, quiet)
        with pytest.raises(ConfigError, match=r"back holds another conversion"):
            other.to_hf(tmp_path / "whole", back, quiet)


def test_a_checkpoint_of_another_model_is_refused_by_name(conversion_of, tmp_path):
    """Nothing is written."""
    dense, tied = make_tiny(tmp_path / "dense", "qwen3", tied=False), make_tiny(tmp_path / "tied", "qwen3")
    wide, biased = make_tiny(tmp_path / "wide", "qwen3", ffn=160, tied=False), make_tiny(tmp_path / "biased", "qwen2")
    conversion_of(dense).to_torch_dist(tmp_path / "there", quiet)
    for model, words in (
        (tied, r"holds tensors that the model has not: output_layer\.weight"),
        (wide, r"decoder\.layers\.mlp\.linear_fc1\.weight has shape \(2, 256, 64\), the model's is \(2, 320, 64\)"),
        (biased, r"lacks decoder\.layers\.self_attention\.linear_qkv\.bias"),
    ):
        with pytest.raises(ConfigError, match=words):
            conversion_of(model).to_hf(tmp_path / "there", tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_wrong_tensors_is_refused_by_name(conversion_of, tmp_path):
    model = make_tiny(tmp_path / "hf", "qwen3")
    path = model / "model.safetensors"
    kept = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, words in (
        ({**kept, "model.layers.0.mlp.gate.weight": torch.zeros(2)}, r"no parameters of qwen3 .*mlp\.gate\.weight"),
        ({n: t for n, t in kept.items() if n != name}, f"has no tensor {name}"),
        ({**kept, name: torch.zeros(3, 3)}, rf"{name} has shape \(3, 3\)"),
    ):
        save_file(changed, path)
        with pytest.raises(ConfigError, match=words):
            conversion_of(model).to_torch_dist(tmp_path / words[:5], quiet)
