"""The order of prompts and their ledger."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.data.source import PromptSource, epoch_order
from vime.errors import CheckpointError, DataError, RolloutError
from vime.types import PromptId


def source(num_rows: int = 4, *, identity: str = "A", seed: int = 1, shuffle: bool = False, epochs: int | None = None):
    return PromptSource(num_rows, identity=identity, seed=seed, shuffle=shuffle, epochs=epochs)


def rows(prompts: list[PromptId]) -> list[int]:
    return [prompt.row for prompt in prompts]


def groups(prompts: list[PromptId]) -> list[int]:
    return [prompt.group for prompt in prompts]


def resumed(old: PromptSource, new: PromptSource) -> list[str]:
    return new.restore(json.loads(json.dumps(old.state())))


# ---- order


def test_rows_come_in_order_and_groups_rise_over_epoch_borders() -> None:
    taken = source(3).take(8)
    assert taken[:2] == [PromptId(0, 0, 0), PromptId(1, 0, 1)]
    assert [(p.epoch, p.row) for p in taken] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert groups(taken) == list(range(8))


def test_shuffled_order_is_fixed_by_seed_and_epoch() -> None:
    assert list(epoch_order(8, seed=0, epoch=0, shuffle=True)) == [5, 3, 7, 4, 0, 1, 6, 2]
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch, shuffle=True)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_one_large_request_equals_many_small_ones() -> None:
    one, many = source(5, shuffle=True), source(5, shuffle=True)
    assert one.take(23) == [prompt for n in (1, 0, 7, 15) for prompt in many.take(n)]


def test_finite_epochs_end() -> None:
    finite = source(3, epochs=2)
    assert finite.num_groups == 6
    assert len(finite.take(5)) == 5
    assert not finite.exhausted
    assert rows(finite.take(5)) == [2]
    assert finite.exhausted
    assert finite.take(1) == []
    assert source(3).num_groups is None


@pytest.mark.parametrize(("num_rows", "epochs"), [(0, None), (3, 0)])
def test_no_data_is_an_error(num_rows: int, epochs: int | None) -> None:
    with pytest.raises(DataError):
        source(num_rows, epochs=epochs)


# ---- ledger


def test_returned_prompts_come_first_in_group_order_with_the_attempt_of_a_failure() -> None:
    s = source(10)
    taken = s.take(5)
    s.give_back([taken[3]], regenerate=True)
    s.give_back([taken[1]], regenerate=False)
    assert s.lowest_returned == 1
    assert s.take(3) == [PromptId(1, 0, 1), PromptId(3, 0, 3, attempt=1), PromptId(5, 0, 5)]
    s.give_back([PromptId(3, 0, 3, attempt=1)], regenerate=True)
    assert s.take(1) == [PromptId(3, 0, 3, attempt=2)]
    assert s.counters == {"dropped_by_filter": 0, "regenerated": 2}


def test_a_returned_prompt_comes_out_after_the_data_ended() -> None:
    s = source(2, epochs=1)
    taken = s.take(2)
    s.give_back(taken[:1], regenerate=True)
    assert not s.exhausted
    assert groups(s.take(2)) == [0]


@pytest.mark.parametrize("again", ["give_back", "drop", "settle"])
@pytest.mark.parametrize("first", ["give_back", "drop", "settle"])
def test_a_prompt_ends_once(first: str, again: str) -> None:
    s = source()
    taken = s.take(2)
    end = {"give_back": lambda ids: s.give_back(ids, regenerate=True), "drop": s.drop, "settle": s.settle}
    end[first](taken[:1])
    with pytest.raises(RolloutError, match=r"group 0 \(attempt 0\) is .* but it is not out"):
        end[again](taken[:1])
    assert list(s.out) == [1]


def test_an_old_attempt_cannot_end_the_new_one() -> None:
    s = source()
    old = s.take(1)
    s.give_back(old, regenerate=True)
    s.take(1)
    with pytest.raises(RolloutError, match="attempt 0"):
        s.settle(old)


def test_the_listener_hears_every_change() -> None:
    s = source()
    heard: list[list[int]] = []
    s.watch(lambda: heard.append(list(s.out)))
    taken = s.take(3)
    s.settle(taken[:1])
    s.drop(taken[1:2])
    s.give_back(taken[2:], regenerate=False)
    assert heard == [[0, 1, 2], [1, 2], [2], []]


# ---- resume


def test_resume_at_an_epoch_border_goes_on_with_the_next_epoch_and_its_shuffle() -> None:
    old, new = source(60, shuffle=True, epochs=1), source(60, shuffle=True, epochs=2)
    old.settle(old.take(60))
    assert resumed(old, new) == []
    rest = new.take(100)
    assert rows(rest) == list(epoch_order(60, seed=1, epoch=1, shuffle=True))
    assert {prompt.epoch for prompt in rest} == {1}
    assert groups(rest) == list(range(60, 120))


@pytest.mark.parametrize("taken", range(13))
def test_resume_anywhere_equals_going_on(taken: int) -> None:
    old, new = source(5, shuffle=True), source(5, shuffle=True)
    old.settle(old.take(taken))
    assert resumed(old, new) == []
    assert new.take(20) == old.take(20)


def test_other_data_starts_at_its_first_row_with_a_warning() -> None:
    old, new = source(10, identity="A"), source(4, identity="B")
    old.settle(old.take(4))
    old.take(2)
    (warning,) = resumed(old, new)
    assert "identity 'A' -> 'B'" in warning
    assert "2 unfinished" in warning
    assert new.take(5) == [PromptId(6, 0, 0), PromptId(7, 0, 1), PromptId(8, 0, 2), PromptId(9, 0, 3), PromptId(10, 1, 0)]


@pytest.mark.parametrize("change", [{"seed": 2}, {"shuffle": True}, {"num_rows": 5}])
def test_another_order_of_the_same_data_starts_over_too(change: dict[str, int]) -> None:
    old, new = source(), source(**change)  # type: ignore[arg-type]
    old.settle(old.take(2))
    (warning,) = resumed(old, new)
    assert next(iter(change)) in warning
    assert new.take(1)[0].row == new._order[0]
    assert new.take(1)[0].epoch == 0


def test_unfinished_prompts_come_first_after_resume_once_with_their_attempts() -> None:
    old, new = source(20), source(20)
    taken = old.take(8)
    old.give_back([taken[6]], regenerate=True)
    old.settle([taken[i] for i in (0, 2, 3, 5)])
    old.drop([taken[4]])
    assert resumed(old, new) == []
    assert new.out == {}
    unfinished = [PromptId(1, 0, 1), PromptId(6, 0, 6, attempt=1), PromptId(7, 0, 7)]
    assert new.take(5) == [*unfinished, PromptId(8, 0, 8), PromptId(9, 0, 9)]
    assert new.counters == {"dropped_by_filter": 1, "regenerated": 1}


def test_trained_prompts_that_are_still_out_are_left_out_of_the_state() -> None:
    s = source()
    taken = s.take(3)
    assert s.state(trained=taken[:2])["unfinished"] == [[2, 0, 2, 0]]
    assert len(s.state()["unfinished"]) == 3


@pytest.mark.parametrize("spoil", [{"unfinished": [[1, 2]]}, {"unfinished": None}, {"offset": "x"}, {"counters": []}])
def test_an_unreadable_state_is_refused_and_changes_nothing(spoil: dict[str, object]) -> None:
    s = source()
    with pytest.raises(CheckpointError, match="cannot be read"):
        s.restore({**source().state(), **spoil})
    with pytest.raises(CheckpointError):
        s.restore({})
    assert s.take(1) == [PromptId(0, 0, 0)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "back", "fail", "drop", "settle", "resume"]), st.integers(0, 5)), max_size=40)
)
def test_every_group_has_one_end(operations: list[tuple[str, int]]) -> None:
    s, ended = source(3, shuffle=True), set[int]()
    for name, n in operations:
        out = [s.out[group] for group in sorted(s.out)][:n]
        if name == "take":
            taken = groups(s.take(n))
            assert not ended & set(taken)
            assert taken == sorted(taken)
        elif name == "resume":
            again = source(3, shuffle=True)
            assert resumed(s, again) == []
            s = again
        elif name in ("back", "fail"):
            s.give_back(out, regenerate=name == "fail")
        else:
            ended |= {prompt.group for prompt in out}
            (s.drop if name == "drop" else s.settle)(out)
    state = s.state()
    unfinished = [group for group, *_ in state["unfinished"]]
    assert sorted([*ended, *unfinished]) == list(range(state["next_group"]))
