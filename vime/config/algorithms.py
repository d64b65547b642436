"""One section an algorithm, and what each needs of the run. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vime.config.corrections import CorrectionSection, dotted
from vime.config.optimizer import OptimizerSection
from vime.yamltree import Count, NonNegative, Rate, Section

LossMean = Literal["rollout", "token", "constant"]
OldLogProbs = Literal["rollout", "recompute"]
Fraction = Annotated[Rate, Field(le=1)]


class KlSection(Section):
    """Penalty for leaving the frozen reference (estimators: Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

    coef: Rate = Field(default=0.0, description="0: no penalty and no reference.")
    estimator: Literal["k1", "k2", "k3", "low_var"] = Field(default="k3", description="low_var is k3 with values up to 10.")
    use: Literal["loss", "reward"] = "loss"
    unbiased: bool = Field(default=False, description="Multiply by the ratio to the old policy, which mends the gradient.")

    @model_validator(mode="after")
    def _sensible(self) -> KlSection:
        if self.coef == 0:
            return self
        if self.use == "loss" and self.estimator == "k1" and not self.unbiased:
            raise ValueError(
                "algorithm.kl.estimator k1 as a loss has an expected gradient of 0:"
                " use k2 or k3, or unbiased: true, or use: reward"
            )
        if self.use == "reward" and self.unbiased:
            raise ValueError("algorithm.kl.unbiased is about the gradient of a loss: leave it out with use: reward")
        return self


class OverlongSection(Section):
    """Soft punishment of long responses (Yu et al. 2025, DAPO, arXiv:2503.14476, equation 13)."""

    max_tokens: Count = Field(description="A response of this length gets the whole penalty.")
    buffer_tokens: Count = Field(description="The penalty rises from 0 over this many tokens before it.")
    penalty: Rate = 1.0

    @model_validator(mode="after")
    def _fits(self) -> OverlongSection:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens {self.buffer_tokens} must be at most max_tokens {self.max_tokens}"
            )
        return self


class CriticSection(Section):
    """The critic's own training."""

    optimizer: OptimizerSection = OptimizerSection(lr=1e-5)
    warmup_steps: NonNegative = Field(default=0, description="Steps at the start in which only the critic trains.")
    value_clip: Rate = Field(default=0.2, description="Largest useful move of a value away from its old one; 0: no limit.")


class PolicySection(Section):
    """What all algorithms with a policy loss have in common."""

    clip_low: Fraction = Field(default=0.2, description="The ratio counts down to 1 - clip_low.")
    clip_high: Rate = Field(default=0.2, description="The ratio counts up to 1 + clip_high.")
    loss_mean: LossMean = Field(
        default="rollout",
        description="Over rollouts of token means, over tokens, or over rollouts of token sums / loss_tokens.",
    )
    loss_tokens: Count | None = Field(default=None, description="The constant length of loss_mean: constant (Dr. GRPO).")
    old_log_probs: OldLogProbs = Field(
        default="rollout", description="Denominator of the ratio: the sampler's, or the trainer's before the step."
    )
    flat_groups: Literal["skip", "train"] = Field(
        default="skip",
        description="Groups of equal rewards have zero gradient: skip leaves them out, denominators stay.",
    )
    whiten: bool = Field(default=False, description="Advantages of mean 0 and deviation 1 over all tokens of an update.")
    entropy_coef: Rate = 0.0
    kl: KlSection = KlSection()
    overlong: OverlongSection | None = Field(default=None, description="Null: no length penalty.")
    correction: CorrectionSection = CorrectionSection()
    advantage_function: str | None = Field(
        default=None, description="`module.function` with slime's signature of --custom-advantage-function-path."
    )
    loss_function: str | None = Field(
        default=None, description="`module.function` with slime's signature of --custom-loss-function-path."
    )

    @field_validator("advantage_function", "loss_function")
    @classmethod
    def _dotted(cls, value: str | None) -> str | None:
        return dotted(value)

    @model_validator(mode="after")
    def _fits(self) -> PolicySection:
        if (self.loss_mean == "constant") != (self.loss_tokens is not None):
            raise ValueError("algorithm.loss_tokens belongs to loss_mean: constant; write both or neither")
        if self.old_log_probs == "rollout" and self.correction.level is not None:
            raise ValueError(
                "algorithm.correction.level weighs by old policy / sampler, which is 1 with old_log_probs: rollout:"
                " write old_log_probs: recompute, or leave level out"
            )
        return self


def _check_whitened(section: PolicySection) -> None:
    if not section.whiten:
        raise ValueError("algorithm.whiten is what REINFORCE++ consists of: leave it out, or use kind: rloo")


class SiblingSection(PolicySection):
    """What algorithms have in common whose baseline is made of the siblings' whole rewards."""

    @model_validator(mode="after")
    def _kl_in_loss(self) -> SiblingSection:
        """A penalty in the reward would be needed of the siblings too, which another rank may hold."""
        if self.kl.coef and self.kl.use == "reward":
            raise ValueError(
                f"algorithm.kl.use reward is not there for {type(self).model_fields['kind'].default}, whose baseline is made of"
                " whole rewards: write use: loss, or kind: reinforce_plus_plus_baseline"
            )
        return self


class GroupedSection(SiblingSection):
    """What algorithms with group-relative advantages have in common."""

    normalize_std: bool = Field(default=True, description="Divide by the group's unbiased standard deviation.")


class GrpoSection(GroupedSection):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    dual_clip: Rate | None = Field(default=None, description="Ratio at which the loss of a negative advantage stops growing.")

    @model_validator(mode="after")
    def _own(self) -> GrpoSection:
        _check_dual_clip(self.dual_clip)
        return self


class GspoSection(GroupedSection):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: Fraction = 3e-4
    clip_high: Rate = 4e-4


class CispoSection(GroupedSection):
    """Clipped importance-sampling policy optimisation (MiniMax 2025, arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: Fraction = Field(default=1.0, description="1: no lower bound.")
    clip_high: Rate = Field(default=4.0, description="The ratio weighs at most 1 + clip_high.")


class RlooSection(SiblingSection):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class PpoSection(PolicySection):
    """Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    gamma: Fraction = Field(default=1.0, description="Discount per trained token.")
    lam: Fraction = Field(default=1.0, description="Of generalised advantage estimation (arXiv:1506.02438).")
    whiten: bool = Field(default=True, description="Advantages of mean 0 and deviation 1 over all tokens of an update.")
    dual_clip: Rate | None = Field(default=None, description="Ratio at which the loss of a negative advantage stops growing.")
    critic: CriticSection = CriticSection()

    @model_validator(mode="after")
    def _own(self) -> PpoSection:
        _check_dual_clip(self.dual_clip)
        return self


class ReinforcePlusPlusSection(PolicySection):
    """REINFORCE++: discounted returns, whitened over the batch, no critic (Hu et al. 2025, arXiv:2501.03262)."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Fraction = Field(default=1.0, description="Discount per trained token.")
    whiten: bool = Field(default=True, description="The method's baseline: always.")

    @model_validator(mode="after")
    def _own(self) -> ReinforcePlusPlusSection:
        _check_whitened(self)
        return self


class ReinforcePlusPlusBaselineSection(PolicySection):
    """REINFORCE++ with the group's mean as baseline before whitening (Hu et al. 2025, arXiv:2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    whiten: bool = Field(default=True, description="The method's scale: always.")

    @model_validator(mode="after")
    def _own(self) -> ReinforcePlusPlusBaselineSection:
        _check_whitened(self)
        return self


class DistillSection(GroupedSection):
    """On-policy distillation: the reverse KL to a teacher as advantage (Agarwal et al. 2023, arXiv:2306.13649)."""

    kind: Literal["distill"] = "distill"
    teacher_coef: Annotated[Rate, Field(gt=0)] = 1.0
    reward_coef: Rate = Field(default=0.0, description="Adds this times the group-relative advantage of the reward.")


class SftSection(Section):
    """Supervised fine-tuning on the same trainer: masked negative log-likelihood of the labels."""

    kind: Literal["sft"] = "sft"
    loss_mean: Literal["rollout", "token"] = "token"
    digits_apart: bool = Field(default=False, description="Encode a label character by character, as a sampler emits digits.")


AnyAlgorithm = (
    GrpoSection
    | GspoSection
    | CispoSection
    | PpoSection
    | ReinforcePlusPlusSection
    | ReinforcePlusPlusBaselineSection
    | RlooSection
    | DistillSection
    | SftSection
)
AlgorithmSection = Annotated[AnyAlgorithm, Field(discriminator="kind")]
GROUP_BASELINES = frozenset({"grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"})
"""Kinds for which an answer without siblings has advantage 0."""


def _check_dual_clip(value: float | None) -> None:
    if value is not None and value <= 1:
        raise ValueError(f"algorithm.dual_clip is a ratio above 1, usually 3, got {value:g}")


def needs_of(section: PolicySection | SftSection) -> frozenset[str]:
    """The other training roles that a section's algorithm reads: of `reference`, `values`, `teacher`."""
    needs = set()
    if isinstance(section, PolicySection) and section.kl.coef:
        needs.add("reference")
    if isinstance(section, PpoSection):
        needs.add("values")
    if isinstance(section, DistillSection):
        needs.add("teacher")
    return frozenset(needs)


def skips_flat_groups(section: PolicySection | SftSection) -> bool:
    """Whether groups of equal rewards are left out of the work: only where advantages alone give gradient, and those of such a
    group are 0 by themselves.
    """
    if not isinstance(section, GrpoSection | GspoSection | CispoSection | RlooSection):
        return False
    other = section.whiten or section.entropy_coef or section.kl.coef or section.overlong
    own = section.advantage_function or section.loss_function or section.correction.function
    return section.flat_groups == "skip" and not other and not own


def log_prob_passes(section: PolicySection | SftSection, *, updates_per_step: int) -> int:
    """Forward passes of the actor over a batch beside the one of its update.

    The first update's own forward pass gives the old log-probs; later ones need them from before it.
    """
    if not isinstance(section, PolicySection) or section.old_log_probs == "rollout":
        return 0
    return int(updates_per_step > 1 or section.advantage_function is not None)


def kinds() -> dict[str, type[Any]]:
    """The section of every kind."""
    return {section.model_fields["kind"].default: section for section in AnyAlgorithm.__args__}
