"""The whole plan: order of the questions, residency, errors, and that any small topology gives a plan or a typed error."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.errors import ConfigError, Errors, PlacementError, PlanError, TopologyError
from vime.facts.bindings import RayBinding
from vime.facts.diagnosis import ProbeContext
from vime.facts.inventory import NodeInventory
from vime.facts.memory import EngineSleep, NullMemory, Tag
from vime.facts.model import ModelShape
from vime.facts.process import EnvMode, EnvValue, Slot
from vime.facts.transports import Relation, Side
from vime.planning.explain import explain_json, explain_text, slots_text, switches
from vime.planning.explain_roles import engine_text
from vime.planning.make import Here, make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.platforms.cpu import plugin
from vime.platforms.lineage import Platform
from vime.testing.plans import BIG, BOUNDED, UNBOUNDED, error_of, plan_of, topology
from vime.testing.platforms import GIB, STAYS, TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

MOE = replace(TINY_MODEL, experts=8, experts_per_token=2, expert_ffn=64)


# ---- the host


@pytest.fixture(scope="module")
def host() -> Platform:
    return Platform.of(plugin)


def test_a_host_shares_one_slot_and_stays_resident(host: Platform) -> None:
    plan = make_plan(load_topology("cpu-colocate"), model=TINY_MODEL, needs=PlanNeeds(), platforms={"cpu": host})
    assert (plan.shared, plan.residency, plan.dtype) == (True, "resident", "float32")
    assert plan.actor.request.placement.slots == (Slot(0, 0),)
    assert [e.request.placement.slots for e in plan.engines] == [(Slot(0, 0),)]
    assert plan.actor.request.shared_with == ("rollout",)
    assert plan.transport is not None
    assert plan.transport.edge.relation is Relation.SAME_DEVICE
    assert plan.transport.edge.num_bytes == 830_000 * 4
    assert plan.notes == ("W281 made from nominal devices: no machine was looked at",)


def test_a_host_disaggregated_has_slots_for_everyone(host: Platform) -> None:
    nodes = {"host": (host.inventory(ProbeContext({})),)}
    plan = make_plan(
        load_topology("cpu-disaggregated"), model=TINY_MODEL, needs=PlanNeeds(), platforms={"cpu": host}, inventories=nodes
    )
    assert (plan.shared, plan.residency) == (False, None)
    assert [e.request.placement.slots for e in plan.engines] == [(Slot(0, 1),), (Slot(0, 2),)]
    assert len(plan.pools[0].inventories[0].devices) == 3
    assert plan.notes == ()
    assert plan.start_timeout_s == 300.0


def test_supervised_training_needs_no_engine(host: Platform) -> None:
    loaded = load_topology("cpu-train")
    plan = make_plan(loaded, model=TINY_MODEL, needs=PlanNeeds(samples=False), platforms={"cpu": host})
    assert (plan.engines, plan.transport, plan.shared) == ((), None, False)
    with pytest.raises(PlanError, match="no rollout role, but the algorithm samples"):
        make_plan(loaded, model=TINY_MODEL, needs=PlanNeeds(), platforms={"cpu": host})


def test_tensor_parallel_on_slots_of_a_host(host: Platform) -> None:
    source = {
        "pools": {"h": {"platform": "cpu"}},
        "roles": {"actor": {"kind": "train", "parallel": {"tp": 2, "dp": 2}}, "rollout": {"kind": "rollout", "engines": 2}},
    }
    plan = make_plan(load_topology(source), model=TINY_MODEL, needs=PlanNeeds(), platforms={"cpu": host})
    assert plan.actor.request.parallel.dp == 2
    assert len(plan.pools[0].inventories[0].devices) == 6


def test_a_parked_host_plan_names_what_stays(host: Platform) -> None:
    source = {
        "pools": {"h": {"platform": "cpu"}},
        "roles": {"actor": {"kind": "train"}, "rollout": {"kind": "rollout"}},
        "share": [{"roles": ["actor", "rollout"], "residency": "park"}],
    }
    plan = make_plan(load_topology(source), model=TINY_MODEL, needs=PlanNeeds(), platforms={"cpu": host})
    assert plan.residency == "park"
    serving = {(r.role, r.tag) for r in plan.memory.rows if r.phase == "serving"}
    assert serving == {("rollout", "engine_weights"), ("rollout", "kv")}
    training = {(r.role, r.tag) for r in plan.memory.rows if r.phase == "training"}
    assert ("rollout", "kv") in training


# ---- order and records


def test_hooks_are_asked_in_the_stated_order_once_for_every_residency() -> None:
    fake = FakePlatform()
    plan = plan_of(topology(), fake=fake)
    assert plan.residency == "park"
    candidate = ["transports", "transports", "memory_backend", "engine_sleep", "engine_sleep"]
    engine = ["process_env", "vllm_defaults"]
    assert fake.calls == [
        "profiles",
        "ray_binding",
        "capabilities",
        "perf_model",
        *candidate,
        *candidate,
        "collective",
        "process_env",
        "trainer_runtime",
        "megatron_adapt",
        *engine,
        *engine,
    ]
    assert plan.hooks_asked[:4] == (
        "acme.ray_binding(p-0)",
        "acme.capabilities(p-0)",
        "acme.perf_model(p-0)",
        "acme.transports(actor -> rollout, trainer)",
    )
    assert len(plan.hooks_asked) == len(fake.calls) - 1


def test_requests_say_what_was_decided() -> None:
    plan = plan_of(topology(share="park"))
    requests = [plan.actor.request, *(e.request for e in plan.engines)]
    assert {r.residency for r in requests} == {"park"}
    assert [e.request.placement.slots[0] for e in plan.engines] == [Slot(0, 0), Slot(0, 4)]
    assert plan.engines[0].request.shared_with == ("actor",)


def test_a_plan_travels() -> None:
    plan = plan_of(topology())
    assert pickle.loads(pickle.dumps(plan)) == plan


# ---- residency


def test_small_roles_stay_large_roles_park() -> None:
    assert plan_of(topology(), model=TINY_MODEL).residency == "resident"
    assert plan_of(topology(), model=BIG, fake=FakePlatform(memory_bytes=1000 * GIB)).residency == "resident"
    assert plan_of(topology(), model=BIG).residency == "park"


def test_a_user_who_takes_the_bound_away_keeps_nothing_resident() -> None:
    for name in ("kv_cache_memory_bytes", "gpu-memory-utilization"):
        needs = PlanNeeds(vllm={name: None})
        plan = plan_of(topology(), model=TINY_MODEL, needs=needs)
        assert (plan.residency, {a.name for a in plan.engines[0].args} & {"kv_cache_memory_bytes"}) == ("park", set())
        error = error_of(topology(share="resident"), model=TINY_MODEL, needs=needs)
        assert "E231 residency resident: nothing bounds the engine's cache" in error.what
        assert error.fix == "set rollout.vllm.kv_cache_memory_bytes, or leave it out"


def test_sharing_is_legal_without_any_offload_when_the_sums_fit() -> None:
    stuck = FakePlatform(backend=NullMemory("no memory saver"), sleep=EngineSleep(0, {Tag.KV: STAYS}))
    assert plan_of(topology(), model=TINY_MODEL, fake=stuck).residency == "resident"
    error = error_of(topology(share="park"), model=TINY_MODEL, fake=stuck)
    assert "E231 residency park: nothing can leave the device (trainer: no memory saver" in error.what
    error = error_of(topology(), model=BIG, fake=stuck)
    assert error.what.startswith("E231 roles that share devices neither fit together nor can take turns: resident: E251")
    assert "park: E231" in error.what


def test_what_does_not_fit_even_apart() -> None:
    error = error_of(topology(share=None, actor={"parallel": {"tp": 8}}), model=replace(BIG, parameters=10**12))
    assert isinstance(error, Errors | PlanError)
    assert "E251 pools.p: training needs actor" in str(error)


def test_platform_defaults_of_the_engine_count_in_the_final_sum() -> None:
    fake = FakePlatform(engine_args={"kv_cache_memory_bytes": 10 * GIB})
    plan = plan_of(topology(share=None), needs=UNBOUNDED, fake=fake)
    assert {r.num_bytes for r in plan.memory.rows if r.tag == "kv"} == {10 * GIB}
    too_much = FakePlatform(engine_args={"kv_cache_memory_bytes": 100 * GIB})
    assert "E251" in error_of(topology(share=None), needs=UNBOUNDED, fake=too_much).what


# ---- transports, environment, limits


def test_the_transport_follows_the_relation_and_the_wishes() -> None:
    shared = plan_of(topology())
    assert shared.transport is not None
    assert shared.transport.protocol == "device_ipc"
    apart = plan_of(topology(share=None))
    assert apart.transport is not None
    assert apart.transport.protocol == "collective"
    first = apart.transport.rejected[0]
    assert (first.protocol, first.reason) == (
        "device_ipc",
        "trainer and engine must be on the same devices, each engine on one host",
    )
    edge = {"from": "actor", "to": "rollout", "forbid": ["collective"], "buffer": "1MiB"}
    wished = plan_of(topology(share=None, sync=[edge]))
    assert wished.transport is not None
    assert (wished.transport.protocol, wished.transport.buffer_bytes) == ("disk", 2**20)


def test_an_edge_without_transport_names_its_line() -> None:
    one_sided = FakePlatform(offers=(("a", 1.0, (Side.TRAINER,)), ("b", 1.0, (Side.ENGINE,))))
    error = error_of(topology(), fake=one_sided)
    assert "E241 no transport is left for actor -> rollout" in error.what


def test_environment_of_rules_and_user() -> None:
    rules = {"A": EnvValue("1", "needed", EnvMode.REQUIRE), "B": EnvValue("2", "handy")}
    plan = plan_of(topology(env={"trainer": {"B": "5"}, "engine": {"C": "x"}}), fake=FakePlatform(rules=rules))
    assert plan.actor.env == {"A": "1", "B": "5"}
    assert plan.engines[1].env == {"A": "1", "B": "2", "C": "x"}
    error = error_of(topology(env={"engine": {"A": "0"}}), fake=FakePlatform(rules=rules))
    assert "E261 rollout: A is '0' in the topology, but must be '1': needed" in error.what
    equal = {"A": EnvValue("1", "one communicator", scope="both_equal")}
    assert "E262" in error_of(topology(env={"engine": {"A": "0"}}), fake=FakePlatform(rules=equal)).what


def test_what_both_sides_need_alike_for_a_transport_binds_where_it_is_chosen() -> None:
    fake = FakePlatform(rules={"A": EnvValue("1", "one communicator", scope="both_equal", protocols=("collective",))})
    env, edge = {"engine": {"A": "0"}}, {"from": "actor", "to": "rollout"}
    shared = plan_of(topology(env=env), fake=fake)
    assert shared.transport is not None
    assert shared.transport.protocol == "device_ipc"
    plan_of(topology(share=None, env=env, sync=[{**edge, "forbid": ["collective"]}]), fake=fake)
    for wish in ({}, {"require": ["collective"]}):
        error = error_of(topology(share=None, env=env, sync=[{**edge, **wish}]), fake=fake)
        assert "E262 A is '1' for the trainer and '0' for the engine: one communicator" in error.what


def test_limits() -> None:
    plan = plan_of(topology(limits={"start_timeout": "20m", "device_reserve": "1GiB"}))
    assert (plan.start_timeout_s, plan.memory.reserve_bytes) == (1200.0, GIB)
    error = error_of(topology(limits={"host_pinned_per_node": "1GiB"}))
    assert "E252 pools.p" in str(error)


# ---- errors


def test_everything_hardware_and_model_say_is_reported_together() -> None:
    source = topology(actor={"devices": 16, "parallel": {"tp": 16}}, share=None)
    source["pools"]["p"] |= {"nodes": 1, "devices_per_node": 4}
    error = error_of(source, model=TINY_MODEL)
    assert isinstance(error, Errors)
    assert {e.what.split(" ")[0] for e in error.errors} == {"E201", "E211", "E204", "E205"}


def test_platforms_that_are_not_there() -> None:
    source = topology()
    source["pools"]["p"]["platform"] = "zeta"
    assert "E271 pools.p: platform zeta is not active (active: acme)" in error_of(source).what
    source["pools"]["p"]["platform"] = "auto"
    assert "E271 pools.p: no platform is chosen" in error_of(source).what


def test_a_dtype_that_a_side_lacks() -> None:
    error = error_of(topology(), needs=replace(BOUNDED, dtype="float16"))
    assert error.what == "E214 pools.p: acme has no float16 (model.dtype)"
    assert error.fix == "set model.dtype to one of bfloat16, float32"


def test_a_device_that_a_platform_does_not_know() -> None:
    source = topology()
    source["pools"]["p"]["device"] = "acme-8g"
    assert "E104 pools.p.device: acme knows no 'acme-8g'" in error_of(source).what


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ({"kind": "train", "devices": 1}, "a run has one actor, and actor is it"),
        ({"kind": "train", "optimizer": False}, "the algorithm uses no reference"),
        ({"kind": "rollout"}, "this is a second set of engines beside rollout"),
    ],
)
def test_roles_that_a_run_does_not_start_are_refused(role: dict[str, Any], text: str) -> None:
    source = topology(share=None)
    source["roles"]["more"] = role
    assert f"E301 roles.more: {text}" in error_of(source).what


def test_engines_that_do_not_fit_between_nodes() -> None:
    source = topology(share=None, actor={"devices": 6}, rollout={"engines": 2})
    source["pools"]["p"]["nodes"] = [{"devices": 6}, {"devices": 8}]
    assert plan_of(source).engines[0].request.placement.slots[0] == Slot(1, 0)
    source["pools"]["p"]["nodes"] = [{"devices": 7}, {"devices": 7}]
    error = error_of(source)
    assert isinstance(error, PlacementError)


# ---- in words


def test_the_plan_in_words() -> None:
    plan = plan_of(topology())
    text = explain_text(plan)
    for part in (
        "made: qwen3, 8,000,000,000 parameters, bfloat16; shared by time, park",
        "actor      p-0[0-7]  dp 8",
        "rollout#1  p-0[4-7]  tp 4",
        "optimizer 11.18 GiB",
        "chosen    device_ipc: about 0.149 s (spec)",
        "rejected  collective: slower here",
        "actor: about 0.56 s (spec) each way (28 GB / 50 GB/s)",
        "grads        leaves the device    dropped, zeros later",
        "the first parking takes longer",
        "recompute full, yours (trainer.recompute)",
        "how the memory was found",
        "2 buffers x 536870912 of device_ipc",
        "answers of platforms and 1 rates: `vime plan CONFIG --verbose` prints them",
        "note: W281",
    ):
        assert part in text
    told = explain_text(plan, verbose=True)
    for part in ("hooks asked", "acme.perf_model(p-0)", "p.host_link: 50 GB/s, spec (data sheet)"):
        assert part in told
        assert part not in text


def test_every_size_of_a_role_is_told() -> None:
    plan = plan_of(topology(share=None, actor={"parallel": {"pp": 2, "vpp": 4}}))
    assert "p-0[0-7]  pp 2 dp 4 vpp 4" in explain_text(plan)
    sizes = explain_json(plan)["roles"][0]["parallel"]
    assert sizes == {"tp": 1, "pp": 2, "cp": 1, "ep": 1, "etp": 1, "dp": 4, "vpp": 4}


def test_the_plan_as_json() -> None:
    plan = plan_of(topology())
    told = json.loads(json.dumps(explain_json(plan)))
    assert told["roles"][1] == {
        "name": "rollout#0",
        "pool": "p",
        "slots": [[0, 0], [0, 1], [0, 2], [0, 3]],
        "parallel": {"tp": 4, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "dp": 1, "vpp": 1},
    }
    assert told["transport"]["protocol"] == "device_ipc"
    assert {row["tag"] for row in told["memory"]["rows"]} >= {"params", "optimizer", "kv"}
    assert [s["role"] for s in told["switch"]] == ["actor", "rollout"]


def test_a_pool_that_nobody_uses_is_planned_and_printed() -> None:
    source = topology(share=None)
    source["pools"]["idle"] = {"platform": "acme"}
    source["roles"] = {name: {**role, "pool": "p"} for name, role in source["roles"].items()}
    text = explain_text(plan_of(source))
    assert "pool idle: 1 node(s)" in text
    assert "pool idle: at most" not in text


def test_nothing_moves_where_everything_stays() -> None:
    plan = plan_of(topology(), model=TINY_MODEL)
    assert switches(plan) == []
    assert "nothing moves" in explain_text(plan)


def test_slots_in_words() -> None:
    pool = plan_of(topology(share=None)).pools[0]
    slots = [Slot(0, 0), Slot(0, 1), Slot(0, 3), Slot(1, 5)]
    assert slots_text(slots, pool) == "p-0[0-1,3] p-1[5]"


# ---- any topology

SIZES = st.sampled_from([1, 1, 2, 2, 3, 4, 8])
AXES = st.fixed_dictionaries({}, optional=dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "dp"), SIZES))
POOLS = st.fixed_dictionaries(
    {"platform": st.sampled_from(["acme", "acme", "slots", "auto", "zeta"])},
    optional={
        "nodes": st.one_of(
            SIZES, st.lists(st.fixed_dictionaries({"devices": SIZES}, optional={"count": SIZES}), min_size=1, max_size=2)
        ),
        "devices_per_node": SIZES,
        "device": st.sampled_from(["acme-80g", "other"]),
    },
)
ROLES = st.fixed_dictionaries(
    {"kind": st.sampled_from(["train", "rollout"])},
    optional={
        "pool": st.sampled_from(["p", "q"]),
        "like": st.sampled_from(["actor", "rollout", "ref"]),
        "devices": SIZES,
        "engines": SIZES,
        "parallel": AXES,
        "optimizer": st.booleans(),
        "stage": st.just("prefill"),
        "endpoints": st.just(["http://127.0.0.1:1"]),
    },
)
NAMES = st.sampled_from(["actor", "rollout", "ref", "nobody"])
PROTOCOLS = st.lists(st.sampled_from(["device_ipc", "collective", "disk", "nope"]), max_size=2)
TOPOLOGIES = st.fixed_dictionaries(
    {
        "pools": st.dictionaries(st.sampled_from(["p", "q"]), POOLS, min_size=1),
        "roles": st.dictionaries(st.sampled_from(["actor", "rollout", "ref"]), ROLES, min_size=1),
    },
    optional={
        "share": st.lists(
            st.fixed_dictionaries(
                {"roles": st.lists(NAMES, min_size=1, max_size=3)},
                optional={"residency": st.sampled_from(["auto", "park", "resident"])},
            ),
            max_size=2,
        ),
        "sync": st.lists(
            st.fixed_dictionaries(
                {"from": NAMES, "to": NAMES}, optional={"prefer": PROTOCOLS, "forbid": PROTOCOLS, "require": PROTOCOLS}
            ),
            max_size=2,
        ),
        "limits": st.fixed_dictionaries({}, optional={"device_reserve": st.sampled_from(["0", "79GiB", "1TiB"])}),
        "env": st.fixed_dictionaries({}, optional={"trainer": st.just({"A": "0"}), "engine": st.just({"A": "1"})}),
    },
)


def simple(kind: str) -> Any:
    """Topologies that are mostly right, so that plans come out too."""
    train = st.fixed_dictionaries({"kind": st.just("train")}, optional={"parallel": AXES})
    engines = st.fixed_dictionaries({"kind": st.just("rollout"), "engines": SIZES}, optional={"parallel": AXES})
    return st.fixed_dictionaries(
        {
            "pools": st.just({"p": {"platform": kind, "nodes": 4}}),
            "roles": st.fixed_dictionaries({"actor": train, "rollout": engines}),
        },
        optional={"share": st.just([{"roles": ["actor", "rollout"]}])},
    )


def outcome(source: dict[str, Any], model: ModelShape, needs: PlanNeeds) -> Plan | str:
    slots = FakePlatform(name="slots", virtual=True, devices_per_node=None, dtypes=("float32", "bfloat16"))
    rules = {"A": EnvValue("1", "why", EnvMode.REQUIRE)}
    platforms = {"acme": FakePlatform(rules=rules), "slots": slots}
    try:
        return make_plan(load_topology(source), model=model, needs=needs, platforms=platforms)
    except (TopologyError, PlanError, PlacementError, Errors) as error:
        return f"{type(error).__name__} {error}"


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(TOPOLOGIES, simple("acme"), simple("slots")),
    st.sampled_from([TINY_MODEL, BIG, MOE]),
    st.sampled_from([PlanNeeds(), BOUNDED, PlanNeeds(samples=False), PlanNeeds(vllm={"gpu_memory_utilization": 0.9})]),
)
def test_any_topology_gives_a_plan_or_a_typed_error_and_the_same_twice(
    source: dict[str, Any], model: ModelShape, needs: PlanNeeds
) -> None:
    first = outcome(source, model, needs)
    assert first == outcome(source, model, needs)
    if isinstance(first, Plan):
        assert explain_text(first)
        json.dumps(explain_json(first))
        _check_sound(first)


def _check_sound(plan: Plan) -> None:
    """What every plan keeps: whole placements inside the pool, preconditions of the chosen transport, memory that fits."""
    sizes = {pool.name: [len(node.devices) for node in pool.inventories] for pool in plan.pools}
    placed = [(plan.actor.pool, plan.actor.request), *((e.pool, e.request) for e in plan.engines)]
    for pool, request in placed:
        assert len(request.placement.slots) == request.parallel.devices == len(set(request.placement.slots))
        assert all(slot.device < sizes[pool][slot.node] for slot in request.placement.slots)
    taken = [(pool, slot) for pool, request in placed for slot in request.placement.slots]
    if not plan.shared:
        assert len(set(taken)) == len(taken)
    if plan.transport is not None:
        assert all(p.holds for offer in (plan.transport.trainer, plan.transport.engine) for p in offer.preconditions)
    for pool in plan.pools:
        if not pool.inventories[0].virtual:
            peak = max(plan.memory.phase_bytes(pool.name, phase) for phase in ("serving", "training", "updating"))
            assert peak == 0 or peak + plan.memory.reserve_bytes <= plan.memory.capacity_bytes[pool.name]


def test_the_search_finds_plans_and_errors() -> None:
    """Guards the property test above against strategies that only ever give errors."""
    good = {
        "pools": {"p": {"platform": "acme", "nodes": 4}},
        "roles": {"actor": {"kind": "train"}, "rollout": {"kind": "rollout", "engines": 2}},
    }
    assert isinstance(outcome(good, TINY_MODEL, PlanNeeds()), Plan)
    assert isinstance(outcome({**good, "env": {"trainer": {"A": "0"}}}, TINY_MODEL, PlanNeeds()), str)


# ---- what the placement uses, what the machine sets


class Masked(FakePlatform):
    """Discrete devices that a variable masks."""

    def ray_binding(self, inventory: NodeInventory) -> RayBinding:
        return RayBinding("NPU", ("VISIBLE",), ("NOSET",), unset_env=("OTHER",))


def live_plan(node: NodeInventory, env: dict[str, str], source: Any, fake: FakePlatform | None = None) -> Plan:
    return make_plan(
        load_topology(source),
        model=TINY_MODEL,
        needs=BOUNDED,
        platforms={"acme": fake or Masked()},
        inventories={"p": (node,)},
        here=Here(env, frozenset({"p"})),
    )


def apart(actor: int, engines: int) -> dict[str, Any]:
    return topology(share=None, actor={"devices": actor}, rollout={"engines": engines, "parallel": {}}) | {
        "pools": {"p": {"platform": "acme"}}
    }


def test_masks_of_this_machine_bound_the_plan_and_reach_every_process() -> None:
    node = replace(Masked().node(devices=16))
    plan = live_plan(node, {"VISIBLE": "8,9,10,11"}, apart(2, 2))
    assert [d.index for d in plan.pools[0].inventories[0].devices] == [8, 9, 10, 11]
    assert list(plan.actor.masks) == [{"VISIBLE": "8"}, {"VISIBLE": "9"}]
    assert [e.mask for e in plan.engines] == [{"VISIBLE": "10"}, {"VISIBLE": "11"}]
    assert "VISIBLE leaves 4 of 16 devices of n0" in plan.notes
    assert "rollout#1     VISIBLE = 11" in explain_text(plan)
    with pytest.raises(TopologyError, match=r"E201 pools\.p: roles need actor 2 .* the pool has 3"):
        live_plan(node, {"VISIBLE": "8,9,10"}, apart(2, 2))
    with pytest.raises(TopologyError, match="its nodes have no devices") as caught:
        live_plan(node, {"VISIBLE": ""}, apart(2, 2))
    assert caught.value.fix == "look at `vime doctor`, and at VISIBLE in the environment"


def test_masks_of_this_machine_say_nothing_of_other_hardware() -> None:
    loaded = load_topology(apart(2, 2))
    here = Here({"VISIBLE": "7", "OTHER": "3"})
    plan = make_plan(loaded, model=TINY_MODEL, needs=BOUNDED, platforms={"acme": Masked()}, here=here)
    assert list(plan.actor.masks) == [{"VISIBLE": "0"}, {"VISIBLE": "1"}]


def test_options_apply_to_the_environment_that_processes_inherit() -> None:
    rules = {"A": EnvValue("x", "the pool needs it", EnvMode.WITHOUT)}
    plan = live_plan(Masked().node(), {"A": "x:1,y:2"}, apart(1, 1), Masked(rules=rules))
    assert (plan.actor.env, plan.engines[0].env) == ({"A": "y:2"}, {"A": "y:2"})
    assert "is y:2  the pool needs it (from the environment's value 'x:1,y:2')" in explain_text(plan)


def test_training_refuses_parts_of_devices_and_nobody_uses_sick_ones() -> None:
    node = Masked().node()
    devices = list(node.devices)
    devices[0] = replace(devices[0], partition="3 of 7 slices")
    parts = replace(node, devices=tuple(devices))
    with pytest.raises(TopologyError, match=r"E212 roles.actor: .* n0\[0\]: 3 of 7 slices"):
        live_plan(parts, {}, apart(1, 1))
    assert live_plan(parts, {"VISIBLE": "1,0"}, apart(1, 1)).engines[0].mask == {"VISIBLE": "0"}
    devices[0] = replace(node.devices[0], health="12 uncorrected memory errors")
    sick = replace(node, devices=tuple(devices))
    both = topology(share="resident", actor={"devices": 2}, rollout={"parallel": {}}) | {"pools": {"p": {"platform": "acme"}}}
    with pytest.raises(Errors) as caught:
        live_plan(sick, {}, both)
    assert [e.what for e in caught.value.errors] == [
        f"E213 roles.{role}: not healthy: n0[0]: 12 uncorrected memory errors" for role in ("actor", "rollout")
    ]
    assert live_plan(sick, {"VISIBLE": "1,2"}, apart(1, 1)).actor.masks[0] == {"VISIBLE": "1"}


# ---- parts of a pool


@pytest.mark.parametrize(("name", "devices", "engines", "shared"), [("colocate", 8, 8, True), ("disaggregated", 4, 4, False)])
def test_topologies_for_any_platform_take_what_a_node_has(name: str, devices: int, engines: int, shared: bool) -> None:
    plan = make_plan(load_topology(name, platform="acme"), model=TINY_MODEL, needs=BOUNDED, platforms={"acme": FakePlatform()})
    assert (len(plan.actor.request.placement.slots), len(plan.engines), plan.shared) == (devices, engines, shared)


@pytest.mark.parametrize(("name", "slots"), [("colocate", 1), ("disaggregated", 2)])
def test_on_a_host_they_make_as_few_slots_as_will_do(host: Platform, name: str, slots: int) -> None:
    loaded = load_topology(name, platform="cpu")
    plan = make_plan(loaded, model=TINY_MODEL, needs=PlanNeeds(), platforms={"cpu": host})
    assert len(plan.pools[0].inventories[0].devices) == slots
    assert len(plan.engines) == 1


def test_parts_that_do_not_come_out_even() -> None:
    source = topology(share=None, actor={"devices": "half"}, rollout={"devices": "half", "parallel": {"tp": 3}})
    del source["roles"]["rollout"]["engines"]
    source["pools"]["p"]["nodes"] = 1
    text = "E206 roles.rollout.devices: 4 devices (half of pool p) are not a multiple of an engine's 3"
    assert text in error_of(source).what
    odd = error_of(source, fake=FakePlatform(devices_per_node=5))
    assert "E201 roles.actor.devices: half of 5 devices of pool p is no whole number" in odd.what
    mixed = topology(actor={"devices": "all"})
    assert len(plan_of(mixed).actor.request.placement.slots) == 8
    mixed["roles"]["rollout"] = {"kind": "rollout", "engines": 1, "parallel": {"tp": 4}}
    assert "E233 share.0: time sharing needs one set of devices, but actor uses 8, rollout uses 4" in error_of(mixed).what


# ---- engine arguments


def test_every_engine_argument_has_its_origin() -> None:
    sleep = EngineSleep(1, {Tag.KV: STAYS}, args={"enable_sleep_mode": True})
    fake = FakePlatform(engine_args={"max_num_seqs": 256, "block_size": 16, "seed_cache": 1}, sleep=sleep)
    needs = replace(BOUNDED, vllm={**BOUNDED.vllm, "max-num-seqs": 64, "seed_cache": None})
    plan = plan_of(topology(), model=TINY_MODEL, needs=needs, fake=fake)
    told = {a["name"]: (a["value"], a["origin"], a["over"]) for a in explain_json(plan)["engine"]}
    assert told["max_num_seqs"] == (64, "user", 256)
    assert told["block_size"] == (16, "platform acme", None)
    assert told["enable_sleep_mode"] == (True, "sleep", None)
    assert told["tensor_parallel_size"] == (4, "topology", None)
    assert told["logprobs_mode"] == ("processed_logprobs", "vime", None)
    assert "seed_cache" not in told
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.middleware is set by vime"):
        plan_of(topology(), model=TINY_MODEL, needs=replace(BOUNDED, vllm={"middleware": "x"}))


def test_engines_that_tell_experts_are_shown_with_the_reason() -> None:
    plan = plan_of(topology(), model=TINY_MODEL, needs=replace(BOUNDED, returns_experts=True))
    (arg,) = [a for a in explain_json(plan)["engine"] if a["name"] == "enable_return_routed_experts"]
    assert (arg["value"], arg["origin"]) == (True, "replay")
    assert "needed by trainer.routing_replay" in "\n".join(engine_text(plan))
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts is set by vime\n  fix: use trainer\.routing_replay"):
        plan_of(topology(), model=TINY_MODEL, needs=replace(BOUNDED, vllm={"enable_return_routed_experts": True}))
