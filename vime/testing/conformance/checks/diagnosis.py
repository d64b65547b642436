"""Doctor checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vime.errors import PluginError
from vime.facts.diagnosis import Check, DoctorContext, Severity
from vime.testing.conformance.checks.planning import repeated
from vime.testing.conformance.registry import check, require
from vime.testing.conformance.subject import Subject


def contexts(subject: Subject) -> Iterator[tuple[str, DoctorContext]]:
    """Every machine that can be read, nominal nodes, a node without devices and a node that is broken; machines in place."""
    for machine in (m for m in subject.machines if m.readable):
        with machine.installed() as ctx:
            try:
                inventory = subject.platform.inventory(ctx)
            except PluginError:
                continue
            yield machine.name, DoctorContext(inventory, ctx.env)
    for case in subject.cases:
        if case.nominal:
            yield case.name, DoctorContext(case.inventory, {})
    if subject.cases:
        inventory = subject.cases[0].inventory
        yield "a node without devices", DoctorContext(replace(inventory, devices=(), links=()), {})
        sick = tuple(replace(device, health="it does not answer", memory_bytes=0, arch=None) for device in inventory.devices)
        bare = replace(inventory, devices=sick, links=(), numa=(), driver=None, software={}, vendor={})
        yield "a node of broken devices", DoctorContext(bare, {})


@check("C34", hooks=["vime_doctor_checks"], title="doctor names what to do")
def doctor_names_what_to_do(subject: Subject) -> None:
    """Doctor raises on no machine, broken or nominal; ids begin with the plugin's name, are unique and the same when asked
    again; warnings and errors say what to do."""
    found: list[Check] = []
    for name, ctx in contexts(subject):
        first, second = subject.platform.doctor_checks(ctx), subject.platform.doctor_checks(ctx)
        found += first
        broken = [c.finding for c in first if c.id.endswith(".doctor") and c.finding.startswith("the checks of ")]
        require(not broken, f"{broken[0] if broken else ''} (on {name})", "let the checks answer on every machine")
        alien = [c.id for c in first if c.id.partition(".")[0] not in subject.platform.lineage or not c.id.partition(".")[2]]
        require(not alien, f"ids {', '.join(alien)} do not begin with {subject.name}. (on {name})", f"write {subject.name}.…")
        twice = repeated(f"{c.id} {c.finding}" for c in first)
        require(not twice, f"a finding is listed twice: {twice} (on {name})", "find it once")
        ids = [[c.id for c in checks] for checks in (first, second)]
        require(ids[0] == ids[1], f"asked again, doctor lists {ids[1]}, before {ids[0]} (on {name})", "keep ids stable")
        for one in first:
            told = one.severity not in (Severity.WARNING, Severity.ERROR) or one.fix.strip()
            require(told, f"{one.id} is a {one.severity} without a fix (on {name})", "give a command or an action")
            require(one.finding.strip(), f"{one.id} has no finding (on {name})", "say what was found")
    require(
        found,
        "doctor finds nothing on any machine, not even that all is well",
        "add checks, with severity ok where all is well",
    )
