"""Names of metrics with unit and meaning, and the arithmetic that makes them from parts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

from vime.types import Batch, SampleStatus

Number = int | float


@dataclass(frozen=True, slots=True)
class Metric:
    """A name (parts in braces stand for any text without a slash), its unit (empty: a pure number) and its meaning."""

    name: str
    unit: str
    meaning: str


DIFF = "train/train_rollout_logprob_abs_diff"
DIFF_MAX = "train/train_rollout_logprob_abs_diff_max"
CORR = "train/rollout_corr"
REWARD = "rollout/raw_reward"
STALENESS_MEAN = "rollout/staleness/mean"
STALENESS_MAX = "rollout/staleness/max"
RESPONSE_TOKENS = "rollout/response_tokens"
TOTAL_TOKENS = "rollout/total_tokens"

REGISTRY: tuple[Metric, ...] = (
    Metric("rollout/raw_reward", "", "Mean reward of the batch's samples, as the grader gave it."),
    Metric("rollout/rewards", "", "Mean reward after shaping, as the advantage saw it."),
    Metric("rollout/response_len/{stat}", "tokens", "Response length: mean, median, max and min over samples."),
    Metric("rollout/truncated_ratio", "", "Share of samples that reached the length limit."),
    Metric("rollout/zero_std/count_{reward}", "groups", "Groups whose samples all have this reward: no advantage."),
    Metric("rollout/staleness/{stat}", "steps", "Steps by which the oldest trained token of a group lags behind: mean, max."),
    Metric("rollout/staleness/count_{steps}", "groups", "Groups of this staleness, where not all have the last version."),
    Metric("rollout/mixed_versions", "", "Share of samples that an update met on the way: two versions or more sampled them."),
    Metric("rollout/returned_stale", "groups", "Groups that were too old to be trained and went back, over the whole run."),
    Metric("rollout/samples", "samples", "Samples in the batch."),
    Metric("rollout/response_tokens", "tokens", "Response tokens in the batch."),
    Metric("rollout/trainable_tokens", "tokens", "Response tokens that are trained on."),
    Metric("rollout/total_tokens", "tokens", "Prompt and response tokens in the batch."),
    Metric("rollout/dynamic_filter/drop_{reason}", "groups", "Groups that the dynamic filter left out, by reason."),
    Metric("rollout/regenerated", "groups", "Groups that failed and were generated anew."),
    Metric("rollout/error_cat/{kind}", "samples", "Samples that failed, by kind of failure."),
    Metric("rollout/repetition_frac", "", "Share of responses that end in a loop."),
    Metric("rollout/log_probs", "nat", "Mean log-prob of response tokens under the trainer before the update."),
    Metric("rollout/ref_log_probs", "nat", "The same under the reference model."),
    Metric("rollout/rollout_log_probs", "nat", "The same as the engine reported it while sampling."),
    Metric("rollout/advantages", "", "Mean advantage of response tokens."),
    Metric("rollout/teacher_log_probs", "nat", "Mean log-prob of response tokens under the teacher."),
    Metric("rollout/opd_reverse_kl", "nat", "Mean of the trainer's minus the teacher's log-prob."),
    Metric("rollout/returns", "", "Mean return of response tokens."),
    Metric("rollout/values", "", "Mean value that the critic gave response tokens."),
    Metric("rollout/kl", "nat", "Mean estimated divergence from the reference."),
    Metric("rollout/entropy", "nat", "Mean entropy of the policy at response tokens."),
    Metric("rollout/response_lengths", "tokens", "Mean response length as the trainer saw it."),
    Metric("rollout/total_lengths", "tokens", "Mean prompt and response length as the trainer saw it."),
    Metric("train/loss", "", "Loss that was minimised."),
    Metric("train/pg_loss", "", "Its policy-gradient part."),
    Metric("train/entropy_loss", "nat", "Mean entropy of the policy at trained tokens."),
    Metric("train/kl_loss", "nat", "Its divergence part, before the coefficient."),
    Metric("train/pg_clipfrac", "", "Share of trained tokens whose ratio was clipped."),
    Metric("train/ppo_kl", "nat", "Mean of old minus new log-prob: how far the update moved from the old policy."),
    Metric(DIFF, "nat", "Mean absolute difference between the trainer's and the sampler's log-prob of the same token."),
    Metric(DIFF_MAX, "nat", "The largest such difference of one token."),
    Metric("train/tis", "", "Mean importance weight between trainer and sampler, before its bounds."),
    Metric("train/tis_clipfrac", "", "Share of tokens whose importance weight was truncated."),
    Metric("train/tis_abs", "", "Mean absolute deviation of that weight from 1."),
    Metric("train/ois", "", "Mean importance ratio between the current policy and the ratio's old one."),
    Metric("train/opsm_clipfrac", "", "Share of sequences left out by off-policy sequence masking."),
    Metric(f"{CORR}/kl", "nat", "Mean of the sampler's minus the trainer's log-prob: estimator k1 of the divergence."),
    Metric(f"{CORR}/k3_kl", "nat", "Estimator k3 of the divergence of the trainer from the sampler."),
    Metric(f"{CORR}/chi2_token", "", "Mean squared ratio of trainer to sampler by token, minus 1."),
    Metric(f"{CORR}/chi2_seq", "", "The same of whole responses."),
    Metric(f"{CORR}/training_ppl", "", "Perplexity of responses under the trainer, mean over responses."),
    Metric(f"{CORR}/training_log_ppl", "nat", "Its logarithm, mean over responses."),
    Metric(f"{CORR}/rollout_ppl", "", "Perplexity of responses under the sampler, mean over responses."),
    Metric(f"{CORR}/rollout_log_ppl", "nat", "Its logarithm, mean over responses."),
    Metric(f"{CORR}/ppl_ratio", "", "Perplexity under the trainer by that under the sampler, mean over responses."),
    Metric(f"{CORR}/log_ppl_diff", "nat", "Logarithm of that ratio, mean over responses."),
    Metric(f"{CORR}/log_ppl_abs_diff", "nat", "Its absolute value, mean over responses."),
    Metric(f"{CORR}/log_ppl_abs_diff_max", "nat", "Its absolute value, the largest of a response."),
    Metric(f"{CORR}/rollout_is_mean", "", "Mean importance weight as applied, after its bounds."),
    Metric(f"{CORR}/rollout_is_std", "", "Deviation of the applied weights."),
    Metric(f"{CORR}/rollout_is_max", "", "Largest applied weight."),
    Metric(f"{CORR}/rollout_is_eff_sample_size", "", "Effective sample size of the applied weights, as a share of the tokens."),
    Metric(f"{CORR}/rollout_is_seq_mean", "", "Mean applied weight of a response, mean over responses."),
    Metric(f"{CORR}/rollout_is_ratio_fraction_high", "", "Share of tokens whose weight was above the upper bound."),
    Metric(f"{CORR}/rollout_is_ratio_fraction_low", "", "Share below the lower bound, or below 1 / upper where that is 0."),
    Metric(f"{CORR}/rollout_is_oob_ratio", "", "Share of tokens whose weight was outside its bounds."),
    Metric(f"{CORR}/rollout_rs_masked_fraction", "", "Share of tokens that a rejection left out."),
    Metric(f"{CORR}/rollout_rs_seq_masked_fraction", "", "Share of responses of which a rejection left out a token."),
    Metric(f"{CORR}/rollout_rs_{{statistic}}_masked_fraction", "", "Share of tokens that one statistic left out."),
    Metric(f"{CORR}/rollout_rs_{{statistic}}_seq_masked_fraction", "", "Share of responses of which it left out a token."),
    Metric(
        "train/routing_replay_differing",
        "",
        "Share of pairs of a token and a layer whose router would have chosen other experts than those that were prescribed.",
    ),
    Metric("train/grad_norm", "", "Global norm of the gradient before clipping."),
    Metric("train/lr-pg_{index}", "", "Learning rate of an optimizer parameter group."),
    Metric("train/tokens", "tokens", "Tokens that the step trained on."),
    Metric("train/rollouts", "samples", "Samples that the step trained on; those of flat groups may be left out."),
    Metric("train/global_batch_size", "samples", "Samples in one optimizer step."),
    Metric("train/step", "", "The step, for trackers that need it as a metric."),
    Metric(
        "train/critic-{metric}",
        "",
        "Of the critic: loss, value_loss, value_clipfrac, values, returns, explained_variance, grad_norm, lr-pg_0.",
    ),
    Metric("train/mtp_loss", "", "Loss of the multi-token-prediction layers."),
    Metric("eval/{set}", "", "Mean reward on an evaluation set of one mode."),
    Metric("eval/{set}/{mode}", "", "Mean reward on an evaluation set; mode is greedy or sampled."),
    Metric("eval/{set}/{mode}/response_len/{stat}", "tokens", "Response length in that evaluation."),
    Metric("eval/{set}/{mode}/truncated_ratio", "", "Share of its samples that reached the length limit."),
    Metric("eval/{set}-pass@{k}", "", "Chance that one of k samples is right."),
    Metric("perf/step_time", "s", "Wall time of the learner's loop from one batch to the next."),
    Metric("perf/train_wait_time", "s", "Time the learner waited for its batch."),
    Metric("perf/train_time", "s", "Time in the trainer's step."),
    Metric("perf/update_weights_time", "s", "Time of a weight update, from pause to open."),
    Metric("perf/save_model_time", "s", "Time that training waited for a checkpoint."),
    Metric("perf/save_write_time", "s", "Time until a checkpoint was whole, where it was written asynchronously."),
    Metric("perf/wait_time_ratio", "", "Waiting for a batch as a share of the step's wall time."),
    Metric("perf/response_tokens_per_s", "tokens/s", "Response tokens per second of the step's wall time."),
    Metric("perf/total_tokens_per_s", "tokens/s", "Prompt and response tokens per second of the step's wall time."),
    Metric("perf/rollout_time", "s", "Time from the first request of a batch to its last group."),
    Metric("perf/tokens_per_gpu_per_sec", "tokens/s", "Response tokens per second of sampling and engine device."),
    Metric("perf/actor_train_tok_per_s", "tokens/s", "Tokens per second of training."),
    Metric("perf/actor_train_tflops", "TFLOP/s", "Arithmetic rate of training, per device."),
    Metric("perf/data_preprocess_time", "s", "Time to pack a batch."),
    Metric("perf/log_probs_time", "s", "Time of a separate log-prob pass."),
    Metric("perf/sleep_time", "s", "Time to free a shared device."),
    Metric("perf/wake_up_time", "s", "Time to take a shared device back."),
    Metric("perf/update_weights_wire_bytes", "bytes", "Bytes that a weight update moved."),
    Metric("sync/probe_abs_diff", "nat", "Mean absolute difference of the probe's log-probs between trainer and engine."),
    Metric("sync/probe_abs_diff_max", "nat", "The largest such difference."),
    Metric("sync/engine_{phase}", "s", "Time of the slowest engine in a phase of its update: start, update, finish."),
    Metric("sync/staging", "s", "Time in which the trainer makes its weights readable, within `hold`."),
    Metric("sync/held_{tag}", "bytes", "What the fullest engine worker holds of model (`engine_weights`) and cache (`kv`)."),
    Metric("sync/fingerprint_tensors", "tensors", "Tensors whose bytes were compared after the transfer."),
)


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    """The longest literal text first, so that a placeholder never hides a more exact name."""
    ordered = sorted(REGISTRY, key=lambda metric: -len(re.sub(r"\{\w+\}", "", metric.name)))
    return tuple((re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(m.name))), m) for m in ordered)


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """The registered metric that a concrete name belongs to; None for names from custom functions."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def eval_score(name: str) -> tuple[str, str] | None:
    """Set and mode (empty: the set has one mode) of a metric that is a mean reward of an evaluation; None for others."""
    section, *parts = name.split("/")
    if section != "eval" or not parts or parts == ["step"] or parts[-1].endswith("-truncated_ratio") or "-pass@" in parts[-1]:
        return None
    match parts:
        case [dataset]:
            return dataset, ""
        case [dataset, "greedy" | "sampled" as mode]:
            return dataset, mode
        case _:
            return None


def as_number(value: Any) -> Number | None:
    """A plain int or float from a bool, an int, a float or any scalar with `item()`; None for anything else."""
    if value.__class__ is float or value.__class__ is int:
        return value
    try:
        plain = value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):
        return None
    if isinstance(plain, bool):
        return int(plain)
    return plain if isinstance(plain, int | float) else None


class Metrics:
    """Collects parts and gives weighted means, sums and maxima by name.

    None is left out. NaN is kept, so that a broken part shows in the result.
    """

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def mean(self, name: str, value: Number | None, *, weight: float = 1.0) -> None:
        """Add a part of a mean; a weight of 0 adds nothing."""
        if value is None or weight == 0:
            return
        total, weights = self._means.get(name, (0.0, 0.0))
        self._means[name] = (total + value * weight, weights + weight)

    def sum(self, name: str, value: Number | None = 1) -> None:
        if value is not None:
            self._sums[name] = self._sums.get(name, 0) + value

    def max(self, name: str, value: Number | None) -> None:
        if value is None:
            return
        known = self._maxima.get(name, -math.inf)
        self._maxima[name] = value if math.isnan(value) or value > known else known

    def update(self, other: Mapping[str, Number | None]) -> None:
        """Add one part of a mean for every entry."""
        for name, value in other.items():
            self.mean(name, value)

    def as_dict(self) -> dict[str, float]:
        means = {name: total / weights for name, (total, weights) in self._means.items()}
        return means | self._sums | self._maxima


def batch_metrics(batch: Batch) -> dict[str, float]:
    """`rollout/...` metrics from the sizes, rewards and versions of a batch. Samples without a reward do not count in it."""
    samples = [sample for group in batch.groups for sample in group.samples]
    if not samples:
        return {}
    lengths = [sample.response_tokens for sample in samples]
    rewards = [reward for sample in samples if (reward := as_number(sample.reward)) is not None]
    result: dict[str, float] = {
        "rollout/response_len/mean": sum(lengths) / len(lengths),
        "rollout/response_len/median": float(median(lengths)),
        "rollout/response_len/max": max(lengths),
        "rollout/response_len/min": min(lengths),
        "rollout/truncated_ratio": sum(s.status is SampleStatus.TRUNCATED for s in samples) / len(samples),
        "rollout/samples": len(samples),
        RESPONSE_TOKENS: sum(lengths),
        "rollout/trainable_tokens": sum(s.trainable_tokens for s in samples),
        TOTAL_TOKENS: sum(s.total_tokens for s in samples),
    }
    if rewards:
        result[REWARD] = sum(rewards) / len(rewards)
    staleness = [batch.step - 1 - group.oldest.step for group in batch.groups if group.oldest is not None]
    if staleness:
        result[STALENESS_MEAN] = sum(staleness) / len(staleness)
        result[STALENESS_MAX] = max(staleness)
        if any(staleness):
            result |= {f"rollout/staleness/count_{steps}": n for steps, n in sorted(Counter(staleness).items())}
    return result | _flat_groups(batch) | _group_metrics(batch)


def _flat_groups(batch: Batch) -> dict[str, float]:
    """Counts by reward, to one decimal."""
    firsts = (as_number(g.samples[0].reward) for g in batch.groups if len(g.samples) > 1 and g.is_flat)
    counts = Counter(f"{round(first, 1):g}" for first in firsts if first is not None and math.isfinite(first))
    return {f"rollout/zero_std/count_{reward}": count for reward, count in sorted(counts.items())}


def _group_metrics(batch: Batch) -> dict[str, float]:
    """Means of what rollout functions reported by group; names without a slash belong to `rollout/`."""
    means = Metrics()
    for group in batch.groups:
        for name, value in group.metrics.items():
            means.mean(name if "/" in name else f"rollout/{name}", as_number(value))
    return means.as_dict()


def render_docs() -> str:
    """The page docs/metrics.md."""
    sections = {
        "rollout": "Sampling: the batch that a step trains.",
        "train": "The update.",
        "eval": "Held-out questions.",
        "perf": "Time and throughput. These differ between two runs that are otherwise equal bit for bit.",
        "sync": "Weight updates, in rows of kind `sync`.",
    }
    lines = [
        "# Metrics",
        "",
        "Generated from `vime/observe/metrics.py` by `python -m vime.observe.metrics > docs/metrics.md`; do not edit.",
        "",
        "Every name below may appear in `metrics.jsonl`, in TensorBoard and in the report. Braces stand for any text.",
        "Custom functions may add names of their own.",
    ]
    for section, title in sections.items():
        lines += ["", f"## {section}/", "", title, "", "| name | unit | meaning |", "|---|---|---|"]
        entries = (m for m in REGISTRY if m.name.startswith(f"{section}/"))
        lines += [f"| `{m.name}` | {m.unit or '1'} | {m.meaning} |" for m in entries]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_docs(), end="")
