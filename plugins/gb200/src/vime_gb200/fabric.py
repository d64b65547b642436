"""Whether the devices of a tray may talk to those of other trays over NVLink: the acceptance rule, over recorded facts.

Facts are those of `vime_cuda.probe`. A fact that the driver does not give is unknown, and an unknown term never makes the
whole a yes. What no reading can prove is left to the moment of connecting: two trays may report one cluster and clique and
still fail to import each other's memory where their IMEX daemons do not form one domain.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.facts.inventory import FabricDomain, Tri

Facts = Mapping[str, Any]

ARCHITECTURES = ("sm100", "sm103")
HOST_ARCH = "aarch64"
UNTOLD = "unknown"
"""Domain and clique of a tray whose driver names none."""

STATES: Mapping[int, str] = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_COMPLETED = 3
_SUCCESS = 0
_TRUE, _FALSE = 1, 2
_UNHEALTHY, _LIMITED = 2, 3

_PROVED_LATER = "that trays can import each other's memory is proved when a group connects"


@dataclass(frozen=True, slots=True)
class Term:
    """One condition of the rule on one device or on the tray: what holds, and what to print where it does not."""

    name: str
    holds: Tri
    text: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """A yes-no answer of two bits in the health mask: 0 not supported, 1 true, 2 false."""

    shift: int
    bad: int
    holds: Tri
    text: str


# A device with less bandwidth still works, at a rate that nobody promises: unknown, not no.
_ANSWERS = (
    _Answer(0, _TRUE, Tri.UNKNOWN, "its bandwidth is degraded"),
    _Answer(2, _TRUE, Tri.NO, "its routes are being recovered"),
    _Answer(4, _TRUE, Tri.NO, "a route is unhealthy"),
    _Answer(6, _TRUE, Tri.NO, "it recovers from an access time-out"),
    _Answer(12, _FALSE, Tri.NO, "no fabric partition is assigned to it"),
)
_CONFIGURATION_SHIFT = 8
_CONFIGURATIONS: Mapping[int, str] = {
    2: "system GUID",
    3: "chassis serial number",
    4: "no partition",
    5: "too few NVLinks",
    6: "incompatible firmware",
    7: "invalid location",
    8: "invalid state",
}


def arch_of(device: Facts) -> str | None:
    """The instruction set as compilers name it: [10, 0] is `sm100`."""
    capability = device.get("capability")
    return None if not capability else f"sm{int(capability[0])}{int(capability[1])}"


def is_grace_blackwell(host_arch: str, devices: Iterable[Facts]) -> Tri:
    """Blackwell devices on Grace: aarch64, sm100 or sm103, and the chip-to-chip link in use. Names are not asked.

    Devices that do not answer do not count. Unknown where only the state of a chip-to-chip link is not told.
    """
    known = [device for device in devices if arch_of(device) is not None]
    if host_arch != HOST_ARCH or not known or any(arch_of(device) not in ARCHITECTURES for device in known):
        return Tri.NO
    links = [(device.get("c2c") or {}).get("enabled") for device in known]
    if False in links:
        return Tri.NO
    return Tri.UNKNOWN if None in links else Tri.YES


def health_terms(mask: int | None, summary: int | None) -> tuple[Term, ...]:
    """Decode the health mask, whose fields say true (1), false (2) or not supported (0): `0xaa` has no complaint.

    `summary` is the driver's own: 1 healthy, 2 unhealthy, 3 limited capacity, 0 not supported.
    """
    told = mask or 0
    terms = [Term("health", a.holds, a.text) for a in _ANSWERS if (told >> a.shift) & 0b11 == a.bad]
    if (wrong := (told >> _CONFIGURATION_SHIFT) & 0b1111) > 1:
        text = f"its configuration is wrong ({_CONFIGURATIONS.get(wrong, f'code {wrong}')})"
        terms.append(Term("health", Tri.NO, text))
    if summary == _UNHEALTHY:
        terms.append(Term("health", Tri.NO, "the driver calls it unhealthy"))
    if summary == _LIMITED:
        terms.append(Term("health", Tri.UNKNOWN, "the driver calls its capacity limited"))
    if terms:
        return tuple(terms)
    if not told and not summary:
        return (Term("health", Tri.UNKNOWN, "the driver does not tell its health"),)
    return (Term("health", Tri.YES, "healthy"),)


def device_terms(device: Facts) -> tuple[Term, ...]:
    """The rule's conditions on one device."""
    fabric = device.get("fabric")
    if fabric is None:
        return (Term("state", Tri.UNKNOWN, "the driver gives no fabric information"),)
    state, status = fabric.get("state"), fabric.get("status")
    if state != _COMPLETED:
        # Nothing else is filled in before registration has ended.
        told = UNTOLD if state is None else STATES.get(state, f"code {state}")
        return (Term("state", Tri.UNKNOWN if state is None else Tri.NO, f"fabric registration is {told}, not completed"),)
    return (
        Term("state", Tri.YES, "completed"),
        _number("status", status, status == _SUCCESS, f"fabric registration ended with status {status}"),
        _number("cluster UUID", fabric.get("cluster_uuid"), domain_id(device) is not None, "the cluster UUID is zero"),
        _number("clique", fabric.get("clique"), bool(fabric.get("clique")), "the clique is 0"),
        *health_terms(fabric.get("health_mask"), fabric.get("health_summary")),
    )


def _tri(value: bool) -> Tri:
    return Tri.YES if value else Tri.NO


def _number(name: str, value: object, holds: bool, text: str) -> Term:
    if value is None:
        return Term(name, Tri.UNKNOWN, f"the driver does not tell the {name}")
    return Term(name, _tri(holds), text)


def domain_id(device: Facts) -> str | None:
    """The cluster UUID in its usual form; None where it is zero, missing or not a UUID."""
    text = (device.get("fabric") or {}).get("cluster_uuid")
    try:
        found = uuid.UUID(hex=str(text))
    except ValueError:
        return None
    return str(found) if found.int else None


def clique_of(device: Facts) -> str | None:
    """The clique within the cluster as text: an NVL36x2 rack pair is one cluster of two cliques."""
    clique = (device.get("fabric") or {}).get("clique")
    return str(clique) if clique else None


def tray_terms(devices: Sequence[Facts], channels: Sequence[str] | None) -> Iterator[Term]:
    """Conditions on the tray as a whole: one domain for all devices, and an IMEX channel to export memory through.

    `channels` are the IMEX channel device nodes, None where they could not be looked for.
    """
    domains = sorted({f"{domain_id(d)}.{clique_of(d)}" for d in devices if domain_id(d) and clique_of(d)})
    if len(domains) > 1:
        yield Term("tray", Tri.NO, f"the devices of this tray are in different domains ({', '.join(domains)})")
    if channels is None:
        yield Term("imex", Tri.UNKNOWN, "IMEX channels could not be looked for")
    elif not channels:
        yield Term("imex", Tri.NO, "there is no IMEX channel, without which no memory is exported to another tray")


def judge(devices: Sequence[Facts], channels: Sequence[str] | None) -> FabricDomain:
    """The domain of a Grace-Blackwell tray and whether it may be used: no, unless every term holds; unknown, unless told."""
    failed: dict[tuple[Tri, str], list[int]] = {}
    for device in devices:
        for term in device_terms(device):
            if term.holds is not Tri.YES:
                failed.setdefault((term.holds, term.text), []).append(int(device["index"]))
    for term in tray_terms(devices, channels):
        failed[term.holds, term.text] = []
    id = next((found for device in devices if (found := domain_id(device))), UNTOLD)
    clique = next((found for device in devices if (found := clique_of(device))), UNTOLD)
    usable = next((answer for answer in (Tri.NO, Tri.UNKNOWN) if any(holds is answer for holds, _ in failed)), Tri.YES)
    if usable is Tri.YES:
        health = f"registration completed, clique {clique}, healthy, {len(channels or ())} IMEX channel(s)"
        return FabricDomain(id, clique, usable, f"{health}; {_PROVED_LATER}")
    reason = "; ".join(_told(text, indexes, len(devices)) for (_, text), indexes in failed.items())
    return FabricDomain(id, clique, usable, reason)


def _told(text: str, indexes: Sequence[int], count: int) -> str:
    if not indexes:
        return text
    who = "every device" if len(indexes) == count else f"device {', '.join(map(str, indexes))}"
    return f"{who}: {text}"
