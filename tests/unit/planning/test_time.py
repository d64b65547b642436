"""Seconds of an update: the transport's, and what the engine adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from vime.facts.inventory import NodeInventory
from vime.facts.model import ModelShape
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.planning.time import NOT_COUNTED, gathering, loading, together
from vime.testing.plans import BIG, plan_of, topology
from vime.testing.platforms import FakePlatform


@pytest.mark.parametrize(
    ("rates", "in_place", "seconds"),
    [
        ({"engine_load": 2e9, "engine_update": 0.1}, False, 1.1),
        ({"engine_load": 2e9, "engine_update": 0.1}, True, 0.1),
        ({"engine_load": 2e9}, False, 1.0),
        ({"engine_load": 2e9}, True, 0.0),
        ({"engine_update": 0.1}, False, 0.0),
    ],
)
def test_an_engine_that_loads_in_place_adds_its_fixed_part_only(
    rates: dict[str, float], in_place: bool, seconds: float
) -> None:
    table = PerfTable({name: Quantity(value, "bytes/s", Provenance.MEASURED, "here") for name, value in rates.items()})
    assert loading(2 * 10**9, table, in_place=in_place).seconds == pytest.approx(seconds)


@dataclass
class Gathers(FakePlatform):
    """Says how fast its trainer ranks receive each other's parts, where `rate` is not None."""

    rate: float | None = None

    def perf_model(self, inventory: NodeInventory) -> PerfTable:
        known = {} if self.rate is None else {"gather": Quantity(self.rate, "bytes/s", Provenance.MEASURED, "here")}
        return PerfTable(known)


MIXED = replace(BIG, experts=8, experts_per_token=2, expert_ffn=768)
INSIDE = 32 * 8 * 3 * 4096 * 768
"""Parameters of all experts of `MIXED`."""


@pytest.mark.parametrize(
    ("model", "axes", "elsewhere"),
    [
        (BIG, {}, 0),
        (BIG, {"tp": 2}, 4 * 10**9),
        (BIG, {"tp": 2, "pp": 4}, 7 * 10**9),
        (MIXED, {"ep": 8}, INSIDE * 7 // 8),
        (MIXED, {"tp": 2, "ep": 8, "pp": 1}, (8 * 10**9 - INSIDE) // 2 + INSIDE * 7 // 8),
    ],
)
def test_an_update_waits_for_what_trainer_ranks_receive_of_each_other(
    model: ModelShape, axes: dict[str, int], elsewhere: int
) -> None:
    """Two bytes a parameter that the first rank does not hold, with every transport; nothing where no rate is known."""
    source = topology(share=None, actor={"parallel": axes})
    without, counted = (plan_of(source, model=model, fake=Gathers(rate=rate)).transport for rate in (None, 1e10))
    assert without is not None
    assert counted is not None
    assert without.seconds is not None
    assert counted.seconds == pytest.approx(without.seconds + 2 * elsewhere / 1e10)
    assert ("of other ranks" in counted.how) is (elsewhere > 0)


def test_nothing_is_gathered_where_one_rank_holds_all_or_no_rate_is_known() -> None:
    table = PerfTable({"gather": Quantity(2e9, "bytes/s", Provenance.MEASURED, "here")})
    assert gathering(0, table) == gathering(10**9, PerfTable()) == NOT_COUNTED


def test_a_sum_is_as_certain_as_its_least_certain_part() -> None:
    rates = {"gather": (1e9, Provenance.DERIVED), "engine_load": (1e9, Provenance.MEASURED)}
    table = PerfTable({name: Quantity(value, "bytes/s", source) for name, (value, source) in rates.items()})
    both = together(loading(10**9, table, in_place=False), gathering(5 * 10**8, table))
    assert (both.seconds, both.provenance) == (pytest.approx(1.5), "derived")
    assert together(NOT_COUNTED, NOT_COUNTED) == NOT_COUNTED
