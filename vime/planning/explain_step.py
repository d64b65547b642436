"""The seconds of a step in words and as JSON, with everything that was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vime.planning.explain_roles import table
from vime.planning.plan import Plan
from vime.planning.step import StepTime, step_time


def step_text(plan: Plan, assume: Mapping[str, float]) -> Iterator[str]:
    """Total, parts and assumptions. Raises ConfigError for an assumption that is not there."""
    found = step_time(plan, assume)
    yield f"step of {found.groups} x {found.group_size} responses: {_seconds(found)}, {found.total.how}"
    rows = [(part.name, _number(part.estimate.seconds), part.estimate.provenance, part.estimate.how) for part in found.parts]
    yield from table(rows)
    yield "assumed for the step (`--assume NAME=VALUE` sets another value)"
    yield from table([(a.name, f"{a.value:g} {a.unit}", a.provenance, a.source) for a in found.assumed.values()])


def _seconds(found: StepTime) -> str:
    if found.total.seconds is None:
        return "time unknown"
    return f"about {found.total.seconds:.3g} s ({found.total.provenance})"


def _number(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.3g} s"


def step_json(plan: Plan, assume: Mapping[str, float]) -> dict[str, Any]:
    """The same as JSON values."""
    found = step_time(plan, assume)
    parts = [
        {
            "name": part.name,
            "side": part.side,
            "devices": part.devices,
            "seconds": part.estimate.seconds,
            "provenance": part.estimate.provenance,
            "how": part.estimate.how,
        }
        for part in found.parts
    ]
    return {
        "groups": found.groups,
        "group_size": found.group_size,
        "ahead": found.ahead,
        "seconds": found.total.seconds,
        "provenance": found.total.provenance,
        "parts": parts,
        "assumed": {
            a.name: {"value": a.value, "unit": a.unit, "provenance": a.provenance, "source": a.source}
            for a in found.assumed.values()
        },
    }
