"""How many ranks of one fabric domain a communicator holds, against what the platform knows to work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from vime.facts.inventory import FabricDomain, NodeInventory, Tri
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

RACK, OTHER = ("rack", Tri.YES), ("other", Tri.YES)


def nodes(domains: Sequence[tuple[str, Tri] | None]) -> tuple[NodeInventory, ...]:
    made = [FakePlatform().node(f"n{i}", devices=4) for i in range(len(domains))]
    fabrics = [None if domain is None else FabricDomain(domain[0], "7", domain[1], "as read") for domain in domains]
    return tuple(replace(node, fabric=fabric) for node, fabric in zip(made, fabrics, strict=True))


def notes(domains: Sequence[tuple[str, Tri] | None], *, limit: int | None, actor: int, engines: int = 0) -> list[str]:
    """W223 of a plan with `actor` ranks and, on devices of their own, so many engines of one device; without any for 0."""
    roles: dict[str, Any] = {"actor": {"kind": "train", "devices": actor}}
    if engines:
        roles["rollout"] = {"kind": "rollout", "engines": engines}
    source = {"name": "made", "pools": {"p": {"platform": "acme", "nodes": len(domains)}}, "roles": roles}
    plan = make_plan(
        load_topology(source),
        model=TINY_MODEL,
        needs=PlanNeeds(samples=engines > 0),
        platforms={"acme": FakePlatform(domain_ranks=limit)},
        inventories={"p": nodes(domains)},
    )
    return [note for note in plan.notes if note.startswith("W223")]


@pytest.mark.parametrize(
    ("domains", "limit"),
    [
        ((RACK, RACK), 8),
        ((RACK, RACK), None),
        ((RACK, OTHER), 7),
        ((RACK, None), 7),
        ((RACK, ("rack", Tri.UNKNOWN)), 7),
    ],
    ids=["at the limit", "no known limit", "two domains", "a node outside", "a fabric that is not used"],
)
def test_nothing_is_said_of_groups_that_work(domains: Sequence[tuple[str, Tri] | None], limit: int | None) -> None:
    assert notes(domains, limit=limit, actor=8) == []


def test_a_role_whose_ranks_crowd_a_domain_is_named_with_the_numbers() -> None:
    (note,) = notes((RACK, RACK, OTHER), limit=7, actor=12)
    assert note.startswith(
        "W223 roles.actor: the group of its ranks has 8 members in the fabric domain rack/7, of which 7 are known to work; "
    )


def test_the_group_of_a_publication_counts_rank_0_and_all_engine_workers() -> None:
    assert notes((RACK, RACK), limit=7, actor=1, engines=6) == []
    (note,) = notes((RACK, RACK), limit=6, actor=1, engines=6)
    what = "W223 weights to rollout: the group of rank 0 and the engines"
    assert note.startswith(f"{what} has 7 members in the fabric domain rack/7, of which 6 are known to work")
