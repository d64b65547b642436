"""slime's flags of nodes, devices and parallel sizes as an inline topology."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vime.errors import ConfigError

_AXES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}
_HEAD = {"schema": "vime.topology/v1", "name": "from-flags"}
_TRANSPORTS = {"disk": {"require": ["disk"]}, "nccl": {"prefer": ["collective"]}}


_NAMES = {"reference": "ref"}
"""Names of roles that are not their task's."""


def shared_topology(tasks: Collection[str]) -> dict[str, Any]:
    """All devices of one node for the actor, the roles of these tasks and the engines in turn."""
    names = ["actor", *(_NAMES.get(task, task) for task in tasks), "rollout"]
    others = {name: {"kind": "train", "like": "actor"} for name in names[1:-1]}
    return {
        **_HEAD,
        "pools": {"devices": {"platform": "auto"}},
        "roles": {"actor": {"kind": "train", "devices": "all"}, **others, "rollout": {"kind": "rollout", "devices": "all"}},
        "share": [{"roles": names, "residency": "auto"}],
        "sync": [_sync({})],
    }


def topology_from(words: Mapping[str, Sequence[str]], *, tasks: Collection[str] = ()) -> dict[str, Any]:
    """The topology that the flags describe: one pool, an actor, and engines on the same devices or on their own.

    Training roles for `tasks` take turns on the actor's devices, as in slime; a critic whose size is given has its own.
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
    critic = _critic(words, tasks, per_node)
    nodes = -(-(actor + critic + (0 if colocate else rollout)) // size)
    axes = {axis: _number(words, flag, 1) for axis, flag in _AXES.items() if flag in words}
    roles: dict[str, Any] = {"actor": {"kind": "train", "devices": actor, "parallel": axes}}
    in_turn = ["actor"]
    for task in tasks:
        name = _NAMES.get(task, task)
        apart = task == "critic" and critic
        roles[name] = {"kind": "train", "like": "actor", **({"devices": critic} if apart else {})}
        in_turn += [] if apart else [name]
    topology: dict[str, Any] = {
        **_HEAD,
        "pools": {"devices": {"platform": "auto", "nodes": nodes, "devices_per_node": size}},
        "roles": roles,
    }
    if rollout:
        roles["rollout"] = {"kind": "rollout", "engines": rollout // each, "parallel": {"tp": each}}
        topology["sync"] = [_sync(words)]
        in_turn += ["rollout"] if colocate else []
    if len(in_turn) > 1:
        topology["share"] = [{"roles": in_turn, "residency": _residency(words)}]
    return topology


def _critic(words: Mapping[str, Sequence[str]], tasks: Collection[str], per_node: int) -> int:
    """Devices of the critic's own; 0: it takes turns with the actor."""
    given = [flag for flag in ("critic-num-nodes", "critic-num-gpus-per-node") if flag in words]
    if given and "critic" not in tasks:
        what = f"--{given[0]} has no effect without a critic"
        raise ConfigError(what, fix="give --advantage-estimator ppo, or leave it out")
    if not given:
        return 0
    return _number(words, "critic-num-nodes", 1) * _number(words, "critic-num-gpus-per-node", per_node)


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
