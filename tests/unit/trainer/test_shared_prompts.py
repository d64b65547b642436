"""Siblings that share one copy of their prompt train like separate sequences."""

from __future__ import annotations

import random

import pytest
import torch

from vime.errors import TrainerError
from vime.trainer.megatron.packing import PackShape, pack_samples
from vime.trainer.megatron.shared_prompts import ResponseRun, arrange, pack_shared, saves_enough
from vime.types import TrainSample

SHAPE = PackShape(8, 64, torch.device("cpu"))


def sample(prompt: tuple[int, ...], response: tuple[int, ...]) -> TrainSample:
    return TrainSample(prompt, response, (-1.0,) * len(response), (1,) * len(response), 1.0, (1.0, 0.0))


def group(prompt: tuple[int, ...], *responses: tuple[int, ...]) -> list[TrainSample]:
    return [sample(prompt, response) for response in responses]


def test_layout_by_hand() -> None:
    samples = arrange([*group((7, 8, 9), (1,), (2, 3)), *group((5, 6), (4, 4), (3, 2))])
    pack = pack_shared(samples, SHAPE)
    assert pack.ids[0].tolist() == [5, 6, 7, 8, 9, 4, 4, 3, 2, 1, 2, 3, 0, 0, 0, 0]
    assert pack.positions[0].tolist() == [0, 1, 0, 1, 2, 2, 3, 2, 3, 3, 3, 4, 0, 1, 2, 3]
    assert pack.rows.tolist() == [1, 5, 1, 7, 4, 4, 10]
    assert pack.targets.tolist() == [4, 4, 3, 2, 1, 2, 3]
    assert pack.params.cu_seqlens_q.tolist() == [0, 2, 5, 7, 9, 10, 12, 16]
    shared = pack.params.shared_prompts
    assert [(r.length, r.tokens) for r in shared.prompts] == [(2, 2), (3, 3)]
    assert [(r.prompt_length, r.length, r.count, r.start) for r in shared.responses] == [
        (2, 2, 2, 5),
        (3, 1, 1, 9),
        (3, 2, 1, 10),
    ]
    first: ResponseRun = shared.responses[0]
    assert first.prompt_rows.tolist() == [0, 1, 0, 1]
    assert shared.padding == 4


def test_targets_are_those_of_separate_sequences() -> None:
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(64) for _ in range(rng.randrange(1, 6))) for _ in range(5)]
    samples = arrange(
        [sample(p, tuple(rng.randrange(64) for _ in range(rng.randrange(1, 5)))) for p in prompts for _ in range(4)]
    )
    shared, separate = pack_shared(samples, SHAPE), pack_samples(samples, SHAPE)
    assert torch.equal(shared.targets, separate.targets)
    assert torch.equal(shared.ids[0][shared.rows], separate.ids[0][separate.rows])
    assert torch.equal(shared.positions[0][shared.rows], separate.positions[0][separate.rows])


def test_sharing_must_pay() -> None:
    assert saves_enough(group((1, 2, 3, 4), (5,), (6,)))
    assert not saves_enough([sample((1, 2), (3,)), sample((2, 1), (3,))])
    assert not saves_enough(group((1,), (2, 3, 4, 5), (3, 4, 5, 6)))


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(TrainerError, match="vocabulary"):
        pack_shared(group((1, 2, 64), (3,), (4,)), SHAPE)
