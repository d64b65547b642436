"""A real engine of two workers leaves no shared memory, whether it is stopped or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from vime.cluster.guardian import guardian_command
from vime.facts.process import Parallel
from vime.platforms.cpu.engine import ARGS
from vime.rollout.engine import EngineServer, EngineSpec
from vime.testing.tiny_models import make_tiny_qwen3

from live_runs import descendants, segments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
LEFT_WITHIN_S = 15.0


def kill_group(engine: EngineServer) -> None:
    """The server's own group: all of vLLM, with what would have cleaned up, but not the guardian above it."""
    (server,) = psutil.Process(engine.pid).children()
    os.killpg(server.pid, signal.SIGKILL)


def kill_core(engine: EngineServer) -> None:
    """One process alone, as the kernel does when memory is short."""
    next(process for process in descendants(engine.pid) if "EngineCore" in " ".join(process.cmdline())).kill()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("segments")
    return EngineSpec(
        make_tiny_qwen3(folder / "model", seed=1),
        "float32",
        folder / "engine.log",
        "segments",
        128,
        parallel=Parallel(tp=2),
        args=ARGS,
        env=ENV,
        entry_points=("vime", "vime_cpu"),
        expected_platform="vllm.platforms.cpu.CpuPlatform",
        command_prefix=guardian_command(),
    )


@pytest.mark.parametrize("end", [kill_group, kill_core, EngineServer.stop])
async def test_no_segment_is_left(spec: EngineSpec, end: Callable[[EngineServer], object]) -> None:
    engine = EngineServer(spec)
    try:
        engine.start()
        await engine.wait_ready(120)
        mine = segments(descendants(engine.pid))
        assert len(mine) >= 6
        end(engine)
        deadline = time.monotonic() + LEFT_WITHIN_S
        while (left := _there(mine)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert left == []
    finally:
        engine.stop()


def _there(paths: set[Path]) -> list[Path]:
    return [path for path in paths if path.exists()]
