"""While no engine lives, nobody is sent work; with one alive, work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vime.cluster import fleet as fleet_module
from vime.cluster.engine_process import EngineAddress
from vime.cluster.fleet import EngineFleet, FleetRules
from vime.rollout.router import RouterSpec


class Call:
    """A method of an actor."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    async def remote(self) -> Any:
        return self._work()


class Host:
    """An engine host whose engine lives or not, and starts again when it is told to."""

    def __init__(self, name: str) -> None:
        self.lives = True
        self.address = EngineAddress(name, f"http://127.0.0.1:1/{name}", 1)
        self.alive = Call(lambda: self.lives)
        self.start = Call(self._start)
        self.stop = Call(lambda: None)

    def _start(self) -> EngineAddress:
        self.lives = True
        return self.address


class Router:
    def alive(self) -> bool:
        return True

    async def add_worker(self, url: str) -> None: ...

    async def remove_worker(self, url: str) -> None: ...


class Admission:
    """Holds an admission until it is let through."""

    def __init__(self) -> None:
        self.let_in = asyncio.Event()

    def remove(self, name: str) -> None: ...

    async def admit(self, engine: Any) -> None:
        await self.let_in.wait()


@asynccontextmanager
async def free_turn() -> Any:
    yield


@pytest.fixture
def hosts() -> list[Host]:
    return [Host("engine 0"), Host("engine 1")]


@pytest.fixture
def fleet(hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineFleet:
    monkeypatch.setattr(fleet_module, "WATCH_INTERVAL_S", 0.01)
    rules = FleetRules(run_token="", api_key=None, start_timeout_s=5.0, call_timeout_s=5.0)
    found = EngineFleet(hosts, RouterSpec(log_path=tmp_path / "router.log"), rules, on_event=lambda kind, text: None)
    found._router = Router()  # type: ignore[assignment]
    found._addresses = [host.address for host in hosts]
    found._controls = [found._control(address) for address in found._addresses]
    return found


async def is_serving(fleet: EngineFleet) -> bool:
    try:
        await asyncio.wait_for(fleet.wait_serving(), 0.1)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(("dead", "serving"), [((0,), True), ((0, 1), False)])
async def test_work_waits_only_while_no_engine_lives(
    fleet: EngineFleet, hosts: list[Host], dead: tuple[int, ...], serving: bool
) -> None:
    admission = Admission()
    watcher = asyncio.create_task(fleet.watch(admission, free_turn))
    try:
        assert await is_serving(fleet)
        for index in dead:
            hosts[index].lives = False
        await asyncio.sleep(0.05)
        assert await is_serving(fleet) is serving
        admission.let_in.set()
        await asyncio.sleep(0.05)
        assert await is_serving(fleet)
        assert fleet.replaced == len(dead)
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def test_an_engine_that_another_party_replaced_ends_the_wait_too(fleet: EngineFleet, hosts: list[Host]) -> None:
    admission, turn_is_free = Admission(), asyncio.Event()
    admission.let_in.set()

    @asynccontextmanager
    async def late_turn() -> Any:
        await turn_is_free.wait()
        yield

    watcher = asyncio.create_task(fleet.watch(admission, late_turn))
    try:
        for host in hosts:
            host.lives = False
        await asyncio.sleep(0.05)
        assert not await is_serving(fleet)
        await fleet.mend(admission)
        turn_is_free.set()
        assert await is_serving(fleet)
        assert fleet.replaced == 2
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
