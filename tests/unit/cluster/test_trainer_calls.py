"""What a rank does with its half of a transport, and in which order the ranks are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vime.cluster.links import TrainerLink
from vime.cluster.trainer_process import HalfInfo, TrainerProcess
from vime.errors import TrainerError
from vime.weights.hosts import ANYWHERE

NAMES = ("a", "b", "c")


class Worker:
    """Gathering counts as begun with the first tensor and as done after the last one: other ranks wait for both."""

    is_writer = True

    def __init__(self) -> None:
        self.gathered: list[str] = []

    def weights_on_first_rank(self) -> Iterator[tuple[str, int]]:
        for name in NAMES:
            yield name, 0
        self.gathered.append("first")

    def weights_on_every_rank(self) -> Iterator[tuple[str, int]]:
        for name in NAMES:
            yield name, 0
        self.gathered.append("every")

    def weights(self) -> Iterator[tuple[str, int]]:
        for name in NAMES:
            yield name, 0
        self.gathered.append("own")


class Half:
    """Reads what it needs: digests only if asked, and everything that it sends or keeps."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.kept: list[Any] = []

    def stage(self, weights: Any, *, version: str, fingerprint: bool) -> dict[str, Any]:
        return {"version": version, "tensors": 3, "digests": [n for n, _ in weights] if fingerprint else []}

    def stream(self, weights: Any) -> None:
        self.sent.append(weights if weights == () else [name for name, _ in weights])

    def keep(self, weights: Any) -> None:
        self.kept.append([name for name, _ in weights])


def rank(half: Any, *, streams: bool = True) -> Any:
    process: Any = TrainerProcess.__new__(TrainerProcess)
    process.worker, process._half, process._streams = Worker(), half, streams
    return process


@pytest.mark.parametrize("half", [Half(), None], ids=["a rank that sends", "a rank that only gathers"])
def test_every_rank_takes_part_in_what_is_gathered_and_in_nothing_else(half: Half | None) -> None:
    process = rank(half)
    process.stage("0.1", False)
    assert process.worker.gathered == [], "nobody reads weights to stage them without digests"
    process.stage("0.1", True)
    process.stream(kept=False, on_every_rank=False)
    process.keep(on_every_rank=False)
    assert process.worker.gathered == ["first"] * 3
    process.stream(kept=True, on_every_rank=False)
    assert process.worker.gathered == ["first"] * 3, "what is kept needs no gathering"
    if half is not None:
        assert (half.sent, half.kept) == ([list(NAMES), ()], [list(NAMES)])


@pytest.mark.parametrize("half", [Half(), None], ids=["a rank that sends", "a rank that only gathers"])
def test_all_ranks_gather_everything_where_more_than_the_first_send(half: Half | None) -> None:
    process = rank(half)
    process.stream(kept=False, on_every_rank=True)
    process.keep(on_every_rank=True)
    assert process.worker.gathered == ["every"] * 2


@pytest.mark.parametrize("fingerprint", [True, False])
def test_a_rank_without_a_half_gathers_for_transports_that_stage_on_the_host(fingerprint: bool) -> None:
    process = rank(None, streams=False)
    assert process.stage("0.1", fingerprint) == {"tensors": 0}
    assert process.worker.gathered == ["own"]


@pytest.mark.parametrize(("number", "manifest"), [(0, ["row"]), (1, [])])
def test_the_first_rank_alone_tells_the_manifest(number: int, manifest: list[str]) -> None:
    """It lists every tensor of the model, and all ranks have the same."""
    process = rank(SimpleNamespace(init_info=lambda receivers: {"manifest": ["row"], "info": {"rings": [receivers]}}))
    process._setup = SimpleNamespace(rank=number)
    assert process.init_info(4) == {"manifest": manifest, "info": {"rings": [4]}}


class Method:
    """One call; what it answers or raises is `outcome`."""

    def __init__(self, log: list[Any], name: str, outcome: Any) -> None:
        self._log, self._name, self._outcome = log, name, outcome

    def remote(self, *words: Any) -> asyncio.Future[Any]:
        self._log.append((self._name, *words))
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        settle = done.set_exception if isinstance(self._outcome, BaseException) else done.set_result
        asyncio.get_running_loop().call_later(0.01, settle, self._outcome)
        return done


class Actor:
    """Notes calls as they are made; an actor runs them in this order."""

    def __init__(self, **outcomes: Any) -> None:
        self.log: list[Any] = []
        self.outcomes = outcomes

    def __getattr__(self, name: str) -> Method:
        return Method(self.log, name, self.outcomes.get(name))

    def words(self, method: str) -> list[list[Any]]:
        return [words for name, *words in self.log if name == method]


async def test_every_rank_is_asked_to_keep_before_any_later_call() -> None:
    actors = [Actor(), Actor()]
    link = TrainerLink(actors)
    keeping = asyncio.ensure_future(link.keep())
    await link.all("train")
    await keeping
    assert [actor.log for actor in actors] == [[("keep", False), ("train",)]] * 2


async def test_a_rank_that_cannot_keep_says_so_where_it_is_awaited() -> None:
    link = TrainerLink([Actor(), Actor(keep=TrainerError("rank 1: no host memory"))])
    keeping = link.keep()
    with pytest.raises(TrainerError, match="no host memory"):
        await keeping


async def test_every_rank_streams() -> None:
    actors = [Actor(), Actor()]
    await TrainerLink(actors).stream()
    assert [actor.log for actor in actors] == [[("stream", False, False)]] * 2


async def opened(actors: list[Actor], *, every_rank: bool, hosts: str = "AA") -> TrainerLink:
    for rank, actor in enumerate(actors):
        actor.outcomes["open_transfer"] = HalfInfo(True, every_rank, {"rank": rank}, 3, hosts[rank])
        manifest = [] if rank else ["row"]
        info = {"rank": rank, "rings": [f"ring {rank}"]}
        actor.outcomes["init_info"] = {"protocol": "p", "manifest": manifest, "info": info}
    link = TrainerLink(actors)
    await link.open_transfer("setup")  # type: ignore[arg-type]
    return link


async def test_rings_of_all_ranks_are_offered_in_their_order() -> None:
    actors = [Actor(), Actor()]
    link = await opened(actors, every_rank=True)
    offer = {"protocol": "p", "manifest": ["row"], "info": {"rank": 0, "rings": ["ring 0", "ring 1"]}}
    assert link.by_host
    assert await link.init_info({"A": 4}) == {"A": offer}
    assert actors[1].words("open_transfer") == [["setup", {"rank": 0}]]


async def test_each_host_has_the_rings_of_its_own_ranks_which_know_of_its_own_workers_alone() -> None:
    actors = [Actor(), Actor(), Actor(), Actor()]
    link = await opened(actors, every_rank=True, hosts="ABAC")
    offers = await link.init_info({"A": 4, "B": 8, "D": 1})
    assert {host: offer["info"]["rings"] for host, offer in offers.items()} == {
        "A": ["ring 0", "ring 2"],
        "B": ["ring 1"],
        "C": ["ring 3"],
    }
    assert [actor.words("init_info") for actor in actors] == [[[4]], [[8]], [[4]], [[0]]]
    assert all(offer["manifest"] == ["row"] for offer in offers.values()), "rank 0 alone tells it"


async def test_where_only_the_first_rank_sends_the_others_are_not_asked() -> None:
    actors = [Actor(), Actor()]
    link = await opened(actors, every_rank=False)
    assert not link.by_host
    offers = await link.init_info({"A": 3, "B": 1})
    assert {host: offer["info"]["rank"] for host, offer in offers.items()} == {ANYWHERE: 0}
    assert actors[0].words("init_info") == [[4]]
    await link.connect()
    assert [name for name, *_ in actors[1].log] == ["open_transfer"]


async def test_all_weights_go_to_all_ranks_only_while_others_than_the_first_send() -> None:
    """A rank from which workers took once keeps every publication from then on: they may start again there."""
    actors = [Actor(), Actor()]
    link = await opened(actors, every_rank=True)
    for counts in ((2, 0), (1, 1), (2, 0)):
        for actor, count in zip(actors, counts, strict=True):
            actor.outcomes["connect_transfer"] = count
        await link.connect()
        await link.stream()
        await link.keep()
    for actor in actors:
        assert actor.words("stream") == [[False, False], [False, True], [False, False]]
        assert actor.words("keep") == [[False], [True], [True]]
