"""Calls vime's algorithms and those of verl and TRL on the same drawn batches and prints the largest differences as JSON.

Needs a Python with vime, torch, and `verl` or `trl` (what is missing is left out). Everything runs in float64, so what is left
is rounding, weights in float32, and the small constants that others add to denominators (1e-6 beside a deviation in verl).
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vime.algorithms import mismatch
from vime.algorithms.base import AdvantageBatch, TokenBatch, token_weights
from vime.algorithms.corrections import corrected
from vime.algorithms.critic import returns, value_loss
from vime.algorithms.kl import divergence
from vime.algorithms.registry import algorithm_of
from vime.algorithms.sequences import Sequences
from vime.config.algorithms import (
    CispoSection,
    CriticSection,
    GrpoSection,
    GspoSection,
    KlSection,
    PpoSection,
    ReinforcePlusPlusBaselineSection,
    ReinforcePlusPlusSection,
    RlooSection,
)
from vime.config.corrections import CorrectionSection, RejectSection

GROUPS, GROUP_SIZE, WIDTH = 6, 4, 12
Row = tuple[str, float]


class Drawn:
    """A batch as a table [samples, width], its last tokens masked, and as flattened tokens; `gaps` masks some in the middle."""

    def __init__(self, seed: int, *, gaps: bool = True) -> None:
        draw = torch.Generator().manual_seed(seed)
        count = GROUPS * GROUP_SIZE
        self.sizes = torch.randint(1, WIDTH + 1, (count,), generator=draw).tolist()
        self.sequences = Sequences.of(self.sizes)
        keep = torch.rand(count, WIDTH, generator=draw) > (0.2 if gaps else 0.0)
        keep[:, 0] = True
        self.mask = (torch.arange(WIDTH) < torch.tensor(self.sizes)[:, None]) & keep
        self.index = [i // GROUP_SIZE for i in range(count)]
        self.rewards = torch.rand(count, generator=draw, dtype=torch.float64)

        def table(scale: float) -> Tensor:
            return scale * torch.randn(count, WIDTH, generator=draw, dtype=torch.float64)

        self.old = table(0.5) - 2.0
        self.now, self.rollout, self.ref = (self.old + table(scale) for scale in (0.3, 0.4, 0.2))
        self.values, self.advantages, self.new_values = table(0.5), table(1.0), table(0.6)

    def flat(self, table: Tensor) -> Tensor:
        return table[self.sequences.sample, self.sequences.position]

    def tokens(self, now: Tensor, *, loss_mean: str) -> TokenBatch:
        mask = self.flat(self.mask)
        weights = token_weights(
            mask,
            torch.tensor(self.sizes),
            loss_mean="rollout" if loss_mean == "rollout" else "token",
            num_rollouts=len(self.sizes),
            num_tokens=len(self.sizes) * WIDTH if loss_mean == "constant" else int(mask.sum()),
        )
        return TokenBatch(
            log_probs=self.flat(now),
            entropy=torch.zeros(mask.shape),
            old_log_probs=self.flat(self.old),
            policy_log_probs=self.flat(self.old),
            rollout_log_probs=self.flat(self.rollout),
            advantages=self.flat(self.advantages),
            mask=mask,
            weights=weights.double(),
            sequences=self.sequences,
            ref_log_probs=self.flat(self.ref),
        )

    def samples(self) -> AdvantageBatch:
        groups = self.rewards.view(GROUPS, GROUP_SIZE).repeat_interleave(GROUP_SIZE, dim=0)
        lengths = torch.tensor(self.sizes)
        facts = {name: self.flat(getattr(self, name)) for name in ("values", "old", "rollout", "ref")}
        return AdvantageBatch(
            rewards=self.rewards,
            group_rewards=groups,
            group_lengths=torch.ones_like(groups),
            group_weights=torch.ones_like(groups),
            lengths=lengths,
            total_lengths=lengths,
            mask=self.flat(self.mask),
            log_probs=facts["old"],
            rollout_log_probs=facts["rollout"],
            ref_log_probs=facts["ref"],
            teacher_log_probs=facts["ref"],
            values=facts["values"],
        )

    @property
    def token_rewards(self) -> Tensor:
        """[samples, width]: the reward on each sample's last trained token."""
        last = WIDTH - 1 - self.mask.int().flip(1).argmax(dim=1)
        return torch.zeros(len(self.sizes), WIDTH, dtype=torch.float64).index_put(
            (torch.arange(len(self.sizes)), last), self.rewards
        )


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, by the largest of theirs."""
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-12)).item()


def both(batch: Drawn, section: Any, theirs: Callable[[Tensor], Tensor], *, loss_mean: str) -> tuple[float, float]:
    """Difference of loss and of gradient to the table of current log-probs."""
    algorithm, found = algorithm_of(section), []
    for loss in (lambda x: algorithm.loss(batch.tokens(x, loss_mean=loss_mean)).loss, theirs):
        now = batch.now.clone().requires_grad_()
        value = loss(now)
        (gradient,) = torch.autograd.grad(value, now)
        found.append((value.detach(), gradient))
    return gap(found[0][0], found[1][0]), gap(found[0][1], found[1][1])


def against_verl(batch: Drawn) -> Iterator[Row]:
    """Advantages, policy losses, value loss, divergences, corrections and their metrics."""
    from verl.trainer.ppo import core_algos as verl

    mask, at = batch.mask.double(), batch.flat(batch.mask)
    grouped: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
        "grpo": (GrpoSection(), verl.compute_grpo_outcome_advantage, {}),
        "dr_grpo": (
            GrpoSection(normalize_std=False),
            verl.compute_grpo_outcome_advantage,
            {"norm_adv_by_std_in_grpo": False},
        ),
        "rloo": (RlooSection(), verl.compute_rloo_outcome_advantage, {}),
        "reinforce_plus_plus_baseline": (
            ReinforcePlusPlusBaselineSection(),
            verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
            {},
        ),
    }
    for name, (section, function, options) in grouped.items():
        theirs, _ = function(batch.token_rewards.clone(), mask, index=batch.index, **options)
        yield (
            f"advantages {name}",
            gap(algorithm_of(section).advantages(batch.samples(), lambda x: x)[at], batch.flat(theirs)[at]),
        )
    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        batch.token_rewards, mask, config=SimpleNamespace(gamma=0.95)
    )
    ours = algorithm_of(ReinforcePlusPlusSection(gamma=0.95)).advantages(batch.samples(), lambda x: x)
    yield "advantages reinforce_plus_plus", gap(ours[at], batch.flat(theirs)[at])
    section = PpoSection(gamma=0.95, lam=0.9, critic=CriticSection(value_clip=0.2))
    theirs, target = verl.compute_gae_advantage_return(batch.token_rewards, batch.values, mask, 0.95, 0.9)
    yield (
        "advantages ppo (GAE)",
        gap(algorithm_of(section).advantages(batch.samples(), lambda x: x)[at], batch.flat(theirs)[at]),
    )
    yield "returns ppo", gap(returns(batch.samples(), section)[at], batch.flat(target)[at])
    new, weights = batch.new_values, batch.tokens(batch.now, loss_mean="token").weights
    loss, fraction = verl.compute_value_loss(new, target, batch.values, mask, 0.2)
    own = value_loss(batch.flat(new), batch.flat(batch.values), batch.flat(target), at, weights, section)
    yield "value loss", gap(own.loss, loss)
    yield "value clip fraction", gap(own.token_sums["value_clipfrac"] / at.sum(), torch.as_tensor(fraction))
    yield from _verl_losses(batch, verl)
    for ours_name, theirs_name in (("k1", "k1"), ("k2", "k2"), ("low_var", "low_var_kl")):
        theirs = verl.kl_penalty_forward(batch.now, batch.ref, theirs_name)
        yield f"divergence {ours_name}", gap(divergence(batch.now - batch.ref, ours_name), theirs)
    yield from _verl_corrections(batch)


def _verl_losses(batch: Drawn, verl: Any) -> Iterator[Row]:
    from verl.workers.config import ActorConfig

    mask = batch.mask.double()
    for ours_mean, theirs_mean in (("rollout", "seq-mean-token-mean"), ("token", "token-mean")):

        def clipped(now: Tensor, mode: str = theirs_mean) -> Tensor:
            return verl.compute_policy_loss(
                batch.old,
                now,
                batch.advantages,
                mask,
                cliprange_low=0.2,
                cliprange_high=0.28,
                clip_ratio_c=3.0,
                loss_agg_mode=mode,
            )[0]

        section = GrpoSection(clip_high=0.28, dual_clip=3.0)
        loss, gradient = both(batch, section, clipped, loss_mean=ours_mean)
        yield f"loss clipped, {ours_mean} mean", loss
        yield f"gradient clipped, {ours_mean} mean", gradient
    names = {"gspo": GspoSection(clip_low=0.1, clip_high=0.2), "cispo": CispoSection(clip_low=0.1, clip_high=0.2)}
    # verl's GSPO gives every token its own advantage, which is the same only where a response has one.
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, clip_ratio=0.2, clip_ratio_low=0.1, clip_ratio_high=0.2, use_dynamic_bsz=True
    )
    batch = copy.copy(batch)
    batch.advantages = batch.rewards[:, None].expand_as(batch.old) - 0.5
    for name, section in names.items():
        function = verl.get_policy_loss_fn(name)

        def own(now: Tensor, function: Any = function) -> Tensor:
            return function(batch.old, now, batch.advantages, mask, "seq-mean-token-mean", config)[0]

        loss, gradient = both(batch, section, own, loss_mean="rollout")
        yield f"loss {name}", loss
        yield f"gradient {name}", gradient


def _verl_corrections(batch: Drawn) -> Iterator[Row]:
    from verl.trainer.ppo import rollout_corr_helper as verl

    mask, log_ratio, at = batch.mask.double(), batch.old - batch.rollout, batch.flat(batch.mask)
    tokens = batch.tokens(batch.now, loss_mean="token")
    for level in ("token", "sequence"):
        for bounds, threshold in (("truncate", 1.3), ("mask", "0.7_1.3")):
            section = CorrectionSection(level=level, bounds=bounds, high=1.3, low=0.7 if bounds == "mask" else 0.0)
            theirs, metrics = verl.compute_rollout_correction_weights(log_ratio, mask, level, threshold)
            found = corrected(tokens, section)
            assert found.weights is not None
            yield f"weights {level}, {bounds}", gap(found.weights[at], batch.flat(theirs)[at])
            if level == "token":
                sums = mismatch.Sums(at, batch.sequences)
                mismatch.weights(sums, found, section)
                yield from _metrics(sums, metrics, f"metrics of weights, {bounds}")
    for statistic in (
        "token_k1",
        "token_k2",
        "token_k3",
        "seq_sum_k1",
        "seq_mean_k1",
        "seq_mean_k3",
        "seq_max_k2",
        "seq_max_k3",
    ):
        high = 1.5 if statistic.endswith("k1") else 0.08
        theirs, metrics = verl.compute_rollout_rejection_mask(log_ratio, mask, statistic, str(high))
        section = CorrectionSection(reject=(RejectSection(statistic=statistic, high=high),))
        found = corrected(tokens, section)
        yield f"rejection {statistic}", float((found.kept[at] != (batch.flat(theirs)[at] > 0)).sum())
        sums = mismatch.Sums(at, batch.sequences)
        mismatch.weights(sums, found, section)
        yield from _metrics(sums, metrics, f"metrics of rejection {statistic}")
    sums = mismatch.Sums(at, batch.sequences)
    mismatch.differences(sums, batch.flat(batch.old), batch.flat(batch.rollout))
    yield from _metrics(sums, verl.compute_offpolicy_metrics(batch.old, batch.rollout, mask), "metrics of the difference")


def _metrics(sums: mismatch.Sums, theirs: dict[str, float], what: str) -> Iterator[Row]:
    """The largest difference over the names that both have."""
    tokens, samples = sums.mask.sum(), sums.trained.sum()
    ours = {name: (value / tokens).item() for name, value in sums.tokens.items()}
    ours |= {name: (value / samples).item() for name, value in sums.samples.items()}
    ours = mismatch.finish({**ours, **{name: value.item() for name, value in sums.maxima.items()}})
    shared = {name: ours[f"rollout_corr/{name}"] for name in theirs if f"rollout_corr/{name}" in ours}
    assert shared, (ours, theirs)
    yield f"{what} ({len(shared)} names)", max(abs(value - theirs[name]) for name, value in shared.items())


def against_trl(batch: Drawn) -> Iterator[Row]:
    """GRPOTrainer's loss in its kinds, with divergence and importance weights."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    kl = {"estimator": "k3", "coef": 0.3}
    truncated = CorrectionSection(level="token", high=1.3)
    cases: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "grpo": (GrpoSection(clip_high=0.28), "rollout", {"loss_type": "grpo"}),
        "dapo": (GrpoSection(clip_high=0.28), "token", {"loss_type": "dapo"}),
        "dr_grpo": (GrpoSection(clip_high=0.28), "constant", {"loss_type": "dr_grpo"}),
        "gspo": (GspoSection(clip_low=0.2, clip_high=0.28), "rollout", {"loss_type": "grpo", "level": "sequence"}),
        "cispo": (CispoSection(clip_high=0.28), "token", {"loss_type": "cispo", "epsilon_high": 1.28}),
        "grpo, k3": (GrpoSection(clip_high=0.28, kl=KlSection(**kl)), "rollout", {"loss_type": "grpo", "beta": 0.3}),
        "grpo, k3 unbiased": (
            GrpoSection(clip_high=0.28, kl=KlSection(**kl, unbiased=True)),
            "rollout",
            {"loss_type": "grpo", "beta": 0.3, "unbiased": True},
        ),
        "grpo, TIS": (
            GrpoSection(clip_high=0.28, old_log_probs="recompute", correction=truncated),
            "rollout",
            {"loss_type": "grpo", "cap": 1.3},
        ),
    }
    for name, (section, loss_mean, options) in cases.items():
        loss, gradient = both(batch, section, lambda now, o=options: _trl_loss(GRPOTrainer, batch, now, o), loss_mean=loss_mean)
        yield f"loss {name}", loss
        yield f"gradient {name}", gradient


def _trl_loss(trainer: Any, batch: Drawn, now: Tensor, options: dict[str, Any]) -> Tensor:
    """`_compute_loss` of a trainer that has nothing but its settings, with these log-probs as the model's."""
    from collections import defaultdict

    cap = options.get("cap")
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (now, torch.zeros_like(now), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.get("level", "token"),
        beta=options.get("beta", 0.0),
        loss_type=options["loss_type"],
        epsilon_low=0.2,
        epsilon_high=options.get("epsilon_high", 0.28),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=options.get("unbiased", False), steps_per_generation=1),
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=WIDTH,
        _entropy_bonus_enabled=False,
        entropy_coef=0.0,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **k: x),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        tools=None,
    )
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch.mask.double(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": None if cap is None else (batch.old - batch.rollout).exp().clamp(max=cap),
    }
    return trainer._compute_loss(stub, None, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--limit", type=float, default=1e-4, help="largest difference allowed")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    for name, compare in (("verl", against_verl), ("trl", against_trl)):
        try:
            package = __import__(name)
        except ImportError as error:
            report[name] = f"left out: {error}"
            continue
        largest: dict[str, float] = {}
        for seed in range(args.batches):
            for what, difference in compare(Drawn(seed)):
                largest[what] = max(largest.get(what, 0.0), difference)
        report[f"{name} {package.__version__}"] = largest
    print(json.dumps(report, indent=1))
    wrong = [
        what for found in report.values() if isinstance(found, dict) for what, gap in found.items() if not gap <= args.limit
    ]
    if wrong:
        raise SystemExit(f"differ by more than {args.limit}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
