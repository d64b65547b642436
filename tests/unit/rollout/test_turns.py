"""The shared and the exclusive turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.rollout.turns import FreeTurns, Turns
from vime.testing.clock import run_virtual


class Diary:
    """Who held which turn, and when (virtual seconds)."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.lines: list[tuple[str, float, float]] = []

    async def hold(self, name: str, *, at_s: float, for_s: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(at_s)
        async with self.turns.exclusive() if name.startswith("train") else self.turns.rollout():
            started = loop.time()
            await asyncio.sleep(for_s)
            self.lines.append((name, started, loop.time()))


def play(make: Callable[[Diary], list[Coroutine[Any, Any, None]]]) -> list[tuple[str, float, float]]:
    diary = Diary()

    async def main() -> None:
        await asyncio.gather(*make(diary))

    run_virtual(main())
    assert diary.turns.open
    assert diary.turns.holders == 0
    return sorted(diary.lines, key=lambda line: line[1:])


# ---- turns


def test_the_rollout_turn_is_shared() -> None:
    assert play(lambda d: [d.hold("a", at_s=0, for_s=2), d.hold("b", at_s=1, for_s=2)]) == [("a", 0, 2), ("b", 1, 3)]


def test_the_train_turn_waits_for_running_requests_and_new_ones_wait_for_it() -> None:
    lines = play(
        lambda d: [
            d.hold("a", at_s=0, for_s=5),
            d.hold("train", at_s=1, for_s=2),
            d.hold("late", at_s=2, for_s=1),
            d.hold("later", at_s=6, for_s=1),
        ]
    )
    assert lines == [("a", 0, 5), ("train", 5, 7), ("late", 7, 8), ("later", 7, 8)]


def test_a_stream_of_requests_does_not_starve_training() -> None:
    lines = play(lambda d: [*(d.hold(f"r{i}", at_s=i, for_s=1.5) for i in range(10)), d.hold("train", at_s=3.25, for_s=1)])
    assert ("train", 4.5, 5.5) in lines


def test_exclusive_turns_follow_each_other() -> None:
    lines = play(
        lambda d: [d.hold("train 1", at_s=0, for_s=2), d.hold("train 2", at_s=1, for_s=2), d.hold("a", at_s=1, for_s=1)]
    )
    assert lines == [("train 1", 0, 2), ("train 2", 2, 4), ("a", 4, 5)]


def test_a_cancelled_wait_for_the_train_turn_lets_requests_go_on() -> None:
    async def main() -> None:
        diary = Diary()
        first = asyncio.create_task(diary.hold("a", at_s=0, for_s=10))
        training = asyncio.create_task(diary.hold("train", at_s=1, for_s=1))
        late = asyncio.create_task(diary.hold("late", at_s=2, for_s=1))
        await asyncio.sleep(3)
        assert not diary.turns.open
        training.cancel()
        await late
        assert diary.lines == [("late", 3, 4)]
        await first

    run_virtual(main())


def test_turns_are_released_when_their_holder_fails_or_is_cancelled() -> None:
    async def main() -> None:
        turns = Turns()
        for turn in (turns.rollout, turns.exclusive, turns.train):
            with pytest.raises(KeyError):
                async with turn():
                    raise KeyError
            holder = asyncio.create_task(_hold(turn))
            await asyncio.sleep(1)
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)
            assert turns.open
            assert turns.holders == 0

    run_virtual(main())


async def _hold(turn: Any) -> None:
    async with turn():
        await asyncio.sleep(100)


def test_acquire_and_release_serve_a_holder_elsewhere() -> None:
    async def main() -> None:
        turns = Turns()
        await turns.acquire_exclusive()
        assert not turns.open
        waiting = asyncio.create_task(turns.acquire_rollout())
        await asyncio.sleep(1)
        assert not waiting.done()
        turns.release_exclusive()
        await waiting
        assert turns.holders == 1
        turns.release_rollout()

    run_virtual(main())


def test_free_turns_never_wait() -> None:
    async def main() -> None:
        turns = FreeTurns()
        async with turns.train(), turns.rollout(), turns.exclusive():
            assert asyncio.get_running_loop().time() == 0

    run_virtual(main())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 20))), max_size=12
    )
)
def test_exclusive_excludes_whatever_is_cancelled(holders: list[tuple[bool, int, int, int | None]]) -> None:
    async def main() -> None:
        diary = Diary()
        tasks = []
        for i, (exclusive, at_s, for_s, cancel_s) in enumerate(holders):
            name = f"train {i}" if exclusive else f"request {i}"
            tasks.append(asyncio.create_task(diary.hold(name, at_s=at_s, for_s=for_s + 0.5)))
            if cancel_s is not None:
                asyncio.get_running_loop().call_later(cancel_s + 0.25, tasks[-1].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        for name, start, end in diary.lines:
            others = [line for line in diary.lines if line[0] != name and line[1] < end and start < line[2]]
            assert not others or (name.startswith("request") and all(other[0].startswith("request") for other in others))
        assert diary.turns.open
        assert diary.turns.holders == 0
        assert len(diary.lines) >= sum(cancel_s is None for *_, cancel_s in holders)

    run_virtual(main())
