"""A cluster joined by address: which nodes it has, and what each of them offers, looked at on the node itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vime.cluster.session import RaySession, clean_environment, restore_signals
from vime.errors import PlacementError, VimeError
from vime.facts.diagnosis import ProbeContext
from vime.facts.inventory import NodeInventory
from vime.planning.joined import Offer
from vime.platforms.discovery import ResolvedPlugin, impose
from vime.platforms.lineage import Platform

ANSWER_S = 15.0
"""For the cluster to say that it is there."""

LOOK_S = 60.0
"""For every node to read its inventory: a driver that sleeps takes seconds to wake."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A living node as Ray knows it: `resources` in total."""

    id: str
    name: str
    address: str
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node's processes see: inventories by platform, why others have none, and the environment that they inherit."""

    inventories: Mapping[str, NodeInventory]
    problems: Mapping[str, str]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JoinedCluster:
    """A cluster that vime uses and never stops. `nodes` are by the host names that the plan uses."""

    address: str
    nodes: Mapping[str, ClusterNode]
    offers: Mapping[str, tuple[Offer, ...]]
    env: Mapping[str, Mapping[str, str]]


def living_nodes() -> tuple[ClusterNode, ...]:
    """The nodes that are alive, of the cluster that this process is connected to."""
    import ray

    return tuple(
        ClusterNode(
            id=node["NodeID"],
            name=node["NodeName"],
            address=node["NodeManagerAddress"],
            resources={n: a for n, a in node["Resources"].items() if not n.startswith(("node:", "memory", "object_store_"))},
            labels=node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def look_around(address: str, platforms: Mapping[str, Platform], plugins: Sequence[ResolvedPlugin]) -> JoinedCluster:
    """Ask every node of a running cluster what it has for these platforms; the connection ends before this returns.

    Raises PlacementError where no cluster answers, or a node does not within `LOOK_S`.
    """
    check_answers(address)
    session = RaySession(resources={}, address=address, log_dir=Path(os.devnull), run_id="look")
    try:
        session.start()
        nodes = living_nodes()
        seen = _look(nodes, tuple(platforms), plugins)
    finally:
        session.close()
        restore_signals()
    named = _named(nodes, seen)
    offers = {name: tuple(_offer(platform, host, named[host], seen) for host in named) for name, platform in platforms.items()}
    return JoinedCluster(address, named, offers, {host: seen[node.id].env for host, node in named.items()})


def check_answers(address: str, timeout_s: float = ANSWER_S) -> None:
    """Ask for a sign of life in a process of its own: Ray's client waits for minutes in native code for a server that is not
    there. Raises PlacementError with the reason.
    """
    fix = "correct the address (`ray start` and `vime node start --head` print it), or leave it out to start a local cluster"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError as error:
        raise PlacementError(f"no Ray cluster answers at {address}: {error.strerror or error}", fix=fix) from error
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise PlacementError(f"no Ray cluster answers at {address} within {timeout_s:.0f} s", fix=fix) from error
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip().splitlines()
        raise PlacementError(f"no Ray cluster answers at {address}: {told[-1] if told else 'it is not healthy'}", fix=fix)


def see(platforms: Sequence[str], plugins: Sequence[ResolvedPlugin]) -> Seen:
    """What this node has. Runs on the node, as a short task; a platform that fails here leaves a problem."""
    inventories: dict[str, NodeInventory] = {}
    problems: dict[str, str] = {}
    for name in platforms:
        try:
            inventories[name] = impose(plugins).platform(name).inventory(ProbeContext(dict(os.environ)))
        except VimeError as error:
            problems[name] = str(error)
    return Seen(inventories, problems, dict(os.environ))


def check_shared(folder: Path, nodes: Mapping[str, ClusterNode], *, run_id: str) -> None:
    """Every node, by host, must see what the driver writes into the run's folder: logs, checkpoints and weights by disk are
    written there from everywhere. Raises PlacementError naming the nodes that do not.
    """
    marker = folder.resolve() / f".seen-{run_id}"
    marker.touch()
    try:
        calls = _on_each(is_there, tuple(nodes.values()), str(marker))
        blind = [host for host, node in nodes.items() if not _answer(calls[node.id])]
    finally:
        marker.unlink()
    if blind:
        raise PlacementError(
            f"{', '.join(blind)} of {len(nodes)} nodes do not see the run's folder",
            where=str(folder),
            fix="set run.dir to a folder that every node mounts under the same path",
        )


def is_there(path: str) -> bool:
    """Whether this node sees a file."""
    return Path(path).exists()


def _answer(call: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    with suppress(RayError):
        return ray.get(call)


def _on_each(what: Any, nodes: Sequence[ClusterNode], *words: Any) -> dict[str, Any]:
    """Start a short task on every node -> its answered call, by node id. Raises PlacementError naming who is silent."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(what)
    calls = {
        node.id: task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(*words)
        for node in nodes
    }
    done, waiting = ray.wait(list(calls.values()), num_returns=len(calls), timeout=LOOK_S)
    if waiting:
        silent = ", ".join(f"{node.name} ({node.address})" for node in nodes if calls[node.id] in waiting)
        raise PlacementError(
            f"{silent} did not answer within {LOOK_S:.0f} s ({len(done)} of {len(nodes)} nodes did)",
            fix="look at the node with `vime doctor`, or stop Ray there to leave it out",
        )
    return calls


def _look(nodes: Sequence[ClusterNode], platforms: Sequence[str], plugins: Sequence[ResolvedPlugin]) -> dict[str, Seen]:
    """What every node sees, by its id."""
    calls = _on_each(see, nodes, tuple(platforms), tuple(plugins))
    return {node.id: _got(calls[node.id], platforms) for node in nodes}


def _got(call: Any, platforms: Iterable[str]) -> Seen:
    """A node's answer; one that vime cannot be imported on, or that vanished meanwhile, has a problem for every platform."""
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(call)
    except RayError as error:
        told = str(error).strip().splitlines()
        return Seen({}, dict.fromkeys(platforms, f"cannot run vime: {told[-1] if told else type(error).__name__}"), {})


def _named(nodes: Sequence[ClusterNode], seen: Mapping[str, Seen]) -> dict[str, ClusterNode]:
    """Nodes by host name; several nodes of one host get their names in Ray as well."""
    hosts = {node.id: next((i.hostname for i in seen[node.id].inventories.values()), node.name) for node in nodes}
    counts = Counter(hosts.values())
    named: dict[str, ClusterNode] = {}
    for node in nodes:
        host = hosts[node.id] if counts[hosts[node.id]] == 1 else f"{hosts[node.id]}/{node.name}"
        named[host if host not in named else f"{host}/{node.id[:8]}"] = node
    return named


def _offer(platform: Platform, host: str, node: ClusterNode, seen: Mapping[str, Seen]) -> Offer:
    mine = seen[node.id]
    inventory = mine.inventories.get(platform.name)
    offer = Offer(host, resources=node.resources, labels=node.labels, env=mine.env, problem=mine.problems.get(platform.name))
    if inventory is None:
        return offer
    return replace(offer, inventory=replace(inventory, hostname=host), binding=platform.ray_binding(inventory))
