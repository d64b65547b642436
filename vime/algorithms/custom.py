"""Functions of the user's own in place of a correction, a loss or the advantages, called with slime's signatures.

`args` is the algorithm's section of the run file. Values by token come as slime's lists, one tensor a sample. A metric may be
a tensor [tokens], such a list, or one number. With several pipeline stages or ranks a function is also called with no samples
and must then give the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vime.algorithms.base import AdvantageBatch, TokenBatch, masked_sum, select
from vime.config.algorithms import PolicySection
from vime.errors import TrainerError

Function = Callable[..., Any]


def flat(values: Tensor | Sequence[Tensor], like: Tensor) -> Tensor:
    """A tensor [tokens] or one tensor a sample -> [tokens] as `like`. Raises TrainerError for another number of tokens."""
    joined = values if isinstance(values, Tensor) else torch.cat([*values]) if len(values) else like.new_zeros(0)
    if joined.shape != like.shape:
        raise TrainerError(
            f"a custom function gave {tuple(joined.shape)} values for {tuple(like.shape)} response tokens",
            fix="give one value for every response token",
        )
    return joined.to(like.device)


def correct(
    function: Function, section: PolicySection, batch: TokenBatch, loss: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """loss [tokens] -> loss [tokens], the mask of what is kept [tokens] bool, and sums of metrics over trained tokens."""
    lengths = batch.sequences.lengths
    loss, masks, metrics = function(
        args=section,
        pg_loss=loss,
        train_log_probs=batch.sequences.split(batch.policy_log_probs),
        rollout_log_probs=batch.sequences.split(batch.rollout_log_probs),
        loss_masks=batch.sequences.split(batch.mask.float()),
        total_lengths=[p + r for p, r in zip(batch.prompt_lengths, lengths, strict=True)],
        response_lengths=list(lengths),
    )
    return flat(loss, batch.weights), flat(masks, batch.weights) > 0, token_sums(metrics, batch)


def loss_of(function: Function, section: PolicySection, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Scalar loss and sums of metrics. Logits are never whole here: `log_probs` and `entropy` carry the gradient instead."""
    by_sample = batch.sequences.split
    values = {
        "log_probs": by_sample(batch.log_probs),
        "entropy": by_sample(batch.entropy),
        "old_log_probs": by_sample(batch.old_log_probs),
        "rollout_log_probs": by_sample(batch.rollout_log_probs),
        "advantages": by_sample(batch.advantages),
        "loss_masks": by_sample(batch.mask.float()),
        "response_lengths": list(batch.sequences.lengths),
        "total_lengths": [p + r for p, r in zip(batch.prompt_lengths, batch.sequences.lengths, strict=True)],
    }
    if batch.ref_log_probs is not None:
        values["ref_log_probs"] = by_sample(batch.ref_log_probs)
    loss, metrics = function(section, values, None, lambda x: masked_sum(flat(x, batch.weights), batch.mask, batch.weights))
    return loss, token_sums(metrics, batch)


def advantages_of(function: Function, section: PolicySection, batch: AdvantageBatch) -> Tensor:
    """[tokens] float64: what the function puts under `advantages`."""
    by_sample = batch.sequences.split
    data: dict[str, Any] = {
        "rewards": batch.rewards.tolist(),
        "response_lengths": batch.lengths.tolist(),
        "total_lengths": batch.total_lengths.tolist(),
        "loss_masks": by_sample(batch.mask.float()),
    }
    for name in ("log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "values"):
        data[name] = by_sample(getattr(batch, name))
    function(section, data)
    if "advantages" not in data:
        raise TrainerError("the custom advantage function set no `advantages`", fix='fill rollout_data["advantages"]')
    return flat(data["advantages"], batch.mask.double()).double()


def token_sums(metrics: Mapping[str, Any], batch: TokenBatch) -> dict[str, Tensor]:
    """Scalar float64 sums over trained tokens; one number counts for each of them."""
    sums = {}
    for name, value in metrics.items():
        single = not isinstance(value, Tensor | list | tuple) or (isinstance(value, Tensor) and value.dim() == 0)
        sums[name] = (
            torch.as_tensor(value, dtype=torch.float64, device=batch.mask.device).detach() * batch.mask.sum()
            if single
            else select(flat(value, batch.weights).detach().double(), batch.mask).sum()
        )
    return sums
