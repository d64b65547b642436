"""`vime bench` with a real engine on the host: every part is done, told and recorded, and no process is left."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
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


def test_sync(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = bench("sync", tmp_path, "--repeats", "2")
    found = parts["publications"]
    assert found["bytes"] == parts["stream from tensors"]["bytes"]
    assert found["checked"]["log_prob_differences"]["one set from itself"] < 1e-4
    assert found["checked"]["log_prob_differences"]["one set from the other"] > 0.01
    assert set(found["medians"]["plain"]["seconds"]) >= {"hold", "update", "open", "total"}
    assert parts["ratios"]["publication / copy on device"] > 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("publication / copy on device")


def test_sleep_on_a_host_measures_parking_and_says_why_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = bench("sleep", tmp_path, "--repeats", "1")
    assert "vLLM refuses its sleep mode on a host" in capsys.readouterr().out
    assert parts["park"]["bits_equal"]
    assert set(parts["ratios"]) >= {"park / copy to host", "wake / copy from host"}


def test_publications_that_stream_and_an_engines_sleep(tmp_path: Path) -> None:
    """The ways of an accelerator on the host: device_ipc to a real engine, and the cycle of sleep, which only pauses here."""
    plain, clock = planned("sync", tmp_path), engines.Clock(280)
    transport = plain.plan.transport
    trainer, engine = (
        replace(offer, protocol="device_ipc", factory=half)
        for offer, half in zip((transport.trainer, transport.engine), sync.ON_HOST, strict=True)
    )
    streaming = replace(plain, plan=replace(plain.plan, transport=replace(transport, trainer=trainer, engine=engine)))
    where, sizes = moves.Where("cpu", plain.plan.dtype), moves.sizes_of(plain.config.model.path)

    async def both() -> dict[str, Any]:
        found = await sync.publications(streaming, (where, sizes), 2, clock)
        async with (
            engines.served(streaming, clock) as server,
            engines.control_of(streaming, server, clock) as control,
        ):
            await control.open("0.0")
            await control.shut("drain")
            return {**found, "cycles": await sleep.cycles(control, streaming, {"level": 1, "repeats": 2})}

    found = engines.bounded(both, clock)
    assert found["transport"] == "device_ipc"
    assert found["medians"]["plain"]["keep_s"] > 0
    assert found["checked"]["after the last publication"]["one set from the other"] > 0.01
    assert all(found["cycles"][phase] > 0 for phase in sleep.PHASES)


def test_a_floor_that_cannot_start_names_the_cause_and_leaves_its_log(tmp_path: Path) -> None:
    plain = planned("rollout", tmp_path)
    broken = replace(
        plain, config=plain.config.model_copy(update={"model": plain.config.model.model_copy(update={"path": tmp_path})})
    )
    with pytest.raises(EngineError, match="bare vLLM ended with exit code 1"):
        bare.ask(broken, {"work": "sleep", "level": 1, "repeats": 1}, engines.Clock(120))
    assert broken.logs()["bare-sleep.log"]
