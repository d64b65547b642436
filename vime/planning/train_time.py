"""Seconds of a training rank's products and of what ranks send each other. Pure arithmetic.

A token takes 2 FLOP a parameter forward and 4 backward; causal attention adds 2 x layers x query width x length a token forward
and twice that backward (Narayanan et al. 2021, arXiv:2104.04473, appendix, with half of the scores masked). Full recomputation
is one more forward pass, selective recomputation one of attention alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from vime.facts.model import ModelShape
from vime.facts.process import Parallel
from vime.planning.amounts import rank_parameters
from vime.planning.decode import Lengths, weighed_parameters


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch in the trainer: sequences, their lengths, bytes of a value, what is recomputed."""

    model: ModelShape
    parallel: Parallel
    sequences: int
    lengths: Lengths
    width: int
    recompute: str

    @property
    def tokens(self) -> float:
        return self.sequences * (self.lengths.prompt + self.lengths.mean)


def forward_seconds(batch: Trained, products: float, expert_share: float) -> float:
    """One forward pass over the batch; `products` are FLOP/s that a device reaches."""
    return (_dense(batch, expert_share) + _attention(batch)) / (products * batch.parallel.devices)


def backward_seconds(batch: Trained, products: float, expert_share: float) -> float:
    """The backward pass, with what it recomputes."""
    dense, attention = _dense(batch, expert_share), _attention(batch)
    again = {"full": dense + attention, "selective": attention}.get(batch.recompute, 0.0)
    return (2 * (dense + attention) + again) / (products * batch.parallel.devices)


def _dense(batch: Trained, expert_share: float) -> float:
    return 2 * batch.tokens * weighed_parameters(batch.model, expert_share)


def _attention(batch: Trained) -> float:
    model = batch.model
    return model.layers * model.heads * (model.head_dim + model.value_dim) * batch.sequences * batch.lengths.squared


def expert_bytes(batch: Trained, passes: float) -> float:
    """What a rank sends in `passes` over the layers: every token to the experts of other ranks, and its answer back."""
    ranks, model = batch.parallel.ep, batch.model
    each = 2 * model.expert_layers * model.experts_per_token * model.hidden * batch.width * (ranks - 1) / ranks
    return passes * batch.tokens / batch.parallel.devices * each


def reduction_bytes(batch: Trained, passes: float) -> float:
    """What tensor parallelism sends in `passes`: two reductions a layer."""
    tp, model = batch.parallel.tp, batch.model
    each = 2 * model.layers * 2 * (tp - 1) / tp * model.hidden * batch.width
    return passes * batch.tokens / (batch.parallel.dp * batch.parallel.cp) / batch.parallel.pp * each


def gradient_bytes(model: ModelShape, parallel: Parallel, width: int) -> float:
    """Gradients in float32 to the rank that owns them, and parameters back, for one update."""
    dense_here, experts_here = rank_parameters(model, parallel)
    shared = parallel.dp * parallel.cp
    experts_shared = max(1, parallel.devices // parallel.pp // (parallel.ep * parallel.etp))
    crossing = dense_here * (shared - 1) / shared + experts_here * (experts_shared - 1) / experts_shared
    return crossing * (4 + width)
