"""slime's flags of nodes, devices and parallel sizes as an inline topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import ConfigError

_AXES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}
_TRANSPORTS = {"disk": {"require": ["disk"]}, "nccl": {"prefer": ["collective"]}}


def topology_from(words: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The topology that the flags describe: one pool, an actor, and engines on the same devices or on their own.

    Raises ConfigError when the numbers do not go together.
    """
    per_node = _number(words, "actor-num-gpus-per-node", 8)
    actor = _number(words, "actor-num-nodes", 1) * per_node
    each = _number(words, "rollout-num-gpus-per-engine", 1)
    colocate = "colocate" in words
    rollout = _number(words, "rollout-num-gpus", actor if colocate else each, least=0)
    if rollout % each:
        what = f"--rollout-num-gpus {rollout} is not a multiple of --rollout-num-gpus-per-engine {each}"
        raise ConfigError(what, fix=f"use {rollout // each * each or each} or {(rollout // each + 1) * each}")
    size = _number(words, "num-gpus-per-node", per_node)
    nodes = -(-(actor if colocate else actor + rollout) // size)
    axes = {axis: _number(words, flag, 1) for axis, flag in _AXES.items() if flag in words}
    topology: dict[str, Any] = {
        "schema": "vime.topology/v1",
        "name": "from-flags",
        "pools": {"devices": {"platform": "auto", "nodes": nodes, "devices_per_node": size}},
        "roles": {
            "actor": {"kind": "train", "devices": actor, "parallel": axes},
        },
    }
    if rollout:
        topology["roles"]["rollout"] = {"kind": "rollout", "engines": rollout // each, "parallel": {"tp": each}}
        topology["sync"] = [_sync(words)]
    if rollout and colocate:
        topology["share"] = [{"roles": ["actor", "rollout"], "residency": _residency(words)}]
    return topology


def _number(words: Mapping[str, Sequence[str]], name: str, default: int, *, least: int = 1) -> int:
    if name not in words:
        return default
    text = words[name][0]
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(f"--{name} takes a whole number of at least {least}, got {text!r}")
    return number


def _residency(words: Mapping[str, Sequence[str]]) -> str:
    if {"no-offload-train", "no-offload-rollout"} & set(words):
        return "resident"
    return "park" if {"offload", "offload-train", "offload-rollout"} & set(words) else "auto"


def _sync(words: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    edge: dict[str, Any] = {"from": "actor", "to": "rollout"}
    if "update-weight-buffer-size" in words:
        edge["buffer"] = words["update-weight-buffer-size"][0]
    if "update-weight-transport" in words:
        wanted = words["update-weight-transport"][0]
        if wanted not in _TRANSPORTS:
            raise ConfigError(f"--update-weight-transport {wanted!r} is not there", fix=f"use {' or '.join(_TRANSPORTS)}")
        edge |= _TRANSPORTS[wanted]
    return edge
