"""Seconds of an update: the transport's, and what the engine adds."""

from __future__ import annotations

import pytest

from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.planning.time import loading


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
