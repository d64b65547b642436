"""Parts of the weight-sync tests: a trainer made of a transformers model, and a worker extension that spoils weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from vime.weights.manifest import build_manifest
from vime.weights.protocol import merge_stage_info


class ReferenceTrainer:
    """A `TrainerLink` over a transformers model in this process.

    `after_stage` runs between staging and the engines' update, where a transport can be tampered with.
    """

    def __init__(self, model_path: Any, half_for: Callable[[Any], Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.weights = dict(self.model.named_parameters())
        self.manifest = build_manifest((name, "float32", p.shape) for name, p in self.weights.items())
        self.half = half_for(self.manifest)
        self.streams = self.half.streams
        self.after_stage: Callable[[], None] | None = None
        self._generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def perturb(self) -> None:
        """Change every tensor, as a training step does, by about 5 %."""
        for param in self.weights.values():
            param.mul_(1 + 0.05 * torch.randn(param.shape, generator=self._generator))

    async def init_info(self, receivers: int) -> Any:
        return self.half.init_info(receivers)

    async def connect(self) -> None:
        await asyncio.to_thread(self.half.connect)

    async def stage(self, version: str, fingerprint: bool) -> Any:
        info = self.half.stage(self.weights.items(), version=version, fingerprint=fingerprint)
        if self.after_stage is not None:
            self.after_stage()
        return merge_stage_info([info], len(self.weights))

    async def stream(self) -> None:
        await asyncio.to_thread(self.half.stream, ())

    @torch.no_grad()
    async def probe_log_probs(self, sequences: Any) -> Any:
        ids = torch.tensor(sequences)
        log_probs = self.model(ids).logits.log_softmax(-1)[:, :-1]
        return log_probs.gather(-1, ids[:, 1:, None])[..., 0].tolist()

    def close(self) -> None:
        self.half.close()


class SpoilingWorker:
    """A vLLM worker extension: changes a parameter of the loaded model."""

    model_runner: Any

    def spoil(self, name: str) -> float:
        param = dict(self.model_runner.model.named_parameters())[name]
        with torch.no_grad():
            param.mul_(1.1)
        return float(param.abs().sum())
