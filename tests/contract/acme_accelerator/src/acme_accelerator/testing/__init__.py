"""ACME machines without hardware: device tables for the driver, and the machines of the conformance kit."""

from __future__ import annotations

from pathlib import Path

TABLES = Path(__file__).parent / "tables"


def table(name: str) -> Path:
    """A device table of this folder."""
    return TABLES / f"{name}.json"
