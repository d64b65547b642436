"""Nodes of a pool without the machine: nominal devices from a platform's profiles, and the slots of a host."""

from __future__ import annotations

from dataclasses import replace

from vime.facts.inventory import Device, DeviceProfile, FabricDomain, NodeInventory, NumaNode, Tri
from vime.topology.domains import num_nodes
from vime.topology.model import MAX_DEVICES, Pool
from vime.topology.rules import place_of, rule_error, several
from vime.yamltree import Node, did_you_mean


def choose_profile(name: str, pool: Pool, profiles: tuple[DeviceProfile, ...], tree: Node) -> DeviceProfile:
    """The profile that a pool's `device` names; else the platform's only one, or the one with the platform's own name.

    Raises TopologyError E104.
    """
    known = {p.name: p for p in profiles}
    if pool.device is not None:
        if pool.device in known:
            return known[pool.device]
        where, fix = place_of(tree, "pools", name, "device"), did_you_mean(pool.device, known, what="devices")
        raise rule_error("E104", f"pools.{name}.device", f"{pool.platform} knows no {pool.device!r}", where=where, fix=fix)
    if len(known) == 1:
        return profiles[0]
    if pool.platform in known:
        return known[pool.platform]
    text = f"{pool.platform} knows {len(known)} nominal devices and none is named"
    listed = ", ".join(known)
    fix = f"give --device, or write `device:`, with one of {listed}" if known else "give --inventory, or run on the machine"
    raise rule_error("E104", f"pools.{name}.device", text, where=place_of(tree, "pools", name), fix=fix)


def looks_like(node: NodeInventory, profile: DeviceProfile) -> bool:
    """Whether a machine's devices are what a profile describes: same instruction set where both say it, memory within 10 %."""
    return bool(node.devices) and all(
        (None in (device.arch, profile.device_arch) or device.arch == profile.device_arch)
        and abs(device.memory_bytes - profile.memory_bytes) <= profile.memory_bytes / 10
        for device in node.devices
    )


def node_sizes(name: str, pool: Pool, *, default: int | None, demand: int, tree: Node) -> tuple[int, ...]:
    """Devices of each node. `default` is what the hardware has; None (a host) makes as many slots as roles ask for."""
    if isinstance(pool.nodes, tuple):
        sizes = tuple(group.devices for group in pool.nodes for _ in range(min(group.count, MAX_DEVICES)))
    else:
        each = pool.devices_per_node or default or -(-max(demand, 1) // pool.nodes)
        sizes = (each,) * min(pool.nodes, MAX_DEVICES)
    if sum(sizes) > MAX_DEVICES:
        where = place_of(tree, "pools", name, "nodes")
        text = f"more than {MAX_DEVICES} devices"
        raise rule_error("E103", f"pools.{name}.nodes", text, where=where, fix="write the number you have")
    return sizes


def nominal_nodes(name: str, pool: Pool, profile: DeviceProfile, *, demand: int, tree: Node) -> tuple[NodeInventory, ...]:
    """Nodes as a profile describes them."""
    sizes = node_sizes(name, pool, default=profile.devices_per_node, demand=demand, tree=tree)
    hosts = pool.select.hosts or tuple(f"{name}-{index}" for index in range(len(sizes)))
    return tuple(_nominal_node((name, hosts[index]), index, size, profile) for index, size in enumerate(sizes))


def _nominal_node(named: tuple[str, str], index: int, size: int, profile: DeviceProfile) -> NodeInventory:
    name, host = named
    homes = min(profile.numa_nodes, size)
    blank = NodeInventory(
        hostname=host,
        platform=profile.platform,
        arch=profile.arch,
        devices=(),
        cpus=0,
        memory_bytes=profile.node_memory_bytes,
        numa=tuple(NumaNode(home, (), profile.node_memory_bytes // homes) for home in range(homes)),
        fabric=_nominal_fabric(name, index, profile),
        virtual=profile.virtual,
    )
    if profile.virtual:
        return with_devices(blank, size, profile.node_memory_bytes // size, profile.name)
    node = with_devices(blank, size, profile.memory_bytes, profile.name)
    placed = (replace(d, numa_node=d.index * homes // size, arch=profile.device_arch) for d in node.devices)
    return replace(node, devices=tuple(placed))


def _nominal_fabric(name: str, index: int, profile: DeviceProfile) -> FabricDomain | None:
    """Nodes fill one domain after the other, where the device has domains that span nodes."""
    if not profile.domain_devices or not profile.devices_per_node or profile.domain_devices <= profile.devices_per_node:
        return None
    domain = index // (profile.domain_devices // profile.devices_per_node)
    return FabricDomain(f"{name}-domain-{domain}", "nominal", Tri.YES, "as the vendor describes it; no machine was looked at")


def with_devices(node: NodeInventory, count: int, memory_bytes: int, kind: str) -> NodeInventory:
    """The node with `count` equal devices."""
    devices = tuple(Device(index=i, uuid=f"{node.hostname}:{i}", name=kind, memory_bytes=memory_bytes) for i in range(count))
    return replace(node, devices=devices)


def real_nodes(
    name: str, pool: Pool, inventories: tuple[NodeInventory, ...], *, demand: int, tree: Node
) -> tuple[NodeInventory, ...]:
    """Nodes as they were found, those of `select.hosts` in its order; a host's slots are made here.

    Raises TopologyError E201 when there are too few nodes.
    """
    wanted, inventories = num_nodes(pool), _selected(name, pool, inventories, tree)
    if len(inventories) < wanted:
        text = f"{several(wanted, 'node')} asked for, {len(inventories)} there"
        where = place_of(tree, "pools", name, "nodes")
        fix = f"write {len(inventories)}, or add nodes" if inventories else "add nodes"
        raise rule_error("E201", f"pools.{name}.nodes", text, where=where, fix=fix)
    chosen = inventories[:wanted]
    foreign = sorted({n.platform for n in chosen if n.platform != pool.platform})
    if foreign:
        text = f"the inventory is of {', '.join(foreign)}, the pool of {pool.platform}"
        fix = "give the pool's own inventory"
        raise rule_error("E105", f"pools.{name}", text, where=place_of(tree, "pools", name), fix=fix)
    if not all(node.virtual for node in chosen):
        return chosen
    sizes = node_sizes(name, pool, default=None, demand=demand, tree=tree)
    return tuple(_with_slots(node, size) for node, size in zip(chosen, sizes, strict=True))


def _selected(name: str, pool: Pool, inventories: tuple[NodeInventory, ...], tree: Node) -> tuple[NodeInventory, ...]:
    """The nodes that the pool's hosts name; all of them where it names none. Raises E201 for a host that is not there."""
    hosts = pool.select.hosts
    if not hosts:
        return inventories
    there = {node.hostname: node for node in inventories}
    missing = [host for host in hosts if host not in there]
    if len(hosts) - len(missing) < num_nodes(pool):
        text = f"{', '.join(missing)} of select.hosts are not there; found {', '.join(there) or 'none'}"
        where = place_of(tree, "pools", name, "select", "hosts")
        raise rule_error("E201", f"pools.{name}.select.hosts", text, where=where, fix="correct the names, or start the nodes")
    return tuple(there[host] for host in hosts if host in there)


def _with_slots(node: NodeInventory, count: int) -> NodeInventory:
    """A host with as many slots as the topology asks for, each with an equal share of the memory."""
    made = with_devices(node, count, node.memory_bytes // count, node.devices[0].name if node.devices else "slot").devices
    share = node.memory_bytes // count
    found = tuple(replace(device, memory_bytes=share) for device in node.devices[:count])
    return replace(node, devices=(*found, *made[len(found) :]))
