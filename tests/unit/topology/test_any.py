"""Any inventory with any topology gives a plan or a typed error, and the same twice.

Topologies are drawn by seed: a right one, some of its values replaced by others, sometimes by what no topology has. A failure
names its seed; `outcome(SEED)` repeats it.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.errors import Errors, PlacementError, PlanError, TopologyError, VimeError
from vime.facts.inventory import Device, DeviceProfile, FabricDomain, NodeInventory, Tri
from vime.facts.process import EnvMode, EnvValue
from vime.planning.explain import explain_json, explain_text
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.testing.platforms import GIB, TINY_MODEL, FakePlatform
from vime.topology.load import load_topology, shipped_names, shipped_text
from vime.topology.rules import RULES

BIG = replace(TINY_MODEL, parameters=8 * 10**9, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288)
MOE = replace(TINY_MODEL, experts=8, experts_per_token=2, expert_ffn=64)
MODELS = (TINY_MODEL, TINY_MODEL, MOE, BIG)
NEEDS = (PlanNeeds(), PlanNeeds(samples=False), PlanNeeds(vllm={"kv_cache_memory_bytes": GIB}, recompute="full"))
RARE = PlanNeeds(dtype="float16")
"""A type that one platform has."""
BESIDE = {"ref": "needs_reference", "critic": "needs_values", "teacher": "needs_teacher"}
"""Training roles beside the actor, and what asks for them."""
EXPECTED = (TopologyError, PlanError, PlacementError, Errors)

REACHED = sorted(RULES.keys() - {"E101", "E106", "E105", "E262"})
"""Rules that ten thousand seeds break; the others need a file, an option or a rule of both sides."""

SMALL = (1, 1, 2, 2, 3, 4, 8)
JUNK: tuple[Any, ...] = (None, -1, 0, 1.5, True, "", "two", "1GiB", [], {}, [1], {"a": 1}, 10**12, "2*4", float("nan"))
VALUES: dict[str, tuple[Any, ...]] = {
    "platform": ("acme", "acme", "tray", "slots", "auto", "zeta"),
    "device": ("acme-80g", "other"),
    "nodes": (1, 2, 4, 5, [{"devices": 8}, {"devices": 4, "count": 2}], [{"devices": 3}]),
    "devices_per_node": (4, 8, 3),
    "kind": ("train", "rollout", "fabric", "node"),
    "segment_nodes": SMALL,
    "require": ("strict", "prefer", "off", ["disk"], ["nope"]),
    "hosts": (["n0"], ["n1", "n0"], ["n0", "n0"], ["zz"]),
    "labels": ({}, {"zone": "a"}),
    "interpreter": ("/opt/python",),
    "pool": ("p", "q", "external", "r"),
    "like": ("actor", "rollout", "ref"),
    "devices": (*SMALL, 16, "all", "half"),
    "engines": (*SMALL, [{"count": 2, "parallel": {"tp": 2}}, {}], [{"parallel": {"tp": 4}}]),
    "task": ("actor", "critic", "reference", "teacher"),
    "optimizer": (True, False),
    "stage": ("prefill", "decode"),
    "endpoints": (["http://a:1"], ["a"], ["http://a:1", "http://a:1"]),
    "residency": ("auto", "park", "resident"),
    "roles": (["actor", "rollout"], ["actor", "ref"], ["actor", "nobody"]),
    "from": ("actor", "rollout", "ref"),
    "to": ("rollout", "actor", "more"),
    "prefer": (["disk"], ["nope"]),
    "forbid": (["collective", "disk"], ["disk"], ["device_ipc", "collective", "disk"]),
    "buffer": ("1MiB", 1, "8GiB"),
    "device_reserve": ("0", "6GiB", "79GiB", "1TiB"),
    "host_pinned_per_node": ("1GiB", "700GiB"),
    "start_timeout": ("20m", 5),
    **dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "count"), SMALL),
}
PLACES = {
    "pool": ("platform", "device", "nodes", "devices_per_node", "interpreter"),
    "domain": ("kind", "segment_nodes", "require"),
    "select": ("hosts", "labels"),
    "role": ("pool", "like", "devices", "engines", "task", "optimizer", "stage", "endpoints"),
    "parallel": ("tp", "pp", "cp", "ep", "etp", "dp", "vpp"),
    "share": ("roles", "residency"),
    "sync": ("from", "to", "prefer", "forbid", "require", "buffer"),
    "limits": ("device_reserve", "host_pinned_per_node", "start_timeout"),
}
"""Keys that may be written into a section of each kind."""


class Tray(FakePlatform):
    """Four devices a node, four nodes a scale-up domain."""

    def profile(self, name: str = "acme-80g") -> DeviceProfile:
        return replace(super().profile(name), domain_devices=16)


def platforms() -> dict[str, FakePlatform]:
    slots = FakePlatform(name="slots", virtual=True, devices_per_node=None, dtypes=("float32", "bfloat16"))
    rules = {"A": EnvValue("1", "needed", EnvMode.REQUIRE)}
    tray = Tray(name="tray", devices_per_node=4, dtypes=("bfloat16", "float32", "float16"))
    return {"acme": FakePlatform(rules=rules), "tray": tray, "slots": slots}


def draw_topology(rng: random.Random) -> Any:
    """A topology that is right, with up to four changes."""
    shared = rng.random() < 0.5
    actor = {"kind": "train", "devices": rng.choice((1, 2, 4, 8)), "parallel": {"tp": rng.choice((1, 1, 2, 4))}}
    rollout = {"kind": "rollout", "engines": rng.choice((1, 2, 4)), "parallel": {"tp": rng.choice((1, 1, 2, 4))}}
    pool: dict[str, Any] = {"platform": rng.choice(("acme", "tray", "slots")), "nodes": rng.choice((1, 2, 4))}
    if rng.random() < 0.4:
        pool["domain"] = {"kind": "fabric", "segment_nodes": rng.choice((1, 2, 4)), "require": rng.choice(("strict", "prefer"))}
    made: dict[str, Any] = {"pools": {"p": pool}, "roles": {"actor": actor, "rollout": rollout}}
    if shared:
        actor["devices"] = rollout["engines"] * rollout["parallel"]["tp"]
        made["share"] = [{"roles": ["actor", "rollout"], "residency": rng.choice(("auto", "park"))}]
    add_beside(made, rng)
    if rng.random() < 0.4:
        made["sync"] = [
            {
                "from": "actor",
                "to": "rollout",
                rng.choice(("prefer", "forbid", "require")): rng.choice((["collective"], ["collective", "disk"])),
            }
        ]
    if rng.random() < 0.2:
        made["limits"] = {"host_pinned_per_node": rng.choice(("1GiB", "700GiB"))}
    if rng.random() < 0.1:
        made["env"] = {"trainer": {"A": rng.choice(("0", "1"))}}
    if rng.random() < 0.1:
        made["pools"]["q"] = {"platform": rng.choice(("acme", "slots"))}
        actor["pool"], rollout["pool"] = "p", "q"
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        change(made, rng)
    return made


def add_beside(made: dict[str, Any], rng: random.Random) -> None:
    """Sometimes a critic, a reference or a teacher: on devices of its own, or on the actor's."""
    for name in BESIDE:
        if rng.random() < 0.15:
            made["roles"][name] = {"kind": "train", "like": "actor"}
            if rng.random() < 0.5:
                made.setdefault("share", [{"roles": ["actor"]}])[0]["roles"].append(name)


def draw_needs(made: dict[str, Any], rng: random.Random) -> PlanNeeds:
    """Mostly of an algorithm that uses the roles that are there."""
    needs = RARE if rng.random() < 0.05 else rng.choice(NEEDS)
    for name, asked in BESIDE.items():
        needs = replace(needs, **{asked: (name in made["roles"]) is (rng.random() < 0.95)})
    return needs


def change(made: dict[str, Any], rng: random.Random) -> None:
    """Write a key, take one out, or add a pool, a role, an edge, a limit."""
    if rng.random() < 0.2:
        add_section(made, rng)
        return
    kind, section = rng.choice(list(sections(made)))
    key = rng.choice(PLACES[kind])
    if rng.random() < 0.1 and section:
        section.pop(rng.choice(list(section)))
    elif rng.random() < 0.1:
        section[key if rng.random() < 0.8 else "nonsense"] = copy.deepcopy(rng.choice(JUNK))
    else:
        section[key] = copy.deepcopy(rng.choice(VALUES[key]))


def add_section(made: dict[str, Any], rng: random.Random) -> None:
    what = rng.choice(("pools", "roles", "share", "sync", "limits", "env"))
    if what == "pools":
        made["pools"]["q"] = {"platform": rng.choice(VALUES["platform"])}
    elif what == "roles":
        made["roles"][rng.choice(("ref", "critic", "more"))] = {"kind": rng.choice(("train", "rollout"))}
    elif what == "env":
        made["env"] = {rng.choice(("trainer", "engine")): {"A": rng.choice((0, "1", True))}}
    elif what == "limits":
        made["limits"] = {}
    else:
        entry = {"roles": ["actor", "rollout"]} if what == "share" else {"from": "actor", "to": "rollout"}
        made[what] = [*(made.get(what) or []), entry]


def sections(made: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, section) of everything that can be changed."""
    for pool in made["pools"].values():
        yield "pool", pool
        for name in ("domain", "select"):
            if isinstance(found := pool.setdefault(name, {}), dict):
                yield name, found
    for role in made["roles"].values():
        yield "role", role
        if isinstance(found := role.setdefault("parallel", {}), dict):
            yield "parallel", found
    for name in ("share", "sync"):
        yield from ((name, entry) for entry in made.get(name, []))
    if "limits" in made:
        yield "limits", made["limits"]


def draw_nodes(rng: random.Random, platform: str) -> tuple[NodeInventory, ...]:
    """Machines of all kinds: none, uneven ones, with devices that are parts or sick, joined or not."""
    per_node = 4 if platform == "tray" else 8
    return tuple(draw_node(rng, f"n{index}", platform, per_node) for index in range(rng.choice((0, 1, 2, 4, 5))))


def draw_node(rng: random.Random, host: str, platform: str, per_node: int) -> NodeInventory:
    count = rng.choice((per_node, per_node, per_node, 0, 3))
    devices = tuple(
        Device(
            index,
            f"{host}/{index}",
            "acme-80g",
            rng.choice((80, 80, 80, 1)) * GIB,
            partition="a part" if rng.random() < 0.01 else None,
            health="sick" if rng.random() < 0.01 else "ok",
        )
        for index in range(count)
    )
    node = NodeInventory(host, platform, "x86_64", devices, cpus=64, memory_bytes=1024 * GIB, virtual=platform == "slots")
    if rng.random() < 0.5:
        usable = rng.choice((Tri.YES, Tri.YES, Tri.NO, Tri.UNKNOWN))
        node = replace(node, fabric=FabricDomain(rng.choice(("r1", "r1", "r2")), "1", usable, "as drawn"))
    return replace(node, driver=rng.choice((None, "1", "2")), arch=rng.choice(("x86_64", "x86_64", "x86_64", "aarch64")))


def outcome(seed: int) -> Plan | VimeError:
    """The plan of a seed, or its error. Anything else goes up."""
    rng = random.Random(seed)
    source, model = draw_topology(rng), rng.choice(MODELS)
    needs = draw_needs(source, rng)
    try:
        loaded = load_topology(source)
        found = {}
        for name, pool in loaded.topology.pools.items():
            if pool.platform in platforms() and rng.random() < 0.4:
                found[name] = draw_nodes(rng, pool.platform)
        return make_plan(loaded, model=model, needs=needs, platforms=platforms(), inventories=found)
    except EXPECTED as error:
        return error


def told(found: Plan | VimeError) -> object:
    return (type(found).__name__, str(found)) if isinstance(found, VimeError) else found


def check(seed: int) -> Plan | VimeError:
    """One seed, twice; a plan can be printed and is sound, an error says something."""
    first = outcome(seed)
    assert told(first) == told(outcome(seed)), seed
    if isinstance(first, Plan):
        assert explain_text(first), seed
        json.dumps(explain_json(first))
        check_sound(first, seed)
    else:
        assert str(first).strip(), seed
    return first


def check_sound(plan: Plan, seed: int) -> None:
    """Whole placements on healthy, whole devices that nobody uses who does not share them, and memory that fits."""
    nodes = {pool.name: pool.inventories for pool in plan.pools}
    placed = [(process.pool, process.request) for process in (*plan.trainers, *plan.engines)]
    for pool, request in placed:
        slots = request.placement.slots
        assert len(slots) == request.parallel.devices == len(set(slots)), seed
        assert all(nodes[pool][slot.node].devices[slot.device].health == "ok" for slot in slots), seed
    alone = [role for role in plan.others if not plan.shares_actor(role)]
    members = (*([] if plan.shared else [plan.actor]), *alone, *plan.engines)
    taken = [(member.pool, slot) for member in members for slot in member.request.placement.slots]
    assert len(taken) == len(set(taken)), seed
    assert {role.task for role in plan.others} == plan.needs.uses, seed
    for pool in plan.pools:
        if not pool.inventories[0].virtual and pool.name in plan.memory.capacity_bytes:
            peak = max(plan.memory.phase_bytes(pool.name, phase) for phase in plan.memory.phases)
            assert peak == 0 or peak + plan.memory.reserve_bytes <= plan.memory.capacity_bytes[pool.name], seed


def run(seeds: range) -> Counter[str]:
    """How often each outcome came: `plan`, or the ids of an error."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        found = check(seed)
        errors = found.errors if isinstance(found, Errors) else (found,)
        seen.update({"plan"} if isinstance(found, Plan) else {getattr(error, "what", "").split(" ")[0] for error in errors})
    return seen


def test_any_topology_gives_a_plan_or_a_typed_error() -> None:
    seen = run(range(350))
    assert seen["plan"] >= 30
    assert len(seen) >= 15


@pytest.mark.slow
def test_ten_thousand_topologies_give_plans_or_typed_errors() -> None:
    seen = run(range(10_000))
    assert seen["plan"] >= 1200
    assert seen.keys() >= {"plan", *REACHED}


def damage(text: str, rng: random.Random) -> str:
    """The text with up to three places cut out, doubled or replaced."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(text) + 1)
        to = at + rng.choice((0, 1, 1, 2, 8))
        text = (
            text[:at]
            + rng.choice(("", "", text[at:to] * 2, ":", "{", "]", "\n", " ", "\t", "&a ", "*a", "!!set ", "\0", "é"))
            + text[to:]
        )
    return text


def test_any_damage_to_a_file_is_told_with_its_place(tmp_path: Path) -> None:
    texts = [shipped_text(name) for name in shipped_names()]
    path, refused = tmp_path / "t.yaml", 0
    for seed in range(400):
        rng = random.Random(seed)
        path.write_text(damage(rng.choice(texts), rng))
        try:
            load_topology(path)
        except VimeError as error:
            refused += 1
            for one in error.errors if isinstance(error, Errors) else (error,):
                assert (one.where or "").startswith(f"{path}"), (seed, one)
                assert one.what[:4] in RULES, (seed, one)
    assert refused > 100
