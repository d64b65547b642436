"""What a grader may return."""

from __future__ import annotations

import numpy as np
import pytest

from vime.errors import RewardError
from vime.rewards.values import Score, read_score


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.75), 0.75),
        (-3, -3.0),
    ],
)
def test_numbers_of_all_kinds_become_a_float(value: object, reward: float) -> None:
    score = read_score(value, key=None, name="sample 1")
    assert score == Score(reward, reward)
    assert type(score.reward) is float


def test_none_means_not_trained() -> None:
    assert read_score(None, key=None, name="") == Score(None)
    assert read_score({"acc": None}, key="acc", name="") == Score(None)


def test_the_key_picks_from_a_mapping() -> None:
    assert read_score({"acc": 1, "fmt": 0.2}, key="acc", name="") == Score(1.0, 1.0)
    assert read_score({"acc": 1, "fmt": np.float64(0.2)}, key="fmt", name="") == Score(0.2, 0.2)


def test_a_missing_key_names_key_and_sample() -> None:
    with pytest.raises(RewardError, match="no 'score'") as caught:
        read_score({"acc": 1, "fmt": 0.2}, key="score", name="prompt 7, sample 2")
    assert caught.value.where == "prompt 7, sample 2"
    assert "'acc', 'fmt'" in caught.value.what


def test_a_mapping_without_a_key_is_refused() -> None:
    with pytest.raises(RewardError, match="returned a mapping that holds 'acc'"):
        read_score({"acc": 1}, key=None, name="s")


@pytest.mark.parametrize("value", ["1", "1.0", [1], (1,), {"a": {"b": 1}}, np.array([1.0]), b"1", 1j, object()])
def test_what_is_not_a_number_is_refused(value: object) -> None:
    with pytest.raises(RewardError, match="is not a number"):
        read_score(value, key="a", name="s")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(RewardError, match="the reward is"):
        read_score(value, key=None, name="s")
    with pytest.raises(RewardError, match="the raw score is"):
        read_score(Score(1.0, value), key=None, name="s")


def test_a_score_keeps_its_raw_value_apart() -> None:
    assert read_score(Score(0.0, 0.75), key="ignored", name="") == Score(0.0, 0.75)
    assert read_score(Score(None), key=None, name="") == Score(None)


def test_a_coroutine_is_explained() -> None:
    async def grade() -> float:
        return 1.0

    pending = grade()
    with pytest.raises(RewardError, match="coroutine function"):
        read_score(pending, key=None, name="s")
    pending.close()
