"""Probing, checks and recordings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vime.facts.inventory import NodeInventory


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """What a probe may look at: the environment (a copy) and an optional recording to replay instead of hardware."""

    env: Mapping[str, str]
    recording: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """`This is my hardware.` Among several the highest specificity wins; a tie is an error that lists both."""

    platform: str
    specificity: int
    reason: str


class Severity(StrEnum):
    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """What doctor checks look at."""

    inventory: NodeInventory
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `id` is stable; `fix` is a command or an action, empty only when severity is ok."""

    id: str
    severity: Severity
    finding: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class RecordedFixture:
    """A recording that replays discovery. `origin` is `recorded` or `synthetic`; `data` is JSON."""

    platform: str
    origin: str
    date: str
    data: Mapping[str, object] = field(default_factory=dict)
