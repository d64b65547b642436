"""The ways between two processes without vime: real gloo and copies on the host, and what is told where they fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vime.benchmarks import between
from vime.benchmarks.engines import Clock, Planned
from vime.errors import DeadlineError, WeightSyncError
from vime.facts.bindings import RayBinding
from vime.facts.process import Factory

BUCKETS = {1 << 20: 2, 4096: 3}


def planned(backend: str = "gloo", options: dict[str, Any] | None = None) -> Planned:
    """One rank and one engine on slots of a host."""
    slots = (SimpleNamespace(node=0, device=0), SimpleNamespace(node=0, device=1))
    requests = [SimpleNamespace(placement=SimpleNamespace(slots=(slot,))) for slot in slots]
    actor = SimpleNamespace(
        request=requests[0], env={"OMP_NUM_THREADS": "1"}, masks=(), pool="p", collective=SimpleNamespace(backend=backend)
    )
    pool = SimpleNamespace(name="p", binding=RayBinding("SLOT", virtual=True), entries=())
    trainer = SimpleNamespace(factory=Factory("none:none", options or {}))
    plan = SimpleNamespace(
        actor=actor,
        engines=(SimpleNamespace(request=requests[1], mask={}),),
        pools=(pool,),
        transport=SimpleNamespace(trainer=trainer),
    )
    return cast("Planned", SimpleNamespace(plan=plan, device_type="cpu"))


def test_bytes_arrive_and_are_timed() -> None:
    for found in (
        between.copy_between(planned(), BUCKETS, Clock(60)),
        between.broadcast_between(planned(), BUCKETS, Clock(60)),
    ):
        assert {int(nbytes): row["count"] for nbytes, row in found["buckets"].items()} == BUCKETS
        for nbytes, row in found["buckets"].items():
            assert row["bytes_per_s"] == pytest.approx(int(nbytes) * row["count"] / row["seconds"])
        assert found["bytes_per_s"] == max(row["bytes_per_s"] for row in found["buckets"].values())


def test_the_transports_own_backend_is_measured_and_its_failure_told() -> None:
    with pytest.raises(WeightSyncError, match="two devices do not reach each other") as caught:
        between.broadcast_between(planned(options={"backend": "ring"}), BUCKETS, Clock(60))
    assert "ring" in str(caught.value)
    assert "process 0" in str(caught.value)
    assert "process 1" in str(caught.value)


def test_bytes_that_do_not_arrive_fail() -> None:
    order = {"buckets": [(8, 1)]}
    with pytest.raises(WeightSyncError, match="8 bytes did not arrive"):
        between._timed(order, lambda _: (lambda: None, lambda: False), lambda: None)


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="--limit"):
        between.copy_between(planned(), BUCKETS, Clock(0))
