"""Log-probs and entropy over a vocabulary that tensor parallelism splits, in chunks of rows.

The vocabulary-parallel form follows Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3: every rank reduces its
columns, then the ranks reduce the rows' statistics.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, *, vocab: int, temperature: float, chunk_rows: int, group: Any = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of each row's target and entropy of each row's distribution, both float32 with gradients.

    logits [rows, columns]: this rank's columns of the padded vocabulary, rank by rank in `group`; targets [rows]: global
    ids below `vocab` -> ([rows], [rows]). Columns from `vocab` on are padding and take no part. Logits are divided by
    `temperature`. Extra memory is `chunk_rows` x columns float32.
    """
    return _LogProbsAndEntropy.apply(logits, targets, vocab, temperature, chunk_rows, group)


def is_greedy(logits: Tensor, targets: Tensor, *, vocab: int, group: Any = None) -> Tensor:
    """Whether each row's target is its argmax (the lowest id among equals): logits [rows, columns] -> [rows] bool."""
    rank, size = _place(group)
    first = rank * logits.shape[1]
    own = logits[:, : max(0, min(logits.shape[1], vocab - first))]
    best = torch.full(targets.shape, float("-inf"), dtype=torch.float32, device=logits.device)
    at = torch.full_like(targets, vocab)
    if own.shape[1] and own.shape[0]:
        values, columns = own.float().max(dim=1)
        best, at = values, columns + first
    if size > 1:
        top = best.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        at = torch.where(best == top, at, torch.full_like(at, vocab))
        dist.all_reduce(at, op=dist.ReduceOp.MIN, group=group)
    return at == targets


def _place(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


class _LogProbsAndEntropy(torch.autograd.Function):
    """With x = logits / temperature, p = softmax(x) and H the entropy:

    d log p[t] / dx[j] = (j == t) - p[j] and dH / dx[j] = -p[j] (log p[j] + H). The softmax is computed again in backward,
    chunk by chunk, so that only the logits and vectors over rows are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab: int, temperature: float, chunk_rows: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        rank, size = _place(group)
        rows, columns = logits.shape
        first = rank * columns
        valid = max(0, min(columns, vocab - first))
        own = logits[:, :valid]
        mine = (targets >= first) & (targets < first + valid)
        column = torch.where(mine, targets - first, torch.zeros_like(targets))
        spans = [slice(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]
        highest = torch.full((rows,), float("-inf"), dtype=torch.float32, device=logits.device)
        sums = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
        for span in spans if valid else ():
            highest[span] = own[span].amax(dim=1).float() / temperature
        if size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        for span in spans if valid else ():
            shifted = _scaled(own[span], temperature) - highest[span, None]
            target = shifted.gather(1, column[span, None])[:, 0]
            sums[2, span] = torch.where(mine[span], target, torch.zeros_like(target))
            exponentials = shifted.exp()
            sums[0, span] = exponentials.sum(dim=1)
            sums[1, span] = exponentials.mul_(shifted).sum(dim=1)
        if size > 1:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, column, mine, highest + log_sum, entropy)
        ctx.valid, ctx.temperature, ctx.spans = valid, temperature, spans
        ctx.set_materialize_grads(False)
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        log_prob_grad, entropy_grad = grads
        logits, column, mine, normaliser, entropy = ctx.saved_tensors
        if log_prob_grad is None and entropy_grad is None:
            return (None,) * 6
        if log_prob_grad is None:
            log_prob_grad = torch.zeros_like(entropy)
        out = torch.zeros_like(logits)
        for span in ctx.spans if ctx.valid else ():
            log_p = _scaled(logits[span, : ctx.valid], ctx.temperature) - normaliser[span, None]
            p = log_p.exp()
            if entropy_grad is None:
                grad = p.mul_(-log_prob_grad[span, None])
            else:
                slope = log_p.add_(entropy[span, None]).mul_(entropy_grad[span, None]).add_(log_prob_grad[span, None])
                grad = slope.mul_(p).neg_()
            hit = torch.where(mine[span], log_prob_grad[span], torch.zeros_like(log_prob_grad[span]))
            grad.scatter_add_(1, column[span, None], hit[:, None])
            out[span, : ctx.valid] = grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)
        return out, None, None, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Float32 logits over temperature. May alias its input, so the caller never writes into it."""
    wide = logits.float()
    return wide if temperature == 1.0 else wide / temperature
