"""What a rollout worker process does: sample groups through the router, score them, evaluate. No Ray in here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vime.config.schema import DataSection, EvaluationSet, RewardSection, RolloutSection, SamplingSection
from vime.data.prompts import PromptTable, read_prompts
from vime.data.routing import Ids, Routing
from vime.errors import EngineError, RolloutError, VimeError
from vime.models.registry import read_shape
from vime.observe.samples import SamplesFile, SampleText
from vime.rewards.workers import GradeJob, GraderPool
from vime.rollout.client import Completion, GenerateClient, Generation, RetryableError
from vime.rollout.filters import Filter, load_filter
from vime.rollout.sampling import sampling_params, seed_for
from vime.rollout.turns import Turns
from vime.types import Prompt, PromptId, Sample, SampleStatus

LINGER_S = 0.03
"""How long a finished group waits for others before it is handed over: each hand-over costs a call."""


@dataclass(frozen=True)
class WorkerSetup:
    """Everything a rollout worker needs to know.

    With `seeded` every request has a seed of its own. With `experts` samples carry the experts that the engine sent their
    tokens to. `samples_file` None: no samples are kept for reading.
    """

    seed: int
    model_path: Path
    data: DataSection
    rollout: RolloutSection
    reward: RewardSection
    evaluation: tuple[EvaluationSet, ...] = ()
    api_key: str | None = None
    seeded: bool = True
    experts: bool = False
    samples_file: Path | None = None
    samples_per_step: int = 0


@dataclass(frozen=True)
class WorkerInfo:
    """What the driver needs of the data: how many rows, which set, and the rows left out with the reason."""

    num_rows: int
    identity: str
    skipped: tuple[str, ...]


def worker_info(table: PromptTable) -> WorkerInfo:
    return WorkerInfo(len(table), table.identity, tuple(map(str, table.bad_rows)))


@dataclass(frozen=True)
class Outcome:
    """One submitted prompt's end: scored samples, or the reason there are none.

    `dropped` is the dynamic filter's reason (the group is complete but not wanted); `failure` asks for the prompt to be
    generated again.
    """

    prompt: PromptId
    samples: tuple[Sample, ...] = ()
    dropped: str | None = None
    failure: str | None = None
    counts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationResult:
    """Means over the scored rows of one set in one mode. Rows whose grader failed are counted, not scored."""

    mean_reward: float
    num_rows: int
    num_errors: int
    mean_response_tokens: float
    truncated_ratio: float


class RolloutWorker:
    """Holds the HTTP client, the prompts, the tokenizer and the grader pool of one process."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._turns = Turns()
        self._done: asyncio.Queue[Outcome | RolloutError] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._filter: Filter | None = load_filter(setup.rollout.filter)
        self._client: GenerateClient | None = None
        self._sets: dict[str, PromptTable] = {}
        self._samples: SamplesFile | None = None
        self._routing = Routing.of(read_shape(setup.model_path)) if setup.experts else None

    async def start(self) -> WorkerInfo:
        """Read the data and start the graders. Raises DataError or RewardError."""
        from vime.data.templates import load_tokenizer

        setup = self._setup
        reward = setup.reward
        self._graders = GraderPool(reward.kind, workers=reward.workers, timeout_s=reward.timeout_s, key=reward.key)
        self._graders.launch()
        self._tokenizer = load_tokenizer(setup.model_path, template=setup.data.template)
        self._prompts = read_prompts(setup.data, self._tokenizer)
        for held_out in setup.evaluation:
            section = setup.data.model_copy(update={"path": held_out.path})
            self._sets[held_out.name] = read_prompts(section, self._tokenizer, limit=held_out.num_rows)
        await self._graders.start()
        return worker_info(self._prompts)

    async def connect(self, url: str) -> None:
        """Send requests to `url` from now on (the router)."""
        if self._client is not None:
            await self._client.close()
        self._client = GenerateClient(url, self._setup.api_key, timeout_s=self._setup.rollout.request_timeout_s)

    async def submit(self, prompts: Sequence[PromptId]) -> None:
        """Start sampling these groups; their outcomes come from `finished`."""
        for prompt in prompts:
            task = asyncio.create_task(self._run_group(prompt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def finished(self) -> tuple[Outcome, ...]:
        """Wait for at least one outcome and return all there are. Raises RolloutError where sampling again is of no use."""
        found = [await self._done.get()]
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LINGER_S)
        found += [self._done.get_nowait() for _ in range(self._done.qsize())]
        for error in found:
            if isinstance(error, RolloutError):
                raise error
        return tuple(one for one in found if isinstance(one, Outcome))

    async def pause(self) -> None:
        """Return once running requests have finished; new ones wait until `resume`."""
        await self._turns.acquire_exclusive()

    async def resume(self) -> None:
        self._turns.release_exclusive()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self._samples is not None:
            self._samples.close()
        await self._graders.close()

    # ---- one group

    async def _run_group(self, prompt_id: PromptId) -> None:
        try:
            outcome: Outcome | RolloutError = await self._sample_group(prompt_id)
        except RolloutError as error:
            outcome = error
        except VimeError as error:
            outcome = Outcome(prompt_id, failure=str(error))
        self._done.put_nowait(outcome)

    async def _sample_group(self, prompt_id: PromptId) -> Outcome:
        rollout, prompt = self._setup.rollout, self._prompts.rows[prompt_id.row]
        size = rollout.group_size
        seeded = self._setup.seeded
        seed = seed_for(self._setup.seed, prompt_id.group, prompt_id.attempt, group_size=size) if seeded else None
        params = sampling_params(rollout.sampling, experts=self._routing is not None)
        generation = await self._generate(prompt, params, n=size, seed=seed, request_id=f"g{prompt_id.group}")
        if any(choice.finish is SampleStatus.ABORTED for choice in generation.choices):
            # What the response would have become is unknown: neither its tokens nor a reward for them may be trained.
            return Outcome(prompt_id, failure="a response was ended from outside before it was whole")
        if self._routing is not None:
            _require_experts(generation)
        samples, counts = await self._score(prompt, generation)
        if len(samples) < size:
            return Outcome(prompt_id, dropped="unscored_sample", counts=counts)
        self._keep_for_reading(prompt_id, prompt, samples)
        reason = self._filter(samples) if self._filter is not None else None
        return Outcome(prompt_id, samples, dropped=reason, counts=counts)

    async def _generate(
        self, prompt: Prompt, params: Mapping[str, Any], *, n: int, seed: int | None, request_id: str
    ) -> Generation:
        """One request, retried while its engine is away. The turn is held per try, so a pause is not held up by a retry."""
        if self._client is None:
            raise RolloutError(
                "the rollout worker has no router to send to", fix="this is a fault in vime: connect() comes first"
            )
        for attempt in range(self._setup.rollout.max_retries + 1):
            try:
                async with self._turns.rollout():
                    return await self._client.generate(prompt.token_ids, n=n, params=params, seed=seed, request_id=request_id)
            except RetryableError:
                if attempt == self._setup.rollout.max_retries:
                    raise
                await asyncio.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    async def _score(self, prompt: Prompt, generation: Generation) -> tuple[tuple[Sample, ...], dict[str, float]]:
        """Turn choices into samples with rewards; a sample that cannot be scored is left out and counted."""
        samples = [self._sample(prompt, choice) for choice in generation.choices]
        jobs = [
            GradeJob(s.text, prompt.label, prompt.task, prompt.metadata, s.status is SampleStatus.COMPLETED) for s in samples
        ]
        outcomes = await self._graders.score(jobs)
        counts: dict[str, float] = {}
        scored: list[Sample] = []
        for sample, outcome in zip(samples, outcomes, strict=True):
            if outcome.reward is None:
                name = "reward/grader_timeout" if outcome.timed_out else "reward/grader_error"
                counts[name] = counts.get(name, 0) + 1
                continue
            scored.append(replace(sample, reward=outcome.reward))
        return tuple(scored), counts

    def _sample(self, prompt: Prompt, choice: Completion) -> Sample:
        """The mask follows the response's length and status, never its tokens."""
        masked = self._setup.rollout.mask_truncated and choice.finish is SampleStatus.TRUNCATED
        return Sample(
            index=choice.index,
            prompt_ids=prompt.token_ids,
            response_ids=choice.token_ids,
            log_probs=choice.log_probs,
            loss_mask=(0 if masked else 1,) * len(choice.token_ids),
            status=choice.finish,
            versions=choice.spans,
            text=self._tokenizer.decode(choice.token_ids),
            routed_experts=self._experts(prompt, choice),
        )

    def _experts(self, prompt: Prompt, choice: Completion) -> Ids | None:
        """Rows of every token of a sample, None in evaluations. Raises RolloutError for rows that are not this sample's."""
        if self._routing is None or choice.routed_experts is None:
            return None
        return self._routing.align(choice.routed_experts, tokens=len(prompt.token_ids) + len(choice.token_ids))

    def _keep_for_reading(self, prompt_id: PromptId, prompt: Prompt, samples: Sequence[Sample]) -> None:
        """Without drops, group g belongs to step g // batch_size + 1; the first few of each step are kept."""
        step, position = divmod(prompt_id.group, self._setup.rollout.batch_size)
        if self._setup.samples_file is None or position >= self._setup.samples_per_step:
            return
        if self._samples is None:
            self._samples = SamplesFile(self._setup.samples_file, per_step=1)
        first = samples[0]
        self._samples.write(step + 1, [SampleText(prompt.text, first.text, first.reward, prompt.label)])

    # ---- evaluation

    async def evaluate(self, name: str, mode: str) -> EvaluationResult:
        """Answer every row of a held-out set once, greedily or sampled, and grade it."""
        held_out = next(s for s in self._setup.evaluation if s.name == name)
        sampling = held_out.sampling.model_copy(update={"temperature": 0.0}) if mode == "greedy" else held_out.sampling
        rows = self._sets[name].rows
        pairs = await asyncio.gather(*(self._evaluate_row(row, sampling, mode) for row in rows))
        scored = [sample for samples, _ in pairs for sample in samples]
        lengths = [len(s.response_ids) for s in scored]
        return EvaluationResult(
            mean_reward=sum(s.reward or 0.0 for s in scored) / len(scored) if scored else float("nan"),
            num_rows=len(scored),
            num_errors=len(rows) - len(scored),
            mean_response_tokens=sum(lengths) / len(scored) if scored else float("nan"),
            truncated_ratio=sum(s.status is SampleStatus.TRUNCATED for s in scored) / max(1, len(scored)),
        )

    async def _evaluate_row(
        self, row: Prompt, sampling: SamplingSection, mode: str
    ) -> tuple[tuple[Sample, ...], dict[str, float]]:
        seed = None if mode == "greedy" else seed_for(self._setup.seed, row.row, 0, group_size=1)
        params = sampling_params(sampling)
        generation = await self._generate(row, params, n=1, seed=seed, request_id=f"e-{mode}-{row.row}")
        return await self._score(row, generation)


def _require_experts(generation: Generation) -> None:
    """Raise RolloutError where a response lacks its experts, EngineError for one that the engine could not finish."""
    for choice in generation.choices:
        if choice.routed_experts is not None:
            continue
        if choice.finish is SampleStatus.FAILED:
            raise EngineError("the engine could not finish a response")
        raise RolloutError(
            "`trainer.routing_replay: rollout` needs the experts of every token, and the engine answered without them",
            fix="use a vLLM whose enable_return_routed_experts works on this platform, or trainer.routing_replay: trainer",
        )
