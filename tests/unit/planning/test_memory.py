"""Bytes per device, by hand."""

from __future__ import annotations

from dataclasses import replace

from vime.facts.memory import EngineSleep, NullMemory, Tag
from vime.facts.process import Parallel
from vime.planning.amounts import Amount, Beside
from vime.planning.memory import (
    Occupant,
    PoolSpace,
    check_memory,
    parked_bytes,
    phases_of,
    plan_memory,
    room_for_cache,
    turns_of,
)
from vime.testing.platforms import FREED, STAYS, FakePlatform
from vime.topology.rules import ResolvedRole

# ---- phases


FAKE = FakePlatform()
ACTOR = ResolvedRole("actor", "train", "p", Parallel(), 1, 1)
ROLLOUT = ResolvedRole("rollout", "rollout", "p", Parallel(), 1, 1, optimizer=False)
HELD = (
    Amount(Tag.PARAMS, 1, ""),
    Amount(Tag.GRADS, 2, ""),
    Amount(Tag.OPTIMIZER, 4, ""),
    Amount(Tag.ACTIVATIONS, 8, ""),
)
SERVED = (Amount(Tag.ENGINE_WEIGHTS, 16, ""), Amount(Tag.KV, 32, ""))


def pair(
    *, parks: bool, sleep: EngineSleep = FAKE.sleep, group: str = "g", virtual: bool = False
) -> tuple[PoolSpace, list[Occupant]]:
    node = FakePlatform(memory_bytes=1000, node_memory_bytes=1000, virtual=virtual).node(devices=2)
    space = PoolSpace("p", (node,), 0, None, "t.yaml:3")
    other = group if group == "g" else "own"
    turns = turns_of([(ACTOR, "g"), (ROLLOUT, other)])
    return space, [
        Occupant(ACTOR, "g", HELD, FAKE.backend, parks, (0,), turns["actor"]),
        Occupant(ROLLOUT, other, SERVED, sleep, parks, (0,), turns["rollout"]),
    ]


def phases(space: PoolSpace, occupants: list[Occupant]) -> list[int]:
    plan = plan_memory([space], occupants, published_bytes=0)
    assert plan.phases == ("serving", "training", "updating")
    return [plan.phase_bytes("p", phase) for phase in plan.phases]


def test_resident_roles_stay_in_every_phase() -> None:
    assert phases(*pair(parks=False)) == [1 + 2 + 4 + 16 + 32, 15 + 48, 7 + 48]


def test_parked_roles_leave_and_meet_only_while_updating() -> None:
    assert phases(*pair(parks=True)) == [48, 15, 1 + 16]


def test_what_an_engine_cannot_free_stays() -> None:
    pause_only = EngineSleep(0, {Tag.ENGINE_WEIGHTS: STAYS, Tag.KV: STAYS})
    assert phases(*pair(parks=True, sleep=pause_only)) == [48, 15 + 48, 1 + 48]


TEAM = {
    "ref": ((Amount(Tag.PARAMS, 1000, ""), Amount(Tag.ACTIVATIONS, 2000, "", scoring=True)), "reference"),
    "critic": (
        (
            *(Amount(tag, size, "") for tag, size in ((Tag.PARAMS, 100), (Tag.GRADS, 200), (Tag.OPTIMIZER, 400))),
            Amount(Tag.ACTIVATIONS, 800, ""),
            Amount(Tag.ACTIVATIONS, 50, "", scoring=True),
        ),
        "critic",
    ),
}


def team(*, parks: bool, groups: dict[str, str]) -> tuple[PoolSpace, list[Occupant]]:
    """The pair, a reference and a critic; `groups` says on which devices those are."""
    space, (actor, rollout) = pair(parks=parks)
    more = [(name, held, replace(ACTOR, name=name, task=task)) for name, (held, task) in TEAM.items()]
    turns = turns_of([(ACTOR, "g"), *((role, groups[name]) for name, _, role in more), (ROLLOUT, "g")])
    others = [
        Occupant(role, groups[name], held, FAKE.backend, parks and groups[name] == "g", (0,), turns[name])
        for name, held, role in more
    ]
    here = [replace(actor, turns=turns["actor"]), *others, replace(rollout, turns=turns["rollout"])]
    return replace(space, nodes=(FakePlatform(memory_bytes=10_000, node_memory_bytes=10_000).node(devices=2),)), here


def test_training_roles_on_the_same_devices_take_turns() -> None:
    space, occupants = team(parks=True, groups={"ref": "g", "critic": "g"})
    plan = plan_memory([space], occupants, published_bytes=0)
    found = {phase: plan.phase_bytes("p", phase) for phase in plan.phases}
    assert found == {
        "serving": 48,
        "scoring ref": 1000 + 2000,
        "scoring critic": 100 + 50,
        "training critic": 100 + 200 + 400 + 800,
        "training": 15,
        "updating": 1 + 16,
    }
    assert plan.host_bytes_per_node == 5 + 48 + 1000 + 500


def test_training_roles_that_stay_are_added_up() -> None:
    space, occupants = team(parks=False, groups={"ref": "g", "critic": "g"})
    plan, stay = plan_memory([space], occupants, published_bytes=0), 7 + 1000 + 700 + 48
    assert [plan.phase_bytes("p", phase) - stay for phase in plan.phases] == [0, 2000, 50, 800, 8, 0]


def test_training_roles_on_devices_of_their_own_work_side_by_side() -> None:
    space, occupants = team(parks=True, groups={"ref": "r", "critic": "c"})
    plan = plan_memory([space], occupants, published_bytes=0)
    assert plan.phases == ("serving", "scoring", "training", "updating")
    assert [plan.phase_bytes("p", phase) for phase in plan.phases] == [1000, 3000, 700 + 800, 1000]
    mixed = team(parks=True, groups={"ref": "g", "critic": "c"})[1]
    assert phases_of(mixed) == ("serving", "scoring ref", "training", "updating")
    assert next(o for o in mixed if o.role.name == "critic").turns == {"scoring ref": "scoring", "training": "training"}


def test_a_host_adds_up_who_works_side_by_side() -> None:
    """Its slots are one memory: what is parked stays in it, and roles with slots of their own work at once."""
    space, occupants = team(parks=False, groups={"ref": "r", "critic": "c"})
    node = FakePlatform(memory_bytes=10, node_memory_bytes=2562, virtual=True).node(devices=2)
    here = [replace(occupant, nodes=(0,)) for occupant in occupants]
    errors, _ = check(replace(space, nodes=(node,)), here)
    assert [error.removeprefix("t.yaml:3: E251 pools.p: ") for error in errors] == [
        "scoring needs actor 7 B + ref 2.93 KiB + critic 750 B + rollout 48 B = 3.72 KiB of 2.50 KiB",
        "training needs actor 15 B + ref 1000 B + critic 1.46 KiB + rollout 48 B = 2.50 KiB of 2.50 KiB",
    ]


def test_roles_on_devices_of_their_own_are_not_added_up() -> None:
    assert phases(*pair(parks=False, group="other")) == [48, 48, 48]


def test_what_processes_take_beside_tensors_stays_and_an_engine_works_while_it_serves() -> None:
    for parks, expected in ((True, [48 + 96, 15 + 64, 17 + 64]), (False, [55 + 96, 63 + 96, 55 + 96])):
        space, (actor, rollout) = pair(parks=parks)
        more = (*rollout.amounts, Amount(Beside.RUNTIME, 64, ""), Amount(Tag.ACTIVATIONS, 32, ""))
        assert phases(space, [actor, replace(rollout, amounts=more)]) == expected


def test_a_cache_gets_what_the_fullest_phase_that_it_lives_in_leaves() -> None:
    without = (SERVED[0],)
    for parks, left in ((True, 920 - 20 - 16), (False, 920 - 20 - 15 - 16)):
        space, (actor, rollout) = pair(parks=parks)
        engine = replace(rollout, amounts=without)
        found, how = room_for_cache(replace(space, reserve_bytes=20), [actor, engine], engine)
        assert found == left
        assert how.startswith("0.92 x 1000 B - reserve 20 B - (")


def test_parked_bytes_are_those_whose_content_is_kept_and_gradients_are_dropped() -> None:
    _, (actor, rollout) = pair(parks=True)
    assert (parked_bytes(actor), parked_bytes(rollout)) == (5, 48)
    lost = replace(FREED, preserves=False)
    level2 = EngineSleep(2, {Tag.ENGINE_WEIGHTS: lost, Tag.KV: lost})
    assert parked_bytes(replace(rollout, leaves=level2)) == 0
    assert parked_bytes(replace(actor, parks=False)) == parked_bytes(replace(actor, leaves=NullMemory("no"))) == 0


def check(space: PoolSpace, occupants: list[Occupant], published: int = 0) -> tuple[list[str], list[str]]:
    errors, notes = check_memory(space, plan_memory([space], occupants, published_bytes=published), occupants)
    return [f"{e.where}: {e.what}" for e in errors], notes


def test_what_does_not_fit_names_phase_parts_and_sum() -> None:
    space, occupants = pair(parks=False)
    small = FakePlatform(memory_bytes=60, node_memory_bytes=1000).node(devices=2)
    errors, _ = check(replace(space, nodes=(small,), reserve_bytes=2), occupants)
    assert errors == ["t.yaml:3: E251 pools.p: training needs actor 15 B + rollout 48 B + reserve 2 B = 65 B of 60 B"]


def test_nearly_full_is_a_warning() -> None:
    space, occupants = pair(parks=False)
    node = FakePlatform(memory_bytes=65, node_memory_bytes=1000).node(devices=2)
    assert check(replace(space, nodes=(node,)), occupants)[1] == [
        "W253 pools.p: training needs actor 15 B + rollout 48 B = 63 B of 65 B: within 8% of the limit"
    ]


def test_host_memory_of_parked_state_and_published_weights() -> None:
    space, occupants = pair(parks=True)
    plan = plan_memory([space], occupants, published_bytes=100)
    assert plan.host_bytes_per_node == 5 + 48 + 100
    errors, _ = check(replace(space, host_limit_bytes=150), occupants, published=100)
    assert errors == [
        "t.yaml:3: E252 pools.p: parked state and published weights need 153 B a node, limits.host_pinned_per_node is 150 B"
    ]
    assert check(replace(space, host_limit_bytes=153), occupants, published=100)[0] == []


def test_the_copy_of_a_checkpoint_is_host_memory_beside_that() -> None:
    """The optimizer's part of two ranks and one set of parameters; a limit of pinned memory does not bound it."""
    space, (actor, rollout) = pair(parks=True)
    space = replace(space, host_limit_bytes=400)
    ranks = replace(actor, nodes=(0, 0), role=replace(ACTOR, parallel=Parallel(dp=2)), amounts=tens(HELD))
    plan = plan_memory([space], [ranks, rollout], published_bytes=100, copies=True)
    assert (plan.host_bytes_per_node, plan.copied_bytes_per_node) == (2 * 50 + 48 + 100, 2 * (40 + 5))
    assert plan_memory([space], [ranks, rollout], published_bytes=100).copied_bytes_per_node == 0
    assert check_memory(space, plan, [ranks, rollout])[0] == []
    small = replace(space, nodes=(replace(space.nodes[0], memory_bytes=337),))
    assert [str(error) for error in check_memory(small, plan, [ranks, rollout])[0]] == [
        "t.yaml:3: E252 pools.p: parked state, published weights and the copy of a checkpoint need 338 B a node,"
        " the node's memory is 337 B\n  fix: set checkpoint.asynchronous to false"
    ]


def tens(amounts: tuple[Amount, ...]) -> tuple[Amount, ...]:
    return tuple(replace(amount, num_bytes=10 * amount.num_bytes) for amount in amounts)


def test_slots_of_a_host_share_its_memory() -> None:
    """A slot's share may be exceeded while the host has room; what is parked stays in the host."""
    space, occupants = pair(parks=True, virtual=True)
    roomy = FakePlatform(memory_bytes=10, node_memory_bytes=63, virtual=True).node(devices=2)
    assert check(replace(space, nodes=(roomy,)), occupants)[0] == []
    tight = FakePlatform(memory_bytes=10, node_memory_bytes=62, virtual=True).node(devices=2)
    assert check(replace(space, nodes=(tight,)), occupants)[0] == [
        "t.yaml:3: E251 pools.p: training needs actor 15 B + rollout 48 B = 63 B of 62 B"
    ]
