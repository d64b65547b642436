"""Supervised rows as groups of one: encoded instead of sampled, so that the same loop and trainer serve fine-tuning."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vime.config.schema import DataSection, EvaluationSet
from vime.data.prompts import PromptTable, read_prompts
from vime.errors import DataError
from vime.rollout.worker import Outcome, WorkerInfo, worker_info
from vime.types import Prompt, PromptId, Sample, SampleStatus


@dataclass(frozen=True)
class SupervisedSetup:
    """What the worker of supervised rows needs to know."""

    model_path: Path
    data: DataSection
    digits_apart: bool
    evaluation: tuple[EvaluationSet, ...] = ()


class SupervisedWorker:
    """The interface of `RolloutWorker` over labelled rows; there is no engine behind it."""

    def __init__(self, setup: SupervisedSetup) -> None:
        self._setup = setup
        self._done: asyncio.Queue[Outcome] = asyncio.Queue()
        self._sets: dict[str, PromptTable] = {}

    async def start(self) -> WorkerInfo:
        """Read the data. Raises DataError where a row has no label."""
        from vime.data.templates import load_tokenizer

        setup = self._setup
        self._tokenizer = load_tokenizer(setup.model_path, template=setup.data.template)
        self._prompts = read_prompts(setup.data, self._tokenizer)
        for held_out in setup.evaluation:
            section = setup.data.model_copy(update={"path": held_out.path})
            self._sets[held_out.name] = read_prompts(section, self._tokenizer, limit=held_out.num_rows)
        return worker_info(self._prompts)

    async def submit(self, prompts: Sequence[PromptId]) -> None:
        for prompt in prompts:
            self._done.put_nowait(Outcome(prompt, (self._encode(self._prompts.rows[prompt.row]),)))

    async def finished(self) -> tuple[Outcome, ...]:
        """Wait for at least one row and return all there are."""
        first = await self._done.get()
        return (first, *(self._done.get_nowait() for _ in range(self._done.qsize())))

    def encoded_set(self, name: str) -> tuple[Sample, ...]:
        """A held-out set as labelled samples."""
        return tuple(self._encode(row) for row in self._sets[name])

    def _encode(self, row: Prompt) -> Sample:
        from vime.data.templates import encode_label

        if row.label is None:
            raise DataError(f"row {row.row} has no label to learn from", where=str(self._setup.data.path))
        label = tuple(encode_label(self._tokenizer, row.label, digits_apart=self._setup.digits_apart))
        return Sample(
            index=0,
            prompt_ids=row.token_ids,
            response_ids=label,
            log_probs=(),
            loss_mask=(1,) * len(label),
            status=SampleStatus.COMPLETED,
            text=row.label,
        )
