"""Groups between sampling and training: admission that bounds staleness, delivery order, the journal of what was trained."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vime.data.source import PromptSource
from vime.errors import CheckpointError, ConfigError, RolloutError
from vime.types import Batch, Group, PolicyVersion, PromptId

Order = Literal["prompt", "completion"]

RETURNED_STALE = "returned_stale"


def staleness(group: Group, step: int) -> int:
    """Updates between the version of the oldest trainable token and the one that `step` starts from; 0 if supervised."""
    return 0 if group.oldest is None else step - 1 - group.oldest.step


def next_by_prompt(ready: Mapping[int, Group], *, size: int, barrier: float) -> list[Group] | None:
    """The `size` lowest groups, or None while a group below one of them (`barrier` is the lowest) has yet to finish."""
    chosen = sorted(ready)[:size]
    complete = len(chosen) == size and chosen[-1] < barrier
    return [ready[number] for number in chosen] if complete else None


def next_by_completion(
    ready: Sequence[Group], *, size: int, slack: Mapping[int, int], slack_in_flight: Iterable[int]
) -> list[Group] | None:
    """The first `size` groups that finished, save that none may be passed over which no later batch could still take.

    The slack of a group is the number of later steps that may train it. Batches hold `size` groups, so of those with slack
    k or less at most k * size can wait; the rest belongs to this batch, or the batch is not complete yet (None).

    Args:
        ready: finished groups in order of completion.
        slack: by group id, for every ready group.
        slack_in_flight: of every group that has yet to finish.
    """
    alive = sorted([*slack.values(), *slack_in_flight])
    chosen: dict[int, Group] = {}
    for k in sorted(set(alive)):
        due = min(sum(s <= k for s in alive) - k * size, size)
        candidates = [g for g in ready if slack[g.prompt.group] <= k and g.prompt.group not in chosen]
        missing = due - sum(slack[number] <= k for number in chosen)
        if missing > len(candidates):
            return None
        chosen |= {g.prompt.group: g for g in candidates[: max(missing, 0)]}
    fill = [g for g in ready if g.prompt.group not in chosen][: size - len(chosen)]
    chosen |= {g.prompt.group: g for g in fill}
    return [g for g in ready if g.prompt.group in chosen] if len(chosen) == size else None


def missing_by_completion(slack: Iterable[int], slack_in_flight: Iterable[int], *, size: int) -> tuple[int, int] | None:
    """(k, n): `next_by_completion` waits until n groups of slack k or less have left the flight; None where it does not wait.

    Arguments are as there. Of groups with slack k or less, all but k * size must be ready, and never more than `size`.
    """
    ready = Counter(slack)
    alive = ready + Counter(slack_in_flight)
    num_ready = num_alive = 0
    for k in sorted(alive):
        num_ready, num_alive = num_ready + ready[k], num_alive + alive[k]
        if (missing := min(num_alive - k * size, size) - num_ready) > 0:
            return k, missing
    return None


class BufferRoom:
    """The `Room` of a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    async def take(self, limit: int) -> int:
        return await self._buffer.admit(limit)

    def give_back(self, count: int) -> None:
        self._buffer.readmit(count)


@dataclass(slots=True)
class _Wait:
    """What `step` waits for: `count` groups that started at `version` or before, or the group `group`."""

    step: int = -1
    version: int = -1
    count: int = 0
    group: float = math.inf


class Buffer:
    """An `ExperienceBuffer` over a `PromptSource`.

    Admission: at most `max_staleness + 1` batches of groups are in flight, ready or in training together. A batch leaves when
    its weights are published, so a group that starts at version v can be trained by step v + max_staleness + 1.

    Order `prompt` fills batches by group id: which groups a batch holds does not depend on timing. Order `completion` fills
    them as groups finish, but keeps places for groups that a later step could not take any more. A group that is too old
    all the same goes back to the source and is counted. `put` never waits: its place was taken when the group started.

    Args:
        source: the ledger of prompts. The rollout takes room first and prompts then; what it will not deliver it drops or
            gives back there, and gives its room back here.
        batch_size: groups in a step.
        order: None means `prompt` at staleness 0, else `completion`.
        partial_last: when the data ends, a smaller last batch is delivered.
        start: the step that the first published version names (the restored one after a resume).
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        batch_size: int,
        max_staleness: int,
        order: Order | None = None,
        partial_last: bool = False,
        start: int = 0,
    ) -> None:
        if batch_size < 1 or max_staleness < 0:
            raise ConfigError(f"expected batch_size >= 1 and max_staleness >= 0, got {batch_size} and {max_staleness}")
        self._source = source
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._order: Order = order or ("prompt" if max_staleness == 0 else "completion")
        self._partial_last = partial_last
        self._version = start
        self._last_taken = start
        self._released = start
        self._permits = 0
        self._in_flight: dict[int, int] = {}
        self._ready: dict[int, Group] = {}
        self._arrived: list[Group] = []
        self._checked_step = start
        self._wait = _Wait()
        self._training: dict[int, tuple[PromptId, ...]] = {}
        self._journal: dict[int, Batch] = {}
        self._returned_stale = 0
        self._on_stale: Callable[[int], None] = lambda _: None
        self._closed = False
        self._waiters: list[asyncio.Future[None]] = []
        source.watch(self._on_source_change)

    @property
    def capacity(self) -> int:
        """Groups that may be in flight, ready and in training together."""
        return (self._max_staleness + 1) * self._batch_size

    @property
    def free(self) -> int:
        """Groups that may start now."""
        return self.capacity - self._permits - len(self._ready) - sum(len(ids) for ids in self._training.values())

    @property
    def num_ready(self) -> int:
        """Finished groups that wait to be trained."""
        return len(self._ready)

    @property
    def counters(self) -> Mapping[str, int]:
        """`returned_stale`, `dropped_by_filter`, `regenerated`: groups over the whole run, restarts included."""
        return {RETURNED_STALE: self._returned_stale, **self._source.counters}

    def watch_stale(self, listener: Callable[[int], None]) -> None:
        """Tell `listener` how many groups go back because they are too old, when they do. One listener: the run's metrics."""
        self._on_stale = listener

    def room(self) -> BufferRoom:
        return BufferRoom(self)

    async def admit(self, limit: int) -> int:
        """See `Room.take`."""
        while self.free < 1:
            await self._changed()
        count = min(limit, self.free)
        self._permits += count
        return count

    def readmit(self, count: int) -> None:
        """See `Room.give_back`. Raises RolloutError when more comes back than was taken."""
        if not 0 <= count <= self._permits:
            raise RolloutError(f"room for {count} groups is given back, {self._permits} are taken")
        self._permits -= count
        self._wake()

    async def put(self, group: Group) -> None:
        """Accept a finished group. Raises RolloutError for one that is not in flight or has no room."""
        prompt = group.prompt
        if self._source.out.get(prompt.group) != prompt or prompt.group not in self._in_flight:
            raise RolloutError(
                f"group {prompt.group} (attempt {prompt.attempt}) is delivered, but it is not in flight",
                fix="a rollout must deliver each group once, and none that it dropped or gave back",
            )
        if self._permits < 1:
            raise RolloutError(f"group {prompt.group} is delivered without room", fix="take room before a group starts")
        self._permits -= 1
        self._leave_flight(prompt.group)
        self._ready[prompt.group] = group
        self._arrived.append(group)
        self._wake()

    async def take(self, step: int) -> Batch:
        """Wait for the groups of `step`. Raises RolloutError when sampling has ended and there are too few."""
        if step <= self._last_taken:
            raise RolloutError(f"step {step} was taken already, the next one is {self._last_taken + 1}")
        while True:
            self._return_stale(step)
            groups = self._rest(step) if self._closed else self._complete(step)
            if groups is not None:
                break
            await self._changed()
        for group in groups:
            del self._ready[group.prompt.group]
        batch = Batch(step, tuple(groups))
        self._last_taken = step
        self._training[step] = tuple(group.prompt for group in groups)
        self._journal[step] = batch
        return batch

    def advance(self, version: PolicyVersion) -> None:
        """Batches up to `version.step` are trained and published: settle their prompts, free their room."""
        for step in [s for s in self._training if s <= version.step]:
            self._source.settle(self._training.pop(step))
        self._version = version.step
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def lose(self, prompts: Iterable[PromptId]) -> None:
        """The samples of these ready groups are gone with the process that held them: generate them anew."""
        for prompt in prompts:
            if self._ready.pop(prompt.group, None) is None:
                raise RolloutError(f"group {prompt.group} is lost, but it is not ready")
            self._source.give_back([prompt], regenerate=True)
        self._wake()

    def rewind(self, step: int) -> tuple[Batch, ...]:
        """The batches after `step` (the checkpoint that the trainer restarts from), in order; the one in training is last.

        Room and prompts stay as they are: to sampling a rewind is one slow step. Raises CheckpointError when some of these
        batches were released.
        """
        if step < self._released:
            raise CheckpointError(
                f"cannot train again from step {step}: batches up to step {self._released} were released",
                fix="restart from the checkpoint that released them",
            )
        return tuple(batch for taken, batch in self._journal.items() if taken > step)

    def release_until(self, step: int) -> None:
        """A checkpoint holds the weights after `step`: let go of the batches up to it."""
        self._released = max(self._released, step)
        self._journal = {taken: batch for taken, batch in self._journal.items() if taken > step}

    def state(self, step: int) -> dict[str, Any]:
        """For the checkpoint of the weights after `step`, as JSON: everything that those weights have not seen is unfinished.

        Raises CheckpointError for a step whose successors are settled already.
        """
        if step < self._version:
            raise CheckpointError(f"the buffer is at version {self._version} and cannot describe step {step}")
        trained = [prompt for taken, ids in self._training.items() if taken <= step for prompt in ids]
        return {"step": step, RETURNED_STALE: self._returned_stale, "source": self._source.state(trained=trained)}

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from `state()`, in a fresh buffer; return the source's warnings. Raises CheckpointError if unreadable."""
        try:
            step, stale, source = int(state["step"]), int(state[RETURNED_STALE]), state["source"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the buffer's state cannot be read: {error!r}", fix="resume from an older one") from error
        warnings = self._source.restore(source)
        self._version = self._last_taken = self._released = step
        self._returned_stale = stale
        return warnings

    def _complete(self, step: int) -> list[Group] | None:
        """A finished group asks this each time, so what is known to be incomplete is not looked through again."""
        if len(self._ready) < self._batch_size or self._still_waits(step):
            return None
        if self._order == "prompt":
            waiting = [*self._in_flight, *([] if (low := self._source.lowest_returned) is None else [low])]
            barrier = min(waiting, default=math.inf)
            self._wait = _Wait(step, group=barrier)
            return next_by_prompt(self._ready, size=self._batch_size, barrier=barrier)
        slack = {number: self._slack(group, step) for number, group in self._ready.items()}
        oldest = step - self._max_staleness - 1
        in_flight = [v - oldest for v in self._in_flight.values() if v >= oldest]
        if (missing := missing_by_completion(slack.values(), in_flight, size=self._batch_size)) is not None:
            self._wait = _Wait(step, version=missing[0] + oldest, count=missing[1])
            return None
        return next_by_completion([*self._ready.values()], size=self._batch_size, slack=slack, slack_in_flight=in_flight)

    def _still_waits(self, step: int) -> bool:
        wait = self._wait
        if wait.step != step:
            return False
        return wait.count > 0 or wait.group in self._in_flight or wait.group == self._source.lowest_returned

    def _leave_flight(self, number: int) -> None:
        version = self._in_flight.pop(number, None)
        if version is not None and version <= self._wait.version:
            self._wait.count -= 1

    def _rest(self, step: int) -> list[Group]:
        """What is left after the last group, a batch at a time."""
        by_prompt = self._order == "prompt"
        left = [self._ready[number] for number in sorted(self._ready)] if by_prompt else [*self._ready.values()]
        if not by_prompt:
            left.sort(key=lambda group: self._slack(group, step))
        unfinished = len(self._in_flight) + (self._source.lowest_returned is not None)
        if len(left) >= self._batch_size or (self._partial_last and left and not unfinished):
            return left[: self._batch_size]
        raise RolloutError(
            f"step {step} needs {self._batch_size} groups, but sampling has ended with {len(left)} ready",
            fix="the data has ended: lower schedule.num_steps or allow more epochs; if sampling failed, its error says why",
        )

    def _slack(self, group: Group, step: int) -> int:
        return self._max_staleness - staleness(group, step)

    def _return_stale(self, step: int) -> None:
        """Those that were ready at the last look at this step have not aged since."""
        groups = self._arrived if step == self._checked_step else self._ready.values()
        here = (group for group in groups if self._ready.get(group.prompt.group) is group)
        stale = [group.prompt for group in here if self._slack(group, step) < 0]
        self._checked_step, self._arrived = step, []
        for prompt in stale:
            del self._ready[prompt.group]
        self._returned_stale += len(stale)
        if stale:
            self._on_stale(len(stale))
            self._source.give_back(stale, regenerate=False)

    def _on_source_change(self) -> None:
        """Note the version at which prompts went out: none of their tokens can be older."""
        for number in self._source.changed:
            if number in self._source.out:
                self._in_flight.setdefault(number, self._version)
            else:
                self._leave_flight(number)
        self._wake()

    async def _changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
