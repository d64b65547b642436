"""The order of a publish and what a failure leaves behind, with engines that behave in memory."""

import asyncio
import time

import pytest

from vime.errors import DeadlineError, EngineError, ProbeError, WeightSyncError
from vime.types import PolicyVersion
from vime.weights.protocol import ProbeSettings, Publisher

IDS = ((1, 2, 3),)


class Link:
    """A trainer whose weights are a number; its log-probs are that number."""

    def __init__(self, log, streams=False):
        self.log, self.streams, self.weights = log, streams, 0.0
        self.groups = []

    async def init_info(self, receivers):
        self.log.append(f"init_info {receivers}")
        self.groups.append(receivers)
        return {"protocol": "memory", "manifest": [["a", "float32", [2], 0, 8], ["b", "float32", [1], 64, 4]], "info": {}}

    async def connect(self):
        self.log.append("connect")

    async def stage(self, version, fingerprint):
        self.log.append(f"stage {version} {fingerprint}")
        return {"version": version, "weights": self.weights}

    async def stream(self):
        self.log.append("stream")

    async def probe_log_probs(self, sequences):
        assert sequences == IDS
        self.log.append("reference")
        return [[self.weights, self.weights]]


class Engine:
    """Refuses what a real one refuses: an update while it runs, generation while it is paused."""

    def __init__(self, name, log, size=1):
        self.name, self.log, self.size = name, log, size
        self.paused, self.open_version, self.weights, self.served = False, None, None, None
        self.offset = None
        self.fail = {}
        self.skew = 0.0
        self.asleep = set()

    async def _step(self, what):
        self.log.append(f"{self.name} {what}")
        await asyncio.sleep(0)
        if error := self.fail.get(what):
            raise error

    async def world_size(self):
        return self.size

    async def init(self, info):
        self.offset = info["rank_offset"]
        await self._step("init")

    async def shut(self, pause):
        self.open_version = None
        await self._step("shut")
        self.paused = True

    async def sleep(self, level):
        assert self.paused
        assert not self.asleep
        await self._step(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}

    async def wake(self, tags):
        assert self.asleep.issuperset(tags)
        await self._step(f"wake {' '.join(tags)}")
        self.asleep -= set(tags)
        self.paused = bool(self.asleep)

    async def update(self, info, *, version):
        assert self.paused
        assert "weights" not in self.asleep
        await self._step("update")
        self.weights = info["staged"]["weights"]
        return {"update": 0.0}

    async def resume(self):
        assert not self.asleep
        await self._step("resume")
        self.paused = False

    async def probe(self, ids):
        assert not self.paused
        assert self.open_version is None
        await self._step("probe")
        return [[self.weights + self.skew] * 2]

    async def open(self, version, *, resume):
        await self._step("open")
        if resume:
            self.paused = False
        assert not self.paused
        self.open_version, self.served = version, self.weights

    async def close(self):
        pass

    @property
    def is_held(self):
        return self.paused and self.open_version is None


@pytest.fixture
def log():
    return []


@pytest.fixture
def engines(log):
    return [Engine("e0", log, size=2), Engine("e1", log)]


@pytest.fixture
def link(log):
    return Link(log)


@pytest.fixture
def publisher(link, engines):
    publisher = Publisher(link, probe=ProbeSettings(ids=IDS))
    publisher.set_engines(engines)
    return publisher


def version(step):
    return PolicyVersion(0, step)


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
    steps = ("shut", "sleep 2", "wake weights", "update", "wake kv_cache", "resume", "probe", "open")
    assert [line for line in log if line.startswith("e0") and line != "e0 init"] == [f"e0 {step}" for step in steps]
    both = [max(log.index(f"e{n} update") for n in (0, 1)), min(log.index(f"e{n} wake kv_cache") for n in (0, 1))]
    assert both[0] < log.index("trainer leaves") < both[1]
    assert list(report.seconds)[3:7] == ["wake_weights", "update", "leave", "wake_kv_cache"]
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


async def test_streaming_transports_stream_beside_the_update_and_rebuild_their_group(engines, log):
    link = Link(log, streams=True)
    publisher = Publisher(link, probe=ProbeSettings(ids=IDS))
    publisher.set_engines(engines)
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
