"""Settings against the difference between the trained policy and the one that sampled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from vime.yamltree import Rate, Section

Statistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""What a rejection looks at: a token's divergence, or the sum, mean or largest of a response; seq_mean_k1: geometric."""


class RejectSection(Section):
    """Leaves tokens or whole responses out of the policy loss; the denominators stay."""

    statistic: Statistic = "token_k1"
    high: Annotated[Rate, Field(gt=0)] = Field(
        description="k1: largest ratio of trainer to sampler; k2, k3: largest divergence."
    )
    low: Rate | None = Field(default=None, description="Smallest ratio, for k1 only; null: 1 / high.")

    @model_validator(mode="after")
    def _bounds(self) -> RejectSection:
        if self.low is not None and not self.statistic.endswith("k1"):
            raise ValueError(f"low is a bound on a ratio, and {self.statistic} is a divergence: leave low out")
        if self.low is not None and not 0 < self.low < self.high:
            raise ValueError(f"low {self.low} must be above 0 and below high {self.high}")
        if self.low is None and self.statistic.endswith("k1") and self.high <= 1:
            raise ValueError(f"high {self.high} bounds a ratio that is 1 where nothing differs: write more than 1, or give low")
        return self


class CorrectionSection(Section):
    """Importance weights and rejections from log-probs of trainer and sampler."""

    level: Literal["token", "sequence", "geometric"] | None = Field(
        default=None,
        description="Weight of a token: its own ratio, the product over its response, or that product's mean per token;"
        " null: no weights.",
    )
    bounds: Literal["truncate", "mask"] = Field(
        default="truncate", description="A weight outside low..high is moved to the bound, or becomes 0."
    )
    low: Rate = 0.0
    high: Annotated[Rate, Field(gt=0)] = 2.0
    reject: tuple[RejectSection, ...] = Field(default=(), description="All must hold for a token to be trained.")
    opsm_delta: Rate | None = Field(
        default=None,
        description="Leave out responses of negative advantage whose mean log-ratio, old minus current, is above this.",
    )
    function: str | None = Field(
        default=None, description="`module.function` with slime's signature of --custom-tis-function-path."
    )

    @field_validator("function")
    @classmethod
    def _dotted(cls, value: str | None) -> str | None:
        return dotted(value)

    @model_validator(mode="after")
    def _bounds(self) -> CorrectionSection:
        if self.low >= self.high:
            raise ValueError(f"algorithm.correction.low {self.low} must be below algorithm.correction.high {self.high}")
        return self


def dotted(value: str | None) -> str | None:
    """The path of a function of the user's own. Raises ValueError for anything else."""
    if value is None:
        return None
    module, _, name = value.replace(":", ".").rpartition(".")
    if not module or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ValueError(f"expected a function as package.module.function, got {value!r}")
    return value
