"""How many rollout workers a plan advises: what it says once is enough, and asks for no worker without a group."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from vime.planning.plan import Plan
from vime.planning.workers import check_workers
from vime.testing.plans import plan_of, topology


def planned(*, batch_size: int, pairs: int, workers: int = 1, max_staleness: int = 0) -> Plan:
    """A plan with `pairs` times two engines of four devices."""
    plan = plan_of(topology(share=None))
    needs = replace(plan.needs, batch_size=batch_size, workers=workers, max_staleness=max_staleness)
    return replace(plan, engines=plan.engines * pairs, needs=needs)


@pytest.mark.parametrize(
    ("given", "told", "number"),
    [
        ({"batch_size": 1500, "pairs": 1, "max_staleness": 1}, "3000 groups in flight", 3),
        ({"batch_size": 1500, "pairs": 33, "max_staleness": 1}, "264 devices of engines", 5),
        ({"batch_size": 3000, "pairs": 33, "max_staleness": 1}, "6000 groups in flight", 6),
        ({"batch_size": 2, "pairs": 33}, "264 devices of engines", 2),
        ({"batch_size": 2, "pairs": 33, "workers": 3}, "at most 2 groups are in flight", 2),
    ],
)
def test_the_number_that_is_told_leaves_nothing_to_say(given: dict[str, int], told: str, number: int) -> None:
    plan = planned(**given)
    (note,) = check_workers(plan)
    assert note.startswith(f"W302 rollout.workers {plan.needs.workers}")
    assert told in note
    (advised,) = map(int, re.findall(r"write (\d+)", note))
    assert advised == number
    assert list(check_workers(replace(plan, needs=replace(plan.needs, workers=advised)))) == []


def test_nothing_is_said_where_nothing_is_sampled() -> None:
    assert list(check_workers(planned(batch_size=5000, pairs=0))) == []
