"""Driver-side ends of the processes: async calls with a deadline and an error that names who did not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions

from vime.cluster.trainer_process import HalfInfo, TransferSetup
from vime.errors import DeadlineError, TrainerError, VimeError
from vime.rollout.vllm_rollout import GroupOutcome
from vime.rollout.worker import EvaluationResult, WorkerInfo
from vime.types import PromptId
from vime.weights.hosts import ANYWHERE
from vime.weights.merge import merge_offers, merge_stage_info


async def answer(call: Any, *, who: str, what: str, timeout_s: float | None = None) -> Any:
    """Await one actor call.

    Raises the VimeError that the actor raised, DeadlineError after `timeout_s`, TrainerError when the process is gone.
    """
    try:
        return await asyncio.wait_for(_awaitable(call), timeout_s)
    except TimeoutError as error:
        raise DeadlineError(
            f"{who} did not answer `{what}` within {timeout_s:.0f} s", fix="read its log in the run's logs folder"
        ) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, VimeError):
            raise error.cause from error
        raise
    except ray.exceptions.RayActorError as error:
        raise TrainerError(
            f"{who} died during `{what}`: {_first_line(error)}", fix="read its log; `--resume` goes on"
        ) from error


async def _awaitable(call: Any) -> Any:
    return await call


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class TrainerLink:
    """All ranks of the trainer as one: every method runs on every rank."""

    def __init__(self, actors: Sequence[Any], *, name: str = "actor") -> None:
        self._actors = list(actors)
        self._name = name
        self.streams = False
        self._every_rank = False
        self._num_tensors = 0
        self._hosts = [ANYWHERE] * self.size
        self._sends, self._keeps = [False] * self.size, [False] * self.size

    @property
    def size(self) -> int:
        return len(self._actors)

    async def each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout_s: float | None = None) -> list[Any]:
        """Call a method with each rank's own arguments. The first failure surfaces at once."""
        calls = [self._rank(rank, method, *words, timeout_s=timeout_s) for rank, words in enumerate(arguments)]
        return await asyncio.gather(*calls)

    async def all(self, method: str, *words: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method with the same arguments on every rank."""
        return await self.each(method, [words] * self.size, timeout_s=timeout_s)

    # ---- vime.weights.protocol.TrainerLink

    async def open_transfer(self, transfer: TransferSetup) -> None:
        """Build the halves: rank 0's first, the other writers' with what rank 0 says of itself."""
        info: HalfInfo = await self._first("open_transfer", transfer, {})
        self.streams, self._every_rank, self._num_tensors = info.streams, info.every_rank, info.num_tensors
        others = [self._rank(rank, "open_transfer", transfer, info.lead) for rank in range(1, self.size)]
        self._hosts = [one.host for one in (info, *await asyncio.gather(*others))]

    @property
    def by_host(self) -> bool:
        return self._every_rank

    async def init_info(self, receivers: Mapping[str, int]) -> Mapping[str, Mapping[str, Any]]:
        """Where every rank sends, each is told of the engine workers on its own host, also that there are none."""
        if self._every_rank:
            counts = [(receivers.get(host, 0),) for host in self._hosts]
            return merge_offers(await self.each("init_info", counts), self._hosts)
        return {ANYWHERE: await self._first("init_info", sum(receivers.values()))}

    async def connect(self) -> None:
        """Finish the handshakes, and learn from which ranks engines take. Those ranks keep what they sent from then on."""
        if not self._every_rank:
            await self._first("connect_transfer")
            return
        self._sends = [count > 0 for count in await self.all("connect_transfer")]
        self._keeps = [kept or sends for kept, sends in zip(self._keeps, self._sends, strict=True)]

    async def stage(self, version: str, fingerprint: bool) -> Mapping[str, Any]:
        return merge_stage_info(await self.all("stage", version, fingerprint), self._num_tensors)

    async def stream(self, *, kept: bool = False) -> None:
        await self.all("stream", kept, any(self._sends[1:]))

    def keep(self) -> Awaitable[None]:
        """The calls are made here and not when the result is awaited: an actor's calls run in the order in which they were
        made, so the next training step cannot begin before the copy is done.
        """
        on_every_rank = any(self._keeps[1:])
        return self._each_done("keep", [actor.keep.remote(on_every_rank) for actor in self._actors])

    async def _each_done(self, method: str, calls: Sequence[Any]) -> None:
        await asyncio.gather(*(answer(call, who=self._who(rank), what=method) for rank, call in enumerate(calls)))

    async def probe_log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return (await self.all("log_probs", sequences))[0]

    async def _first(self, method: str, *words: Any) -> Any:
        return await self._rank(0, method, *words)

    async def _rank(self, rank: int, method: str, *words: Any, timeout_s: float | None = None) -> Any:
        call = getattr(self._actors[rank], method).remote(*words)
        return await answer(call, who=self._who(rank), what=method, timeout_s=timeout_s)

    def _who(self, rank: int) -> str:
        return f"trainer rank {rank} of {self._name}"


class RolloutWorkerLink:
    """One rollout worker actor."""

    def __init__(self, actor: Any, *, name: str) -> None:
        self._actor = actor
        self._name = name

    async def _call(self, method: str, *words: Any) -> Any:
        return await answer(getattr(self._actor, method).remote(*words), who=self._name, what=method)

    async def start(self) -> WorkerInfo:
        return await self._call("start")

    async def connect(self, url: str) -> None:
        await self._call("connect", url)

    async def submit(self, prompts: Sequence[PromptId]) -> None:
        await self._call("submit", tuple(prompts))

    async def finished(self) -> Sequence[GroupOutcome]:
        return await self._call("finished")

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def evaluate(self, name: str, mode: str) -> EvaluationResult:
        return await self._call("evaluate", name, mode)

    async def encoded_set(self, name: str) -> Any:
        """A reference to a held-out set of labelled samples (supervised workers only)."""
        return self._actor.encoded_set.remote(name)

    async def close(self) -> None:
        await self._call("close")
