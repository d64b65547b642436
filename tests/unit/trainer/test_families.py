"""Every family on one real rank: logits and gradients beside transformers, folders in and out, the router's bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.config.schema import OptimizerSection, SftSection, TrainerSection
from vime.errors import ConfigError
from vime.testing.tiny_models import FamilySizes, make_tiny
from vime.trainer.megatron import folders
from vime.types import UpdateWork

VOCAB = 320
CASES: dict[str, tuple[str, FamilySizes]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tied": False}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-plain": ("qwen3_moe", {}),
    "llama": ("llama", {"rotary_factor": 1.0}),
    "llama-scaled": ("llama", {"rotary_factor": 8.0, "max_positions": 512}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-qk_norm": ("glm4_moe", {"qk_norm": True}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-plain": ("deepseek_v3", {"q_rank": 0, "rotary_factor": 1.0, "groups": 1, "shared_experts": 2}),
}
SETTINGS = {"qwen3_moe-plain": {"norm_topk_prob": False}}
"""Of config.json, beside those that a tiny model has."""
MIXTURES = ("glm4_moe", "deepseek_v3")


def make(folder: Path, case: str) -> Path:
    """A tiny model whose norms are drawn too."""
    family, sizes = CASES[case]
    path = make_tiny(folder / case, family, init_std=0.1, **sizes) / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    save_file(tensors, path, metadata={"format": "pt"})
    config = path.parent / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SETTINGS.get(case, {})))
    return path.parent


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    known: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in known:
            known[case] = make(tmp_path_factory.mktemp("families"), case)
        return known[case]

    return of


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(worker_of, folder_of, case):
    """Measured: at most 8.2e-7 of the largest. 300 tokens, so that scaled rotary positions differ from plain ones."""
    worker, other = worker_of(folder_of(case), from_scratch_seed=None), reference(folder_of(case))
    ids = torch.randint(4, VOCAB, (1, 300), generator=torch.Generator().manual_seed(1))
    seen: list[torch.Tensor] = []
    head = worker._model.head_weight
    worker._model.bare.output_layer.register_forward_hook(lambda _module, _args, output: seen.append(output[0]))
    worker.log_probs(ids.tolist())
    with torch.no_grad():
        theirs = other(ids).logits[0, :-1]
        ours = seen[0][:, 0] @ head[:VOCAB].t()
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 3e-6
    assert theirs.std() > 0.3


@pytest.mark.parametrize(
    ("case", "recompute"),
    [
        *((case, "none") for case in ("qwen2", "llama-scaled", "qwen3_moe", "deepseek_v3-plain")),
        *((case, "full") for case in ("qwen3_moe", *MIXTURES)),
    ],
)
def test_loss_and_gradient_norm_are_those_of_transformers(worker_of, folder_of, supervised, case, recompute):
    section = TrainerSection(optimizer=OptimizerSection(lr=1e-3), recompute=recompute)
    worker = worker_of(folder_of(case), from_scratch_seed=None, algorithm=SftSection(), trainer=section)
    other, batch = reference(folder_of(case)), supervised
    count = sum(len(r.response_ids) for r in batch)
    loss = torch.zeros(())
    for row in batch:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        log_p = other(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        loss = loss - log_p[len(row.prompt_ids) - 1 :].sum() / count
    loss.backward()
    norm = torch.stack([p.grad.pow(2).sum() for p in other.parameters() if p.grad is not None]).sum().sqrt()
    metrics = worker.train_step([UpdateWork((tuple(batch[:1]), tuple(batch[1:])), num_rollouts=4, num_tokens=count)])
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=2e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


# ---- folders


@pytest.mark.parametrize("case", CASES)
def test_weights_go_through_bit_for_bit(worker_of, folder_of, tmp_path, case):
    """Layers for multi-token prediction go along, and are no part of what engines get."""
    worker = worker_of(folder_of(case), from_scratch_seed=None)
    worker.save_hf(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (folder_of(case), tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    carried = {name for name in before if name.startswith(f"model.layers.{worker._model.shape.layers}.")}
    assert bool(carried) == case.startswith(MIXTURES)
    assert {t.name for t in worker.manifest().tensors} == before.keys() - carried


def test_several_files_go_in_and_out(worker_of, folder_of, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MAX_SHARD_BYTES", 200_000)
    first, second = tmp_path / "first", tmp_path / "second"
    worker_of(folder_of("glm4_moe"), from_scratch_seed=None).save_hf(first)
    worker_of(first, from_scratch_seed=None).save_hf(second)
    index = json.loads((second / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert {path.name for path in second.glob("*.safetensors*")} == files | {"model.safetensors.index.json"}
    after = {name: tensor for file in files for name, tensor in load_file(second / file).items()}
    before = load_file(folder_of("glm4_moe") / "model.safetensors")
    assert before.keys() == after.keys() == index["weight_map"].keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in before.values())


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", "module.model.norm.weight"),
        ("qwen3", "model.layers.2.input_layernorm.weight"),
        ("glm4_moe", "model.layers.1.mlp.experts.8.up_proj.weight"),
        ("deepseek_v3", "model.layers.4.input_layernorm.weight"),
    ],
)
def test_tensors_of_unknown_names_are_refused_by_name(worker_of, folder_of, tmp_path, case, name):
    path = make(tmp_path, case) / "model.safetensors"
    save_file({**load_file(path), name: torch.zeros(8)}, path)
    with pytest.raises(ConfigError, match=rf"no parameters of \w+ with \d layers: {name}"):
        worker_of(path.parent, from_scratch_seed=None)


def test_what_has_no_parameter_is_left_out(worker_of, tmp_path):
    """A tied head that the folder holds all the same, and frequencies that old folders hold."""
    path = make(tmp_path, "qwen2") / "model.safetensors"
    tensors = load_file(path)
    more = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**tensors, **more}, path)
    worker = worker_of(path.parent, from_scratch_seed=None)
    assert not {t.name for t in worker.manifest().tensors} & more.keys()


# ---- the router's bias


def bias(worker: Any) -> torch.Tensor:
    return worker._model.bare.decoder.layers[1].mlp.router.expert_bias


@pytest.mark.parametrize("case", MIXTURES)
def test_the_routers_bias_keeps_every_bit_in_sixteen_bit_training(worker_of, folder_of, supervised, tmp_path, case):
    worker = worker_of(folder_of(case), from_scratch_seed=None, dtype="bfloat16", algorithm=SftSection())
    worker.train_step([UpdateWork((tuple(supervised),), num_rollouts=4, num_tokens=31)])
    worker.save_hf(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (folder_of(case), tmp_path / "saved"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert after[name].dtype == torch.float32
    assert torch.equal(before[name], after[name])
    assert after["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


def test_the_routers_bias_follows_the_load_where_it_is_asked_to(worker_of, folder_of, supervised, tmp_path):
    """Up by the rate for experts with fewer tokens than the mean, down for those with more; resumed bit for bit."""
    section = TrainerSection(optimizer=OptimizerSection(lr=1e-3), megatron={"moe_router_bias_update_rate": 0.01})
    worker = worker_of(folder_of("glm4_moe"), from_scratch_seed=None, algorithm=SftSection(), trainer=section)
    before, counts = bias(worker).clone(), torch.zeros(8)
    router = worker._model.bare.decoder.layers[1].mlp.router

    def count(_module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        counts.add_(output[1].sum(0))

    router.register_forward_hook(count)
    work = [UpdateWork((tuple(supervised),), num_rollouts=4, num_tokens=31)]
    worker.train_step(work)
    assert counts.max() > counts.min()
    torch.testing.assert_close(bias(worker), before + 0.01 * torch.sign(counts.mean() - counts))
    worker.save(tmp_path / "checkpoint")
    expected = worker.train_step(work), bias(worker).clone()
    resumed = worker_of(folder_of("glm4_moe"), algorithm=SftSection(), trainer=section, from_scratch_seed=3)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.train_step(work) == expected[0]
    assert torch.equal(bias(resumed), expected[1])
