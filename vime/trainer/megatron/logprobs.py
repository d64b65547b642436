"""The head: log-probs and entropy over a vocabulary that tensor parallelism splits, without all logits at once.

Rows go through the head in chunks, forward and backward: logits of a whole batch (rows x vocabulary) never exist. The
vocabulary-parallel form follows Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3: every rank reduces its
columns, then the ranks reduce the rows' statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NOTHING = float("-inf")


@dataclass(frozen=True, slots=True)
class Head:
    """How hidden states become log-probs.

    `weight` [columns, hidden]: this rank's rows of the padded vocabulary, rank by rank in `group`. Ids from `vocab` on are
    padding and take no part. Logits are divided by `temperature`. At most `chunk_rows` rows of logits exist at once.
    """

    weight: Tensor
    vocab: int
    temperature: float
    chunk_rows: int
    group: Any = None

    @property
    def first(self) -> int:
        """The first id of this rank's columns."""
        return 0 if self.group is None else self.group.rank() * self.weight.shape[0]

    @property
    def valid(self) -> int:
        """How many of this rank's columns are no padding."""
        return max(0, min(self.weight.shape[0], self.vocab - self.first))

    @property
    def size(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    def spans(self, rows: int) -> list[slice]:
        """The chunks; none where every column is padding."""
        if not self.valid:
            return []
        return [slice(start, min(start + self.chunk_rows, rows)) for start in range(0, rows, self.chunk_rows)]


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Per row: log-prob of the target and entropy, both float32 with gradients; whether the target is the argmax."""

    log_probs: Tensor
    entropy: Tensor
    greedy: Tensor | None = None


def score_rows(hidden: Tensor, targets: Tensor, head: Head, *, greedy: bool = False) -> HeadScores:
    """hidden [rows, hidden]; targets [rows]: global ids below the vocabulary's size -> scores, each [rows].

    `greedy` asks for the argmax too (the lowest id among equals). Beside hidden states and vectors over rows, memory holds
    a chunk of logits in their own type and two of them in float32; backward adds a gradient of the weight in float32.
    """
    return HeadScores(*_Scores.apply(hidden, head.weight, targets, head, greedy))


class _Scores(torch.autograd.Function):
    """With x = logits / temperature, p = softmax(x) and H the entropy:

    d log p[t] / dx[j] = (j == t) - p[j] and dH / dx[j] = -p[j] (log p[j] + H). Logits are computed again in backward,
    chunk by chunk; those of a single chunk are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head, greedy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = hidden.shape[0]
        mine = (targets >= head.first) & (targets < head.first + head.valid)
        column = torch.where(mine, targets - head.first, torch.zeros_like(targets))
        highest = torch.full((rows,), _NOTHING, dtype=torch.float32, device=hidden.device)
        best = torch.full_like(targets, head.vocab) if greedy else None
        # Sums over columns of e and e x, then the target's x, all with x relative to the row's highest.
        sums = torch.zeros(3, rows, dtype=torch.float32, device=hidden.device)
        spans, kept = head.spans(rows), []
        for span in spans:
            logits = hidden[span] @ weight[: head.valid].t()
            if best is not None:
                best[span] = logits.float().max(dim=1).indices + head.first
            highest[span] = logits.amax(dim=1).float() / head.temperature
            shifted = _scaled(logits, head.temperature) - highest[span, None]
            target = shifted.gather(1, column[span, None])[:, 0]
            sums[2, span] = torch.where(mine[span], target, torch.zeros_like(target))
            exponentials = shifted.exp()
            sums[0, span] = exponentials.sum(dim=1)
            sums[1, span] = exponentials.mul_(shifted).sum(dim=1)
            kept = [logits] if len(spans) == 1 else []
        if head.size > 1:
            highest, best = _combine(highest, sums, best, mine, head)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, column, mine, highest + log_sum, entropy, *kept)
        ctx.head = head
        ctx.set_materialize_grads(False)
        hit = None if best is None else best == targets
        if hit is not None:
            ctx.mark_non_differentiable(hit)
        return sums[2] - log_sum, entropy, hit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        log_prob_grad, entropy_grad, _ = grads
        hidden, weight, column, mine, normaliser, entropy, *kept = ctx.saved_tensors
        if log_prob_grad is None and entropy_grad is None:
            return (None,) * 5
        if log_prob_grad is None:
            log_prob_grad = torch.zeros_like(entropy)
        head: Head = ctx.head
        own = weight[: head.valid]
        hidden_grad = torch.zeros_like(hidden)
        weight_grad: Tensor | None = None
        for span in head.spans(hidden.shape[0]):
            logits = kept[0] if kept else hidden[span] @ own.t()
            log_p = _scaled(logits, head.temperature) - normaliser[span, None]
            slope = None if entropy_grad is None else (entropy[span], entropy_grad[span])
            hit = torch.where(mine[span], log_prob_grad[span], torch.zeros_like(log_prob_grad[span]))
            grad = _logit_grad(log_p, log_prob_grad[span], slope).scatter_add_(1, column[span, None], hit[:, None])
            narrow = (grad if head.temperature == 1.0 else grad.div_(head.temperature)).to(hidden.dtype)
            hidden_grad[span] = narrow @ own
            part = narrow.t() @ hidden[span]
            # Parts are added up in float32, whatever type the product comes in.
            weight_grad = (part if kept else part.float()) if weight_grad is None else weight_grad.add_(part)
        if head.size > 1:
            dist.all_reduce(hidden_grad, group=head.group)
        return hidden_grad, _padded(weight_grad, weight), None, None, None


def _combine(highest: Tensor, sums: Tensor, best: Tensor | None, mine: Tensor, head: Head) -> tuple[Tensor, Tensor | None]:
    """Statistics of all ranks from those of each: the common highest and argmax; `sums` is changed in place."""
    top = highest.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=head.group)
    if best is not None:
        best = torch.where(highest == top, best, torch.full_like(best, head.vocab))
        dist.all_reduce(best, op=dist.ReduceOp.MIN, group=head.group)
    # A rank whose columns are all padding has nothing to shift.
    shift = torch.where(highest == _NOTHING, torch.zeros_like(top), highest - top)
    factor = shift.exp()
    sums[1] = factor * (sums[1] + shift * sums[0])
    sums[0] *= factor
    sums[2] = torch.where(mine, sums[2] + shift, sums[2])
    dist.all_reduce(sums, group=head.group)
    return top, best


def _logit_grad(log_p: Tensor, log_prob_grad: Tensor, slope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Gradient [rows, columns] without the target's part; may reuse `log_p`. `slope`: entropy and its gradient, [rows]."""
    p = log_p.exp()
    if slope is None:
        return p.mul_(-log_prob_grad[:, None])
    entropy, entropy_grad = slope
    return log_p.add_(entropy[:, None]).mul_(entropy_grad[:, None]).add_(log_prob_grad[:, None]).mul_(p).neg_()


def _padded(grad: Tensor | None, weight: Tensor) -> Tensor:
    """The weight's gradient in its own type, zeros for padding."""
    if grad is not None and grad.shape == weight.shape:
        return grad.to(weight.dtype)
    whole = torch.zeros_like(weight)
    if grad is not None:
        whole[: grad.shape[0]] = grad
    return whole


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Float32 logits over temperature. May alias its input, so the caller never writes into it."""
    wide = logits.float()
    return wide if temperature == 1.0 else wide / temperature
