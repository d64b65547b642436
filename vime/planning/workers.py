"""Rollout worker processes against what they have to drive. The figures are measured (docs/scale.md)."""

from __future__ import annotations

from collections.abc import Iterator

from vime.planning.plan import Plan

GROUPS_PER_WORKER = 1000
"""Groups in flight that one worker drives: each is a connection, and processes usually may open 1,024 files."""

DEVICES_PER_WORKER = 64
"""Devices of engines for one worker: what was measured with, at under half of the requests a second that a worker manages."""


def check_workers(plan: Plan) -> Iterator[str]:
    """W302 for fewer rollout workers than groups and engines need, or for more than there are groups to sample."""
    needs = plan.needs
    if not plan.engines:
        return
    devices = sum(len(engine.request.placement.slots) for engine in plan.engines)
    flying = needs.batch_size * (1 + needs.max_staleness)
    driven = (("groups in flight", flying, GROUPS_PER_WORKER), ("devices of engines", devices, DEVICES_PER_WORKER))
    least, what, count, each = max((-(-count // each), what, count, each) for what, count, each in driven)
    least = min(least, flying)
    if needs.workers < least:
        yield f"W302 rollout.workers {needs.workers} for {count} {what}: a worker drives about {each}; write {least}"
    elif needs.workers > flying:
        idle = needs.workers - flying
        yield (
            f"W302 rollout.workers {needs.workers}, but at most {flying} groups are in flight (rollout.batch_size x"
            f" (1 + schedule.max_staleness)): {idle} would never have one; write {flying} or less"
        )
