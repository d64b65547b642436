"""Which role of a benchmark gets which devices."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vime.benchmarks.engines import Planned
from vime.benchmarks.layouts import Layout, add_layout_arguments, layout_of, mask_over, one_each, topology
from vime.errors import ConfigError, PlacementError
from vime.facts.bindings import RayBinding
from vime.facts.inventory import NodeInventory
from vime.planning.make import Here, make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

MASK = "ACME_VISIBLE_DEVICES"


class Board(FakePlatform):
    """Devices that a mask names by their ids."""

    def ray_binding(self, inventory: NodeInventory) -> RayBinding:
        return RayBinding("ACME", (MASK,), id_kind="uuid", virtual=self.virtual)


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_layout_arguments(parser)
    return parser.parse_args(words)


def node(devices: int) -> Any:
    """A node of so many devices; 0: a host."""
    return SimpleNamespace(virtual=not devices, devices=(None,) * devices)


@pytest.mark.parametrize(
    ("words", "devices", "expected"),
    [
        ((), 0, Layout("shared", 1, 1)),
        ((), 1, Layout("shared", 1, 1)),
        ((), 2, Layout("shared", 2, 2, engine_tp=2)),
        (("--actor-tp", "2", "--engine-tp", "2"), 0, Layout("shared", 2, 2, 2, engine_tp=2)),
        (("--engines", "2"), 2, Layout("shared", 2, 2, engines=2)),
        (("--engines", "2"), 0, Layout("shared", 2, 2, engines=2)),
        (("--engine-tp", "1"), 4, Layout("shared", 4, 4, engines=4)),
        (("--actor-ep", "2"), 0, Layout("shared", 2, 2, actor_ep=2, engine_tp=2)),
        (("--layout", "apart"), 0, Layout("apart", 2, 1)),
        (("--layout", "apart"), 2, Layout("apart", 2, 1)),
        (("--layout", "apart"), 8, Layout("apart", 8, 4, engine_tp=4)),
        (("--layout", "apart", "--actor-tp", "2"), 0, Layout("apart", 3, 2, 2)),
        (("--layout", "apart", "--actor-devices", "2", "--engines", "6"), 8, Layout("apart", 8, 2, engines=6)),
    ],
)
def test_sizes_that_the_words_leave_open(words: tuple[str, ...], devices: int, expected: Layout) -> None:
    assert layout_of(asked(*words), node(devices)) == expected


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (("--layout", "apart"), 1),
        (("--layout", "apart", "--actor-devices", "2"), 2),
        (("--actor-devices", "3"), 2),
        (("--actor-devices", "3", "--actor-tp", "2"), 4),
        (("--engine-tp", "4"), 2),
        (("--layout", "apart", "--engines", "2"), 2),
        (("--actor-devices", "1", "--actor-ep", "2"), 2),
    ],
)
def test_sizes_that_do_not_fit_are_refused(words: tuple[str, ...], devices: int) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        layout_of(asked(*words), node(devices))


def plan_of(layout: Layout, *, virtual: bool = False, transport: str | None = None) -> Plan:
    board = Board(virtual=virtual)
    made = topology(layout, "park", virtual=virtual, transport=transport)
    inventories = {"node": (board.node(devices=1 if virtual else layout.devices),)}
    platforms = {"acme": board}
    needs = PlanNeeds(vllm={"kv_cache_memory_bytes": 2**28})
    here = Here({}, frozenset({"node"}))
    return make_plan(
        load_topology(made, platform="acme"),
        model=TINY_MODEL,
        needs=needs,
        platforms=platforms,
        inventories=inventories,
        here=here,
    )


@pytest.mark.parametrize("virtual", [True, False], ids=["host", "device"])
def test_a_plan_places_the_roles_as_the_layout_says(virtual: bool) -> None:
    apart = plan_of(Layout("apart", 4, 2, 2, engines=2), virtual=virtual)
    actor = {slot.device for slot in apart.actor.request.placement.slots}
    engines = [{slot.device for slot in engine.request.placement.slots} for engine in apart.engines]
    assert (actor, engines, apart.shared) == ({0, 1}, [{2}, {3}], False)
    shared = plan_of(Layout("shared", 2, 2, 2, engine_tp=2), virtual=virtual)
    assert (shared.shared, shared.residency, len(shared.engines)) == (True, "park", 1)
    assert shared.engines[0].request.placement.slots == shared.actor.request.placement.slots


def test_only_the_asked_transport_is_taken() -> None:
    layout = Layout("apart", 2, 1)
    for name in ("collective", "disk"):
        chosen = plan_of(layout, transport=name).transport
        assert chosen is not None
        assert chosen.protocol == name


def test_a_mask_over_both_roles_starts_with_the_first() -> None:
    planned = cast("Planned", SimpleNamespace(plan=plan_of(Layout("apart", 2, 1))))
    assert mask_over(planned, [0, 1]) == {MASK: "n0/0,n0/1"}
    assert mask_over(planned, [1]) == planned.plan.engines[0].mask == {MASK: "n0/1"}
    with pytest.raises(PlacementError, match="device 2"):
        mask_over(planned, [2])
    on_host = cast("Planned", SimpleNamespace(plan=plan_of(Layout("apart", 2, 1), virtual=True)))
    assert mask_over(on_host, [0, 1]) == {}


def test_one_device_a_role() -> None:
    assert one_each("shared", node(2)) == Layout("shared", 2, 1)
    assert one_each("apart", node(0)) == Layout("apart", 2, 1)
    with pytest.raises(ConfigError):
        one_each("apart", node(1))


def test_rates_of_the_command_line_are_those_of_the_pool() -> None:
    layout = layout_of(asked(), node(8))
    made = topology(layout, "resident", virtual=False, rates=asked("--rate", "network=25e9", "gather=3e8").rate)
    assert made["pools"]["node"]["rates"] == {"network": 25e9, "gather": 3e8}
    for word in ("gather", "gather=fast"):
        with pytest.raises(ConfigError, match=f"--rate: expected NAME=NUMBER, got '{word}'"):
            topology(layout, "resident", virtual=False, rates=[word])
