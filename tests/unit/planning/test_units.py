"""Bytes and rates in words."""

from __future__ import annotations

import pytest

from vime.facts.perf import Provenance, Quantity
from vime.planning.units import decimal, in_units, in_words

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "text"),
    [(17, "17 B"), (1536, "1.50 KiB"), (512 * 2**20, "512 MiB"), (3 * GIB, "3.00 GiB"), (2 * 1024 * GIB, "2.00 TiB")],
)
def test_memory(size: int, text: str) -> None:
    assert in_units(size) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.79e8, "B/s", "279 MB/s"),
        (989e12, "FLOP/s", "989 TFLOP/s"),
        (999.6e6, "B/s", "1 GB/s"),
        (28_000_000_000, "B", "28 GB"),
        (8.044e9, "B", "8.04 GB"),
        (100.0, "B/s", "100 B/s"),
        (0, "B", "0 B"),
    ],
)
def test_rates(value: float, unit: str, text: str) -> None:
    assert decimal(value, unit) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (4.8e12, "bytes/s", "4.8 TB/s"),
        (3.5 * GIB, "bytes", "3.50 GiB"),
        (0.25, "s", "0.25 s"),
        (0.7, "share", "0.7 share"),
        (None, "bytes/s", "unknown"),
    ],
)
def test_a_platforms_quantities(value: float | None, unit: str, text: str) -> None:
    assert in_words(Quantity(value, unit, Provenance.SPEC)) == text
