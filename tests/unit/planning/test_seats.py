"""Plans with a critic, a reference and a teacher: where they sit, what is asked for them, what they hold, seconds."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml

from vime.errors import PlanError, TopologyError
from vime.facts.inventory import NodeInventory
from vime.facts.memory import NullMemory
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.facts.process import Slot
from vime.observe.jsonl import Row, RowKind
from vime.planning.compare import compare
from vime.planning.explain import explain_json, explain_text
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.planning.step import StepTime, step_time
from vime.planning.switching import switches
from vime.platforms.cpu import plugin
from vime.platforms.lineage import Platform
from vime.testing.plans import BIG, BOUNDED
from vime.testing.platforms import GIB, TINY_MODEL, FakePlatform
from vime.topology.load import load_topology, shipped_text

NEEDED = {"ref": "needs_reference", "critic": "needs_values", "teacher": "needs_teacher"}
RATES = {"device_memory": 1e12, "matmul": 1e14, "scale_up": 1e11, "host_link": 50e9}


class Rated(FakePlatform):
    """Devices whose rates are known."""

    def perf_model(self, inventory: NodeInventory) -> PerfTable:
        self.calls.append("perf_model")
        return PerfTable({name: Quantity(value, "bytes/s", Provenance.MEASURED, "here") for name, value in RATES.items()})


def planned(
    *beside: str, share: str | None = "auto", nodes: int = 1, model: Any = BIG, fake: FakePlatform | None = None, **needs: Any
) -> Plan:
    """Actor on eight devices, two engines of four; `beside` on the actor's devices, or each on eight of its own."""
    roles: dict[str, Any] = {name: {"kind": "train", "like": "actor"} for name in beside}
    source: dict[str, Any] = {
        "pools": {"p": {"platform": "acme", "nodes": nodes}},
        "roles": {
            "actor": {"kind": "train", "devices": 8},
            **roles,
            "rollout": {"kind": "rollout", "engines": 2, "parallel": {"tp": 4}},
        },
    }
    if share:
        source["share"] = [{"roles": ["actor", *beside, "rollout"], "residency": share}]
    asked = replace(BOUNDED, **{NEEDED[name]: True for name in beside}, **needs)
    return make_plan(load_topology(source), model=model, needs=asked, platforms={"acme": fake or Rated()})


def by_phase(plan: Plan, role: str) -> dict[str, set[str]]:
    return {phase: {r.tag for r in plan.memory.rows if (r.role, r.phase) == (role, phase)} for phase in plan.memory.phases}


# ---- where they sit


def test_every_shipped_topology_with_another_role_is_planned() -> None:
    host = Platform.of(plugin)
    for name, needed in (("critic", "needs_values"), ("reference", "needs_reference"), ("teacher", "needs_teacher")):
        for source, platform in ((f"cpu-{name}", "cpu"), (f"colocate-{name}", "cpu")):
            loaded = load_topology(source, platform=platform)
            plan = make_plan(loaded, model=TINY_MODEL, needs=replace(PlanNeeds(), **{needed: True}), platforms={"cpu": host})
            assert [role.task for role in plan.others] == [name]
            apart = plan.others[0].request.placement.slots != plan.actor.request.placement.slots
            assert apart is (source in ("cpu-critic", "cpu-teacher"))
            assert plan.shares_actor(plan.others[0]) is not apart
            with pytest.raises(PlanError, match=f"E301 roles.*: the algorithm uses no {name}"):
                make_plan(loaded, model=TINY_MODEL, needs=PlanNeeds(), platforms={"cpu": host})


def test_roles_on_the_actors_devices_get_its_slots_and_know_each_other() -> None:
    plan = planned("critic", "ref")
    slots = tuple(Slot(0, device) for device in range(8))
    assert [(r.role, r.task, r.trained) for r in plan.trainers] == [
        ("actor", "actor", True),
        ("critic", "critic", True),
        ("ref", "reference", False),
    ]
    assert all(role.request.placement.slots == slots for role in plan.trainers)
    assert plan.others[0].request.shared_with == ("actor", "ref", "rollout")
    assert (plan.shared, plan.residency) == (True, "park")
    assert {role.request.residency for role in (*plan.trainers, *plan.engines)} == {"park"}
    assert plan.memory.together == (("actor", "critic", "ref", "rollout"),)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_roles_on_devices_of_their_own_never_leave_them() -> None:
    plan = planned("critic", "ref", share=None, nodes=4)
    assert [role.request.placement.slots[0] for role in plan.trainers] == [Slot(0, 0), Slot(1, 0), Slot(2, 0)]
    assert plan.engines[0].request.placement.slots[0] == Slot(3, 0)
    assert (plan.shared, plan.residency, switches(plan)) == (False, None, [])
    assert {role.request.residency for role in plan.trainers} == {None}
    assert plan.memory.phases == ("serving", "scoring", "training", "updating")
    assert by_phase(plan, "critic")["serving"] == {"params", "grads", "optimizer"}


def test_a_pool_of_its_own_may_have_another_platform() -> None:
    source = {
        "pools": {"p": {"platform": "acme"}, "q": {"platform": "other"}},
        "roles": {
            "actor": {"kind": "train", "pool": "p", "devices": 4},
            "critic": {"kind": "train", "pool": "q", "devices": 2, "parallel": {"tp": 2}},
            "rollout": {"kind": "rollout", "pool": "p", "engines": 4},
        },
    }
    other = FakePlatform(name="other")
    platforms = {"acme": FakePlatform(), "other": other}
    plan = make_plan(load_topology(source), model=TINY_MODEL, needs=replace(BOUNDED, needs_values=True), platforms=platforms)
    (critic,) = plan.others
    assert (critic.pool, critic.request.parallel.tp, critic.request.placement.slots) == ("q", 2, (Slot(0, 0), Slot(0, 1)))
    assert not plan.shares_actor(critic)
    assert other.calls == [
        *("profiles", "ray_binding", "capabilities", "perf_model", "memory_backend"),
        *("collective", "process_env", "trainer_runtime", "megatron_adapt"),
    ]


def test_engines_of_their_own_beside_roles_that_take_turns() -> None:
    """A reference on the actor's devices; engines neither share nor sleep."""
    source = {
        "pools": {"p": {"platform": "acme", "nodes": 2}},
        "roles": {
            "actor": {"kind": "train", "devices": 8},
            "ref": {"kind": "train", "like": "actor"},
            "rollout": {"kind": "rollout", "engines": 8},
        },
        "share": [{"roles": ["actor", "ref"], "residency": "park"}],
    }
    needs = replace(BOUNDED, needs_reference=True)
    plan = make_plan(load_topology(source), model=BIG, needs=needs, platforms={"acme": FakePlatform()})
    assert (plan.shared, plan.residency) == (False, "park")
    assert {engine.request.residency for engine in plan.engines} == {None}
    assert by_phase(plan, "rollout")["training"] >= {"engine_weights", "kv"}
    assert by_phase(plan, "ref")["training"] == set()
    assert [role for role, _ in switches(plan)] == ["actor", "ref"]
    text = explain_text(plan)
    assert "shared by actor, ref by time, park" in text
    assert "switch between training roles" in text
    assert "sleep of" not in text


def test_nothing_to_leave_with_is_told_for_training_roles_alone() -> None:
    stuck = FakePlatform(backend=NullMemory("no memory saver"))
    source = {
        "pools": {"p": {"platform": "acme", "nodes": 2}},
        "roles": {"actor": {"kind": "train"}, "ref": {"kind": "train", "like": "actor"}, "rollout": {"kind": "rollout"}},
        "share": [{"roles": ["actor", "ref"], "residency": "park"}],
    }
    with pytest.raises(PlanError, match=r"E231 .*nothing can leave the device \(trainer: no memory saver\)"):
        make_plan(
            load_topology(source), model=TINY_MODEL, needs=replace(BOUNDED, needs_reference=True), platforms={"acme": stuck}
        )


@pytest.mark.parametrize("needed", [("ref",), ("critic",), ("teacher",), ("ref", "critic")])
@pytest.mark.parametrize("name", ["colocate", "disaggregated", "cpu-colocate", "cpu-disaggregated", "cpu-one-ahead"])
def test_the_lines_that_a_refusal_gives_make_the_plan(name: str, needed: tuple[str, ...]) -> None:
    """Written into the file as they are told, one refusal after the other."""
    source = yaml.safe_load(shipped_text(name))
    platforms = {"cpu": Platform.of(plugin)}
    needs = replace(PlanNeeds(), **{NEEDED[role]: True for role in needed})
    for _ in needed:
        with pytest.raises(PlanError, match="E301 the algorithm needs a ") as caught:
            make_plan(load_topology(source, platform="cpu"), model=TINY_MODEL, needs=needs, platforms=platforms)
        role, *shares = re.findall(r"`([^`]+)`", caught.value.fix or "")
        source["roles"] |= yaml.safe_load(role)
        (written,) = (yaml.safe_load(text) for text in shares)
        if "share" in written:
            source |= written
        else:
            source["share"][0] |= written
    plan = make_plan(load_topology(source, platform="cpu"), model=TINY_MODEL, needs=needs, platforms=platforms)
    assert {role.role for role in plan.others} == set(needed)
    assert all(plan.shares_actor(role) for role in plan.others)


# ---- what they hold


def test_parked_roles_are_on_the_device_in_their_own_turn_only() -> None:
    plan = planned("critic", "ref")
    assert plan.memory.phases == ("serving", "scoring ref", "scoring critic", "training critic", "training", "updating")
    held = {phase: tags for phase, tags in by_phase(plan, "ref").items() if tags}
    assert held == {"scoring ref": {"params", "activations"}}
    held = {phase: tags for phase, tags in by_phase(plan, "critic").items() if tags}
    assert held == {
        "scoring critic": {"params", "activations"},
        "training critic": {"params", "grads", "optimizer", "activations"},
    }
    moved = dict(switches(plan))
    assert set(moved) == {"actor", "critic", "ref", "rollout"}
    assert moved["ref"].seconds == pytest.approx(8e9 * 2 / 50e9)


def test_a_role_may_hold_a_model_of_its_own() -> None:
    small = replace(BIG, parameters=10**9, layers=8)
    plan = planned("teacher", share=None, nodes=3, models={"teacher": small})
    (teacher,) = plan.others
    assert (teacher.model, plan.model_of(teacher), plan.model_of(plan.actor)) == (small, small, BIG)
    rows = {row.role: row.num_bytes for row in plan.memory.rows if row.tag == "params"}
    assert rows == {"actor": 16 * 10**9, "teacher": 2 * 10**9}
    with pytest.raises(TopologyError, match=r"E205 roles\.teacher\.parallel\.pp: pp 16 does not divide 8 layers"):
        planned_with_pp(16, small)


def planned_with_pp(pp: int, teacher: Any) -> Plan:
    source = {
        "pools": {"p": {"platform": "acme", "nodes": 5}},
        "roles": {
            "actor": {"kind": "train", "devices": 16, "parallel": {"pp": pp}},
            "teacher": {"kind": "train", "devices": 16, "parallel": {"pp": pp}},
            "rollout": {"kind": "rollout"},
        },
    }
    needs = replace(BOUNDED, needs_teacher=True, models={"teacher": teacher})
    return make_plan(load_topology(source), model=BIG, needs=needs, platforms={"acme": FakePlatform()})


def test_experts_of_a_role_like_the_actor_are_spread_as_the_actors() -> None:
    moe = replace(BIG, parameters=30 * 10**9, ffn=0, experts=128, experts_per_token=8, expert_ffn=768, layers=48, hidden=2048)
    plan = planned("critic", model=moe, fake=Rated(node_memory_bytes=2048 * GIB))
    assert [role.request.parallel.ep for role in plan.trainers] == [8, 8]
    assert sum("parallel.ep 8, chosen by the plan" in note for note in plan.notes) == 2


# ---- how long they take


def parts(step: StepTime) -> Mapping[str, float]:
    return {part.name: part.estimate.seconds or 0.0 for part in step.parts}


def test_scores_and_the_critics_training_are_parts_of_a_step() -> None:
    plan = planned("critic", "ref", group_size=8)
    step = step_time(plan)
    found = parts(step)
    assert found["scores of ref"] == pytest.approx(found["forward"])
    assert found["values of critic"] == pytest.approx(found["forward"], rel=0.1)
    assert found["backward of critic"] == pytest.approx(3 * found["forward of critic"])
    assert "between ranks of critic" in found
    assert {"switch of ref", "switch of critic"} <= found.keys()
    assert step.total.seconds == pytest.approx(sum(found.values()))
    assert all(part.estimate.how for part in step.parts)


def test_roles_on_devices_of_their_own_score_and_train_side_by_side() -> None:
    step = step_time(planned("critic", "ref", share=None, nodes=4, group_size=8))
    found, of_critic = parts(step), ("forward of critic", "backward of critic", "between ranks of critic")
    of_actor = ("forward", "backward", "between ranks")
    hidden = min(sum(found[name] for name in names) for names in (of_actor, of_critic))
    hidden += min(found["scores of ref"], found["values of critic"])
    assert step.total.seconds == pytest.approx(sum(found.values()) - hidden)
    assert step.total.how == "one part after the other; training roles on devices of their own work side by side"


# ---- in words, as JSON, beside a run


def test_the_plan_says_what_becomes_of_every_role() -> None:
    plan = planned("critic", "ref")
    text = explain_text(plan)
    for part in (
        "shared by actor, critic, ref, rollout by time, park",
        "critic     p-0[0-7]  dp 8",
        "trainer critic: a critic, otherwise as actor",
        "memory of actor, critic, ref: vime.testing.platforms:nothing",
        "scoring ref",
        "scores of ref",
    ):
        assert part in text
    told = json.loads(json.dumps(explain_json(plan)))
    assert [(o["role"], o["task"], o["collective"]["backend"]) for o in told["others"]] == [
        ("critic", "critic", "gloo"),
        ("ref", "reference", "gloo"),
    ]
    assert [role["name"] for role in told["roles"]] == ["actor", "critic", "ref", "rollout#0", "rollout#1"]
    assert set(told["leaving"]) == {"actor", "critic", "ref", "rollout"}


def test_bytes_of_every_role_stand_beside_those_of_a_run() -> None:
    plan = planned("critic", "ref")
    planned_bytes = next(
        r.num_bytes for r in plan.memory.rows if (r.role, r.tag, r.phase) == ("critic", "optimizer", "training critic")
    )
    device = {"actor": {"params": 0}, "critic": {"optimizer": 2 * planned_bytes}, "ref": {"params": 16 * 10**9}}
    rows = [
        Row(RowKind.MEMORY, 1, 0.0, data={"edge": edge, "device": device, "host": {}})
        for edge in ("training critic", "scoring ref")
    ]
    found = {one.what: one.ratio for one in compare(plan, rows) if one.ratio is not None}
    assert found == {"training critic critic optimizer": 2.0, "scoring ref ref params": 1.0}
