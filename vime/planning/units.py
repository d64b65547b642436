"""Bytes and rates as people read them."""

from __future__ import annotations

from vime.facts.perf import Quantity

_DECIMAL = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def in_units(num_bytes: int) -> str:
    """`3.20 GiB`, `512 MiB`, `17 B`: memory, in powers of 1024."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"
    return f"{num_bytes} B"


def decimal(value: float, unit: str) -> str:
    """`279 MB/s`, `395 TFLOP/s`, `8.04 GB`: three digits, in powers of 1000, as data sheets and rates have them."""
    rounded = float(f"{value:.3g}")
    for prefix, size in _DECIMAL:
        if rounded >= size:
            return f"{rounded / size:.4g} {prefix}{unit}"
    return f"{rounded:g} {unit}"


def in_words(quantity: Quantity) -> str:
    """A platform's quantity with its unit; `unknown` where it has no value."""
    if quantity.value is None:
        return "unknown"
    if quantity.unit == "bytes":
        return in_units(int(quantity.value))
    rate = {"bytes/s": "B/s", "FLOP/s": "FLOP/s"}.get(quantity.unit)
    return decimal(quantity.value, rate) if rate else f"{quantity.value:g} {quantity.unit}"
