"""A trainer and engines in memory, for the tests of publishing."""

import asyncio

from vime.types import PolicyVersion

IDS = ((1, 2, 3),)


def version(step):
    return PolicyVersion(0, step)


class Link:
    """A trainer whose weights are a number; its log-probs are that number."""

    def __init__(self, log, streams=False):
        self.log, self.streams, self.weights = log, streams, 0.0
        self.groups = []
        self.hosts = ()
        self.sent = self.kept = None
        self.keeping = asyncio.Event()
        self.keeping.set()
        self.keep_fails = None

    @property
    def by_host(self):
        return bool(self.hosts)

    async def init_info(self, receivers):
        """Offers of `hosts`, or the one offer for everybody."""
        self.log.append(f"init_info {receivers}")
        self.groups.append(dict(receivers) if self.hosts else sum(receivers.values()))
        rows = [["a", "float32", [2], 0, 8], ["b", "float32", [1], 64, 4]]
        return {host: {"protocol": "memory", "manifest": rows, "info": {"of": host}} for host in self.hosts or ("",)}

    async def connect(self):
        self.log.append("connect")

    async def stage(self, version, fingerprint):
        self.log.append(f"stage {version} {fingerprint}")
        return {"version": version, "weights": self.weights}

    async def stream(self, *, kept=False):
        self.log.append("stream kept" if kept else "stream")
        self.sent = self.kept if kept else self.weights

    def keep(self):
        """As a rank does it: the weights are those of the moment of the call, whenever the copy is done."""
        self.log.append("keep")
        return self._keep(self.weights)

    async def _keep(self, weights):
        await self.keeping.wait()
        if self.keep_fails:
            self.kept = None
            raise self.keep_fails
        self.kept = weights
        self.log.append("kept")

    async def probe_log_probs(self, sequences):
        assert sequences == IDS
        self.log.append("reference")
        return [[self.weights, self.weights]]


class Engine:
    """Refuses what a real one refuses: an update while it runs, generation while it is paused, looking at weights that have no
    memory. Like vLLM it takes sleep for done where anything sleeps, and waking for done where the tag is awake.

    A step in `fail` fails before it has an effect, one in `lose` has its effect and the answer is lost.
    """

    def __init__(self, name, log, size=1):
        self.name, self.log, self.size = name, log, size
        self.paused, self.open_version, self.weights, self.served = False, None, None, None
        self.offset = self.told = None
        self.place = ""
        self.fail, self.lose = {}, {}
        self.link = None
        self.skew = 0.0
        self.asleep = set()
        self.pauses = []
        self.held_bytes = {}

    async def _step(self, what, effect=lambda: None):
        self.log.append(f"{self.name} {what}")
        await asyncio.sleep(0)
        if error := self.fail.get(what):
            raise error
        effect()
        if error := self.lose.get(what):
            raise error

    async def world_size(self):
        return self.size

    async def host(self):
        return self.place

    async def init(self, info):
        assert "weights" not in self.asleep
        self.offset, self.told = info["rank_offset"], info
        await self._step("init")

    async def shut(self, pause):
        self.open_version = None
        self.pauses.append(pause)
        await self._step("shut")
        self.paused = True

    async def sleep(self, level):
        assert self.paused

        def fall_asleep():
            self.asleep = self.asleep or {"weights", "kv_cache"}

        await self._step(f"sleep {level}", fall_asleep)

    async def wake(self, tags):
        def wake_up():
            self.asleep -= set(tags)
            self.paused = self.paused and bool(self.asleep)

        await self._step(f"wake {' '.join(tags)}", wake_up)

    async def update(self, info, *, version):
        assert self.paused
        assert "weights" not in self.asleep
        await self._step("update")
        await asyncio.sleep(0)
        self.weights = self.link.sent if self.link else info["staged"]["weights"]
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
