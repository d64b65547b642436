"""The order of prompts, and the ledger of those that are handed out and not yet trained."""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vime.errors import CheckpointError, DataError, RolloutError
from vime.types import PromptId

DROPPED = "dropped_by_filter"
REGENERATED = "regenerated"


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> array[int]:
    """The rows of an epoch in the order they are handed out.

    Sorts by random keys and does not call `shuffle`: only `random()` is promised to stay the same between Python versions.
    """
    if not shuffle:
        return array("q", range(num_rows))
    digest = hashlib.sha256(f"vime.prompt-order:{seed}:{epoch}".encode()).digest()
    draws = random.Random(int.from_bytes(digest[:8], "big"))
    keys = [draws.random() for _ in range(num_rows)]
    return array("q", sorted(range(num_rows), key=keys.__getitem__))


class PromptSource:
    """Hands out every row once an epoch, and prompts that were given back before anything new.

    A prompt is *unfinished* from `take` until `settle` (trained) or `drop` (never trained). Unfinished prompts are part of
    the state, so a resumed run starts with them: same ids, each once.

    Args:
        num_rows: rows of the prompt file.
        identity: names the data (a checksum of the file and of how it is read); a position is valid for one identity only.
        epochs: None means that epoch follows epoch without end.
    """

    def __init__(self, num_rows: int, *, identity: str, seed: int, shuffle: bool, epochs: int | None = None) -> None:
        if num_rows < 1:
            raise DataError("the prompt file has no usable row", fix="check data.path and data.max_prompt_tokens")
        if epochs is not None and epochs < 1:
            raise DataError(f"expected at least one epoch, got {epochs}")
        self._num_rows = num_rows
        self._identity = identity
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._epoch = 0
        self._offset = 0
        self._next_group = 0
        self._order = epoch_order(num_rows, seed=seed, epoch=0, shuffle=shuffle)
        self._out: dict[int, PromptId] = {}
        self._returned: list[tuple[int, PromptId]] = []
        self._counters: Counter[str] = Counter()
        self._changed: list[int] = []
        self._listener: Callable[[], None] = lambda: None

    @property
    def num_groups(self) -> int | None:
        """Groups that a whole run over this source can start; None without a limit on epochs."""
        return None if self._epochs is None else self._epochs * self._num_rows

    @property
    def exhausted(self) -> bool:
        """Nothing is left to take now. A prompt that is still out may come back."""
        return not self._returned and self._at_end()

    @property
    def out(self) -> Mapping[int, PromptId]:
        """Prompts that were taken and are neither given back, nor dropped, nor trained, by group."""
        return self._out

    @property
    def lowest_returned(self) -> int | None:
        """The lowest group that waits to be handed out again."""
        return self._returned[0][0] if self._returned else None

    @property
    def counters(self) -> Mapping[str, int]:
        """Groups `dropped_by_filter` and `regenerated` over the whole run, restarts included."""
        return {name: self._counters[name] for name in (DROPPED, REGENERATED)}

    def watch(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change of the ledger. One listener: the buffer."""
        self._listener = listener

    @property
    def changed(self) -> Sequence[int]:
        """To the listener: the groups that came into `out` or left it. Looking through all of `out` would cost as much as the
        whole batch for every group that a filter refuses.
        """
        return self._changed

    def take(self, n: int) -> list[PromptId]:
        """The next `n` prompts, fewer only where the data ends. Crosses as many epoch borders as it takes."""
        taken = [heapq.heappop(self._returned)[1] for _ in range(min(n, len(self._returned)))]
        while len(taken) < n and not self._at_end():
            taken.append(self._fresh())
        for prompt in taken:
            self._out[prompt.group] = prompt
            self._changed.append(prompt.group)
        self._tell()
        return taken

    def give_back(self, ids: Iterable[PromptId], *, regenerate: bool) -> None:
        """Hand these out again, before anything new and lowest group first.

        `regenerate` says that they failed after sampling began: the attempt rises, so that seeds derived from it change.
        Without it the same id comes out again. Raises RolloutError for a prompt that is not out.
        """
        for prompt in ids:
            self._remove(prompt, "given back")
            attempt = prompt.attempt + 1 if regenerate else prompt.attempt
            again = PromptId(prompt.group, prompt.epoch, prompt.row, attempt)
            heapq.heappush(self._returned, (again.group, again))
            self._counters[REGENERATED] += regenerate
        self._tell()

    def drop(self, ids: Iterable[PromptId]) -> None:
        """These groups will never be trained (a filter refused them). Raises RolloutError for a prompt that is not out."""
        for prompt in ids:
            self._remove(prompt, "dropped")
            self._counters[DROPPED] += 1
        self._tell()

    def settle(self, ids: Iterable[PromptId]) -> None:
        """These groups are trained. Raises RolloutError for a prompt that is not out: it would count twice."""
        for prompt in ids:
            self._remove(prompt, "trained")
        self._tell()

    def state(self, *, trained: Iterable[PromptId] = ()) -> dict[str, Any]:
        """Position and unfinished prompts as JSON. `trained` are out, but in the weights that the checkpoint holds."""
        done = {prompt.group for prompt in trained}
        unfinished = [p for p in self._out.values() if p.group not in done] + [p for _, p in self._returned]
        return {
            **self._order_state(),
            "epoch": self._epoch,
            "offset": self._offset,
            "next_group": self._next_group,
            "unfinished": [[p.group, p.epoch, p.row, p.attempt] for p in sorted(unfinished, key=lambda p: p.group)],
            "counters": dict(self.counters),
        }

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from `state()`; return warnings.

        Other data, seed or shuffling make the old position meaningless: the run starts at the first row of epoch 0, without
        the old unfinished prompts, and group ids go on rising. Raises CheckpointError for a state that cannot be read.
        """
        try:
            position = int(state["epoch"]), int(state["offset"]), int(state["next_group"])
            unfinished = [PromptId(*(int(part) for part in entry)) for entry in state["unfinished"]]
            counters = {name: int(count) for name, count in state["counters"].items()}
            saved_order = {key: state[key] for key in self._order_state()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the prompt position cannot be read: {error!r}", fix="resume from an older one") from error
        self._changed += self._out
        self._out.clear()
        self._counters = Counter(counters)
        self._next_group = position[2]
        changes = [
            f"{key} {saved_order[key]!r} -> {now!r}" for key, now in self._order_state().items() if saved_order[key] != now
        ]
        self._epoch, self._offset = (0, 0) if changes else position[:2]
        self._returned = [] if changes else [(p.group, p) for p in unfinished]
        heapq.heapify(self._returned)
        self._order = epoch_order(self._num_rows, seed=self._seed, epoch=self._epoch, shuffle=self._shuffle)
        self._tell()
        if not changes:
            return []
        return [
            f"the prompts differ from those of the checkpoint ({', '.join(changes)}): starting at the first row, "
            f"{len(unfinished)} unfinished prompts of the old order are left out"
        ]

    def _order_state(self) -> dict[str, Any]:
        return {"identity": self._identity, "num_rows": self._num_rows, "seed": self._seed, "shuffle": self._shuffle}

    def _at_end(self) -> bool:
        if self._epochs is None:
            return False
        return self._epoch * self._num_rows + self._offset >= self._epochs * self._num_rows

    def _fresh(self) -> PromptId:
        if self._offset == self._num_rows:
            self._epoch += 1
            self._offset = 0
            self._order = epoch_order(self._num_rows, seed=self._seed, epoch=self._epoch, shuffle=self._shuffle)
        prompt = PromptId(self._next_group, self._epoch, self._order[self._offset])
        self._next_group += 1
        self._offset += 1
        return prompt

    def _remove(self, prompt: PromptId, verb: str) -> None:
        if self._out.get(prompt.group) != prompt:
            raise RolloutError(
                f"group {prompt.group} (attempt {prompt.attempt}) is {verb}, but it is not out",
                fix="a rollout must settle each prompt once: put its group, give it back or drop it",
            )
        del self._out[prompt.group]
        self._changed.append(prompt.group)

    def _tell(self) -> None:
        self._listener()
        self._changed = []
