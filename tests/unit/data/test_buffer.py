"""Admission, delivery order, staleness and the journal, without a loop around them."""

from __future__ import annotations

import asyncio
import json

import pytest

from vime.data.buffer import Buffer, Order, next_by_completion, next_by_prompt, staleness
from vime.data.source import PromptSource
from vime.errors import CheckpointError, ConfigError, RolloutError
from vime.testing.clock import run_virtual
from vime.testing.fakes import fake_group
from vime.types import Batch, Group, PolicyVersion, PromptId


class Bench:
    """A buffer with a rollout that is played by hand."""

    def __init__(
        self,
        *,
        batch_size: int = 2,
        bound: int = 1,
        order: Order | None = None,
        partial: bool = False,
        epochs: int | None = None,
    ) -> None:
        self.source = PromptSource(6, identity="A", seed=0, shuffle=False, epochs=epochs)
        self.stale: list[int] = []
        self.buffer = Buffer(self.source, batch_size=batch_size, max_staleness=bound, order=order, partial_last=partial)
        self.buffer.watch_stale(self.stale.append)
        self.room = self.buffer.room()
        self.prompts: dict[int, PromptId] = {}

    async def start(self, n: int) -> list[int]:
        """Take room for up to `n` groups and start them; returns their ids."""
        taken = self.source.take(await self.room.take(n))
        self.prompts |= {prompt.group: prompt for prompt in taken}
        return [prompt.group for prompt in taken]

    async def finish(self, *groups: int, version: int = 0) -> None:
        for group in groups:
            await self.buffer.put(self.group(group, version))

    def group(self, number: int, version: int) -> Group:
        return fake_group(self.prompts[number], PolicyVersion(0, version))

    def fail(self, group: int) -> None:
        self.source.give_back([self.prompts[group]], regenerate=True)
        self.room.give_back(1)

    def drop(self, group: int) -> None:
        self.source.drop([self.prompts[group]])
        self.room.give_back(1)

    def advance(self, step: int) -> None:
        self.buffer.advance(PolicyVersion(0, step))

    async def ready(self, step: int) -> list[int] | None:
        """The ids that `take` delivers, None if it would wait."""
        task = asyncio.create_task(self.buffer.take(step))
        await asyncio.sleep(0.01)
        if task.done():
            return ids(task.result())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None


def ids(batch: Batch) -> list[int]:
    return [group.prompt.group for group in batch.groups]


def ready_groups(*numbers: int) -> list[Group]:
    return [fake_group(PromptId(number, 0, 0), PolicyVersion(0, 0)) for number in numbers]


# ---- the pure choices


def test_staleness_counts_updates_since_the_oldest_token() -> None:
    group = fake_group(PromptId(0, 0, 0), PolicyVersion(3, 4))
    assert [staleness(group, step) for step in (5, 6, 9)] == [0, 1, 4]
    assert staleness(fake_group(PromptId(0, 0, 0), None), 100) == 0


def test_by_prompt_takes_the_lowest_and_waits_for_lower_ones() -> None:
    ready = {group.prompt.group: group for group in ready_groups(5, 2, 7)}
    chosen = next_by_prompt(ready, size=2, barrier=6)
    assert chosen is not None
    assert [group.prompt.group for group in chosen] == [2, 5]
    assert next_by_prompt(ready, size=2, barrier=4) is None
    assert next_by_prompt(ready, size=4, barrier=100) is None


@pytest.mark.parametrize(
    ("slack", "in_flight", "expected"),
    [
        ([9, 9, 9], [], [0, 1]),  # nothing presses: as they finished
        ([9, 9, 0], [], [0, 2]),  # the last chance of group 2
        ([9, 9, 9], [0], None),  # the last chance of one that has yet to finish
        ([9, 9, 0], [0], None),  # both places are kept
        ([9, 0, 0], [], [1, 2]),
        ([9, 9, 1], [1], [0, 1]),  # two fit into the next batch
        ([9, 9, 1], [1, 1], [0, 2]),  # three do not
        ([9, 9, 9], [1, 1, 1], None),
        ([9, 9, 9], [1, 1], [0, 1]),
        ([9], [], None),
    ],
)
def test_by_completion_keeps_places_that_no_later_batch_has(
    slack: list[int], in_flight: list[int], expected: list[int] | None
) -> None:
    chosen = next_by_completion(
        ready_groups(*range(len(slack))), size=2, slack=dict(enumerate(slack)), slack_in_flight=in_flight
    )
    assert (chosen and [group.prompt.group for group in chosen]) == expected


# ---- admission


def test_room_is_for_staleness_plus_one_batches_and_comes_back_at_advance() -> None:
    async def main() -> None:
        bench = Bench(batch_size=2, bound=2)
        assert bench.buffer.capacity == 6
        assert await bench.start(4) == [0, 1, 2, 3]
        assert await bench.start(9) == [4, 5]
        assert bench.buffer.free == 0
        await bench.finish(0, 1)
        assert bench.buffer.num_ready == 2
        await bench.buffer.take(1)
        asking = asyncio.create_task(bench.room.take(9))
        await asyncio.sleep(0.01)
        assert not asking.done()
        bench.advance(1)
        assert await asking == 2

    run_virtual(main())


def test_room_is_per_group_and_given_back_for_dropped_ones() -> None:
    async def main() -> None:
        bench = Bench(batch_size=2, bound=0)
        await bench.start(2)
        bench.drop(1)
        assert await bench.start(5) == [2]
        await bench.finish(0, 2)
        assert await bench.ready(1) == [0, 2]

    run_virtual(main())


def test_room_and_groups_must_match() -> None:
    async def main() -> None:
        bench = Bench(bound=0)
        with pytest.raises(RolloutError, match="room for 1 groups is given back, 0 are taken"):
            bench.room.give_back(1)
        await bench.start(2)
        await bench.finish(0)
        with pytest.raises(RolloutError, match=r"group 0 .*not in flight"):
            await bench.finish(0)
        bench.fail(1)
        with pytest.raises(RolloutError, match=r"group 1 .*not in flight"):
            await bench.finish(1)
        (without_room,) = bench.source.take(1)
        with pytest.raises(RolloutError, match="group 1 is delivered without room"):
            await bench.buffer.put(fake_group(without_room, None))

    run_virtual(main())


@pytest.mark.parametrize(("batch_size", "bound"), [(0, 0), (2, -1)])
def test_sizes_are_checked(batch_size: int, bound: int) -> None:
    with pytest.raises(ConfigError):
        Bench(batch_size=batch_size, bound=bound)


# ---- order


def test_prompt_order_waits_for_returned_prompts_and_passes_over_dropped_ones() -> None:
    async def main() -> None:
        bench = Bench(bound=1, order="prompt")
        await bench.start(4)
        await bench.finish(2, 3)
        assert await bench.ready(1) is None
        bench.fail(0)
        assert await bench.ready(1) is None
        bench.drop(1)
        assert await bench.start(1) == [0]
        assert bench.prompts[0].attempt == 1
        assert await bench.ready(1) is None
        await bench.finish(0)
        assert await bench.ready(1) == [0, 2]

    run_virtual(main())


def test_dropping_a_group_wakes_the_take_that_waited_for_it() -> None:
    async def main() -> None:
        bench = Bench(bound=1, order="prompt")
        await bench.start(3)
        await bench.finish(1, 2)
        taking = asyncio.create_task(bench.buffer.take(1))
        await asyncio.sleep(0.01)
        assert not taking.done()
        bench.drop(0)
        assert ids(await taking) == [1, 2]

    run_virtual(main())


def test_completion_order_keeps_a_place_for_the_group_in_flight() -> None:
    async def main() -> None:
        bench = Bench(bound=1, order="completion")
        await bench.start(4)
        await bench.finish(3, 2)
        assert await bench.ready(1) == [3, 2]
        bench.advance(1)
        await bench.start(2)
        await bench.finish(4, 5, version=1)
        assert await bench.ready(2) is None
        await bench.finish(0)
        assert await bench.ready(2) is None
        await bench.finish(1)
        assert await bench.ready(2) == [0, 1]

    run_virtual(main())


def test_completion_order_does_not_wait_for_prompts_that_have_not_started_again() -> None:
    async def main() -> None:
        bench = Bench(bound=1, order="completion")
        await bench.start(4)
        await bench.finish(2, 3)
        await bench.buffer.take(1)
        bench.advance(1)
        await bench.start(2)
        await bench.finish(4, 5, version=1)
        bench.fail(0)
        bench.fail(1)
        assert await bench.ready(2) == [4, 5]
        bench.advance(2)
        assert await bench.start(4) == [0, 1, 6, 7]
        await bench.finish(6, 7, version=2)
        assert await bench.ready(3) == [6, 7]

    run_virtual(main())


@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_group_that_is_too_old_goes_back_as_a_prompt_and_is_counted(order: Order) -> None:
    async def main() -> None:
        bench = Bench(bound=1, order=order)
        await bench.start(4)
        await bench.finish(0, 1, 2, 3, version=-1)
        assert await bench.ready(1) == [0, 1]
        bench.advance(1)
        assert await bench.ready(2) is None
        assert bench.buffer.counters == {"returned_stale": 2, "dropped_by_filter": 0, "regenerated": 0}
        assert bench.stale == [2]
        assert await bench.start(9) == [2, 3, 4, 5]
        assert bench.prompts[2].attempt == 0
        await bench.finish(2, 3, version=1)
        assert await bench.ready(2) == [2, 3]

    run_virtual(main())


def test_a_cancelled_take_loses_nothing() -> None:
    async def main() -> None:
        bench = Bench(bound=0)
        await bench.start(2)
        await bench.finish(0)
        assert await bench.ready(1) is None
        await bench.finish(1)
        assert await bench.ready(1) == [0, 1]
        with pytest.raises(RolloutError, match="step 1 was taken already, the next one is 2"):
            await bench.buffer.take(1)

    run_virtual(main())


# ---- close


def test_close_ends_a_waiting_take() -> None:
    async def main() -> None:
        bench = Bench(bound=0)
        await bench.start(2)
        await bench.finish(1)
        taking = asyncio.create_task(bench.buffer.take(1))
        await asyncio.sleep(0.01)
        bench.buffer.close()
        with pytest.raises(RolloutError, match="step 1 needs 2 groups, but sampling has ended with 1 ready"):
            await taking

    run_virtual(main())


def test_after_close_full_batches_are_still_delivered() -> None:
    async def main() -> None:
        bench = Bench(bound=1, epochs=1)
        await bench.start(4)
        await bench.finish(3, 0, 2, 1)
        bench.buffer.close()
        assert ids(await bench.buffer.take(1)) == [3, 0]
        assert ids(await bench.buffer.take(2)) == [2, 1]
        with pytest.raises(RolloutError, match="step 3"):
            await bench.buffer.take(3)

    run_virtual(main())


def test_a_smaller_last_batch_needs_leave_and_that_nothing_is_unfinished() -> None:
    async def main() -> None:
        bench = Bench(bound=1, partial=True, order="prompt")
        await bench.start(3)
        await bench.finish(1, 0)
        assert ids(await bench.buffer.take(1)) == [0, 1]
        bench.buffer.close()
        with pytest.raises(RolloutError):
            await bench.buffer.take(2)
        await bench.finish(2)
        assert ids(await bench.buffer.take(2)) == [2]

    run_virtual(main())


# ---- journal


def test_state_lists_what_the_weights_have_not_seen() -> None:
    async def main() -> None:
        bench = Bench(batch_size=2, bound=2, order="prompt")
        await bench.start(6)
        await bench.finish(0, 1, 2, 3)
        await bench.buffer.take(1)
        unfinished = lambda step: [group for group, *_ in bench.buffer.state(step)["source"]["unfinished"]]  # noqa: E731
        assert unfinished(0) == [0, 1, 2, 3, 4, 5]
        assert unfinished(1) == [2, 3, 4, 5]
        bench.advance(1)
        assert unfinished(1) == [2, 3, 4, 5]
        with pytest.raises(CheckpointError, match="at version 1"):
            bench.buffer.state(0)

    run_virtual(main())


def test_a_restored_buffer_goes_on_with_the_next_step() -> None:
    async def main() -> None:
        old, new = Bench(bound=0), Bench(bound=0)
        await old.start(2)
        old.fail(1)
        await old.start(1)
        await old.finish(0, 1)
        await old.buffer.take(1)
        assert new.buffer.restore(json.loads(json.dumps(old.buffer.state(1)))) == []
        assert new.buffer.counters == {"returned_stale": 0, "dropped_by_filter": 0, "regenerated": 1}
        assert await new.start(9) == [2, 3]
        await new.finish(2, 3, version=1)
        with pytest.raises(RolloutError, match="taken already"):
            await new.buffer.take(1)
        assert await new.ready(2) == [2, 3]
        with pytest.raises(CheckpointError, match="cannot be read"):
            new.buffer.restore({"step": 1})

    run_virtual(main())


def test_the_journal_keeps_batches_until_they_are_released() -> None:
    async def main() -> None:
        bench = Bench(bound=2)
        await bench.start(6)
        await bench.finish(*range(6))
        batches = []
        for step in (1, 2, 3):
            batches.append(await bench.buffer.take(step))
            if step < 3:
                bench.advance(step)
        assert bench.buffer.rewind(0) == tuple(batches)
        assert bench.buffer.rewind(1) == tuple(batches[1:])
        bench.buffer.release_until(2)
        assert bench.buffer.rewind(2) == (batches[2],)
        with pytest.raises(CheckpointError, match="up to step 2 were released"):
            bench.buffer.rewind(1)
        bench.advance(3)
        assert bench.buffer.free == 6

    run_virtual(main())


def test_lost_ready_groups_are_generated_anew() -> None:
    async def main() -> None:
        bench = Bench(bound=0)
        await bench.start(2)
        await bench.finish(0, 1)
        bench.buffer.lose([bench.prompts[0]])
        assert await bench.ready(1) is None
        assert await bench.start(5) == [0]
        assert bench.prompts[0].attempt == 1
        await bench.finish(0)
        assert await bench.ready(1) == [0, 1]
        with pytest.raises(RolloutError, match="group 0 is lost, but it is not ready"):
            bench.buffer.lose([bench.prompts[0]])

    run_virtual(main())
