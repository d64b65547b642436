"""What a scoring pass takes beside parameters, counted from its allocations, against what a plan says of it."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vime.config.algorithms import GrpoSection, PpoSection
from vime.config.schema import TrainerSection
from vime.facts.process import Parallel
from vime.models.registry import read_shape
from vime.planning.amounts import trainer_amounts
from vime.planning.needs import PlanNeeds
from vime.types import TrainSample

TOKENS, ROWS, ANSWER = 512, 64, 100


class Peak(TorchDispatchMode):
    """The most bytes of tensors at once that were made inside."""

    def __init__(self, before: set[int]) -> None:
        super().__init__()
        self.alive: dict[int, int] = dict.fromkeys(before, 0)
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._gone, storage._cdata)
        return made

    def _gone(self, storage: int) -> None:
        self.bytes -= self.alive.pop(storage, 0)


def folder_of(tmp_path: Path, model_of: Any, vocab: int) -> Path:
    folder = model_of(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": vocab, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
    config["max_position_embeddings"] = TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("task", "dtype", "vocab"),
    [("reference", "bfloat16", 64), ("reference", "bfloat16", 8000), ("teacher", "float32", 8000), ("critic", "float32", 8000)],
)
def test_a_scoring_pass_takes_what_the_plan_says(
    tmp_path: Path, model_of: Any, worker_of: Any, task: str, dtype: str, vocab: int
) -> None:
    folder = folder_of(tmp_path, model_of, vocab)
    trainer = TrainerSection(max_tokens_per_micro_batch=TOKENS, log_prob_chunk_tokens=ROWS)
    algorithm = PpoSection() if task == "critic" else GrpoSection()
    rank = worker_of(folder, task=task, role=task, dtype=dtype, trainer=trainer, algorithm=algorithm)
    prompt, answer = tuple(range(28)), tuple(i % vocab for i in range(ANSWER))
    sample = TrainSample(prompt, answer, (0.0,) * ANSWER, (1,) * ANSWER, 1.0, (1.0, 0.0))
    with Peak({parameter.untyped_storage()._cdata for parameter in rank._wrapped.parameters()}) as found:
        scores = rank.score([[sample] * (TOKENS // (len(prompt) + ANSWER))])
    assert len(scores[0]) == 4
    needs = PlanNeeds(micro_batch_tokens=TOKENS, log_prob_chunk_tokens=ROWS)
    planned = next(a for a in trainer_amounts(read_shape(folder), dtype, Parallel(), needs, task=task) if a.scoring)
    assert found.peak == pytest.approx(planned.num_bytes, rel=0.1)
