"""The copy of the published weights for engines that start later: when it is made, who waits for it, what its failure does."""

import asyncio

import pytest
from publisher_parts import Engine, version

from vime.errors import WeightSyncError


async def test_the_copy_for_later_engines_is_made_when_all_gates_are_open_and_nobody_waits_for_it(engines, log, streaming):
    link, publisher = streaming
    link.keeping.clear()
    report = await publisher.publish(version(0))
    assert log[-1] == "keep", "the ranks were asked before publish returned"
    assert max(log.index(f"e{n} open") for n in (0, 1)) < log.index("keep")
    assert "keep" not in report.seconds
    link.keeping.set()
    await publisher.close()
    assert log[-1] == "kept"


async def test_a_trainer_that_leaves_has_kept_its_weights_first(log, streaming):
    _, publisher = streaming

    async def leave():
        log.append("trainer leaves")

    report = await publisher.publish(version(0), before_serving=leave)
    order = [log.index(line) for line in ("e0 update", "keep", "kept", "trainer leaves", "e0 open")]
    assert order == sorted(order)
    assert list(report.seconds)[-4:] == ["update", "keep", "leave", "open"]
    assert log.count("keep") == 1


async def test_an_engine_that_restarts_beside_the_copying_waits_and_gets_what_was_published(engines, log, streaming):
    link, publisher = streaming
    link.keeping.clear()
    link.weights = -0.5
    await publisher.publish(version(3))
    link.weights = -9.0
    again = Engine("e1", log)
    again.link = link
    admission = asyncio.create_task(publisher.admit(again))
    await asyncio.sleep(0.01)
    assert "e1 init" not in log[log.index("keep") :]
    link.keeping.set()
    await admission
    assert (again.served, again.open_version) == (-0.5, "0.3")
    assert log.index("kept") < log.index("stream kept")


async def test_a_copy_that_fails_surfaces_once_at_the_next_publish(engines, log, streaming):
    link, publisher = streaming
    link.keep_fails = WeightSyncError("no host memory is left")
    await publisher.publish(version(0))
    with pytest.raises(WeightSyncError, match="no host memory is left"):
        await publisher.publish(version(1))
    assert [e.open_version for e in engines] == ["0.0"] * 2, "they go on serving what they have"
    link.keep_fails = None
    await publisher.publish(version(1))
    await publisher.close()
    assert [e.open_version for e in engines] == ["0.1"] * 2


async def test_a_copy_that_fails_surfaces_at_an_admission_and_nothing_is_served_from_it(engines, log, streaming):
    link, publisher = streaming
    link.keep_fails = WeightSyncError("no host memory is left")
    await publisher.publish(version(0))
    again = Engine("e1", log)
    again.link = link
    with pytest.raises(WeightSyncError, match="no host memory is left"):
        await publisher.admit(again)
    assert [e.name for e in publisher.engines] == ["e0"]
    await publisher.admit(again)
    assert again.open_version is None, "it waits for the next publish"
    link.keep_fails = None
    await publisher.publish(version(1))
    assert again.open_version == "0.1"


async def test_a_copy_that_fails_surfaces_when_nothing_else_comes(log, streaming):
    link, publisher = streaming
    link.keep_fails = WeightSyncError("no host memory is left")
    await publisher.publish(version(0))
    with pytest.raises(WeightSyncError, match="no host memory is left"):
        await publisher.close()
    await publisher.close()


async def test_transports_that_stage_on_the_host_keep_nothing_more(publisher, log):
    await publisher.publish(version(0))
    await publisher.close()
    assert "keep" not in log
