"""Parts of the weight-sync tests: a trainer made of a transformers model, and a worker extension that spoils weights."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vime.weights.hosts import ANYWHERE
from vime.weights.manifest import build_manifest
from vime.weights.merge import merge_stage_info


class ReferenceTrainer:
    """A `TrainerLink` over a transformers model in this process, which does what it is asked in order, as a rank does.

    `after_stage` runs between staging and the engines' update, where a transport can be tampered with; `before_keep` when
    the copy for later engines begins.
    """

    def __init__(self, model_path: Any, half_for: Callable[[Any], Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.weights = dict(_as_published(self.model.named_parameters()))
        self.manifest = build_manifest((name, "float32", p.shape) for name, p in self.weights.items())
        self.half = half_for(self.manifest)
        self.streams = self.half.streams
        self.by_host = False
        self.after_stage: Callable[[], None] | None = None
        self.before_keep: Callable[[], None] | None = None
        self._rank = ThreadPoolExecutor(1)
        self._generator = torch.Generator().manual_seed(1)

    def perturb(self) -> None:
        """Change every tensor, as a training step does, by about 5 %; after what the rank was asked before."""
        self._rank.submit(self._step).result()

    @torch.no_grad()
    def _step(self) -> None:
        for param in self.weights.values():
            param.mul_(1 + 0.05 * torch.randn(param.shape, generator=self._generator))

    async def init_info(self, receivers: Mapping[str, int]) -> Any:
        return {ANYWHERE: self.half.init_info(sum(receivers.values()))}

    async def connect(self) -> None:
        await self._ask(self.half.connect)

    async def stage(self, version: str, fingerprint: bool) -> Any:
        stage = functools.partial(self.half.stage, self.weights.items(), version=version, fingerprint=fingerprint)
        info = await self._ask(stage)
        if self.after_stage is not None:
            self.after_stage()
        return merge_stage_info([info], len(self.weights))

    async def stream(self, *, kept: bool = False) -> None:
        await self._ask(functools.partial(self.half.stream, () if kept else self.weights.items()))

    def keep(self) -> Awaitable[None]:
        return self._ask(self._keep)

    def _keep(self) -> None:
        if self.before_keep is not None:
            self.before_keep()
        self.half.keep(self.weights.items())

    def _ask(self, call: Callable[[], Any]) -> Awaitable[Any]:
        """The rank takes the call now; the result comes when it is awaited."""
        return asyncio.get_running_loop().run_in_executor(self._rank, call)

    @torch.no_grad()
    async def probe_log_probs(self, sequences: Any) -> Any:
        ids = torch.tensor(sequences)
        log_probs = self.model(ids).logits.log_softmax(-1)[:, :-1]
        return log_probs.gather(-1, ids[:, 1:, None])[..., 0].tolist()

    def close(self) -> None:
        self._rank.shutdown(wait=True, cancel_futures=True)
        self.half.close()


def _as_published(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by the names of a folder, where experts' matrices are apart; those are views of what transformers joins."""
    for name, param in named:
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".experts"):
            yield name, param
            continue
        for index, matrix in enumerate(param.detach()):
            parts = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
            for part, values in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{stem}.{index}.{part}.weight", values


class SpoilingWorker:
    """A vLLM worker extension: changes a parameter of the loaded model, and says how updates are loaded."""

    model_runner: Any
    weight_transfer_engine: Any

    def loads_in_place(self) -> bool:
        return bool(self.weight_transfer_engine._in_place)

    def spoil(self, name: str) -> float:
        param = dict(self.model_runner.model.named_parameters())[name]
        with torch.no_grad():
            param.mul_(1.1)
        return float(param.abs().sum())
