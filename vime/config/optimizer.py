"""The optimizer's settings, shared by everything that trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vime.yamltree import Count, NonNegative, Rate, Section


class OptimizerSection(Section):
    """AdamW and its schedule."""

    lr: Rate = 1e-6
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    clip_grad: Rate = Field(default=1.0, description="Global norm; 0 turns it off.")
    warmup_steps: NonNegative = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: Count | None = Field(default=None, description="None: the length of the run.")
    min_lr: Rate = 0.0
