"""The order of a publish and what a failure leaves behind, with engines that behave in memory."""

import asyncio
import time

import pytest
from publisher_parts import IDS, Engine, version

from vime.errors import DeadlineError, EngineError, ProbeError, WeightSyncError
from vime.types import PolicyVersion
from vime.weights.protocol import ProbeSettings, Publisher


async def test_a_publish_goes_through_its_steps_in_order(publisher, link, log, engines):
    link.weights = -1.5
    report = await publisher.publish(version(1), fingerprint=True, probe=True)
    order = [log.index(f"e0 {step}") for step in ("init", "shut", "update", "resume", "probe", "open")]
    assert order == sorted(order)
    assert log.index("reference") < log.index("e0 shut")
    assert max(log.index(f"e{n} update") for n in (0, 1)) < min(log.index(f"e{n} resume") for n in (0, 1))
    assert max(log.index(f"e{n} probe") for n in (0, 1)) < min(log.index(f"e{n} open") for n in (0, 1))
    assert "stage 0.1 True" in log
    assert [(e.served, e.open_version, e.paused) for e in engines] == [(-1.5, "0.1", False)] * 2
    assert (report.version, report.nbytes, report.probe_mean, report.probe_max) == (version(1), 12, 0.0, 0.0)
    assert list(report.seconds) == ["init", "reference", "hold", "update", "probe", "open"]
    assert publisher.version == version(1)


async def test_the_report_has_the_time_of_staging_and_what_the_fullest_engine_holds(publisher, link, engines):
    staged = link.stage

    async def slowly(*words):
        await asyncio.sleep(0.05)
        return await staged(*words)

    link.stage = slowly
    engines[0].held_bytes, engines[1].held_bytes = {"kv": 5, "engine_weights": 2}, {"kv": 4, "engine_weights": 3}
    report = await publisher.publish(PolicyVersion(0, 0))
    assert 0.05 <= report.stage_s <= report.seconds["hold"]
    assert report.engine_bytes == {"engine_weights": 3, "kv": 5}


async def test_later_publishes_do_not_initialise_or_probe_unless_asked(publisher, log):
    await publisher.publish(version(0))
    log.clear()
    await publisher.publish(version(1))
    assert sorted(log) == sorted(["stage 0.1 False", *(f"e{n} {s}" for n in (0, 1) for s in ("shut", "update", "open"))])


async def test_an_early_pause_is_not_repeated(publisher, log, engines):
    await publisher.publish(version(0))
    publisher.prepare()
    await asyncio.sleep(0.01)
    assert all(e.is_held for e in engines)
    log.clear()
    await publisher.publish(version(1))
    assert "e0 shut" not in log


@pytest.fixture
def sleeping(link, engines):
    publisher = Publisher(link, probe=ProbeSettings(ids=IDS), sleep_level=2)
    publisher.set_engines(engines)
    return publisher


async def test_sleeping_engines_wake_weights_for_the_update_and_caches_when_the_trainer_has_left(sleeping, log, engines):
    async def leave():
        log.append("trainer leaves")

    await sleeping.vacate()
    assert all(e.asleep == {"weights", "kv_cache"} for e in engines)
    report = await sleeping.publish(version(0), probe=True, before_serving=leave)
    steps = ("shut", "sleep 2", "wake weights", "init", "update", "wake kv_cache", "resume", "probe", "open")
    assert [line for line in log if line.startswith("e0")] == [f"e0 {step}" for step in steps]
    both = [max(log.index(f"e{n} update") for n in (0, 1)), min(log.index(f"e{n} wake kv_cache") for n in (0, 1))]
    assert both[0] < log.index("trainer leaves") < both[1]
    assert list(report.seconds)[1:6] == ["hold", "wake_weights", "init", "update", "leave"]
    await sleeping.publish(version(1))
    assert log.count("e1 sleep 2") == 2


async def test_an_engine_left_half_awake_by_a_failure_is_not_put_to_sleep_again(sleeping, log, engines):
    engines[0].fail["update"] = WeightSyncError("torn")
    with pytest.raises(WeightSyncError):
        await sleeping.publish(version(0))
    engines[0].fail.clear()
    await sleeping.vacate()
    await sleeping.publish(version(0))
    assert [log.count(f"e0 {what}") for what in ("sleep 2", "wake weights", "wake kv_cache")] == [1, 1, 1]
    assert engines[0].open_version == "0.0"


@pytest.mark.parametrize("outcome", ["fail", "lose"], ids=["it stayed awake", "it slept"])
async def test_an_engine_that_did_not_answer_sleep_has_left_before_the_next_publish(sleeping, engines, outcome):
    getattr(engines[0], outcome)["sleep 2"] = DeadlineError("e0: no answer to /sleep")
    await sleeping.vacate()
    with pytest.raises(DeadlineError, match="no answer to /sleep"):
        await sleeping.publish(version(0))
    getattr(engines[0], outcome).clear()
    await sleeping.vacate()
    assert all(e.asleep == {"weights", "kv_cache"} for e in engines)
    await sleeping.publish(version(0))
    assert [e.open_version for e in engines] == ["0.0"] * 2


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
@pytest.mark.parametrize("outcome", ["fail", "lose"], ids=["it went on sleeping", "it woke"])
async def test_an_engine_that_did_not_answer_wake_serves_after_the_next_publish(sleeping, engines, tag, outcome):
    getattr(engines[0], outcome)[f"wake {tag}"] = DeadlineError("e0: no answer to /wake_up")
    await sleeping.vacate()
    with pytest.raises(DeadlineError, match="no answer to /wake_up"):
        await sleeping.publish(version(0))
    getattr(engines[0], outcome).clear()
    await sleeping.vacate()
    assert all("kv_cache" in e.asleep for e in engines), "caches have no room beside the trainer's parameters"
    await sleeping.publish(version(0))
    assert [(e.open_version, e.asleep) for e in engines] == [("0.0", set())] * 2


async def test_an_engine_that_cannot_leave_says_so_in_the_publish(sleeping, engines):
    engines[1].fail["sleep 2"] = EngineError("e1: no answer to /sleep")
    await sleeping.vacate()
    with pytest.raises(EngineError, match="no answer to /sleep"):
        await sleeping.publish(version(0))


async def test_engines_that_only_pause_keep_serving_until_the_publish(publisher, log):
    await publisher.vacate()
    assert log == []


async def test_engines_get_rank_offsets_by_their_sizes(publisher, engines, link):
    await publisher.publish(version(0))
    assert [e.offset for e in engines] == [0, 2]
    assert link.groups == [3]


async def test_a_failed_update_leaves_all_held_until_a_full_publish_succeeds(publisher, engines, link):
    await publisher.publish(version(0))
    engines[1].fail["update"] = WeightSyncError("e1: tensor a was altered")
    link.weights = -2.0
    with pytest.raises(WeightSyncError, match="tensor a was altered"):
        await publisher.publish(version(1))
    assert all(e.is_held for e in engines)
    assert publisher.version is None
    engines[1].fail.clear()
    await publisher.publish(version(1), probe=True)
    assert [(e.served, e.open_version) for e in engines] == [(-2.0, "0.1")] * 2


async def test_a_failed_probe_stops_every_engine_before_any_gate_opens(publisher, engines, log):
    engines[1].skew = 0.3
    with pytest.raises(ProbeError, match=r"e1: .* by 0\.3"):
        await publisher.publish(version(0), probe=True)
    assert all(e.is_held for e in engines)
    assert not [line for line in log if line.endswith("open")]


@pytest.fixture
def keeping(link, engines):
    publisher = Publisher(link, probe=ProbeSettings(ids=IDS), pause="keep")
    publisher.set_engines(engines)
    return publisher


async def test_engines_that_keep_their_requests_run_until_everything_is_staged(keeping, log, engines):
    report = await keeping.publish(version(0))
    assert log.index("stage 0.0 False") < min(log.index(f"e{n} shut") for n in (0, 1))
    assert list(report.seconds) == ["init", "reference", "stage", "hold", "update", "open"]
    assert [e.pauses for e in engines] == [["keep"]] * 2


@pytest.mark.parametrize("probe", [True, False])
async def test_requests_end_with_weights_on_trial_and_are_kept_through_other_failures(keeping, engines, probe):
    """A gate that does not open says nothing about the weights, unless they were on trial behind it."""
    engines[0].fail["open"] = DeadlineError("e0: no answer")
    with pytest.raises(DeadlineError):
        await keeping.publish(version(0), probe=probe)
    assert all(e.is_held for e in engines)
    assert [e.pauses for e in engines] == [["keep", "abort" if probe else "keep"]] * 2


async def test_an_engine_that_does_not_open_pauses_the_others_again(publisher, engines):
    engines[0].fail["open"] = DeadlineError("e0: no answer")
    with pytest.raises(DeadlineError, match="e0"):
        await publisher.publish(version(0))
    assert all(e.is_held for e in engines)


async def test_the_first_failure_surfaces_without_waiting_for_a_slow_engine(publisher, engines):
    async def slow(info, *, version):
        await asyncio.sleep(30)

    engines[0].update = slow
    engines[1].fail["update"] = DeadlineError("e1: no answer to /vime/update within 1 s")
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match="e1"):
        await publisher.publish(version(0))
    assert time.monotonic() - begin < 2


async def test_names_are_refused_before_any_engine_is_paused(publisher, engines, log):
    await publisher.publish(version(0))
    newcomer = Engine("e2", log)
    newcomer.fail["init"] = WeightSyncError("e2: unknown tensors")
    publisher.set_engines([*engines, newcomer])
    with pytest.raises(WeightSyncError, match="unknown tensors"):
        await publisher.publish(version(1))
    assert [e.open_version for e in engines] == ["0.0"] * 2
    assert publisher.version == version(0)


async def test_a_restarted_engine_loads_the_last_weights_and_is_probed_before_it_opens(publisher, engines, link, log):
    link.weights = -0.5
    await publisher.publish(version(3), probe=True)
    link.weights = -9.0
    log.clear()
    again = Engine("e1", log)
    await publisher.admit(again)
    assert [line for line in log if line.startswith("e")] == [
        f"e1 {s}" for s in ("init", "shut", "update", "resume", "probe", "open")
    ]
    assert (again.served, again.open_version) == (-0.5, "0.3")
    assert not [line for line in log if line.startswith("e0")]
    await publisher.publish(version(4))
    assert (again.served, engines[0].served) == (-9.0, -9.0)


async def test_an_engine_that_fails_its_admission_leaves_the_set(publisher, engines, log):
    await publisher.publish(version(0), probe=True)
    again = Engine("e1", log)
    again.skew = 1.0
    with pytest.raises(ProbeError, match="e1"):
        await publisher.admit(again)
    assert again.is_held
    assert [e.name for e in publisher.engines] == ["e0"]


async def test_nothing_is_admitted_from_a_failed_publish(publisher, engines, log):
    engines[0].fail["update"] = WeightSyncError("torn")
    with pytest.raises(WeightSyncError):
        await publisher.publish(version(0))
    again = Engine("e1", log)
    await publisher.admit(again)
    assert again.weights is None
    engines[0].fail.clear()
    await publisher.publish(version(0))
    assert again.open_version == "0.0"


async def test_a_lost_engine_is_left_out(publisher, engines):
    await publisher.publish(version(0))
    publisher.remove("e1")
    engines[1].fail["shut"] = DeadlineError("e1 is gone")
    await publisher.publish(version(1))
    assert engines[0].open_version == "0.1"


async def test_streaming_transports_stream_beside_the_update_and_rebuild_their_group(engines, log, streaming):
    link, publisher = streaming
    await publisher.publish(version(0))
    assert log.count("stream") == 1
    assert log.count("connect") == 1
    again = Engine("e1", log)
    await publisher.admit(again)
    await publisher.publish(version(1))
    assert link.groups == [3, 1, 3]
    engines[0].fail["update"] = WeightSyncError("lost")
    with pytest.raises(WeightSyncError):
        await publisher.publish(version(2))
    engines[0].fail.clear()
    await publisher.publish(version(2))
    assert link.groups == [3, 1, 3, 3]


async def test_each_phase_of_an_update_is_told_by_its_slowest_engine(publisher, engines):
    for engine, seconds in zip(engines, ({"start": 1.0, "update": 5.0}, {"start": 2.0, "update": 3.0}), strict=True):
        plain = engine.update

        async def update(info, *, version, plain=plain, seconds=seconds):
            await plain(info, version=version)
            return seconds

        engine.update = update
    report = await publisher.publish(version(0))
    assert report.slowest_engine == {"start": 2.0, "update": 5.0}
    assert report.engine_seconds["e1"] == {"start": 2.0, "update": 3.0}
