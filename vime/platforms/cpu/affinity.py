"""Which processors a process may use when trainer and engines have slots of their own.

Two busy single-threaded processes on two cores lose a quarter of their speed when the scheduler lets them meet on one.
"""

from __future__ import annotations

import os

from vime.facts.process import RoleRequest

VARIABLE = "VIME_HOST_CPUS"
"""Positions in the sorted list of processors that this process is allowed to use, e.g. `0,1`."""


def share(request: RoleRequest) -> tuple[int, ...]:
    """The role's processors, as positions. Empty: no binding, where slots are shared by time or more than processors."""
    node = request.inventories[0]
    slots, cpus = len(node.devices), node.cpus
    if request.shared_with or not 2 <= slots <= cpus:
        return ()
    each = cpus // slots
    return tuple(slot.device * each + i for slot in request.placement.slots for i in range(each))


def bind() -> None:
    """Apply the variable to this process and what it starts; positions that do not exist here are left out."""
    text = os.environ.get(VARIABLE)
    if not text or not hasattr(os, "sched_setaffinity"):
        return
    allowed = sorted(os.sched_getaffinity(0))
    chosen = {allowed[int(position)] for position in text.split(",") if int(position) < len(allowed)}
    if chosen:
        os.sched_setaffinity(0, chosen)
        # The variable counts positions among what was allowed before: a child must not apply it to the rest again.
        del os.environ[VARIABLE]
