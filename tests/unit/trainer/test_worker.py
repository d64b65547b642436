"""One real trainer rank: megatron-core on the host, a model of 20 thousand parameters."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from vime.config.schema import GrpoSection, OptimizerSection, SftSection, TrainerSection
from vime.errors import CheckpointError, ConfigError, MemoryStateError, TrainerError
from vime.facts.collectives import CollectiveSpec
from vime.facts.memory import NullMemory, Tag
from vime.facts.process import Factory, MegatronAdaptation, Override, Parallel, TrainerRuntime
from vime.trainer.megatron.model import checked_passthrough, padded_vocab, transformer_values
from vime.trainer.megatron.parallel import check_parallel
from vime.types import TrainSample, UpdateWork

VOCAB = 50


def samples(count=12, *, seed=0, group=4) -> list[TrainSample]:
    draw = random.Random(seed)
    made = []
    for _ in range(count // group):
        prompt = tuple(draw.randrange(VOCAB) for _ in range(draw.choice([3, 4])))
        rewards = tuple(float(i % 2) for i in range(group))
        for reward in rewards:
            size = draw.choice([2, 3])
            response = tuple(draw.randrange(VOCAB) for _ in range(size))
            log_probs = tuple(-4.0 + draw.random() * 0.1 for _ in response)
            made.append(TrainSample(prompt, response, log_probs, (1,) * size, reward, rewards))
    return made


def work(rows: Sequence[TrainSample], parts: Sequence[int] = ()) -> UpdateWork:
    """Cut at `parts`; 0 twice makes an empty micro-batch."""
    edges = [0, *parts, len(rows)]
    cut = tuple(tuple(rows[a:b]) for a, b in pairwise(edges))
    return UpdateWork(cut, num_rollouts=len(rows), num_tokens=sum(sum(r.loss_mask) for r in rows))


def weights(worker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weights()}


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_step_is_reproducible_and_any_split_gives_the_same(worker_of):
    rows = samples()
    first = worker_of().train_step([work(rows)])
    assert worker_of().train_step([work(rows)]) == first
    for parts in ([3], [0, 5, 5, 7], list(range(1, 12))):
        split = worker_of().train_step([work(rows, parts)])
        assert split["train/loss"] == pytest.approx(first["train/loss"], abs=1e-6)
        assert split["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-5)
        assert split["train/tokens"] == first["train/tokens"]


def test_metrics_agree_with_scores(worker_of):
    worker, rows = worker_of(), samples()
    before = worker.log_probs([(*r.prompt_ids, *r.response_ids) for r in rows])
    metrics = worker.train_step([work(rows)])
    differences = [
        abs(new - old)
        for row, scores in zip(rows, before, strict=True)
        for new, old in zip(scores[len(row.prompt_ids) - 1 :], row.log_probs, strict=True)
    ]
    mean = sum(differences) / len(differences)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(mean, rel=1e-5)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(max(differences), rel=1e-5)
    assert metrics["train/tokens"] == len(differences)
    assert metrics["train/rollouts"] == len(rows)
    assert metrics["train/lr-pg_0"] == pytest.approx(5e-4)
    assert worker.train_step([work(rows)])["train/lr-pg_0"] == pytest.approx(1e-3)
    assert (worker.step_count, worker.update_count) == (2, 2)


def test_recomputed_log_probs_start_at_ratio_one(worker_of):
    rows = samples()
    slow = TrainerSection(optimizer=OptimizerSection(lr=1e-6))
    worker = worker_of(algorithm=GrpoSection(old_log_probs="recompute"), trainer=slow)
    metrics = worker.train_step([work(rows), work(rows)])
    assert worker.update_count == 2
    assert 0 < abs(metrics["train/ppo_kl"]) < 1e-4
    assert metrics["train/pg_clipfrac"] == 0.0
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0.01
    rollout = worker_of(trainer=slow).train_step([work(rows)])
    assert abs(rollout["train/ppo_kl"]) > 0.01


def test_flat_groups_give_no_gradient(worker_of):
    rows = [replace(r, reward=0.1, group_rewards=(0.1,) * 8) for r in samples()]
    worker = worker_of()
    before = weights(worker)
    metrics = worker.train_step([work(rows)])
    assert metrics["train/grad_norm"] == 0.0
    assert equal(before, weights(worker))


def test_entropy_bonus_raises_entropy(worker_of):
    rows = [replace(r, reward=0.0, group_rewards=(0.0,) * 4) for r in samples()]
    worker = worker_of(algorithm=GrpoSection(entropy_coef=1.0))
    values = [worker.train_step([work(rows)])["train/entropy_loss"] for _ in range(4)]
    assert values == sorted(values)
    assert values[-1] > values[0]


def test_nan_stops_before_any_weight_changes(worker_of):
    rows = samples()
    worker = worker_of()
    before = weights(worker)
    bad = rows[0]
    rows[0] = TrainSample(
        bad.prompt_ids, bad.response_ids, (float("nan"),) * len(bad.log_probs), bad.loss_mask, 1.0, (1.0, 0.0)
    )
    with pytest.raises(TrainerError, match="no weight was changed"):
        worker.train_step([work(rows)])
    assert equal(before, weights(worker))
    assert worker.step_count == 0


def test_a_fully_masked_batch_is_loss_zero(worker_of):
    rows = [replace(r, loss_mask=(0,) * len(r.loss_mask)) for r in samples()]
    metrics = worker_of().train_step([work(rows)])
    assert metrics["train/loss"] == 0.0
    assert metrics["train/tokens"] == 0.0


def test_supervised_rows_are_learned_by_heart(worker_of):
    rows = [
        replace(r, prompt_ids=(*r.prompt_ids, i), log_probs=(), reward=None, group_rewards=()) for i, r in enumerate(samples(8))
    ]
    section = TrainerSection(optimizer=OptimizerSection(lr=1e-2))
    worker = worker_of(algorithm=SftSection(), trainer=section)
    start = worker.evaluate_rows(rows)
    for _ in range(40):
        metrics = worker.train_step([work(rows)])
    end = worker.evaluate_rows(rows)
    assert set(metrics) == {f"train/{n}" for n in ("loss", "entropy_loss", "grad_norm", "lr-pg_0", "tokens", "rollouts")}
    assert start["exact_match"] < 0.5
    assert end["exact_match"] == 1.0
    assert end["loss"] < 0.1 < start["loss"]


def test_log_probs_do_not_depend_on_company(worker_of):
    worker = worker_of(trainer=TrainerSection(max_tokens_per_micro_batch=8))
    sequences = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [1, 2, 3]]
    together = worker.log_probs(sequences)
    assert [len(x) for x in together] == [2, 4, 1, 2]
    assert together[0] == together[3]
    for sequence, scores in zip(sequences, together, strict=True):
        assert worker.log_probs([sequence])[0] == pytest.approx(scores, abs=1e-6)
    with pytest.raises(TrainerError, match="fewer than two"):
        worker.log_probs([[1]])


@pytest.mark.parametrize("tied", [True, False])
def test_weights_round_trip_bit_for_bit(worker_of, tmp_path, tied, model_of):
    from safetensors.torch import load_file

    worker = worker_of(model_of(tmp_path / "source", tied=tied))
    before = weights(worker)
    manifest = worker.manifest()
    assert [t.name for t in manifest.tensors] == list(before)
    assert all(t.offset % 64 == 0 and t.shape == tuple(before[t.name].shape) for t in manifest.tensors)
    assert ("lm_head.weight" in before) is not tied
    assert worker.is_writer
    assert equal(before, dict(worker.weights_on_first_rank()))
    worker.save_hf(tmp_path / "saved")
    assert equal(before, load_file(tmp_path / "saved" / "model.safetensors"))
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == '{"kept": "as it is"}'
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    again = worker_of(tmp_path / "saved", from_scratch_seed=None)
    assert equal(before, weights(again))


def test_a_folder_without_its_weights_is_explained(worker_of, tmp_path, model_of):
    with pytest.raises(ConfigError, match="lacks its safetensors"):
        worker_of(model_of(tmp_path / "empty"), from_scratch_seed=None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parking_changes_nothing(worker_of, dtype):
    first, second = samples(seed=1), samples(seed=2)
    plain = worker_of(dtype=dtype)
    plain.train_step([work(first)])
    expected = plain.train_step([work(second)])
    expected_weights = weights(plain)
    worker = worker_of(dtype=dtype)
    worker.train_step([work(first)])
    held = worker.memory_bytes()
    assert all(held.values())
    worker.park([Tag.GRADS, Tag.OPTIMIZER])
    assert worker.memory_bytes() == {Tag.PARAMS: held[Tag.PARAMS], Tag.GRADS: 0, Tag.OPTIMIZER: 0}
    assert list(worker.weights())
    worker.park([Tag.PARAMS])
    assert not any(worker.memory_bytes().values())
    with pytest.raises(MemoryStateError, match="cannot read weights"):
        worker.weights()
    with pytest.raises(MemoryStateError, match="cannot train"):
        worker.train_step([work(second)])
    worker.wake([Tag.PARAMS, Tag.GRADS, Tag.OPTIMIZER])
    assert worker.memory_bytes() == held
    assert worker.train_step([work(second)]) == expected
    assert equal(weights(worker), expected_weights)


def test_a_trainer_that_cannot_leave_says_why(worker_of):
    worker = worker_of(memory=NullMemory("no allocator hooks"))
    with pytest.raises(MemoryStateError, match="no allocator hooks"):
        worker.park([Tag.PARAMS])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_the_uninterrupted_one(worker_of, tmp_path, dtype):
    batches = [work(samples(seed=k)) for k in range(4)]
    section = TrainerSection(optimizer=OptimizerSection(lr=1e-3, warmup_steps=1, decay="cosine", weight_decay=0.1))
    worker = worker_of(dtype=dtype, trainer=section)
    rows = [worker.train_step([b]) for b in batches[:2]]
    worker.save(tmp_path / "checkpoint")
    rows += [worker.train_step([b]) for b in batches[2:]]
    end = weights(worker)
    resumed = worker_of(dtype=dtype, trainer=section, seed=99, from_scratch_seed=8)
    resumed.load(tmp_path / "checkpoint")
    assert (resumed.step_count, resumed.update_count) == (2, 2)
    assert [resumed.train_step([b]) for b in batches[2:]] == rows[2:]
    assert equal(weights(resumed), end)


def test_loading_into_a_used_trainer_rewinds_it(worker_of, tmp_path):
    batches = [work(samples(seed=k)) for k in range(3)]
    worker = worker_of()
    worker.save(tmp_path / "start")
    rows = [worker.train_step([b]) for b in batches]
    worker.load(tmp_path / "start")
    assert worker.step_count == 0
    assert [worker.train_step([b]) for b in batches] == rows


def test_torn_and_foreign_checkpoints_are_refused(worker_of, tmp_path, model_of):
    worker = worker_of()
    worker.train_step([work(samples())])
    worker.save(tmp_path / "good")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        worker.load(tmp_path / "nothing")
    other = worker_of(model_of(tmp_path / "untied", tied=False))
    with pytest.raises(CheckpointError, match=r"of another model: .*tied_embeddings True .this run's: False"):
        other.load(tmp_path / "good")
    (tmp_path / "good" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="good"):
        worker_of().load(tmp_path / "good")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(worker_of, recompute):
    rows = samples()
    optimizer = OptimizerSection(lr=1e-3, warmup_steps=2)
    plain = worker_of(trainer=TrainerSection(optimizer=optimizer)).train_step([work(rows)])
    assert worker_of(trainer=TrainerSection(optimizer=optimizer, recompute=recompute)).train_step([work(rows)]) == plain


def test_drawn_weights_depend_on_seed_and_name_only(worker_of, tmp_path):
    first = weights(worker_of())
    assert equal(first, weights(worker_of(seed=5)))
    other = weights(worker_of(from_scratch_seed=8))
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert torch.equal(first["model.norm.weight"], torch.ones(32))
    assert first[name].std().item() == pytest.approx(0.1, rel=0.1)


def test_passed_through_keys_are_checked():
    assert checked_passthrough({"attention_softmax_in_fp32": False}) == {"attention_softmax_in_fp32": False}
    with pytest.raises(ConfigError, match=r"sequence_paralel .*did you mean sequence_parallel") as caught:
        checked_passthrough({"sequence_paralel": True, "params_dtype": "float16"})
    assert "params_dtype is set by model.dtype" in str(caught.value)


def test_platform_overrides_come_last(tmp_path, model_of, setup_of):
    from vime.models.qwen3 import FAMILY
    from vime.models.registry import read_config

    path = model_of(tmp_path / "m")
    forced = MegatronAdaptation(overrides={"layernorm_epsilon": Override(0.5, "because")})
    setup = setup_of(path, adaptation=forced, trainer=TrainerSection(megatron={"layernorm_epsilon": 0.25}))
    assert transformer_values(setup, FAMILY, read_config(path))["layernorm_epsilon"] == 0.5
    plain = setup_of(path, trainer=TrainerSection(megatron={"layernorm_epsilon": 0.25}))
    assert transformer_values(plain, FAMILY, read_config(path))["layernorm_epsilon"] == 0.25


def test_what_cannot_be_trained_is_refused_by_name(worker_of, tmp_path, setup_of):
    with pytest.raises(TrainerError, match="tp 2 x pp 1 x cp 1 x dp 1 is 2, but the role has 1"):
        check_parallel(setup_of(tmp_path, parallel=Parallel(tp=2)))
    with pytest.raises(TrainerError, match="vpp 2 cuts pipeline stages, but pp is 1"):
        check_parallel(setup_of(tmp_path, parallel=Parallel(dp=2, vpp=2), world=2))
    with pytest.raises(ConfigError, match="float16"):
        worker_of(dtype="float16")


def test_a_backend_without_the_host_is_refused_and_leaves_no_group(worker_of):
    with pytest.raises(TrainerError, match="cuda:gloo does not take host tensors"):
        worker_of(collective=CollectiveSpec("cuda:gloo", 60.0, ("sum",)))
    assert not torch.distributed.is_initialized()


def test_sockets_are_kept_to_loopback_where_the_role_is_alone(monkeypatch):
    import os

    from vime.trainer.megatron import parallel

    told: list[str] = []
    runtime = SimpleNamespace(bind_sockets=told.append)
    monkeypatch.setattr(os, "environ", {})
    outside = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth7": [SimpleNamespace(address="10.0.0.9")]}
    monkeypatch.setattr(parallel.psutil, "net_if_addrs", lambda: outside)
    monkeypatch.setattr(parallel, "own_address", lambda peer: "10.0.0.9" if peer == "10.0.0.1" else "127.0.0.1")
    parallel._choose_interface("10.0.0.1", runtime)  # type: ignore[arg-type]
    assert (told, os.environ) == ([], {"GLOO_SOCKET_IFNAME": "eth7"})
    os.environ.clear()
    parallel._choose_interface("localhost", runtime)  # type: ignore[arg-type]
    assert (told, os.environ) == (["lo"], {"GLOO_SOCKET_IFNAME": "lo"})


@pytest.mark.parametrize(("device", "on_host"), [("cpu", True), ("other", False)])
def test_parameters_are_made_where_they_will_be_used(tmp_path, model_of, setup_of, device, on_host):
    from vime.models.qwen3 import FAMILY
    from vime.models.registry import read_config

    setup = setup_of(model_of(tmp_path / "m"), runtime=TrainerRuntime(Factory("nothing:needed"), device))
    assert transformer_values(setup, FAMILY, read_config(setup.model_path))["use_cpu_initialization"] is on_host


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(50, 1, 56), (50, 2, 64), (64, 2, 64), (151936, 8, 151936)])
def test_vocabulary_is_padded_for_every_rank(vocab, tp, padded):
    assert padded_vocab(vocab, tp) == padded


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sharing_prompts_changes_neither_loss_nor_gradient(worker_of, recompute):
    rows = [replace(row, prompt_ids=(3, 1, 4, 1, 5, 9, 2, 6, group)) for group in range(3) for row in samples(4, seed=group)]

    def step(*, share: bool) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        worker = worker_of(trainer=TrainerSection(optimizer=OptimizerSection(lr=1e-3), recompute=recompute))
        assert worker._shares_prompts
        worker._shares_prompts = share
        metrics = worker.train_step([work(rows, parts=(5,))])
        return metrics, weights(worker)

    (shared, shared_weights), (separate, separate_weights) = step(share=True), step(share=False)
    assert shared == pytest.approx(separate, rel=2e-5, abs=1e-7)
    assert shared["train/grad_norm"] > 0.1
    for name, weight in shared_weights.items():
        # Adam's first step divides by the gradient's own size, so rounding shows where a gradient is nearly zero.
        difference = (weight - separate_weights[name]).abs()
        assert difference.max() < 1e-4
        assert difference.mean() < 1e-6
