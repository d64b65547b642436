"""Routing replay of one real rank: where a pack's experts come from, what they change, and that nothing of them stays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vime.config.algorithms import GrpoSection
from vime.config.schema import OptimizerSection, TrainerSection
from vime.errors import ConfigError, TrainerError
from vime.testing.tiny_models import make_tiny_qwen3_moe
from vime.trainer.megatron.context import ContextSplit
from vime.trainer.megatron.model import checked_passthrough
from vime.trainer.megatron.packing import Pack, PackShape, pack_samples
from vime.trainer.megatron.shared_prompts import arrange, pack_shared
from vime.types import TrainSample, UpdateWork

LAYERS, EXPERTS, TOP_K = 2, 8, 2
DIFFERING = "train/routing_replay_differing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("routed") / "model", hidden=32, ffn=24, vocab_size=320, init_std=0.1)


@pytest.fixture
def actor(worker_of, folder):
    """`actor(kind, **keys of the trainer's section)`: a rank that replays so. Later updates have a pass for old log-probs."""
    algorithm = GrpoSection(old_log_probs="recompute")

    def build(kind: Any, *, lr: float = 1e-3, **changes: Any) -> Any:
        section = TrainerSection(optimizer=OptimizerSection(lr=lr), routing_replay=kind, **{"recompute": "none", **changes})
        return worker_of(folder, from_scratch_seed=None, algorithm=algorithm, trainer=section)

    return build


def drawn_ids(rng: np.random.Generator, tokens: int, *, experts: int = EXPERTS) -> np.ndarray:
    """Distinct experts by chance [tokens, layers, top_k]."""
    return rng.random((tokens, LAYERS, experts)).argsort(-1)[..., :TOP_K].astype(np.uint8 if experts <= 256 else np.uint16)


def samples(*, routed: bool = True, long: int = 0) -> list[TrainSample]:
    """Three groups of four. Three siblings of each group took the same experts in their prompt, the last did not."""
    draw, rng, made = random.Random(3), np.random.default_rng(4), []
    for group in range(3):
        prompt = (*range(10, 10 + long), *(draw.randrange(4, 320) for _ in range(2 + group)))
        common, rewards = drawn_ids(rng, len(prompt)), (1.0, 0.0, 0.0, 1.0)
        for index, reward in enumerate(rewards):
            response = tuple(draw.randrange(4, 320) for _ in range(draw.choice([1, 3, 5])))
            log_probs = tuple(-5.0 + 0.1 * draw.random() for _ in response)
            ids = drawn_ids(rng, len(prompt) + len(response))
            if index < 3:
                ids[: len(prompt)] = common
            one = TrainSample(prompt, response, log_probs, (1,) * len(response), reward, rewards)
            made.append(replace(one, routed_experts=ids) if routed else one)
    return made


def work(rows: Sequence[TrainSample], parts: Sequence[int] = (5, 5)) -> UpdateWork:
    """Cut at `parts`, of which the second is empty unless said otherwise."""
    cut = tuple(tuple(rows[a:b]) for a, b in pairwise((0, *parts, len(rows))))
    return UpdateWork(cut, num_rollouts=len(rows), num_tokens=sum(sum(r.loss_mask) for r in rows))


def weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weights()}


def ids_of(row: TrainSample) -> np.ndarray:
    assert row.routed_experts is not None
    return row.routed_experts


def token_ids(row: TrainSample) -> tuple[int, ...]:
    return (*row.prompt_ids, *row.response_ids)


# ---- where a pack's experts come from


def check_rows(pack: Pack, rows: Sequence[TrainSample]) -> int:
    """Every row has the experts of a sample with its token, or is padding, evenly spread; the number of rows with a token."""
    assert pack.experts is not None
    found = pack.experts.by_piece[0].numpy()
    known = np.concatenate([np.zeros((0, LAYERS, TOP_K), np.uint8), *map(ids_of, rows)])
    tokens = [token for row in rows for token in token_ids(row)]
    held = pack.origin >= 0
    assert pack.ids[0][held].tolist() == [tokens[place] for place in pack.origin[held]]
    np.testing.assert_array_equal(found[held.numpy()], known[pack.origin[held].numpy()])
    counts = np.bincount(found[~held.numpy()][:, 1].ravel(), minlength=EXPERTS)
    assert counts.max() - counts.min() <= 1
    assert (found[..., 0] != found[..., 1]).all()
    return int(held.sum())


def test_rows_of_a_pack_have_the_experts_of_their_tokens(actor) -> None:
    replay, rows = actor("rollout")._replay, samples()
    shape = PackShape(24, 320, torch.device("cpu"))
    pack = replay.given(rows, pack_samples(rows, shape))
    total = sum(len(token_ids(row)) for row in rows)
    assert check_rows(pack, rows) == total
    assert int(pack.experts.real.sum()) == total - len(rows), "the last token of a sample was never routed by an engine"
    nothing = replay.given([], pack_samples([], shape))
    assert nothing.experts.by_piece[0].shape == (24, LAYERS, TOP_K)
    assert check_rows(nothing, []) == 0
    assert not nothing.experts.real.any()


def test_numbers_of_experts_that_no_byte_holds_arrive(worker_of, tmp_path) -> None:
    model = make_tiny_qwen3_moe(tmp_path / "many", hidden=16, ffn=8, vocab_size=320, experts=300)
    section = TrainerSection(recompute="none", routing_replay="rollout")
    worker = worker_of(model, from_scratch_seed=None, trainer=section)
    rng = np.random.default_rng(5)
    rows = [replace(r, routed_experts=drawn_ids(rng, len(token_ids(r)), experts=300)) for r in samples()]
    pack = worker._checked(rows)[1]
    held = pack.origin >= 0
    known = np.concatenate([*map(ids_of, rows)])
    assert known.max() > 256
    np.testing.assert_array_equal(pack.experts.by_piece[0][held].numpy(), known[pack.origin[held].numpy()])
    assert worker.train_step([work(rows)])[DIFFERING] > 0.9


def test_context_parallel_ranks_have_each_token_once(actor) -> None:
    replay, rows = actor("rollout")._replay, samples()
    parts = [PackShape(16, 320, torch.device("cpu"), ContextSplit(rank, 2)) for rank in (0, 1)]
    packs = [replay.given(rows, pack_samples(rows, shape)) for shape in parts]
    assert sum(check_rows(pack, rows) for pack in packs) == sum(len(token_ids(row)) for row in rows)
    places = torch.cat([pack.origin for pack in packs])
    assert places[places >= 0].unique().numel() == int((places >= 0).sum())
    assert sum(int(pack.experts.real.sum()) for pack in packs) == int((places >= 0).sum()) - len(rows)


def test_siblings_share_a_prompt_only_where_it_took_the_same_experts(actor) -> None:
    replay, rows = actor("rollout")._replay, arrange(samples(long=6))
    shape = PackShape(8, 320, torch.device("cpu"))
    pack = replay.given(rows, pack_shared(rows, shape, routed=True))
    assert check_rows(pack, rows) == sum(2 * (8 + group) for group in range(3)) + sum(len(r.response_ids) for r in rows)
    shared = pack_shared(rows, shape)
    assert int((shared.origin >= 0).sum()) == sum(8 + group for group in range(3)) + sum(len(r.response_ids) for r in rows)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_shared_and_separate_prompts_train_alike(actor, recompute: str) -> None:
    rows = samples(long=20)

    def step(*, share: bool) -> dict[str, float]:
        worker = actor("rollout", recompute=recompute)
        worker._shares_prompts = share
        packs = [worker._checked(part)[1] for part in work(rows).micro_batches]
        assert hasattr(packs[0].params, "shared_prompts") is share
        return worker.train_step([work(rows)])

    shared, separate = step(share=True), step(share=False)
    # A shared row is counted once.
    assert shared.pop(DIFFERING) == pytest.approx(separate.pop(DIFFERING), rel=0.2)
    assert shared == pytest.approx(separate, rel=2e-5, abs=1e-7)


# ---- what they change


def with_own_ids(worker: Any, rows: Sequence[TrainSample]) -> list[TrainSample]:
    """Rows with the experts that the worker's routers choose."""
    found = []
    for row in rows:
        pack = pack_samples([row], worker._shape)
        with worker._replay._pieces[0].recording() as passes:
            worker._passes.score([pack], temperature=1.0)
        found.append(replace(row, routed_experts=passes[0][pack.origin >= 0].numpy()))
    return found


def test_ones_own_experts_change_nothing(actor) -> None:
    """Experts get other rows of padding, which changes the order of sums."""
    rows = samples(routed=False)
    plain = actor("none").train_step([work(rows)])
    assert DIFFERING not in plain
    worker = actor("rollout")
    replayed = worker.train_step([work(with_own_ids(worker, rows))])
    assert replayed.pop(DIFFERING) == 0.0
    assert replayed == pytest.approx(plain, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_other_experts_change_the_loss_and_the_router_learns(actor, recompute: str) -> None:
    rows = samples()
    plain = actor("none").train_step([work(rows)])
    megatron = {"recompute_modules": ["moe"]} if recompute == "selective" else {}
    worker = actor("rollout", recompute=recompute, megatron=megatron)
    before = weights(worker)
    replayed = worker.train_step([work(rows)])
    assert replayed[DIFFERING] > 0.8
    assert abs(replayed["train/grad_norm"] / plain["train/grad_norm"] - 1) > 1e-3
    after = weights(worker)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert not torch.equal(before[name], after[name])
    again = actor("rollout").train_step([work(rows)])
    assert replayed == pytest.approx(again, rel=1e-5, abs=1e-7)


def test_the_pass_for_old_log_probs_takes_the_samples_experts_too(actor) -> None:
    """With a second update that changes hardly anything, its ratio to the old log-probs is 1 only then."""
    worker = actor("rollout", updates_per_step=2, lr=1e-12)
    metrics = worker.train_step([work(samples()), work(samples())])
    assert abs(metrics["train/ppo_kl"]) < 1e-7
    scores = worker._passes.score([pack_samples(samples(), worker._shape)], temperature=1.0)[0].log_probs
    given = worker._passes.score([worker._replay.given(samples(), pack_samples(samples(), worker._shape))], temperature=1.0)
    assert (scores - given[0].log_probs).abs().max() > 1e-2


# ---- the routers' own record


def test_a_record_is_what_later_updates_take(actor) -> None:
    """The first update has no pass before it, so nothing is prescribed to it; those after it differ by what it learned."""
    rows = samples(routed=False)
    one = actor("trainer", lr=1e-2).train_step([work(rows)])
    assert DIFFERING not in one
    assert one == actor("none", lr=1e-2).train_step([work(rows)])
    updates = [work(rows), work(rows, (2, 3, 7)), work(rows)]
    plain = actor("none", lr=1e-2, updates_per_step=3).train_step(updates)
    replayed = actor("trainer", lr=1e-2, updates_per_step=3).train_step(updates)
    assert 0.0 < replayed[DIFFERING] < 0.9
    assert replayed["train/grad_norm"] != plain["train/grad_norm"]
    assert actor("trainer", lr=1e-12, updates_per_step=3).train_step(updates)[DIFFERING] == 0.0


# ---- nothing stays


@pytest.mark.parametrize("kind", ["rollout", "trainer"])
def test_other_passes_choose_for_themselves_also_after_an_update_that_failed(actor, kind, monkeypatch) -> None:
    """The second update fails in its second micro-batch, whose passes under recompute were not repeated yet."""
    rows = samples()
    ids = [token_ids(row) for row in rows]
    plain = actor("none")
    expected, scored = plain.log_probs(ids), plain.evaluate_rows(rows)
    worker = actor(kind, recompute="full", updates_per_step=2, lr=1e-12)
    assert worker.log_probs(ids) == expected
    loss, calls = worker._passes._loss, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise TrainerError("in the middle")
        return loss(*args)

    monkeypatch.setattr(worker._passes, "_loss", failing)
    for failed in range(2):
        with pytest.raises(TrainerError, match="in the middle"):
            worker.train_step([work(rows), work(rows)])
        assert len(calls) == 5, failed
        calls.clear()
        for ours, theirs in zip(worker.log_probs(ids), expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert worker.evaluate_rows(rows) == pytest.approx(scored, rel=1e-6)
    monkeypatch.undo()
    metrics = worker.train_step([work(rows), work(rows)])
    fresh = actor(kind, recompute="full", updates_per_step=2, lr=1e-12).train_step([work(rows), work(rows)])
    assert metrics == pytest.approx(fresh, rel=1e-5, abs=1e-7)


def test_a_pass_without_experts_in_an_update_is_an_error(actor, monkeypatch) -> None:
    worker, rows = actor("rollout"), samples()
    given = worker._replay.given
    monkeypatch.setattr(worker._replay, "given", lambda part, pack: given(part, pack) if len(part) == 5 else pack)
    with pytest.raises(TrainerError, match="a pass without expert ids"):
        worker.train_step([work(rows)])


# ---- refusals


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _: None, "sample 1 of the micro-batch has no expert ids"),
        (lambda ids: ids[:-1], r"sample 1 of the micro-batch has expert ids of shape .* layers with experts"),
        (lambda ids: ids[:, :1], "expert ids of shape"),
        (lambda ids: ids[..., :1], "expert ids of shape"),
        (lambda ids: ids + 7, r"sample 1 of the micro-batch names expert 1\d of 8"),
    ],
)
def test_ids_that_are_not_there_or_do_not_fit_are_named(actor, spoil, words: str) -> None:
    worker, rows = actor("rollout"), samples()
    rows[1] = replace(rows[1], routed_experts=spoil(rows[1].routed_experts))
    before = weights(worker)
    with pytest.raises(TrainerError, match=words):
        worker.train_step([work(rows)])
    assert all(map(torch.equal, weights(worker).values(), before.values()))


def test_what_has_no_routers_to_ask_is_refused(worker_of, actor) -> None:
    section = TrainerSection(routing_replay="rollout")
    with pytest.raises(ConfigError, match=r"trainer.routing_replay: qwen3 has no experts"):
        worker_of(trainer=section)
    with pytest.raises(TrainerError, match="fused routers"):
        actor("trainer", megatron={"moe_router_fusion": True})
    with pytest.raises(ConfigError, match=r"moe_enable_routing_replay is not supported: trainer\.routing_replay"):
        checked_passthrough({"moe_enable_routing_replay": True})
