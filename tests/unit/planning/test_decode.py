"""Seconds of sampling: lengths, what a decode step reads, and batches that wait."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.planning.decode import (
    Engine,
    EngineRates,
    Lengths,
    attention_share,
    decode_seconds,
    decode_step_seconds,
    prefill_seconds,
    read_weights,
    touched,
)
from vime.testing.platforms import TINY_MODEL

DENSE = replace(TINY_MODEL, parameters=10**9)
MIXED = replace(DENSE, ffn=0, experts=64, experts_per_token=4, expert_ffn=512)
ALONE = Parallel()
RATES = EngineRates(memory=1e12, products=1e14, expert_share=0.5, step_s=0.0, all_reduce_s=0.0, link=1e11)


def engine(model: ModelShape = DENSE, parallel: Parallel = ALONE, **rates: float) -> Engine:
    return Engine(model, parallel, "bfloat16", 2, replace(RATES, **rates))


@pytest.mark.parametrize(("mean", "longest"), [(512, 512), (256, 512), (100, 512), (400, 512)])
def test_lengths_have_the_mean_and_the_square_that_they_say(mean: float, longest: float) -> None:
    lengths, k = Lengths(64, mean, longest), longest / mean - 1
    rng = random.Random(0)
    drawn = [longest * (1 - rng.random() ** (1 / k)) if k else longest for _ in range(200_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.01)
    assert sum((64 + x) ** 2 for x in drawn) / len(drawn) == pytest.approx(lengths.squared, rel=0.01)
    assert sum(64 * x + x * x / 2 for x in drawn) / sum(drawn) == pytest.approx(lengths.context, rel=0.01)
    for at in (0.0, 0.3 * longest, 0.9 * longest):
        assert sum(x > at for x in drawn) / len(drawn) == pytest.approx(lengths.running(at), abs=0.01)
    assert lengths.running(longest) == 0


def test_a_lone_sequence_reads_all_weights_for_every_token() -> None:
    full, last = decode_seconds(engine(), 1, Lengths(0, 100, 100), at_once=8)
    weights, cache = 100 * 2e9 / 1e12, 100 * 50 * 2 * 4 * 2 * 32 * 2 / 1e12
    assert (full, last) == (0.0, pytest.approx(weights + cache, rel=1e-3))


def test_an_untied_embedding_is_looked_up_and_not_read() -> None:
    untied = replace(DENSE, tied_embeddings=False)
    assert read_weights(DENSE, 1, 2) - read_weights(untied, 1, 2) == 2 * DENSE.vocab * DENSE.hidden


def test_many_sequences_are_bound_by_products() -> None:
    one, many = (decode_step_seconds(engine(), n, 0) for n in (1, 10**6))
    assert one == pytest.approx(2e9 / 1e12)
    assert many == pytest.approx(10**6 * 2 * 1e9 / 1e14)


def test_a_batch_reads_the_experts_that_its_tokens_go_to() -> None:
    rng = random.Random(1)
    seen = [len({e for _ in range(20) for e in rng.sample(range(64), 4)}) / 64 for _ in range(2000)]
    assert touched(MIXED, 20) == pytest.approx(sum(seen) / len(seen), rel=0.01)
    assert touched(MIXED, 1) == pytest.approx(4 / 64)
    assert read_weights(MIXED, 10**4, 2) == pytest.approx(2 * MIXED.parameters)
    assert touched(DENSE, 5) == 0


@pytest.mark.parametrize("model", [DENSE, MIXED], ids=["dense", "experts"])
def test_more_devices_more_memory_or_shorter_responses_never_take_longer(model: ModelShape) -> None:
    slow = sum(decode_seconds(engine(model), 300, Lengths(64, 200, 500), at_once=64))
    for faster in (
        sum(decode_seconds(engine(model, Parallel(tp=2)), 300, Lengths(64, 200, 500), at_once=64)),
        sum(decode_seconds(engine(model, Parallel(dp=2)), 300, Lengths(64, 200, 500), at_once=64)),
        sum(decode_seconds(engine(model, memory=2e12), 300, Lengths(64, 200, 500), at_once=64)),
        sum(decode_seconds(engine(model), 300, Lengths(64, 100, 500), at_once=64)),
        sum(decode_seconds(engine(model), 300, Lengths(64, 200, 400), at_once=64)),
        sum(decode_seconds(engine(model), 300, Lengths(64, 200, 500), at_once=128)),
    ):
        assert faster < slow


def test_waiting_sequences_take_the_places_that_become_free() -> None:
    lengths = Lengths(0, 100, 100)
    full, last = decode_seconds(engine(step_s=1.0, memory=1e30, products=1e30), 24, lengths, at_once=8)
    assert (full, last) == (pytest.approx(200), pytest.approx(100))


def test_reductions_have_a_latency_for_every_layer() -> None:
    alone, split = (decode_step_seconds(engine(memory=1e30, products=1e30, link=1e30, all_reduce_s=1e-3, parallel=p), 1, 0)
                    for p in (Parallel(), Parallel(tp=2)))  # fmt: skip
    assert (alone, split) == (pytest.approx(0), pytest.approx(2 * DENSE.layers * 1e-3))


def test_attention_is_worth_so_many_tokens() -> None:
    """2 FLOP a parameter and token outside attention; inside, 4 layers, 4 heads, 32 + 32 entries, the square of the length."""
    assert attention_share(DENSE) == pytest.approx(4 * 4 * 64 / 2e9)
    unused = 4 * 60 * 3 * DENSE.hidden * 512
    assert attention_share(MIXED) == pytest.approx(4 * 4 * 64 / (2 * (1e9 - unused)))


def test_a_prefill_is_products_and_attention() -> None:
    head, attention = DENSE.vocab * DENSE.hidden, 2 * 4 * 4 * 32 * 100
    expected = 10 * 100 * (2 * (1e9 - head) + attention) / 1e14
    assert prefill_seconds(engine(), 10, Lengths(100, 5, 5)) == pytest.approx(expected)
    assert prefill_seconds(engine(parallel=Parallel(tp=4)), 10, Lengths(100, 5, 5)) == pytest.approx(expected / 4)
