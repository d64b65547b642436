"""Rules about the machines of a pool as they were found: how they are joined, and that no device is in two pools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vime.errors import TopologyError
from vime.facts.inventory import NodeInventory, Tri
from vime.topology.domains import Told
from vime.topology.rules import PoolNodes, place_of, rule_error
from vime.yamltree import Node

_JOINED = ("E291", "W291")


def check_machines(pools: Iterable[PoolNodes], tree: Node) -> Told:
    """E273 and E291 (or W291) of each pool with machines, E201 for a machine whose devices two pools would use."""
    told, found = Told(), list(pools)
    told.errors.extend(_used_twice(found, tree))
    for at in found:
        if at.profile is None and not at.nodes[0].virtual:
            told.errors.extend(_mixed(at, tree))
            told += _joined(at, tree) + _drivers(at, tree)
    return told


def _used_twice(pools: Sequence[PoolNodes], tree: Node) -> Iterator[TopologyError]:
    """Pools whose machines have the same name and platform. A host's slots are made for each pool, so it may be in several."""
    owner: dict[tuple[str, str], str] = {}
    for at in pools:
        for node in at.nodes:
            first = owner.setdefault((node.hostname, node.platform), at.name)
            if first != at.name and not node.virtual:
                text = f"the devices of {node.hostname} would be used by the pools {first} and {at.name}"
                fix = "put the roles into one pool, or name each pool's machines with `select: {hosts: [...]}`"
                yield rule_error("E201", f"pools.{at.name}", text, where=place_of(tree, "pools", at.name), fix=fix)
                break


def _mixed(at: PoolNodes, tree: Node) -> Iterator[TopologyError]:
    first = at.nodes[0]
    for node in at.nodes:
        if node.arch != first.arch:
            text = f"{first.hostname} is {first.arch}, {node.hostname} is {node.arch}: no package fits both"
            fix = "make a pool of each architecture"
            yield rule_error("E273", f"pools.{at.name}", text, where=place_of(tree, "pools", at.name), fix=fix)
            return


def _joined(at: PoolNodes, tree: Node) -> Told:
    """The nodes of every written segment must be in one domain that works. What is unknown is a note."""
    told, domain = Told(), at.pool.domain
    if domain is None or domain.kind != "fabric" or domain.require == "off":
        return told
    for start in range(0, len(at.nodes), domain.segment_nodes):
        nodes = at.nodes[start : start + domain.segment_nodes]
        fault = _fault(nodes)
        if fault is not None:
            sure, text = fault
            fix = "order or replace the machines, or write smaller segments" if sure else "look at `vime doctor` there"
            path, where = f"pools.{at.name}.domain", place_of(tree, "pools", at.name, "domain")
            text = f"segment {start // domain.segment_nodes} ({', '.join(n.hostname for n in nodes)}): {text}"
            told.add(_JOINED, path, text, where=where, fix=fix, strict=sure and domain.require == "strict")
    return told


def _fault(nodes: Sequence[NodeInventory]) -> tuple[bool, str] | None:
    """(whether that is certain, what is wrong) with the domains of a segment's nodes."""
    for node in nodes:
        if node.fabric is None:
            return True, f"{node.hostname} is in no fabric domain"
        if node.fabric.usable is Tri.NO:
            return True, f"the fabric of {node.hostname} does not work: {node.fabric.reason}"
    domains = {(n.fabric.id, n.fabric.clique): n.hostname for n in reversed(nodes) if n.fabric is not None}
    if len(domains) > 1:
        listed = ", ".join(f"{host} in {name}/{clique}" for (name, clique), host in sorted(domains.items(), key=str))
        return True, f"its nodes are in {len(domains)} domains: {listed}"
    for node in nodes:
        if node.fabric is not None and node.fabric.usable is Tri.UNKNOWN:
            return False, f"nobody knows whether the fabric of {node.hostname} works: {node.fabric.reason}"
    return None


def _drivers(at: PoolNodes, tree: Node) -> Told:
    """Different drivers in one pool: an error where the pool is strict about its fabric, whose nodes act as one machine."""
    told = Told()
    drivers = {node.driver: node.hostname for node in reversed(at.nodes) if node.driver is not None}
    if len(drivers) > 1:
        listed = ", ".join(f"{host} has {driver}" for driver, host in sorted(drivers.items()))
        domain = at.pool.domain
        strict = domain is not None and domain.kind == "fabric" and domain.require == "strict"
        where, fix = place_of(tree, "pools", at.name), "install one driver on all of them"
        text = f"its nodes have {len(drivers)} drivers: {listed}"
        told.add(_JOINED, f"pools.{at.name}", text, where=where, fix=fix, strict=strict)
    return told
