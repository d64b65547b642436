import math
from pathlib import Path

import pytest

from vime.errors import DataError
from vime.observe.samples import KeptSample, SamplesFile, SampleText, read_samples, shorten


def test_a_few_samples_of_a_step_are_kept_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = SamplesFile(path, per_step=2)
    answers = [SampleText("1 + 1 =", "2", 1.0, "2"), SampleText("é\n", "\ud800", None), SampleText("x", "y")]
    file.write(4, answers)
    assert read_samples(path) == [KeptSample(4, answers[0]), KeptSample(4, SampleText("é\n", "?", None))]


def test_rewards_that_are_no_numbers_are_left_empty(tmp_path: Path) -> None:
    file = SamplesFile(tmp_path / "s", per_step=3)
    file.write(1, [SampleText("p", "r", math.nan), SampleText("p", "r", "high"), SampleText("p", "r", True)])  # pyright: ignore[reportArgumentType]
    assert [kept.sample.reward for kept in read_samples(tmp_path / "s")] == [None, None, 1]


def test_cut_back_drops_later_steps(tmp_path: Path) -> None:
    file = SamplesFile(tmp_path / "s", per_step=2)
    for step in (1, 2, 3):
        file.write(step, [SampleText("é" * step, str(step)), SampleText("b", "c")])
    file.cut_back(2)
    file.write(3, [SampleText("again", "3")])
    assert [(kept.step, kept.sample.prompt) for kept in read_samples(tmp_path / "s")] == [
        (1, "é"), (1, "b"), (2, "éé"), (2, "b"), (3, "again"),
    ]  # fmt: skip


def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    SamplesFile(tmp_path / "s", per_step=0).write(1, [SampleText("a", "b")])
    assert read_samples(tmp_path / "s") == []
    assert read_samples(tmp_path / "absent") == []


def test_long_texts_keep_both_ends() -> None:
    text = "a" * 60 + "b" * 60
    assert shorten(text, 20) == "a" * 10 + "\n[... 100 characters ...]\n" + "b" * 10
    assert shorten(text, 120) == text


def test_a_broken_sample_is_named(tmp_path: Path) -> None:
    (tmp_path / "s").write_text('{"step": 1}\n')
    with pytest.raises(DataError) as caught:
        read_samples(tmp_path / "s")
    assert caught.value.where == f"{tmp_path / 's'}:1"
