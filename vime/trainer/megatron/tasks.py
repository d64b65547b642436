"""Which class is a rank of which task."""

from __future__ import annotations

from collections.abc import Mapping

from vime.facts.process import Factory
from vime.trainer.megatron.rank import Rank
from vime.trainer.setup import TrainerSetup

TASKS: Mapping[str, Factory] = {
    "actor": Factory("vime.trainer.megatron.worker:MegatronWorker"),
    "critic": Factory("vime.trainer.megatron.values:Critic"),
    "reference": Factory("vime.trainer.megatron.scorer:FrozenScorer"),
    "teacher": Factory("vime.trainer.megatron.scorer:FrozenScorer"),
}


def build_rank(setup: TrainerSetup) -> Rank:
    """The rank that `setup.task` asks for."""
    return TASKS[setup.task].load()(setup)
