"""A rollout worker as a Ray actor: what it finishes goes to the object store, the driver gets sizes and references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from vime.cluster.payload import GroupPayload, group_info
from vime.rollout.vllm_rollout import GroupOutcome
from vime.rollout.worker import EvaluationResult, Outcome, WorkerInfo
from vime.types import PromptId


class RolloutProcess:
    """Wraps `RolloutWorker` or `SupervisedWorker`, named by a factory so that the driver imports neither."""

    def __init__(self, factory: Any, setup: Any) -> None:
        self._worker = factory.load()(setup)

    async def start(self) -> WorkerInfo:
        return await self._worker.start()

    async def connect(self, url: str) -> None:
        await self._worker.connect(url)

    async def submit(self, prompts: Sequence[PromptId]) -> None:
        await self._worker.submit(prompts)

    async def finished(self) -> tuple[GroupOutcome, ...]:
        """Store all wanted groups that are there as one bundle."""
        outcomes: tuple[Outcome, ...] = await self._worker.finished()
        wanted = [o for o in outcomes if o.failure is None and o.dropped is None]
        ref = ray.put(tuple(o.samples for o in wanted)) if wanted else None
        positions = {id(o): i for i, o in enumerate(wanted)}
        return tuple(
            GroupOutcome(
                prompt=o.prompt,
                group=group_info(o.samples, prompt=o.prompt, payload=GroupPayload(ref, positions[id(o)]))
                if id(o) in positions
                else None,
                dropped=o.dropped,
                failure=o.failure,
                counts=o.counts,
            )
            for o in outcomes
        )

    async def pause(self) -> None:
        await self._worker.pause()

    async def resume(self) -> None:
        await self._worker.resume()

    async def evaluate(self, name: str, mode: str) -> EvaluationResult:
        return await self._worker.evaluate(name, mode)

    async def encoded_set(self, name: str) -> Any:
        return self._worker.encoded_set(name)

    async def close(self) -> None:
        close = getattr(self._worker, "close", None)
        if close is not None:
            await close()
