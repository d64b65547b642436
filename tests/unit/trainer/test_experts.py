"""A mixture of experts on one real rank; what cannot be trained is refused. Beside transformers: `test_families.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vime.config.schema import OptimizerSection, SftSection, TrainerSection
from vime.errors import ConfigError, TrainerError
from vime.facts.process import Parallel
from vime.testing.tiny_models import make_tiny_qwen3_moe
from vime.trainer.megatron.experts import check_experts, expert_values
from vime.trainer.megatron.model import checked_passthrough
from vime.trainer.megatron.parallel import check_parallel
from vime.types import TrainSample, UpdateWork

VOCAB = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("mixture") / "model", hidden=32, ffn=24, vocab_size=VOCAB)


def test_training_reaches_router_and_experts(worker_of, folder, supervised):
    worker, batch = worker_of(folder, from_scratch_seed=None, algorithm=SftSection()), supervised
    before = {name: tensor.clone() for name, tensor in worker.weights()}
    worker.train_step([UpdateWork((tuple(batch),), num_rollouts=4, num_tokens=31)])
    changed = {name for name, tensor in worker.weights() if not torch.equal(tensor, before[name])}
    assert {f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)} <= changed
    assert {f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in range(8)} <= changed


def test_bfloat16_keeps_the_router_in_float32(worker_of, folder, supervised):
    worker, batch = worker_of(folder, from_scratch_seed=None, dtype="bfloat16", algorithm=SftSection()), supervised
    logits: list[torch.Tensor] = []
    router = worker._model.bare.decoder.layers[0].mlp.router
    gating = router.gating
    router.gating = lambda hidden: logits.append(gating(hidden)) or logits[-1]
    metrics = worker.train_step([UpdateWork((tuple(batch),), num_rollouts=4, num_tokens=31)])
    assert {x.dtype for x in logits} == {torch.float32}
    assert metrics["train/grad_norm"] > 0.0
    assert {t.dtype for t in worker.manifest().tensors} == {"bfloat16"}


def test_parked_experts_come_back(worker_of, folder, supervised):
    worker, batch = worker_of(folder, from_scratch_seed=None, algorithm=SftSection()), supervised
    work = [UpdateWork((tuple(batch),), num_rollouts=4, num_tokens=31)]
    straight = [worker.train_step(work) for _ in range(2)]
    worker = worker_of(folder, from_scratch_seed=None, algorithm=SftSection())
    first = worker.train_step(work)
    tags = list(worker.memory_bytes())
    worker.park(tags)
    worker.wake(tags)
    assert [first, worker.train_step(work)] == straight


def test_a_checkpoint_with_experts_goes_on_bit_for_bit(worker_of, folder, tmp_path, supervised):
    work = [UpdateWork((tuple(supervised),), num_rollouts=4, num_tokens=31)]
    worker = worker_of(folder, from_scratch_seed=None, algorithm=SftSection())
    worker.train_step(work)
    worker.save(tmp_path / "checkpoint")
    expected = worker.train_step(work)
    resumed = worker_of(folder, algorithm=SftSection(), from_scratch_seed=3)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.train_step(work) == expected


# ---- the router


def router_gradients(worker: Any, batch: list[TrainSample], parts: int) -> dict[int, torch.Tensor]:
    """Of an update in `parts` micro-batches, by layer."""
    size = len(batch) // parts
    micro = tuple(tuple(batch[i : i + size]) for i in range(0, len(batch), size))
    worker.train_step([UpdateWork(micro, num_rollouts=len(batch), num_tokens=31)])
    layers = worker._model.bare.decoder.layers
    return {i: layer.mlp.router.weight.main_grad.clone() for i, layer in enumerate(layers)}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("key", "coefficient"), [("moe_aux_loss_coeff", 0.5), ("moe_z_loss_coeff", 0.05)])
def test_an_auxiliary_loss_is_a_mean_over_the_tokens_of_the_update(worker_of, folder, key, coefficient, parts, supervised):
    """The last router's gradient changes by that of the loss in closed form: nothing behind it depends on it."""

    def trainer(**megatron: float) -> TrainerSection:
        return TrainerSection(optimizer=OptimizerSection(lr=0.0, min_lr=0.0, clip_grad=0.0), megatron=megatron)

    batch = supervised
    plain = router_gradients(worker_of(folder, from_scratch_seed=None, algorithm=SftSection(), trainer=trainer()), batch, parts)
    worker = worker_of(folder, from_scratch_seed=None, algorithm=SftSection(), trainer=trainer(**{key: coefficient}))
    router, seen = worker._model.bare.decoder.layers[1].mlp.router, []
    gating = router.gating
    router.gating = lambda hidden: (seen.append(hidden.detach().flatten(0, -2)), gating(hidden))[1]
    found = router_gradients(worker, batch, parts)[1] - plain[1]
    weight = router.weight.detach().clone().requires_grad_()
    tokens = sum(len(hidden) for hidden in seen)
    total = torch.zeros(())
    for hidden in seen:
        logits = hidden @ weight.t()
        if key == "moe_z_loss_coeff":
            total = total + logits.logsumexp(-1).pow(2).sum() / tokens
        else:
            chosen = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 1.0).mean(0)
            balance = 8 / 2 * (chosen * logits.softmax(-1).mean(0)).sum()
            total = total + balance * len(hidden) / tokens
    (coefficient * total).backward()
    assert weight.grad is not None
    torch.testing.assert_close(found, weight.grad, rtol=1e-3, atol=1e-6)
    assert weight.grad.abs().max() > 1e-4


def test_a_frozen_router_stays_and_the_rest_learns(worker_of, folder, supervised):
    section = TrainerSection(optimizer=OptimizerSection(lr=1e-3), freeze_router=True)
    worker, batch = worker_of(folder, from_scratch_seed=None, algorithm=SftSection(), trainer=section), supervised
    before = {name: tensor.clone() for name, tensor in worker.weights()}
    worker.train_step([UpdateWork((tuple(batch),), num_rollouts=4, num_tokens=31)])
    same = {name for name, tensor in worker.weights() if torch.equal(tensor, before[name])}
    assert same == {f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)}


def test_a_dense_model_has_no_router_to_freeze(worker_of):
    with pytest.raises(ConfigError, match=r"freeze_router: qwen3 has no router"):
        worker_of(trainer=TrainerSection(optimizer=OptimizerSection(lr=1e-3), freeze_router=True))


# ---- refusals


@pytest.mark.parametrize(
    ("parallel", "world", "words"),
    [
        (Parallel(tp=2, ep=4), 2, "ep 4 x etp 1 is 4, which does not divide tp 2 x cp 1 x dp 1 = 2"),
        (Parallel(dp=3, ep=2), 3, "ep 2"),
        (Parallel(tp=2, dp=2, ep=2, etp=2), 4, "unequal numbers of tokens"),
        (Parallel(dp=2, etp=2), 2, "unequal numbers of tokens"),
    ],
)
def test_layouts_that_experts_cannot_take_are_refused(setup_of, tmp_path, parallel, world, words):
    with pytest.raises(TrainerError, match=words):
        check_parallel(setup_of(tmp_path, parallel=parallel, world=world))


@pytest.mark.parametrize(
    "parallel",
    [Parallel(dp=2, ep=2), Parallel(tp=2, ep=2), Parallel(tp=2, etp=2), Parallel(tp=2, dp=2, ep=4), Parallel(pp=2, dp=4, ep=4)],
)
def test_layouts_that_experts_can_take_are_not(setup_of, tmp_path, parallel):
    check_parallel(setup_of(tmp_path, parallel=parallel, world=parallel.devices))


def test_a_dense_model_has_no_experts_to_spread(worker_of):
    from vime.models.qwen3 import FAMILY

    config = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    with pytest.raises(TrainerError, match="ep 2, but the model has no experts"):
        check_experts(FAMILY.shape(config), Parallel(dp=2, ep=2), {})


def test_settings_that_cannot_train_experts_are_refused(folder):
    from vime.models.registry import read_shape

    shape = read_shape(folder)
    with pytest.raises(TrainerError, match="8 experts do not divide into ep 3"):
        check_experts(shape, Parallel(dp=3, ep=3), {})
    with pytest.raises(TrainerError, match="24 columns of an expert do not divide into etp 5"):
        check_experts(shape, Parallel(tp=5, etp=5), {})
    both = Parallel(tp=2, ep=2)
    with pytest.raises(ConfigError, match="sequence_parallel is off"):
        check_experts(shape, both, {"sequence_parallel": False})
    with pytest.raises(ConfigError, match="allgather needs as many tokens"):
        check_experts(shape, both, {"sequence_parallel": True, "moe_token_dispatcher_type": "allgather"})
    for kind in ("sinkhorn", "seq_aux_loss"):
        with pytest.raises(ConfigError, match=f"{kind}.*packs hold many sequences"):
            check_experts(shape, Parallel(), {"moe_router_load_balancing_type": kind})
    check_experts(shape, both, expert_values(shape, both))


@pytest.mark.parametrize("key", ["moe_grouped_gemm", "mtp_num_layers", "moe_enable_routing_replay"])
def test_passed_through_keys_of_experts_are_refused_with_the_reason(key):
    with pytest.raises(ConfigError, match=f"{key} is not supported: ."):
        checked_passthrough({key: 1})
    with pytest.raises(ConfigError, match=r"num_moe_experts is set by config\.json"):
        checked_passthrough({"num_moe_experts": 4})
