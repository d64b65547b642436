"""slime's and Megatron's flags as data: where each goes, which need nothing here, and which vime refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.compat.refused_flags import REFUSED as REFUSED
from vime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag and its home. `arity` is 0 (a switch), 1, or `+`; `convert` gets the text, or the list of texts."""

    path: str
    arity: int | str = 1
    convert: Callable[[Any], Any] = lambda text: text


def switch(path: str, value: object) -> Flag:
    """A flag without a value that stands for one."""
    return Flag(path, 0, lambda _: value)


def _folder(text: str) -> str:
    """A Hugging Face folder; slime's own scripts give one of Megatron's checkpoints."""
    if (Path(text) / "latest_checkpointed_iteration.txt").exists():
        raise ConfigError(f"{text} is a checkpoint of Megatron", fix="give the Hugging Face folder that it was made from")
    return text


def _chunk(text: str) -> object:
    """-1 means all rows at once."""
    return 2**31 if text == "-1" else text


FLAGS: Mapping[str, Flag] = {
    # run and model
    "hf-checkpoint": Flag("model.path"),
    "ref-load": Flag("model.reference", 1, _folder),
    "critic-load": Flag("model.critic", 1, _folder),
    "save": Flag("run.dir"),
    "seed": Flag("run.seed"),
    "rollout-seed": Flag("run.seed"),
    "bf16": switch("model.dtype", "bfloat16"),
    "fp16": switch("model.dtype", "float16"),
    "platform": Flag("platform"),
    "topology": Flag("topology"),
    "ray-address": Flag("cluster.address"),
    "vllm-enable-deterministic-inference": switch("run.deterministic", True),
    # data
    "prompt-data": Flag("data.path"),
    "input-key": Flag("data.input_key"),
    "label-key": Flag("data.label_key"),
    "metadata-key": Flag("data.metadata_key"),
    "apply-chat-template": switch("data.template", "chat"),
    "rollout-shuffle": switch("data.shuffle", True),
    "no-rollout-shuffle": switch("data.shuffle", False),
    "rollout-max-prompt-len": Flag("data.max_prompt_tokens"),
    # rollout
    "rollout-function-path": Flag("rollout.function"),
    "rollout-batch-size": Flag("rollout.batch_size"),
    "n-samples-per-prompt": Flag("rollout.group_size"),
    "rollout-temperature": Flag("rollout.sampling.temperature"),
    "rollout-top-p": Flag("rollout.sampling.top_p"),
    "rollout-top-k": Flag("rollout.sampling.top_k"),
    "rollout-max-response-len": Flag("rollout.sampling.max_response_tokens"),
    "rollout-stop-token-ids": Flag("rollout.sampling.stop_token_ids", "+", list),
    "dynamic-sampling-filter-path": Flag("rollout.filter"),
    "vllm-router-policy": Flag("rollout.router.policy"),
    # reward
    "rm-type": Flag("reward.kind"),
    "custom-rm-path": Flag("reward.kind"),
    "reward-key": Flag("reward.key"),
    # algorithm
    "eps-clip": Flag("algorithm.clip_low"),
    "eps-clip-high": Flag("algorithm.clip_high"),
    "eps-clip-c": Flag("algorithm.dual_clip"),
    "value-clip": Flag("algorithm.critic.value_clip"),
    "gamma": Flag("algorithm.gamma"),
    "lambd": Flag("algorithm.lam"),
    "normalize-advantages": switch("algorithm.whiten", True),
    "no-normalize-advantages": switch("algorithm.whiten", False),
    "critic-lr": Flag("algorithm.critic.optimizer.lr"),
    "critic-lr-warmup-iters": Flag("algorithm.critic.optimizer.warmup_steps"),
    "custom-advantage-function-path": Flag("algorithm.advantage_function"),
    "custom-loss-function-path": Flag("algorithm.loss_function"),
    "custom-tis-function-path": Flag("algorithm.correction.function"),
    "entropy-coef": Flag("algorithm.entropy_coef"),
    "calculate-per-token-loss": switch("algorithm.loss_mean", "token"),
    "disable-grpo-std-normalization": switch("algorithm.normalize_std", False),
    "use-rollout-logprobs": switch("algorithm.old_log_probs", "rollout"),
    "old-log-probs": Flag("algorithm.old_log_probs"),
    # trainer
    "lr": Flag("trainer.optimizer.lr"),
    "min-lr": Flag("trainer.optimizer.min_lr"),
    "weight-decay": Flag("trainer.optimizer.weight_decay"),
    "clip-grad": Flag("trainer.optimizer.clip_grad"),
    "adam-eps": Flag("trainer.optimizer.eps"),
    "lr-warmup-iters": Flag("trainer.optimizer.warmup_steps"),
    "lr-decay-iters": Flag("trainer.optimizer.decay_steps"),
    "lr-decay-style": Flag("trainer.optimizer.decay"),
    "max-tokens-per-gpu": Flag("trainer.max_tokens_per_micro_batch"),
    "log-probs-chunk-size": Flag("trainer.log_prob_chunk_tokens", 1, _chunk),
    "num-steps-per-rollout": Flag("trainer.updates_per_step"),
    "recompute-granularity": Flag("trainer.recompute"),
    "overlap-grad-reduce": switch("trainer.overlap", True),
    "overlap-param-gather": switch("trainer.overlap", True),
    # schedule, checkpoints, evaluation, observation
    "num-rollout": Flag("schedule.num_steps"),
    "save-interval": Flag("checkpoint.every"),
    "async-save": switch("checkpoint.asynchronous", True),
    "eval-interval": Flag("evaluation.every"),
    "skip-eval-before-train": switch("evaluation.at_start", False),
    "in-flight-updates": switch("weights.update", "in_flight"),
    "vllm-weight-transfer-timeout-sec": Flag("weights.timeout_s"),
    "use-tensorboard": switch("observe.tensorboard", True),
}

OWN = frozenset(
    {
        "platform",
        "topology",
        "ray-address",
        "old-log-probs",
        "in-flight-updates",
        "no-rollout-shuffle",
        "no-normalize-advantages",
    }
)
"""Flags of `FLAGS` that slime does not have: for settings that its flags cannot say."""

COMBINED: Mapping[str, int | str] = {
    "adam-beta1": 1,
    "adam-beta2": 1,
    "global-batch-size": 1,
    "eval-prompt-data": "+",
    "eval-max-response-len": 1,
    "eval-temperature": 1,
    "eval-top-p": 1,
    "eval-top-k": 1,
    "use-routing-replay": 0,
    "use-rollout-routing-replay": 0,
}
"""Flags that share a home with others, or say it in other numbers."""

CLUSTER: Mapping[str, int | str] = {
    "actor-num-nodes": 1,
    "actor-num-gpus-per-node": 1,
    "critic-num-nodes": 1,
    "critic-num-gpus-per-node": 1,
    "num-gpus-per-node": 1,
    "rollout-num-gpus": 1,
    "rollout-num-gpus-per-engine": 1,
    "colocate": 0,
    "offload": 0,
    "offload-train": 0,
    "no-offload-train": 0,
    "offload-rollout": 0,
    "no-offload-rollout": 0,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": 1,
    "update-weight-transport": 1,
    "update-weight-buffer-size": 1,
}
"""Flags that together are a topology."""

NOTHING_TO_DO: Mapping[str, int | str] = {
    "use-dynamic-batch-size": 0,
    "balance-data": 0,
    "micro-batch-size": 1,
    "recompute-method": 1,
    "recompute-num-layers": 1,
    "use-distributed-optimizer": 0,
    "accumulate-allreduce-grads-in-fp32": 0,
    "use-fault-tolerance": 0,
    "vllm-weight-sync-packed": 0,
    "get-mismatch-metrics": 0,
    "rollout-skip-special-tokens": 0,
}
"""What vime always does, or what has no effect without a part that is refused."""

SHAPE: Mapping[str, int | str] = {
    "num-layers": 1,
    "hidden-size": 1,
    "ffn-hidden-size": 1,
    "num-attention-heads": 1,
    "group-query-attention": 0,
    "num-query-groups": 1,
    "kv-channels": 1,
    "vocab-size": 1,
    "padded-vocab-size": 1,
    "make-vocab-size-divisible-by": 1,
    "max-position-embeddings": 1,
    "position-embedding-type": 1,
    "rotary-base": 1,
    "rotary-percent": 1,
    "use-rotary-position-embeddings": 0,
    "normalization": 1,
    "norm-epsilon": 1,
    "qk-layernorm": 0,
    "swiglu": 0,
    "disable-bias-linear": 0,
    "add-qkv-bias": 0,
    "untie-embeddings-and-output-weights": 0,
    "num-experts": 1,
    "moe-ffn-hidden-size": 1,
    "moe-router-topk": 1,
    "moe-layer-freq": 1,
    "moe-shared-expert-intermediate-size": 1,
}
"""The model's shape: read from its config.json, so these are accepted and not used."""

ONLY_VALUES: Mapping[str, Mapping[str, str]] = {
    "train-backend": {"megatron": "Megatron is the only trainer"},
    "optimizer": {"adam": "AdamW is the only optimizer"},
    "update-weight-mode": {"full": "full updates only"},
    "update-weights-interval": {"1": "weights are published after every step; use schedule.max_staleness to run ahead"},
    "n-samples-per-eval-prompt": {"1": "one answer a question and mode; see `modes` of an evaluation set"},
}
"""Flags of which one value is what vime does anyway."""
