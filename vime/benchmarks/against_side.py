"""One side of `vime bench train --against`: a process that takes an optimizer step whenever it is asked for one.

Nothing here imports torch before the platform's environment is in place.
"""

from __future__ import annotations

import math
import random
import statistics
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from vime.benchmarks.rank import apply_environment, ask_platform, rank_setup
from vime.config.algorithms import GrpoSection
from vime.data.tiny_model import EOS_ID, PAD_ID
from vime.trainer.setup import TrainerSetup
from vime.types import TrainSample, UpdateWork

GROUP = 8
"""Responses with one mean of rewards."""
EQUAL, GROUPS = "equal", "groups"
KINDS = (EQUAL, GROUPS)

Packs = Sequence[Sequence[TrainSample]]


def batch(vocab: int, kind: str, *, rows: int, length: int, number: int) -> list[TrainSample]:
    """The batch of a step, the same on both sides: prompts of length / 4, with the response at most `length` tokens.

    `equal`: every row has a prompt of its own and is `length` tokens long, so that there is nothing to pad or to share.
    `groups`: a prompt has 8 responses, each between a quarter and the whole of the longest one. The sampler's log-probs are
    near those of an even choice, which is what random weights give.
    """
    draw, even = random.Random(number), -math.log(vocab)
    first = max(1, length // 4)
    longest = length - first

    def ids(size: int) -> tuple[int, ...]:
        return tuple(draw.randrange(EOS_ID + 1, vocab) for _ in range(size))

    made = []
    for _ in range(rows // GROUP):
        prompt = ids(first)
        rewards = (1.0, 0.0, *(float(draw.random() < 0.5) for _ in range(GROUP - 2)))
        for reward in rewards:
            size = longest if kind == EQUAL else draw.randint(max(1, longest // 4), longest)
            log_probs = tuple(even + 0.1 * draw.random() for _ in range(size))
            asked = ids(first) if kind == EQUAL else prompt
            made.append(TrainSample(asked, ids(size), log_probs, (1,) * size, reward, rewards))
    return made


class Side(Protocol):
    def step(self, packs: Packs) -> tuple[float, float]:
        """Train on micro-batches of samples -> (loss, norm of the gradient before it is clipped)."""
        ...


class VimeSide:
    """A trainer rank as a run builds it, with GRPO's defaults and operations that repeat bit for bit."""

    def __init__(self, setup: TrainerSetup) -> None:
        from vime.trainer.megatron.worker import MegatronWorker

        self._worker = MegatronWorker(replace(setup, algorithm=GrpoSection(), from_scratch_seed=None))

    def step(self, packs: Packs) -> tuple[float, float]:
        rows = [sample for pack in packs for sample in pack]
        work = UpdateWork(tuple(map(tuple, packs)), len(rows), num_tokens=sum(len(s.response_ids) for s in rows))
        metrics = self._worker.train_step([work])
        return metrics["train/loss"], metrics["train/grad_norm"]


class TransformersSide:
    """The same step as a loop over transformers has it: padded rows, logits of the responses, torch's fused AdamW."""

    def __init__(self, setup: TrainerSetup) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(1)
        self._section = section = setup.trainer.optimizer
        model: Any = AutoModelForCausalLM.from_pretrained(setup.model_path, dtype=torch.float32)
        self._model = model.train()
        options = {"lr": section.lr, "betas": section.betas, "eps": section.eps, "weight_decay": section.weight_decay}
        self._optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **options)

    def step(self, packs: Packs) -> tuple[float, float]:
        from torch.nn.utils import clip_grad_norm_

        self._optimizer.zero_grad()
        total, rows = 0.0, sum(map(len, packs))
        for samples in packs:
            loss = self._loss(samples) / rows
            loss.backward()
            total += float(loss.detach())
        norm = float(clip_grad_norm_(self._model.parameters(), self._section.clip_grad))
        self._optimizer.step()
        return total, norm

    def _loss(self, samples: Sequence[TrainSample]) -> Any:
        """The clipped loss (arXiv:1707.06347) of group-relative advantages (arXiv:2402.03300), summed over samples of one
        length of prompt.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        def padded(rows: Sequence[Sequence[float]], dtype: Any, value: float = 0) -> Any:
            return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=value)

        ids = padded([(*s.prompt_ids, *s.response_ids) for s in samples], torch.long, PAD_ID)
        then, mask = padded([s.log_probs for s in samples], torch.float), padded([s.loss_mask for s in samples], torch.float)
        advantages = torch.tensor([advantage(s) for s in samples])[:, None]
        width = mask.shape[1]
        # Padding stands behind every token that counts, so causal attention needs no mask, which would be slower.
        logits = self._model(ids, logits_to_keep=width + 1, use_cache=False).logits[:, :-1]
        now = logits.log_softmax(-1).gather(2, ids[:, -width:, None])[:, :, 0]
        ratio, clip = (now - then).exp(), GrpoSection()
        bounded = ratio.clamp(1 - clip.clip_low, 1 + clip.clip_high)
        losses = torch.maximum(-ratio * advantages, -bounded * advantages)
        return ((losses * mask).sum(1) / mask.sum(1)).sum()


def advantage(sample: TrainSample) -> float:
    """The reward's distance from its group's mean in unbiased deviations."""
    rewards = sample.group_rewards
    assert sample.reward is not None
    return (sample.reward - statistics.fmean(rewards)) / statistics.stdev(rewards)


SIDES: Mapping[str, type[VimeSide] | type[TransformersSide]] = {"vime": VimeSide, "transformers": TransformersSide}


def serve(calls: Connection, name: str, words: Mapping[str, Any]) -> None:
    """Answer each (kind of batch, number of step) with the step's figures, or an error with its text, until the caller ends."""
    try:
        asked = ask_platform(words["platform"])
        asked = replace(asked, request=replace(asked.request, deterministic=True))
        apply_environment(asked)
        model = Path(words["model"])
        setup = rank_setup(asked, model, tokens=words["tokens"], chunk=words["chunk"], megatron=words["megatron"])
        side: Side = SIDES[name](setup)
        calls.send({"ready": True})
        while True:
            calls.send(measured(side, words, *calls.recv()))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001  told to the caller, who ends both sides
        calls.send({"error": f"{name}: {type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"})


def measured(side: Side, words: Mapping[str, Any], kind: str, number: int) -> dict[str, float]:
    """Take a step; `cpu_s` are seconds of all threads of this process, from samples to changed weights."""
    each = words["tokens"] // words["length"]
    rows = batch(words["vocab"], kind, rows=each * words["micro_batches"], length=words["length"], number=number)
    packs = [rows[start : start + each] for start in range(0, len(rows), each)]
    wall, cpu = time.perf_counter(), time.process_time()
    loss, norm = side.step(packs)
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in rows)
    return {"loss": loss, "grad_norm": norm, "cpu_s": cpu_s, "wall_s": wall_s, "tokens": tokens}
