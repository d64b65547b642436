"""What a file may say: engines of several sizes, machines by host, engines that run already, tasks, and its JSON Schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from vime.errors import PluginError, TopologyError, VimeError
from vime.facts.process import Parallel, Slot
from vime.facts.transports import Relation
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.platforms.discovery import discover
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.domains import check_crossing
from vime.topology.load import load_topology, shipped_names, shipped_text
from vime.topology.model import json_schema
from vime.topology.profiles import nominal_nodes, real_nodes
from vime.topology.rules import ResolvedRole
from vime.yamltree import parse

BROKEN = Path(__file__).parent / "broken"


def inline(roles: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"pools": {"p": {"platform": "acme"}}, "roles": roles, **more}


def roles_of(source: Any) -> dict[str, ResolvedRole]:
    return {role.name: role for role in load_topology(source).roles}


def plan_of(source: Any, **options: Any) -> Plan:
    slots = FakePlatform(name="slots", virtual=True, devices_per_node=None)
    platforms = {"acme": FakePlatform(), "slots": slots}
    return make_plan(load_topology(source), model=TINY_MODEL, needs=PlanNeeds(), platforms=platforms, **options)


# ---- roles


def test_engines_of_several_sizes_are_added_up() -> None:
    engines = [{"count": 2, "parallel": {"tp": 2}}, {"parallel": {"tp": 4, "dp": 2, "ep": 8}}, {}]
    role = roles_of(inline({"r": {"kind": "rollout", "engines": engines}}))["r"]
    assert (role.engines, role.devices) == (4, 13)
    assert role.groups == ((2, Parallel(tp=2)), (1, Parallel(tp=4, dp=2, ep=8)), (1, Parallel()))
    assert role.told == "2 x 2 + 1 x 8 + 1 x 1 engines"


def test_a_list_of_equal_engines_is_a_number_of_them() -> None:
    source = inline(
        {"actor": {"kind": "train"}, "r": {"kind": "rollout", "parallel": {"tp": 2}, "engines": [{"count": 2}, {}]}}
    )
    role = roles_of(source)["r"]
    assert (role.engines, role.devices, role.groups, role.parallel.tp) == (3, 6, (), 2)
    assert len(plan_of(source).engines) == 3


@pytest.mark.parametrize(
    ("name", "role", "task", "trained"),
    [
        ("actor", {}, "actor", True),
        ("policy", {}, "actor", True),
        ("critic", {}, "critic", True),
        ("values", {"task": "critic"}, "critic", True),
        ("ref", {}, "reference", False),
        ("reference", {"optimizer": False}, "reference", False),
        ("frozen", {"optimizer": False}, "reference", False),
        ("teacher", {}, "teacher", False),
        ("ref", {"task": "actor"}, "actor", True),
    ],
)
def test_a_role_s_task_is_what_it_says_or_its_name(name: str, role: dict[str, Any], task: str, trained: bool) -> None:
    found = roles_of(inline({name: {"kind": "train", **role}}))[name]
    assert (found.task, found.optimizer) == (task, trained)


def test_like_keeps_what_a_role_says_itself() -> None:
    roles = {
        "fast": {"kind": "rollout", "devices": 8, "engines": 2, "parallel": {"tp": 4}},
        "slow": {"kind": "rollout", "like": "fast", "engines": 3},
        "same": {"kind": "rollout", "like": "fast"},
    }
    found = roles_of(inline(roles))
    assert [(r.engines, r.devices, r.parallel.tp) for r in found.values()] == [(2, 8, 4), (3, 12, 4), (2, 8, 4)]


def test_engines_that_run_already_need_no_pool_and_no_devices() -> None:
    source = {
        "pools": {"p": {"platform": "acme"}, "q": {"platform": "acme"}},
        "roles": {
            "actor": {"kind": "train", "pool": "p"},
            "a": {"kind": "rollout", "endpoints": ["http://10.0.0.5:8000", "https://engines.example"]},
            "b": {"kind": "rollout", "pool": "external", "endpoints": ["http://[::1]:8000"]},
        },
        "sync": [{"from": "actor", "to": "a"}],
    }
    found = roles_of(source)
    assert [(r.pool, r.engines, r.devices) for r in found.values()] == [("p", 1, 1), ("external", 2, 0), ("external", 1, 0)]


def test_both_halves_of_split_engines_are_taken() -> None:
    roles = {"pre": {"kind": "rollout", "stage": "prefill"}, "dec": {"kind": "rollout", "stage": "decode", "engines": 2}}
    assert [r.stage for r in roles_of(inline(roles)).values()] == ["prefill", "decode"]


# ---- machines


def test_hosts_choose_machines_in_their_order() -> None:
    fake, source = FakePlatform(), inline({"actor": {"kind": "train"}, "r": {"kind": "rollout"}})
    source["pools"]["p"] |= {"nodes": 2, "select": {"hosts": ["n3", "n9", "n1"]}}
    loaded = load_topology(source)
    pool, found = loaded.topology.pools["p"], tuple(fake.node(f"n{i}") for i in range(4))
    assert [n.hostname for n in real_nodes("p", pool, found, demand=2, tree=loaded.tree)] == ["n3", "n1"]
    assert [n.hostname for n in nominal_nodes("p", pool, fake.profile(), demand=2, tree=loaded.tree)] == ["n3", "n9"]
    with pytest.raises(
        TopologyError, match=r"E201 pools\.p\.select\.hosts: n3, n9 of select\.hosts are not there; found n0, n1"
    ):
        real_nodes("p", pool, found[:2], demand=2, tree=loaded.tree)


def test_pools_of_one_platform_share_the_machines_by_name() -> None:
    fake = FakePlatform()
    machines = (fake.node("a"), fake.node("b"))
    source = {
        "pools": {name: {"platform": "acme", "select": {"hosts": [host]}} for name, host in (("p", "a"), ("q", "b"))},
        "roles": {"actor": {"kind": "train", "pool": "p"}, "rollout": {"kind": "rollout", "pool": "q"}},
    }
    plan = plan_of(source, inventories={"p": machines, "q": machines})
    assert [node.hostname for pool in plan.pools for node in pool.inventories] == ["a", "b"]


def test_a_host_s_slots_may_be_in_several_pools() -> None:
    host = FakePlatform(name="slots", virtual=True, devices_per_node=None).node("h", 1)
    source = {
        "pools": {"p": {"platform": "slots"}, "q": {"platform": "slots"}},
        "roles": {"actor": {"kind": "train", "pool": "p"}, "rollout": {"kind": "rollout", "pool": "q"}},
    }
    assert len(plan_of(source, inventories={"p": (host,), "q": (host,)}).pools) == 2


# ---- domains


def crossing(axes: Parallel, *, kind: str = "train", devices: int, segment: int, first: int = 0) -> list[str]:
    """Axes whose groups cross segments, on nodes of four."""
    domain = {"kind": "fabric", "segment_nodes": segment, "require": "prefer"}
    source = inline({"actor": {"kind": "train"}}, pools={"p": {"platform": "acme", "nodes": 8, "domain": domain}})
    loaded = load_topology(source)
    role = ResolvedRole("actor", kind, "p", axes, devices // axes.devices, devices)
    slots = [Slot(i // 4, i % 4) for i in range(first, first + devices)]
    nodes = tuple(FakePlatform().node(f"n{i}", 4) for i in range(8))
    return [note.split(" ")[1] for note in check_crossing(role, slots, loaded.topology.pools["p"], nodes, loaded.tree).notes]


def test_groups_inside_segments_and_across() -> None:
    assert crossing(Parallel(tp=8, dp=2), devices=16, segment=2) == []
    assert crossing(Parallel(tp=8, dp=2), devices=16, segment=1) == ["roles.actor.parallel.tp:"]
    assert crossing(Parallel(tp=2, dp=8, ep=8), devices=16, segment=2) == []
    assert crossing(Parallel(tp=2, dp=8, ep=16), devices=16, segment=2) == ["roles.actor.parallel.ep:"]
    assert crossing(Parallel(dp=16, ep=4, etp=4), devices=16, segment=2) == ["roles.actor.parallel.ep:"]
    assert crossing(Parallel(pp=2, dp=8, ep=8), devices=16, segment=2) == []
    assert crossing(Parallel(tp=8), devices=8, segment=2, first=4) == ["roles.actor.parallel.tp:"]


def test_the_experts_of_an_engine_are_those_of_one_stage() -> None:
    """An engine of dp 2 x pp 2 x tp 4 has the ranks 0-3 and 8-11 in its first stage."""
    axes = Parallel(tp=4, pp=2, dp=2, ep=8)
    assert crossing(axes, kind="rollout", devices=16, segment=4) == []
    assert crossing(axes, kind="rollout", devices=16, segment=2) == ["roles.actor.parallel.ep:"]
    assert crossing(Parallel(tp=4, dp=2, ep=8), kind="rollout", devices=16, segment=2) == []


def test_a_loose_pool_says_nothing() -> None:
    source = inline({"actor": {"kind": "train"}, "r": {"kind": "rollout"}})
    source["pools"]["p"] |= {"nodes": 5, "domain": {"kind": "fabric", "segment_nodes": 2, "require": "off"}}
    assert [note[:4] for note in plan_of(source).notes] == ["W281"]


# ---- two platforms


def test_train_on_one_platform_and_sample_on_another() -> None:
    source = {
        "pools": {"h": {"platform": "slots"}, "p": {"platform": "acme"}},
        "roles": {"actor": {"kind": "train", "pool": "h"}, "rollout": {"kind": "rollout", "pool": "p", "engines": 2}},
        "sync": [{"from": "actor", "to": "rollout", "prefer": ["disk"]}],
    }
    plan = plan_of(source)
    assert plan.transport is not None
    assert (plan.transport.protocol, plan.transport.edge.relation) == ("disk", Relation.NETWORK)
    assert [pool.platform for pool in plan.pools] == ["slots", "acme"]


def test_the_shipped_mixed_topology_sends_weights_over_a_folder() -> None:
    loaded, plugins = load_topology("mixed-h200x8-mi300x8"), discover()
    try:
        platforms = {name: plugins.platform(name) for name in loaded.platforms()}
    except PluginError as error:
        pytest.skip(str(error))
    plan = make_plan(loaded, model=TINY_MODEL, needs=PlanNeeds(), platforms=platforms)
    assert plan.transport is not None
    assert plan.transport.protocol == "disk"
    assert {r.protocol for r in plan.transport.rejected} >= {"device_ipc", "host_shm", "collective"}
    assert [(e.pool, len(e.request.placement.slots)) for e in plan.engines] == [("sample", 2)] * 4


# ---- JSON Schema


def accepts(source: Any) -> bool:
    return jsonschema.Draft202012Validator(json_schema()).is_valid(source)


def test_the_json_schema_takes_every_shipped_file() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    for name in shipped_names():
        jsonschema.validate(yaml.safe_load(shipped_text(name)), json_schema())
    assert accepts(
        inline({"a": {"kind": "train"}}, limits={"device_reserve": 0, "start_timeout": "20m"}, env={"engine": {"A": 1}})
    )


def test_the_json_schema_is_no_stricter_than_the_reader_and_refuses_shapes() -> None:
    refused = 0
    for path in sorted(BROKEN.glob("*.yaml")):
        for case in yaml.safe_load(path.read_text()):
            try:
                load_topology(parse(case["topology"], "t.yaml"))
            except VimeError:
                continue
            assert accepts(yaml.safe_load(case["topology"])), case["name"]
    for case in yaml.safe_load((BROKEN / "schema.yaml").read_text()):
        if "E102" in case["says"] or "E101" in case["says"]:
            refused += 1
            assert not accepts(yaml.safe_load(case["topology"])), case["name"]
    assert refused >= 4
