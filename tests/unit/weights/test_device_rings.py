"""device_ipc between several trainer ranks and workers on several devices, whose identities are planted."""

import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vime.errors import DeadlineError, WeightSyncError
from vime.weights.merge import merge_offers
from vime.weights.transports.control_page import ControlPage

HERE = Path(__file__).parent


def _module(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ipc = _module("test_device_ipc")
roles, peers = ipc.roles, ipc.peers


class Gathering:
    """The weights as ranks gather them: each tensor comes once all ranks have asked for it, and fails if one does not."""

    def __init__(self, seed, ranks):
        self.weights = roles.make_weights(seed)
        self._together = threading.Barrier(ranks, timeout=10)

    def iterate(self):
        for item in self.weights.items():
            self._together.wait()
            yield item


class Ranks:
    """The trainer's ranks, each on its own thread."""

    def __init__(self, directory, identities, **options):
        self.halves, self.offers = [], {}
        for rank, identity in enumerate(identities):
            folder = directory / f"{directory.name}-r{rank}"
            folder.mkdir()
            self.halves.append(roles.make_trainer(folder, rank=rank, identity=identity, **options))
        self._threads = ThreadPoolExecutor(len(identities))

    def each(self, call):
        """What `call(half)` returns or raises on each rank."""
        return [future.exception() or future.result() for future in [self._threads.submit(call, h) for h in self.halves]]

    def join(self, workers):
        """Connect worker processes -> how many take from each rank."""
        return self.join_on(dict.fromkeys(workers, "one"), ["one"] * len(self.halves))

    def join_on(self, workers, hosts):
        """Connect worker processes by their host, with ranks on `hosts` -> how many take from each rank."""
        beside = {host: [worker for worker, at in workers.items() if at == host] for host in hosts}
        told = [half.init_info(len(beside[host])) for half, host in zip(self.halves, hosts, strict=True)]
        self.offers = merge_offers(told, hosts)
        for host, here in beside.items():
            for number, worker in enumerate(here):
                worker.tell("connect", roles.engine_info(self.offers[host], number))
        counts = self.each(lambda half: half.connect())
        assert [worker.answer() for worker in workers] == ["connected"] * len(workers)
        return counts

    def send(self, seed, workers, *, dies=None):
        """Stream to workers -> (what each rank raised, what each worker answers); one may die after two tensors."""
        gathering = Gathering(seed, len(self.halves))
        staged = self.halves[0].stage(gathering.weights.items(), version="0.1", fingerprint=True)
        for worker in workers:
            worker.tell("receive", staged, {"die_after": 2} if worker is dies else {})
        outcomes = self.each(lambda half: half.stream(gathering.iterate()))
        return outcomes, [None if worker is dies else worker.answer() for worker in workers]

    def keep(self, seed):
        gathering = Gathering(seed, len(self.halves))
        return self.each(lambda half: half.keep(gathering.iterate()))

    def close(self):
        for half in self.halves:
            half.close()
        self._threads.shutdown()


@pytest.fixture
def ranks_of(tmp_path):
    made = []

    def make(*identities, **options):
        made.append(Ranks(tmp_path, identities, **options))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture
def workers_on(peers):
    def start(*identities):
        workers = peers("engine", len(identities))
        for worker, identity in zip(workers, identities, strict=True):
            worker.ask("be on", identity)
        return workers

    return start


def listed(seed):
    return ipc.listed(roles.make_weights(seed))


def test_every_worker_takes_from_the_rank_on_its_device_and_from_the_first_where_there_is_none(ranks_of, workers_on):
    ranks, workers = ranks_of("x", "y"), workers_on("y", "x", "y", "z")
    assert ranks.join(workers) == [2, 2]
    for seed in (1, 2):
        assert ranks.send(seed, workers) == ([None, None], [listed(seed)] * 4)


def test_of_two_ranks_on_one_device_the_first_sends(ranks_of, workers_on):
    ranks, workers = ranks_of("x", "x", "y"), workers_on("x", "y", "x")
    assert ranks.join(workers) == [2, 0, 1]
    assert ranks.send(1, workers) == ([None] * 3, [listed(1)] * 3)


def test_a_rank_from_which_nobody_takes_waits_for_nobody_until_somebody_does(ranks_of, workers_on):
    ranks, workers = ranks_of("x", "y"), workers_on("x")
    assert ranks.join(workers) == [1, 0]
    assert ranks.send(1, workers) == ([None, None], [listed(1)])
    more = [*workers, *workers_on("y")]
    assert ranks.join(more) == [1, 1]
    assert ranks.send(2, more) == ([None, None], [listed(2)] * 2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_is_named_by_its_rank_and_the_other_ring_goes_on(ranks_of, workers_on, victim):
    ranks, workers = ranks_of("x", "y"), workers_on("x", "y")
    ranks.join(workers)
    dies, lives = workers[victim], workers[1 - victim]
    began = time.monotonic()
    outcomes, answers = ranks.send(1, workers, dies=dies)
    assert time.monotonic() - began < 15, "nobody waited for a deadline"
    assert isinstance(outcomes[victim], WeightSyncError)
    assert f"engine worker {victim} (process {dies.process.pid}) is gone" in str(outcomes[victim])
    assert outcomes[1 - victim] is None
    assert answers[1 - victim] == listed(1), "the other device's workers have everything"
    fresh = [lives, *workers_on("xy"[victim])]
    assert sorted(ranks.join(fresh)) == [1, 1]
    assert ranks.send(2, fresh) == ([None, None], [listed(2)] * 2)


def test_an_engine_that_restarts_beside_another_rank_gets_what_that_rank_kept(ranks_of, workers_on):
    ranks, workers = ranks_of("x", "y"), workers_on("x", "y")
    ranks.join(workers)
    ranks.send(1, workers)
    assert ranks.keep(1) == [None, None]
    restarted = workers_on("y")
    assert ranks.join(restarted) == [0, 1]
    restarted[0].tell("receive", {}, {})
    assert ranks.each(lambda half: half.stream(())) == [None, None]
    assert restarted[0].answer() == listed(1)


def test_a_rank_from_which_nobody_ever_took_keeps_nothing(ranks_of, workers_on):
    ranks, workers = ranks_of("x", "y"), workers_on("x")
    ranks.join(workers)
    ranks.send(1, workers)
    assert ranks.keep(1) == [None, None]
    ranks.join(workers_on("y"))
    assert "no published weights are kept" in str(ranks.each(lambda half: half.stream(()))[1])


def test_every_rank_names_the_workers_that_did_not_come(ranks_of, workers_on):
    ranks = ranks_of("x", "y", timeout_s=0.3)
    for half in ranks.halves:
        half.init_info(2)
    for outcome in ranks.each(lambda half: half.connect()):
        assert isinstance(outcome, DeadlineError)
        assert "engine workers [0, 1] of 0..1 did not connect" in str(outcome)


# ---- several hosts


def test_workers_take_from_ranks_of_their_own_host_and_are_told_of_no_other(ranks_of, workers_on):
    """Two of four workers are on devices without a rank: the first rank of their own host sends to them."""
    ranks, workers = ranks_of("a0", "a1", "b0", "b1"), workers_on("a1", "a9", "b1", "b9")
    hosts = dict(zip(workers, "AABB", strict=True))
    assert ranks.join_on(hosts, "AABB") == [1, 1, 1, 1]
    for host, owners in (("A", {"r0", "r1"}), ("B", {"r2", "r3"})):
        pages = [Path(ring["page"]) for ring in ranks.offers[host]["info"]["rings"]]
        assert {page.parent.name.rpartition("-")[2] for page in pages} == owners
        assert [ControlPage.open(page).header("receivers") for page in pages] == [2, 2]
    for seed in (1, 2):
        assert ranks.send(seed, workers) == ([None] * 4, [listed(seed)] * 4)


def test_an_engine_that_restarts_on_one_host_leaves_the_ranks_of_others_alone(ranks_of, workers_on):
    ranks, workers = ranks_of("a0", "b0"), workers_on("a0", "b0")
    ranks.join_on(dict(zip(workers, "AB", strict=True)), "AB")
    ranks.send(1, workers)
    assert ranks.keep(1) == [None, None]
    (restarted,) = workers_on("b0")
    assert ranks.join_on({restarted: "B"}, "AB") == [0, 1]
    restarted.tell("receive", {}, {})
    assert ranks.each(lambda half: half.stream(())) == [None, None]
    assert restarted.answer() == listed(1)
    assert ranks.join_on({workers[0]: "A", restarted: "B"}, "AB") == [1, 1]
    assert ranks.send(2, [workers[0], restarted]) == ([None, None], [listed(2)] * 2)
