"""The words of the loop as frozen values. No tensors: a sample's tokens are plain sequences of ints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    ExpertIds: TypeAlias = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """The weights after step `step`. The incarnation rises when a restart rewinds, so a version names one set of weights."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str()`. Raises ValueError on anything else."""
        incarnation, _, step = text.partition(".")
        return cls(int(incarnation), int(step))


@dataclass(frozen=True, slots=True)
class PromptId:
    """Which prompt a group answers.

    `group` rises by one with every prompt taken in a run; `attempt` counts regenerations after a failure.
    """

    group: int
    epoch: int
    row: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file, ready to be sampled."""

    row: int
    text: str
    token_ids: tuple[int, ...]
    label: str | None = None
    task: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class SampleStatus(StrEnum):
    """Why a response ended: stop -> completed, length -> truncated, abort -> aborted, anything else -> failed."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by `version`."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, with everything that training needs.

    `log_probs` are the sampler's, after temperature; `loss_mask` is 1 on trained tokens. Both are as long as
    `response_ids`. For supervised rows `log_probs` is empty and `reward` None. Samples of a group with the same `rollout` are
    parts of one rollout, which counts once in the loss and among its siblings; None: the sample is a whole one.
    `routed_experts` as in `TrainSample`.
    """

    index: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    status: SampleStatus
    versions: tuple[VersionSpan, ...] = ()
    reward: float | None = None
    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rollout: int | None = None
    routed_experts: ExpertIds | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """What control needs to know of a sample: sizes (tokens), reward, status; `rollout` as in `Sample`."""

    index: int
    prompt_tokens: int
    response_tokens: int
    trainable_tokens: int
    reward: float | None
    status: SampleStatus
    rollout: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Group:
    """The siblings of one prompt as the driver sees them: sizes, rewards, oldest version and a reference to the samples.

    `payload` is opaque here: an object-store reference and a position in it, or the samples themselves in tests.
    `oldest` is the version of the oldest trainable token (None for supervised rows).
    """

    prompt: PromptId
    samples: tuple[SampleInfo, ...]
    payload: Any
    oldest: PolicyVersion | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def rewards(self) -> tuple[float, ...]:
        """One reward a sample; a sample without a reward is an error of whoever made the group."""
        return tuple(s.reward if s.reward is not None else float("nan") for s in self.samples)

    @property
    def is_flat(self) -> bool:
        """All rewards equal: the group has no advantage to learn from."""
        first = self.samples[0].reward
        return all(s.reward == first for s in self.samples)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups that one step trains, in delivery order. `step` counts from 1."""

    step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A sample on the rank that trains it.

    `group_rewards` are the rewards of all scored samples of its group, itself included; beside them `group_lengths` are
    their response tokens and `group_weights` the parts that they are of their rollouts (empty: each is a whole one).
    `rollout_tokens` are the trained tokens of all samples of its rollout; 0 where the sample is the whole rollout.

    Per response token, or empty: `ref_log_probs` of the frozen reference and `teacher_log_probs`, both at the sampler's
    temperature, and `values` that the critic gave before the step's first update.

    `routed_experts` [prompt and response tokens, MoE layers, top_k] are the experts that the engine sent each token to; None
    where the trainer's routers choose for themselves.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    reward: float | None
    group_rewards: tuple[float, ...]
    ref_log_probs: tuple[float, ...] = ()
    teacher_log_probs: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    group_lengths: tuple[int, ...] = ()
    group_weights: tuple[float, ...] = ()
    rollout_tokens: int = 0
    routed_experts: ExpertIds | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Sample `sample` of group `group` (both positions) in a batch."""

    group: int
    sample: int


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """One optimizer step: `micro_batches[rank][i]` are the samples of micro-batch i on data-parallel rank `rank`.

    Every rank has the same number of micro-batches (some may be empty). The denominators are global, so that no
    split of the work changes loss or gradient: `num_rollouts` rollouts, `num_tokens` trainable tokens.
    """

    micro_batches: tuple[tuple[tuple[SampleRef, ...], ...], ...]
    num_rollouts: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """One rank's share of an `UpdatePlan`, with the samples themselves."""

    micro_batches: tuple[tuple[TrainSample, ...], ...]
    num_rollouts: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. `metrics` have full names (`train/loss`); `seconds` are phases on the critical path."""

    step: int
    version: PolicyVersion
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
