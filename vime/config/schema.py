"""The run file as one typed, frozen tree. Every value has one home; each part of vime gets its own section only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vime.config.algorithms import AlgorithmSection, GrpoSection
from vime.config.algorithms import SftSection as SftSection
from vime.config.optimizer import OptimizerSection
from vime.yamltree import Count, NonNegative, Number, Rate, Seconds, Section, Whole


class RunSection(Section):
    """Where the run writes and what seeds it."""

    dir: Path = Field(description="Directory of the run: resolved.yaml, metrics.jsonl, checkpoints, logs, report.html.")
    seed: NonNegative = Field(default=0, description="Seeds shuffling, sampling and initialisation.")
    deterministic: bool = Field(
        default=True,
        description="Derive each sampling seed from (seed, prompt, sample, attempt), and ask the platform for operations that"
        " repeat. Runs are equal bit for bit only at max_staleness 0; above it, which weights sample which token depends on"
        " time.",
    )


class ModelSection(Section):
    """The policy."""

    path: Path = Field(description="Hugging Face folder: config.json, safetensors, tokenizer.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(default=None, description="None: the platform's default.")
    reference: Path | None = Field(default=None, description="Folder of the frozen reference; null: the initial policy.")
    teacher: Path | None = Field(default=None, description="Folder of the teacher of on-policy distillation.")
    critic: Path | None = Field(
        default=None, description="Folder that the critic begins with; null: the policy's. A head that it lacks is drawn."
    )

    @property
    def others(self) -> dict[str, Path]:
        """Folders of further training roles that do not begin with the policy, by task."""
        folders = {"reference": self.reference, "teacher": self.teacher, "critic": self.critic}
        return {task: folder for task, folder in folders.items() if folder is not None}


class DataSection(Section):
    """The prompts (or supervised rows) to learn from."""

    path: Path = Field(description="JSONL or parquet file.")
    input_key: str = Field(default="prompt", description="Column with the prompt: text or a list of messages.")
    label_key: str | None = Field(default="label", description="Column with the expected answer; null where there is none.")
    metadata_key: str = Field(default="metadata", description="Column with a mapping handed to graders.")
    template: str | None = Field(
        default=None,
        description="`chat`: the chat template; or a format such as `<s>{prompt}</s>`; null: as is.",
    )
    shuffle: bool = Field(default=True, description="Permute the rows of every epoch.")
    max_prompt_tokens: Count | None = Field(default=None, description="Longer prompts are left out, counted.")
    on_bad_row: Literal["fail", "skip"] = Field(default="fail", description="What a missing or null field does.")


class SamplingSection(Section):
    """How responses are drawn."""

    temperature: Number = Field(default=1.0, description="Above 0 for training; evaluation may use 0, which is greedy.")
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Whole = Field(default=-1, description="-1: all tokens.")
    max_response_tokens: Count = 256
    stop_token_ids: tuple[NonNegative, ...] = Field(default=(), description="Beside the model's own end of sequence.")

    @field_validator("temperature")
    @classmethod
    def _finite(cls, value: float) -> float:
        if math.isnan(value) or value < 0 or math.isinf(value):
            raise ValueError(f"temperature must be a number >= 0, got {value}")
        return value


DEFAULT_ROLLOUT = "vime.rollout.vllm_rollout.VllmRollout"


class RolloutSection(Section):
    """Sampling for training: what a batch is and how engines are driven."""

    function: str = Field(default=DEFAULT_ROLLOUT, description="The whole rollout; so far only the default can be chosen.")
    batch_size: Count = Field(default=32, description="Groups (prompts) in a step.")
    group_size: Count = Field(default=8, description="Responses to a prompt.")
    sampling: SamplingSection = SamplingSection()
    order: Literal["prompt", "completion"] | None = Field(
        default=None, description="Delivery order; null: prompt at max_staleness 0, else completion."
    )
    filter: str | None = Field(default=None, description="Dynamic filter, e.g. `nonzero_std`; dropped groups are replaced.")
    mask_truncated: bool = Field(default=False, description="Train on no token of a response that hit the length limit.")
    workers: Count = Field(default=1, description="Rollout worker processes.")
    request_timeout_s: Seconds = Field(default=600.0, description="Deadline of a sent request, waits for updates included.")
    max_retries: NonNegative = Field(default=3, description="Tries after a failure; then the prompt returns to the source.")
    start_timeout_s: Seconds = Field(default=300.0, description="Deadline for an engine to answer its health check.")
    vllm: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the engine: vLLM argument names with underscores."
    )
    router: dict[str, Any] = Field(default_factory=dict, description="Passed to vllm-router.")

    @field_validator("function")
    @classmethod
    def _only_default(cls, value: str) -> str:
        if value != DEFAULT_ROLLOUT:
            raise ValueError(f"a rollout of your own cannot be plugged in yet; leave it out or write {DEFAULT_ROLLOUT}")
        return value

    @model_validator(mode="after")
    def _positive_temperature(self) -> RolloutSection:
        if self.sampling.temperature == 0:
            raise ValueError("rollout.sampling.temperature must be above 0: training needs the log-probs of a sampled policy")
        return self


class RewardSection(Section):
    """How responses are scored."""

    kind: str = Field(default="reasoning_gym", description="Name of a grader, or `module:callable`.")
    key: str | None = Field(default=None, description="Entry to use when the grader returns a mapping.")
    timeout_s: Seconds = Field(default=10.0, description="Wall-clock limit of a call; a slower grader is killed and replaced.")
    workers: Count = Field(default=1, description="Grader processes per rollout worker.")


class TrainerSection(Section):
    """The Megatron trainer."""

    optimizer: OptimizerSection = OptimizerSection()
    max_tokens_per_micro_batch: Count = Field(default=8192, description="Strict cap on real tokens in a pack.")
    updates_per_step: Count = Field(default=1, description="Optimizer steps made from one batch.")
    log_prob_chunk_tokens: Count = Field(default=1024, description="Rows of logits handled at once.")
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        default="auto", description="Of activations in the backward pass; auto: the least that fits, by the plan."
    )
    freeze_router: bool = Field(default=False, description="Train no router of a mixture of experts.")
    routing_replay: Literal["none", "trainer", "rollout"] = Field(
        default="none",
        description="Experts of the update's passes. none: each pass chooses. trainer: those that the pass for old log-probs"
        " chose. rollout: those that the engine chose, also in the pass for old log-probs.",
    )
    overlap: bool = Field(
        default=False, description="Reduce gradients during the backward pass, gather parameters during the next forward pass."
    )
    threads: Count = Field(default=1, description="Host threads of a trainer rank.")
    step_timeout_s: Seconds = 1800.0
    megatron: dict[str, Any] = Field(default_factory=dict, description="Passed to megatron-core's transformer config.")


class StopWhen(Section):
    """Ends a run early once an evaluation metric is reached."""

    metric: str
    at_least: Number


class ScheduleSection(Section):
    """How long the run is and how far sampling may run ahead."""

    num_steps: Count
    max_staleness: NonNegative = Field(default=0, description="Steps by which a sample may lag behind; 0 is synchronous.")
    stop_when: StopWhen | None = None


class CheckSchedule(Section):
    """Checks the first few updates, then every Nth."""

    first: NonNegative = 3
    every: NonNegative = Field(default=20, description="0: never again.")


class ProbeSection(CheckSchedule):
    """Compares log-probs of fixed tokens between trainer and engine."""

    tolerance: Rate | None = Field(default=None, description="Largest mean absolute difference; None: by dtype.")


class WeightsSection(Section):
    """Weight updates from trainer to engines."""

    update: Literal["drain", "in_flight"] = Field(
        default="drain",
        description="drain: new requests wait, running ones finish, then publish. in_flight: running ones are frozen and go on"
        " with the new weights; each token keeps the version that sampled it.",
    )
    fingerprint: CheckSchedule = CheckSchedule()
    probe: ProbeSection = ProbeSection()
    timeout_s: Seconds = Field(default=120.0, description="Deadline of every wait in an update.")


class CheckpointSection(Section):
    """Saving and resuming."""

    every: NonNegative = Field(default=0, description="Steps between checkpoints; 0: only at the end.")
    keep: Count = Field(default=2, description="So many of the newest checkpoints stay.")
    keep_every: NonNegative = Field(
        default=0, description="Checkpoints of steps that this divides stay beside them; a multiple of `every`. 0: no others."
    )
    last: bool = Field(
        default=True, description="Write a checkpoint and the model when the run ends; false: neither, for measurements."
    )
    asynchronous: bool = Field(
        default=False,
        description="Training goes on while a checkpoint is written, from a copy in host memory; the next one waits for it.",
    )
    timeout_s: Seconds = Field(default=3600.0, description="Longest time for writing one checkpoint.")
    verify: Literal["content", "size"] = Field(
        default="content", description="What `--resume` checks of every file: its checksum, or its size only."
    )
    export_every: NonNegative = Field(
        default=0, description="Steps between Hugging Face folders of the model in `exports`; 0: only at the end, in `model`."
    )
    export_keep: NonNegative = Field(default=0, description="So many of the newest of these stay; 0: all.")

    @model_validator(mode="after")
    def _kept_are_written(self) -> CheckpointSection:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(f"keep_every must be a multiple of every ({self.every}), here it is {self.keep_every}")
        return self


class EvaluationSet(Section):
    """A held-out question set."""

    name: str
    path: Path
    num_rows: Count | None = Field(default=None, description="None: all rows.")
    sampling: SamplingSection = SamplingSection()
    modes: tuple[Literal["greedy", "sampled"], ...] = ("greedy", "sampled")


class EvaluationSection(Section):
    """When and on what to evaluate."""

    every: NonNegative = Field(default=0, description="Steps between evaluations; 0: only at the start and the end.")
    at_start: bool = True
    sets: tuple[EvaluationSet, ...] = ()


class ObserveSection(Section):
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    samples_per_step: NonNegative = Field(default=2, description="Samples kept for the report.")


class ClusterSection(Section):
    """The Ray cluster that a run uses."""

    address: str | None = Field(
        default=None, description="HOST:PORT of a running cluster, which is never stopped; null: one is started here."
    )

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is None:
            return None
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"expected HOST:PORT, such as 10.0.0.5:6379, got {value!r}")
        return value


class PluginsSection(Section):
    """Third-party platforms are code execution: they load only when allowed by name. Deny beats allow."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class Config(Section):
    """A whole run file."""

    run: RunSection
    model: ModelSection
    data: DataSection
    schedule: ScheduleSection
    algorithm: AlgorithmSection = GrpoSection()
    topology: str | dict[str, Any] = Field(default="colocate", description="A shipped name, a path or an inline topology.")
    platform: str = Field(default="auto", description="Fills pools that say `platform: auto`.")
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    trainer: TrainerSection = TrainerSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    observe: ObserveSection = ObserveSection()
    plugins: PluginsSection = PluginsSection()
    cluster: ClusterSection = ClusterSection()
