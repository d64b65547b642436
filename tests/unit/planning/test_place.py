"""Slots for demands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.errors import PlacementError
from vime.facts.process import Parallel, Slot
from vime.planning.place import Demand, demand_for, engine_slots, nodes_of, place
from vime.topology.rules import ResolvedRole


def rollout(engines: int, tp: int) -> ResolvedRole:
    return ResolvedRole("rollout", "rollout", "p", Parallel(tp=tp), engines, engines * tp, optimizer=False)


def test_engines_sit_where_their_slots_are() -> None:
    placed = place([8, 8], [Demand("actor", 4, 1), Demand("rollout", 12, 4)], pool="p")
    assert [nodes_of(slots) for slots in engine_slots(placed["rollout"], rollout(3, 4))] == [(0,), (1,), (1,)]
    assert placed["rollout"][0] == Slot(0, 4)


def test_a_group_that_would_be_cut_starts_on_the_next_node() -> None:
    placed = place([8, 8], [Demand("actor", 6, 2), Demand("rollout", 8, 4)], pool="p")
    assert placed["rollout"] == tuple(Slot(1, device) for device in range(8))


def test_a_group_larger_than_a_node_takes_whole_nodes() -> None:
    placed = place([4, 4, 4], [Demand("a", 1, 1), Demand("big", 8, 8)], pool="p")
    assert nodes_of(placed["big"]) == (1, 2)


def test_small_nodes_are_passed_over() -> None:
    assert place([2, 4], [Demand("r", 4, 4)], pool="p")["r"] == tuple(Slot(1, device) for device in range(4))


def test_too_few_slots_name_offset_engines_size_and_slots() -> None:
    with pytest.raises(PlacementError) as caught:
        place([8], [Demand("actor", 4, 1), Demand("rollout", 8, 4)], pool="p")
    assert "cannot hold rollout: offset 4 + 2 x 4 devices = 12 of 8 slots (nodes of 8)" in caught.value.what
    assert caught.value.fix == "use at most 1 x 4 devices here, or add nodes"
    with pytest.raises(PlacementError, match=r"offset 0 \+ 2 x 4 devices = 8 of 6 slots"):
        place([6], [Demand("rollout", 8, 4)], pool="p")


def test_enough_slots_that_nodes_cut() -> None:
    with pytest.raises(PlacementError, match="must not be cut by a node's end"):
        place([6, 6], [Demand("rollout", 12, 4)], pool="p")


def test_roles_that_share_devices_are_one_demand() -> None:
    actor = ResolvedRole("actor", "train", "p", Parallel(tp=2, dp=4), 1, 8)
    assert demand_for([actor]) == Demand("actor", 8, 2)
    assert demand_for([actor, rollout(2, 4)]) == Demand("actor/rollout", 8, 4)
    assert demand_for([rollout(2, 3), ResolvedRole("a", "train", "p", Parallel(tp=2, dp=3), 1, 6)]).unit == 6


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=3),
)
def test_placements_are_disjoint_whole_and_repeatable(nodes: list[int], wanted: list[tuple[int, int]]) -> None:
    demands = [Demand(str(i), units * unit, unit) for i, (units, unit) in enumerate(wanted)]
    try:
        placed = place(nodes, demands, pool="p")
    except PlacementError:
        return
    taken = [slot for slots in placed.values() for slot in slots]
    assert len(set(taken)) == len(taken)
    assert all(slot.device < nodes[slot.node] for slot in taken)
    for demand in demands:
        slots = placed[demand.name]
        assert len(slots) == demand.devices
        if demand.unit <= min(nodes):
            for start in range(0, demand.devices, demand.unit):
                assert len(nodes_of(slots[start : start + demand.unit])) == 1
    assert place(nodes, demands, pool="p") == placed
