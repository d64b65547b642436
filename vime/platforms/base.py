"""What every platform inherits: the optional answers only, each an explicit absence.

Required hooks have no answer here, or a half-written plugin would quietly run as a host.
"""

from __future__ import annotations

from collections.abc import Iterable

from vime.facts.memory import EngineSleep, NullMemory, Tag, TagSemantics
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable
from vime.facts.process import Factory, MegatronAdaptation, RoleRequest
from vime.facts.transports import Edge, Side, TransferCost, TransportOffer
from vime.hooks import PluginInfo, hookimpl

BASE = "base"
VIME_PLUGIN = PluginInfo(BASE, parent="")

DISK_HALVES = {
    Side.TRAINER: Factory("vime.weights.transports.disk:DiskTrainer"),
    Side.ENGINE: Factory("vime.weights.transports.disk:DiskEngine"),
}
"""The transport that needs nothing from the hardware: a directory that both sides can reach."""


@hookimpl
def vime_megatron_adapt(request: RoleRequest, model: ModelShape) -> MegatronAdaptation:
    return MegatronAdaptation()


@hookimpl
def vime_memory_backend(request: RoleRequest) -> NullMemory:
    return NullMemory("the platform has no trainer memory backend: parameters and optimizer stay on the device")


@hookimpl
def vime_engine_sleep(request: RoleRequest) -> EngineSleep:
    kept = TagSemantics(frees=False, preserves=True, why="the platform names no sleep mode: the engine is only paused")
    return EngineSleep(0, {Tag.ENGINE_WEIGHTS: kept, Tag.KV: kept, Tag.GRAPHS: kept}, why=kept.why)


@hookimpl
def vime_transports(edge: Edge, side: Side) -> Iterable[TransportOffer]:
    return (TransportOffer("disk", side, DISK_HALVES[side], TransferCost(None)),)


@hookimpl
def vime_perf_model() -> PerfTable:
    return PerfTable()
