"""Placement without Ray: segments, and what is said of nodes that are too small or gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vime.cluster.joined import ClusterNode, Seen, _named
from vime.cluster.placement import _check_living, _check_room, _Need, _segments
from vime.errors import PlacementError
from vime.facts.process import Slot
from vime.testing.platforms import FakePlatform

SMALL = ClusterNode("a", "n1", "10.0.0.2", {"ACME": 1.0})
LARGE = ClusterNode("b", "n2", "10.0.0.10", {"ACME": 4.0})
NEEDS = [_Need("one", SMALL, "ACME", 2.0), _Need("two", LARGE, "ACME", 4.0)]


@pytest.mark.parametrize(("size", "groups"), [(0, [6]), (3, [6]), (2, [3, 3]), (1, [1, 2, 3])])
def test_one_group_a_segment(size: int, groups: list[int]) -> None:
    slots = [Slot(0, 0), Slot(1, 0), Slot(1, 1), Slot(2, 0), Slot(2, 1), Slot(2, 2)]
    pool: Any = SimpleNamespace(segment_nodes=size, inventories=(1, 2, 3))
    assert [len(part) for part in _segments(pool, slots)] == groups
    assert [slot for part in _segments(pool, slots) for slot in part] == slots


def test_what_is_asked_there_and_missing_is_told_of_each_node() -> None:
    living = {"a": SMALL, "b": LARGE}
    _check_room(NEEDS[1:], living)
    with pytest.raises(PlacementError) as raised:
        _check_room(NEEDS, living)
    assert raised.value.what == (
        "1 devices are missing: one (10.0.0.2): asked 2 x ACME, 1 there, 1 missing; two (10.0.0.10): asked 4 x ACME, 4 there"
    )
    _check_living(NEEDS, living)
    with pytest.raises(PlacementError, match=r"left the cluster: one \(10\.0\.0\.2\): asked 2 x ACME, there 0; 1 nodes are"):
        _check_living(NEEDS, {"b": LARGE})


def test_nodes_of_one_host_are_told_apart() -> None:
    node = FakePlatform().node("host")
    seen = Seen({"acme": node}, {}, {})
    bare = Seen({}, {"acme": "no devices"}, {})
    assert list(_named([SMALL], {"a": seen})) == ["host"]
    assert list(_named([SMALL, LARGE], {"a": seen, "b": seen})) == ["host/n1", "host/n2"]
    assert list(_named([SMALL, LARGE], {"a": seen, "b": bare})) == ["host", "n2"]
