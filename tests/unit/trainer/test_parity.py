"""The trainer, whichever megatron-core is installed, beside a Qwen3 written out in plain torch and float64.

The same weights and rows must give the same log-probs, loss and gradient norm: a release of megatron-core that computes
something else shows here.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vime.config.schema import OptimizerSection, SftSection, TrainerSection
from vime.types import TrainSample, UpdateWork

HEADS, GROUPS, HEAD_DIM, LAYERS, THETA, EPSILON, VOCAB = 4, 2, 16, 2, 10000.0, 1e-6, 50


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def turn(x: Tensor) -> Tensor:
    """Rotary positions of x [tokens, heads, dim], first half against second."""
    angles = torch.arange(len(x)).double()[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def log_probs(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Log-probs [tokens - 1] of the tokens from the second on."""
    x = weights["model.embed_tokens.weight"][ids]
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for layer in range(LAYERS):

        def w(name: str, layer: int = layer) -> Tensor:
            return weights[f"model.layers.{layer}.{name}.weight"]

        def project(name: str, heads: int, y: Tensor, layer: int = layer) -> Tensor:
            return (y @ w(f"self_attn.{name}_proj", layer).t()).view(len(ids), heads, HEAD_DIM)

        y = norm(x, w("input_layernorm"))
        q, k = norm(project("q", HEADS, y), w("self_attn.q_norm")), norm(project("k", GROUPS, y), w("self_attn.k_norm"))
        q, k = turn(q), turn(k).repeat_interleave(HEADS // GROUPS, dim=1)
        v = project("v", GROUPS, y).repeat_interleave(HEADS // GROUPS, dim=1)
        scores = torch.einsum("shd,thd->hst", q, k) / HEAD_DIM**0.5
        mixed = torch.einsum("hst,thd->shd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        x = x + mixed.reshape(len(ids), -1) @ w("self_attn.o_proj").t()
        y = norm(x, w("post_attention_layernorm"))
        x = x + (functional.silu(y @ w("mlp.gate_proj").t()) * (y @ w("mlp.up_proj").t())) @ w("mlp.down_proj").t()
    logits = norm(x, weights["model.norm.weight"]) @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).t()
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def rows() -> list[TrainSample]:
    draw = random.Random(5)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(size))

    return [TrainSample(ids(p), ids(r), (), (1,) * r, None, ()) for p, r in ((3, 5), (1, 9), (4, 1), (2, 6))]


TOLERANCES = {"float32": (2e-5, 2e-6), "bfloat16": (0.08, 0.02)}
"""By type: largest difference of a log-prob, relative difference of loss and gradient norm. Rounding of bfloat16 is 2^-9."""


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_loss_log_probs_and_gradient_norm_are_those_of_plain_torch(worker_of, model_of, tmp_path, dtype, tied, chunk):
    section = TrainerSection(optimizer=OptimizerSection(lr=1e-3), log_prob_chunk_tokens=chunk)
    worker = worker_of(model_of(tmp_path / "m", tied=tied), dtype=dtype, algorithm=SftSection(), trainer=section)
    weights = {name: t.detach().clone().double().requires_grad_() for name, t in worker.weights()}
    batch = rows()
    theirs = [log_probs(weights, [*r.prompt_ids, *r.response_ids]) for r in batch]
    ours = worker.log_probs([[*r.prompt_ids, *r.response_ids] for r in batch])
    each, relative = TOLERANCES[dtype]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(a).double(), b, rtol=0, atol=each)
    count = sum(len(r.response_ids) for r in batch)
    loss = -torch.stack([t[len(r.prompt_ids) - 1 :].sum() for r, t in zip(batch, theirs, strict=True)]).sum() / count
    loss.backward()
    grads = [w.grad for w in weights.values()]
    assert all(g is not None for g in grads)
    squares = torch.stack([g.pow(2).sum() for g in grads if g is not None])
    metrics = worker.train_step([UpdateWork((tuple(batch[:1]), tuple(batch[1:])), num_rollouts=4, num_tokens=count)])
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=relative)
    assert metrics["train/grad_norm"] == pytest.approx(squares.sum().sqrt().item(), rel=relative)
