"""Rates that the user measured stand over the platform's, and names that mean nothing are refused."""

from __future__ import annotations

from typing import Any

import pytest

from vime.errors import PlanError
from vime.facts.diagnosis import ProbeContext
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.platforms.cpu import plugin
from vime.platforms.lineage import Platform
from vime.testing.platforms import TINY_MODEL
from vime.topology.load import load_topology

BYTES = 830_000 * 4


def plan_with(rates: dict[str, float], *, tp: int = 1) -> Plan:
    """On one host, trainer and an engine in turn."""
    host = Platform.of(plugin)
    tree: dict[str, Any] = {
        "schema": "vime.topology/v1",
        "name": "rates",
        "pools": {"host": {"platform": "cpu", "rates": rates}},
        "roles": {
            "actor": {"kind": "train", "devices": tp, "parallel": {"tp": tp}},
            "rollout": {"kind": "rollout", "engines": 1},
        },
        "share": [{"roles": ["actor", "rollout"], "mode": "time"}] if tp == 1 else [],
    }
    return make_plan(
        load_topology(tree),
        model=TINY_MODEL,
        needs=PlanNeeds(),
        platforms={"cpu": host},
        inventories={"host": (host.inventory(ProbeContext({})),)},
    )


def test_a_transport_goes_at_your_rate_and_keeps_its_fixed_part() -> None:
    known, yours = plan_with({}).transport, plan_with({"host_shm": 1e6}).transport
    assert known is not None
    assert yours is not None
    fixed = known.trainer.cost.fixed_s
    assert known.provenance == "measured"
    assert (yours.protocol, yours.provenance) == ("collective", "measured")
    slow = next(one.reason for one in yours.rejected if one.protocol == "host_shm")
    assert f"{fixed + BYTES / 1e6:.3g} s" in slow


def test_gathering_goes_at_your_rate_where_ranks_lack_weights() -> None:
    for tp in (1, 2):
        without, given = (
            plan_with({"host_shm": 1e9}, tp=tp).transport,
            plan_with({"host_shm": 1e9, "gather": 1e6}, tp=tp).transport,
        )
        assert without is not None
        assert given is not None
        assert without.seconds is not None
        assert given.seconds is not None
        assert given.seconds - without.seconds == pytest.approx(0.0 if tp == 1 else BYTES / 2 / 1e6, rel=0.05)


def test_the_table_says_that_a_rate_is_yours() -> None:
    quantity = plan_with({"network": 25e9}).perf["host"].get("network")
    assert (quantity.value, quantity.unit, str(quantity.provenance)) == (25e9, "bytes/s", "yours")


def test_a_name_that_is_no_rate_and_no_transport_is_refused() -> None:
    with pytest.raises(PlanError, match=r"E104 pools.host.rates: no rate and no transport is called 'pigeon'") as caught:
        plan_with({"pigeon": 1.0})
    assert "host_shm" in str(caught.value.fix)


def test_a_run_that_samples_nothing_takes_the_topology_of_one_that_does() -> None:
    host = Platform.of(plugin)
    tree = {
        "name": "train",
        "pools": {"host": {"platform": "cpu", "rates": {"host_shm": 1e9}}},
        "roles": {"actor": {"kind": "train", "devices": 1}},
    }
    plan = make_plan(load_topology(tree), model=TINY_MODEL, needs=PlanNeeds(samples=False), platforms={"cpu": host})
    assert plan.transport is None
    assert plan.perf["host"].get("host_shm").value == 1e9
