"""Visible devices: parsing, bounds that the environment sets, the variables of a process, orders."""

from __future__ import annotations

import pytest

from vime.errors import PlacementError, PlanError
from vime.facts.bindings import RayBinding
from vime.facts.inventory import Device, NodeInventory
from vime.planning.masks import (
    by_host,
    check_untouched,
    in_device_order,
    inherited_mask,
    mask_entries,
    parse_mask,
    process_mask,
    scheduler_flags,
    visible_node,
)

ONE = RayBinding("NPU", ("VISIBLE",), ("NOSET",))
TWO = RayBinding("GPU", ("FIRST", "SECOND"), ("NOSET_A", "NOSET_B"), unset_env=("OTHER",), full_node_mask=True)
SLOTS = RayBinding("slots", ("VISIBLE",), virtual=True)


def node(count: int = 8, *, first: int = 0, uuid: str = "GPU-{}") -> NodeInventory:
    devices = tuple(Device(first + i, uuid.format("abcdefghijklmnop"[i] * 4), "acme", 2**30) for i in range(count))
    return NodeInventory("n0", "acme", "x86_64", devices, 8, 2**40)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("0,1", ("0", "1")),
        (" 2 , 3 ", ("2", "3")),
        ("MIG-00000000-0000-0000-0000-000000000001", ("MIG-00000000-0000-0000-0000-000000000001",)),
        ("GPU-aaaa,GPU-bbbb", ("GPU-aaaa", "GPU-bbbb")),
        ("", ()),
        ("0,,1", ("0",)),
        ("-1", ()),
        ("0,-1,1", ("0",)),
    ],
)
def test_entries_are_opaque_and_nothing_counts_after_a_bad_one(text: str, entries: tuple[str, ...]) -> None:
    assert parse_mask(text) == entries


def test_two_masks_that_differ_are_an_error_that_names_both() -> None:
    for env in ({"FIRST": "0,1", "OTHER": "2,3"}, {"FIRST": "0", "SECOND": "1"}):
        with pytest.raises(PlanError) as caught:
            inherited_mask(TWO, env)
        assert all(f"{name} is {value!r}" in caught.value.what for name, value in env.items())


def test_equal_masks_are_one_and_none_is_none() -> None:
    assert inherited_mask(TWO, {"FIRST": "0,1", "SECOND": "0, 1", "OTHER": "0,1"}) == ("0", "1")
    assert inherited_mask(TWO, {"SECOND": "3"}) == ("3",)
    assert inherited_mask(TWO, {}) is None
    assert inherited_mask(TWO, {"FIRST": ""}) == ()
    assert inherited_mask(SLOTS, {"VISIBLE": "0"}) is None
    with pytest.raises(PlanError, match="only OTHER is set"):
        inherited_mask(TWO, {"OTHER": "0"})


def test_a_mask_leaves_its_devices_in_its_order_by_number_and_by_identifier() -> None:
    assert [d.index for d in visible_node(ONE, node(16), {"VISIBLE": "9,8,11"}).devices] == [9, 8, 11]
    assert [d.index for d in visible_node(ONE, node(), {"VISIBLE": "GPU-cccc,GPU-a"}).devices] == [2, 0]
    assert visible_node(ONE, node(), {}) == node()
    assert visible_node(ONE, node(), {"VISIBLE": ""}).devices == ()
    for entry, said in (("9", "no device of n0"), ("GPU-", "8 devices of n0")):
        with pytest.raises(PlanError, match=f"VISIBLE has the entry '{entry}', which names {said}"):
            visible_node(ONE, node(), {"VISIBLE": entry})


def test_a_position_counts_inside_the_inherited_mask() -> None:
    env = {"VISIBLE": "8,9,10,11"}
    entries = mask_entries(ONE, visible_node(ONE, node(16), env), env)
    assert process_mask(ONE, entries, [2]) == {"VISIBLE": "10"}
    with pytest.raises(PlacementError, match="device 4 of a node is asked for, VISIBLE leaves 4: 8,9,10,11"):
        process_mask(ONE, entries, [4])


def test_children_get_the_entry_as_it_is_written() -> None:
    env = {"VISIBLE": "GPU-b,GPU-aaaa"}
    assert mask_entries(ONE, visible_node(ONE, node(), env), env) == ("GPU-b", "GPU-aaaa")


def test_without_a_mask_the_binding_says_what_entries_are() -> None:
    by_uuid = RayBinding("GPU", ("VISIBLE",), id_kind="uuid")
    assert mask_entries(ONE, node(2, first=4), {}) == ("4", "5")
    assert mask_entries(by_uuid, node(2), {}) == ("GPU-aaaa", "GPU-bbbb")


def test_own_devices_first_then_the_rest_of_the_node_in_every_variable() -> None:
    entries = ("0", "1", "2", "3")
    assert process_mask(TWO, entries, [2, 3]) == {"FIRST": "2,3,0,1", "SECOND": "2,3,0,1"}
    assert process_mask(ONE, entries, [2, 3]) == {"VISIBLE": "2,3"}
    assert process_mask(SLOTS, (), [2]) == {}
    assert mask_entries(SLOTS, node(), {}) == ()


def test_the_scheduler_is_told_to_leave_them_alone_and_the_user_does_not_set_them() -> None:
    assert scheduler_flags(TWO) == {"NOSET_A": "1", "NOSET_B": "1"}
    check_untouched(TWO, {"A": "1"}, process="actor", where=None)
    for name in ("FIRST", "OTHER", "NOSET_A"):
        with pytest.raises(PlanError, match=f"E261 actor: {name} is set by vime"):
            check_untouched(TWO, {name: "0"}, process="actor", where="t.yaml:3")


def test_orders_are_by_number() -> None:
    hosts = ["10.0.0.10", "node-10", "10.0.0.2", "node-9"]
    assert sorted(hosts, key=by_host) == ["10.0.0.2", "10.0.0.10", "node-9", "node-10"]
    assert in_device_order(["0", "1", "10", "11", "2"]) == ("0", "1", "2", "10", "11")
    assert in_device_order(["GPU-b", "GPU-a"]) == ("GPU-b", "GPU-a")
