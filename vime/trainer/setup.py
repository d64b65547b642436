"""Everything one trainer rank is built from. Torch-free, so that the driver can make it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vime.config.algorithms import AnyAlgorithm
from vime.config.schema import TrainerSection
from vime.facts.collectives import CollectiveSpec
from vime.facts.memory import MemoryBackend, NullMemory
from vime.facts.process import MegatronAdaptation, Parallel, TrainerRuntime
from vime.planning.plan import Task


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """One rank of a training role.

    `rank` and `world` count all ranks of the role, `local_rank` is the device's position among those that the process sees.
    `num_steps` is the length of the run in steps, for the learning-rate schedule. `temperature` is the sampler's; logits
    are divided by it, except for supervised rows, which no sampler drew. With `from_scratch_seed` the weights are drawn
    instead of read: `model_path` then needs no safetensors.
    """

    model_path: Path
    dtype: str
    parallel: Parallel
    rank: int
    world: int
    local_rank: int
    master_address: str
    master_port: int
    seed: int
    num_steps: int
    temperature: float
    algorithm: AnyAlgorithm
    trainer: TrainerSection
    runtime: TrainerRuntime
    adaptation: MegatronAdaptation
    collective: CollectiveSpec
    memory: MemoryBackend | NullMemory
    from_scratch_seed: int | None = None
    node_device: int | None = None
    """The device's place in its node's inventory, whatever is masked; None where nothing needs to know."""
    role: str = "actor"
    """The role's name in the topology."""
    task: Task = "actor"
