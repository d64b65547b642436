"""Seconds of an update: the transport's, and what the engine adds."""

from __future__ import annotations

import pytest

from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.planning.time import NOT_COUNTED, gathering, loading, together


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


@pytest.mark.parametrize(("parts", "seconds"), [(1, 0.0), (2, 0.5), (4, 0.75)])
def test_what_trainer_ranks_receive_of_each_other_is_added(parts: int, seconds: float) -> None:
    table = PerfTable({"gather": Quantity(2e9, "bytes/s", Provenance.MEASURED, "here")})
    assert gathering(2 * 10**9, table, parts=parts).seconds == pytest.approx(seconds)
    assert gathering(2 * 10**9, PerfTable(), parts=parts) == NOT_COUNTED


def test_a_sum_is_as_certain_as_its_least_certain_part() -> None:
    rates = {"gather": (1e9, Provenance.DERIVED), "engine_load": (1e9, Provenance.MEASURED)}
    table = PerfTable({name: Quantity(value, "bytes/s", source) for name, (value, source) in rates.items()})
    both = together(loading(10**9, table, in_place=False), gathering(10**9, table, parts=2))
    assert (both.seconds, both.provenance) == (pytest.approx(1.5), "derived")
    assert together(NOT_COUNTED, NOT_COUNTED) == NOT_COUNTED
