"""Rows of expert ids: how many an answer must have, what pads them, what is refused."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
import pytest

from vime.data.routing import Routing, align_ids, check_ids, continue_ids, cyclic_ids, decode_ids
from vime.errors import RolloutError, TrainerError
from vime.testing.platforms import TINY_MODEL


def rows(count: int, *, layers: int = 3, top_k: int = 2, experts: int = 8, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.stack([[draw.permutation(experts)[:top_k] for _ in range(layers)] for _ in range(count)]).astype(np.uint8)


def encoded(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_an_answer_survives_its_encoding() -> None:
    ids = rows(5)
    np.testing.assert_array_equal(decode_ids(encoded(ids)), ids)


@pytest.mark.parametrize(
    "text", ["?", "", encoded(np.zeros((2, 2))), encoded(np.zeros((2, 2, 2))), encoded(np.array([None]))[:-4]]
)
def test_what_is_no_array_of_ids_is_refused(text: str) -> None:
    with pytest.raises(RolloutError, match=r"expert ids"):
        decode_ids(text)


def test_one_row_less_than_tokens_is_right_and_nothing_else() -> None:
    aligned = align_ids(rows(9), tokens=10, moe_layers=(0, 1, 2), experts=8)
    assert aligned.shape == (10, 3, 2)
    np.testing.assert_array_equal(aligned[:-1], rows(9))
    check_ids(aligned, experts=8)
    for count in (8, 10, 11):
        with pytest.raises(TrainerError, match="for 10 tokens"):
            align_ids(rows(count), tokens=10, moe_layers=(0, 1, 2), experts=8)


def test_layers_without_experts_are_left_out() -> None:
    ids = rows(4)
    ids[:, 0] = 0
    np.testing.assert_array_equal(align_ids(ids, tokens=5, moe_layers=(1, 2), experts=8)[:-1], ids[:, 1:])
    with pytest.raises(TrainerError, match="twice"):
        align_ids(ids, tokens=5, moe_layers=(0, 1, 2), experts=8)
    with pytest.raises(TrainerError, match="layer 3"):
        align_ids(ids, tokens=5, moe_layers=(1, 3), experts=8)


def test_a_model_says_which_rows_its_samples_carry() -> None:
    model = replace(TINY_MODEL, layers=3, dense_layers=1, experts=8, experts_per_token=2)
    routing = Routing.of(model)
    assert (routing, routing.token_bytes) == (Routing((1, 2), 8, 2), 4)
    assert Routing.of(replace(model, experts=300)).token_bytes == 8
    assert Routing.of(TINY_MODEL).moe_layers == ()
    aligned = routing.align(rows(4).astype(np.int32), tokens=5)
    assert (aligned.shape, aligned.dtype) == ((5, 2, 2), np.uint8)
    for wrong, what in [(rows(4, top_k=3), "3 experts for each token"), (rows(5), "for 5 tokens"), (rows(4) * 9, "8 experts")]:
        with pytest.raises(RolloutError, match=what):
            routing.align(wrong, tokens=5)


def test_ids_of_another_model_are_refused() -> None:
    with pytest.raises(TrainerError, match="but 4 experts"):
        align_ids(rows(4, experts=8), tokens=5, moe_layers=(0, 1, 2), experts=4)


@pytest.mark.parametrize(("top_k", "experts"), [(1, 4), (2, 8), (3, 8), (8, 8), (2, 300)])
def test_padding_is_distinct_and_even(top_k: int, experts: int) -> None:
    ids = cyclic_ids(experts, layers=2, top_k=top_k, experts=experts)
    check_ids(ids, experts=experts)
    assert (np.bincount(ids[:, 1].ravel(), minlength=experts) == top_k).all()
    whole, part = (
        cyclic_ids(6, layers=1, top_k=top_k, experts=experts),
        cyclic_ids(2, layers=1, top_k=top_k, experts=experts, start=4),
    )
    np.testing.assert_array_equal(whole[4:], part)


def test_a_second_answer_brings_the_row_that_the_first_one_lacks() -> None:
    """6 tokens, then 5 more: the first answer has 5 rows, the second all 10."""
    first, second = rows(5, seed=1), rows(10, seed=2)
    joined = continue_ids(first, second)
    np.testing.assert_array_equal(joined[:5], first)
    np.testing.assert_array_equal(joined[5:], second[5:])
    np.testing.assert_array_equal(continue_ids(first, second[3:], start=3), joined)
    assert align_ids(joined, tokens=11, moe_layers=(0, 1, 2), experts=8).shape[0] == 11
    np.testing.assert_array_equal(continue_ids(None, second), second)
    with pytest.raises(TrainerError, match="end at position 5 and go on at 6"):
        continue_ids(first, second[6:], start=6)
    with pytest.raises(TrainerError, match="end at position 0"):
        continue_ids(None, second, start=1)
