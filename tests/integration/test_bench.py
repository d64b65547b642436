"""`vime bench` with a real engine on the host: every part is done, told and recorded, and no process is left."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from vime.benchmarks import bare, engines, moves, sleep, sync
from vime.cli.bench import parser_of
from vime.cli.main import main
from vime.errors import EngineError

pytestmark = pytest.mark.timeout(300)


def bench(name: str, folder: Path, *words: str) -> dict[str, Any]:
    before = set(psutil.Process().children(recursive=True))
    code = main(["bench", name, "--platform", "cpu", "--shape", "tiny", "--out", str(folder), "--limit", "280", *words])
    parts = json.loads((folder / f"bench-{name}.json").read_text())["parts"]
    assert code == 0, {part: found.get("error") for part, found in parts.items()}
    assert set(psutil.Process().children(recursive=True)) <= before
    return parts


def planned(name: str, folder: Path) -> engines.Planned:
    args: argparse.Namespace = parser_of(name).parse_args(["--out", str(folder)])
    here = engines.look(args)
    return engines.plan_run(args, here, engines.model_of(args, here, engines.Clock(60)))


def test_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--prompts", "4", "--prompt-tokens", "8", "--response-tokens", "12", "--n", "2", "--repeats", "1")
    parts = bench("rollout", tmp_path, *words)
    assert [row["tokens"] for row in parts["server"]["repeats"] if row["kind"] in ("equal", "direct")] == [96, 96]
    for name in ("plain", "log_probs"):
        rows = {row["kind"]: row for row in parts["bare"][name]}
        assert rows["equal"]["tokens"] == 96
        spread = next(row for row in parts["server"]["repeats"] if row["kind"] == "spread")
        assert rows["spread"]["tokens"] == spread["tokens"]
    assert parts["server"]["answer"]["bytes_per_token"] > 20
    assert {"client"} < set(parts["server"]["us_per_token"])
    assert "enable_prompt_tokens_details" in parts["bare"]["left_out"]
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("served / floor, spread")


@dataclass(frozen=True)
class Synced:
    """What `vime bench sync` left, and what its engine was used for afterwards."""

    parts: dict[str, Any]
    printed: str
    streamed: dict[str, Any]
    cycles: dict[str, Any]


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Synced:
    """One engine for three tests: before the benchmark ends it, weights are streamed to it and it goes to sleep."""
    after: dict[str, Any] = {}

    @asynccontextmanager
    async def kept(planned: engines.Planned, clock: engines.Clock) -> AsyncIterator[Any]:
        async with engines.served(streaming(planned), clock) as server:
            yield server

            @asynccontextmanager
            async def running(*_: Any) -> AsyncIterator[Any]:
                yield server

            patch.setattr(sync, "served", running)
            where, sizes = moves.Where("cpu", planned.plan.dtype), moves.sizes_of(planned.config.model.path)
            after["streamed"] = await sync.publications(streaming(planned), (where, sizes), 2, clock)
            async with engines.control_of(planned, server, clock) as control:
                await control.shut("drain")
                after["cycles"] = await sleep.cycles(control, planned, {"level": 1, "repeats": 2})

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(sync, "served", kept)
        parts = bench("sync", tmp_path_factory.mktemp("sync"), "--repeats", "2")
    return Synced(parts, printed.getvalue(), **after)


def streaming(planned: engines.Planned) -> engines.Planned:
    """With the transport of an accelerator, on the host; an engine of this plan knows those of the release too."""
    transport = planned.plan.transport
    trainer, engine = (
        replace(offer, protocol="device_ipc", factory=half)
        for offer, half in zip((transport.trainer, transport.engine), sync.ON_HOST, strict=True)
    )
    return replace(planned, plan=replace(planned.plan, transport=replace(transport, trainer=trainer, engine=engine)))


def test_sync(synced: Synced) -> None:
    found = synced.parts["publications"]
    assert found["transport"] == "host_shm"
    assert found["bytes"] == synced.parts["stream from tensors"]["bytes"]
    assert found["checked"]["log_prob_differences"]["one set from itself"] < 1e-4
    assert found["checked"]["log_prob_differences"]["one set from the other"] > 0.01
    assert set(found["medians"]["plain"]["seconds"]) >= {"hold", "update", "open", "total"}
    assert synced.parts["ratios"]["publication / copy on device"] > 0
    assert synced.printed.rstrip().splitlines()[-1].startswith("publication / copy on device")


def test_publications_that_stream(synced: Synced) -> None:
    """The way of an accelerator, to a real engine on the host."""
    found = synced.streamed
    assert found["transport"] == "device_ipc"
    assert found["medians"]["plain"]["keep_s"] > 0
    assert found["checked"]["after the last publication"]["one set from the other"] > 0.01


def test_an_engines_sleep(synced: Synced) -> None:
    """The cycle of an accelerator, which only pauses here."""
    assert all(synced.cycles[phase] > 0 for phase in sleep.PHASES)


def test_sleep_on_a_host_measures_parking_and_says_why_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = bench("sleep", tmp_path, "--repeats", "1")
    assert "vLLM refuses its sleep mode on a host" in capsys.readouterr().out
    assert parts["park"]["bits_equal"]
    assert set(parts["ratios"]) >= {"park / copy to host", "wake / copy from host"}


@pytest.mark.slow
def test_a_floor_that_cannot_start_names_the_cause_and_leaves_its_log(tmp_path: Path) -> None:
    plain = planned("rollout", tmp_path)
    broken = replace(
        plain, config=plain.config.model_copy(update={"model": plain.config.model.model_copy(update={"path": tmp_path})})
    )
    with pytest.raises(EngineError, match="bare vLLM ended with exit code 1"):
        bare.ask(broken, {"work": "sleep", "level": 1, "repeats": 1}, engines.Clock(120))
    assert broken.logs()["bare-sleep.log"]
