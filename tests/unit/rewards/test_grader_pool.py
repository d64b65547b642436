"""Grader processes: limits, deaths, replacement, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from vime.errors import RewardError
from vime.rewards.process import GraderProcess
from vime.rewards.workers import GradeJob, GradeOutcome, GraderPool

STUB = """
import os, signal, subprocess, sys, time
from vime.rewards.values import Score

def grade(job):
    word, _, argument = job.text.partition(" ")
    if word == "hang":
        time.sleep(60)
    if word == "slow":
        time.sleep(float(argument))
    if word == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        10 ** (10 ** 9)
    if word == "die":
        os._exit(3)
    if word == "die-once" and not os.path.exists(argument):
        open(argument, "w").close()
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "raise":
        raise KeyError("nothing here")
    if word == "print":
        print("noise" * 1000, flush=True)
        sys.stdin.read()
    if word == "child":
        return subprocess.Popen(["sleep", "60"]).pid
    if word == "pid":
        return os.getpid()
    if word == "modules":
        return len({"torch", "transformers", "ray", "numpy", "pydantic"} & set(sys.modules))
    if word == "map":
        return {"acc": 1, "fmt": 0.25}
    if word == "text":
        return "1.0"
    if word == "none":
        return None
    if word == "score" and job.finished:
        return Score(0.0, 0.75)
    return float(len(job.text)) if job.finished else 0.0
"""


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stub_grader.py").write_text(STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "stub_grader:grade"


def jobs(*texts: str) -> list[GradeJob]:
    return [GradeJob(text) for text in texts]


def rewards(outcomes: list[GradeOutcome]) -> list[float | None]:
    return [outcome.reward for outcome in outcomes]


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_hanging_call_costs_itself_and_nothing_else(stub: str) -> None:
    async with GraderPool(stub, timeout_s=1.0) as pool:
        before = pool.pids
        started = time.monotonic()
        outcomes = await pool.score(jobs("a", "bb", "ccc", "hang", "a", "bb", "ccc", "dddd"))
        assert time.monotonic() - started < 5.0
        assert rewards(outcomes) == [1.0, 2.0, 3.0, None, 1.0, 2.0, 3.0, 4.0]
        assert [o.timed_out for o in outcomes] == [False] * 3 + [True] + [False] * 4
        assert "response 3: the grader took longer than 1 s" in (outcomes[3].error or "")

        assert rewards(await pool.score(jobs("a", "bb"))) == [1.0, 2.0]
        assert len(pool.pids) == 1
        assert pool.pids != before
        assert pool.num_replaced == 1


async def test_the_limit_is_per_call_and_not_per_batch(stub: str) -> None:
    async with GraderPool(stub, timeout_s=0.5) as pool:
        outcomes = await pool.score(jobs(*["slow 0.2"] * 5))
        assert [o.timed_out for o in outcomes] == [False] * 5
        assert pool.num_replaced == 0


async def test_a_call_that_never_leaves_the_interpreter_is_killed_too(stub: str) -> None:
    async with GraderPool(stub, timeout_s=0.5) as pool:
        outcomes = await pool.score(jobs("stuck", "a"))
        assert outcomes[0].timed_out
        assert outcomes[1].reward == 1.0


async def test_several_hangs_leave_the_pool_whole(stub: str) -> None:
    async with GraderPool(stub, workers=2, timeout_s=0.3) as pool:
        outcomes = await pool.score(jobs("hang", "a", "hang", "a"))
        assert [o.timed_out for o in outcomes] == [True, False, True, False]
        assert rewards(await pool.score(jobs("a", "bb"))) == [1.0, 2.0]
        assert await asyncio.to_thread(wait_until, lambda: len(pool.pids) == 2)


async def test_a_grader_that_raises_is_an_error_and_not_a_zero(stub: str) -> None:
    async with GraderPool(stub) as pool:
        outcomes = await pool.score([GradeJob("raise", name="prompt 4, sample 1"), *jobs("text", "none", "a")])
        assert rewards(outcomes) == [None, None, None, 1.0]
        assert outcomes[0].error == "prompt 4, sample 1: the grader raised KeyError: 'nothing here'"
        assert "is not a number but str" in (outcomes[1].error or "")
        assert outcomes[2] == GradeOutcome(None)
        assert not any(o.timed_out for o in outcomes)


async def test_the_key_picks_from_a_mapping(stub: str) -> None:
    async with GraderPool(stub, key="fmt") as pool:
        assert rewards(await pool.score(jobs("map"))) == [0.25]
    async with GraderPool(stub, key="style") as pool:
        [outcome] = await pool.score([GradeJob("map", name="prompt 2, sample 0")])
        assert "no 'style'" in (outcome.error or "")
        assert "prompt 2, sample 0" in (outcome.error or "")


async def test_the_raw_score_and_the_end_of_the_response_travel(stub: str) -> None:
    async with GraderPool(stub) as pool:
        solved, cut = await pool.score([GradeJob("score"), GradeJob("score", finished=False)])
        assert (solved.reward, solved.raw) == (0.0, 0.75)
        assert (cut.reward, cut.raw) == (0.0, 0.0)


async def test_a_call_that_kills_its_process_is_tried_once_more(stub: str, tmp_path: Path) -> None:
    async with GraderPool(stub) as pool:
        outcomes = await pool.score(jobs("a", f"die-once {tmp_path}/mark", "bb"))
        assert outcomes[0].reward == 1.0
        assert outcomes[1].error is None
        assert outcomes[2].reward == 2.0
        assert pool.num_replaced == 1
        outcomes = await pool.score(jobs("a", "die", "bb"))
        assert rewards(outcomes) == [1.0, None, 2.0]
        assert "the grader process died (exit code 3)" in (outcomes[1].error or "")
        assert not outcomes[1].timed_out


async def test_a_process_killed_from_outside_is_replaced(stub: str) -> None:
    async with GraderPool(stub) as pool:
        [idle] = pool.pids
        os.kill(idle, signal.SIGKILL)
        assert rewards(await pool.score(jobs("a"))) == [1.0]

        busy = asyncio.create_task(pool.score(jobs("slow 0.5", "bb")))
        await asyncio.sleep(0.2)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert rewards(await busy) == [8.0, 2.0]


async def test_order_is_kept_over_workers_and_callers(stub: str) -> None:
    async with GraderPool(stub, workers=2) as pool:
        batches = [["x" * (1 + (i * 7 + j) % 50) for j in range(40)] for i in range(6)]
        scored = await asyncio.gather(*(pool.score(jobs(*batch)) for batch in batches))
        assert [rewards(s) for s in scored] == [[float(len(text)) for text in batch] for batch in batches]
        assert await pool.score([]) == []


async def test_a_grader_may_print_and_read(stub: str) -> None:
    async with GraderPool(stub, timeout_s=5.0) as pool:
        assert rewards(await pool.score(jobs("print", "a"))) == [5.0, 1.0]


async def test_long_responses_and_odd_characters_travel(stub: str) -> None:
    async with GraderPool(stub) as pool:
        texts = ["é" * 300_000, "\x00", "line\nline", "\ud800"]
        assert rewards(await pool.score(jobs(*texts))) == [300_000.0, 1.0, 9.0, 1.0]


class Stubborn:
    def __reduce__(self) -> str:
        raise ValueError("no state")


@pytest.mark.parametrize("value", [lambda: 1, Stubborn()], ids=["a function", "an object that refuses"])
async def test_what_cannot_be_sent_is_that_samples_error(stub: str, value: object) -> None:
    async with asyncio.timeout(20), GraderPool(stub) as pool:
        outcomes = await pool.score([GradeJob("a"), GradeJob("a", metadata={"f": value}), GradeJob("bb")])
        assert rewards(outcomes) == [1.0, None, 2.0]
        assert "cannot be sent" in (outcomes[1].error or "")


async def test_the_children_hold_the_grader_and_nothing_heavy(stub: str) -> None:
    async with GraderPool(stub) as pool:
        assert rewards(await pool.score(jobs("modules"))) == [0.0]


async def test_a_grader_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="known are exact"):
        GraderPool("nonsense")
    (tmp_path / "broken_grader.py").write_text("import surely_not_installed\n")
    (tmp_path / "dying_grader.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "raising_grader.py").write_text("1 / 0\n")
    for kind, message in (
        ("broken_grader:grade", "No module named 'surely_not_installed'"),
        ("dying_grader:grade", "exit code 7"),
        ("raising_grader:grade", "fails at import: ZeroDivisionError"),
    ):
        pool = GraderPool(kind)
        with pytest.raises(RewardError, match=message):
            await pool.score(jobs("a"))
        with pytest.raises(RewardError, match=message):
            await pool.start()
        await pool.close()


async def test_a_slow_import_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "sleepy_grader.py").write_text("import time\ntime.sleep(60)\n")
    pool = GraderPool("sleepy_grader:grade", start_timeout_s=0.3)
    with pytest.raises(RewardError, match=r"not imported within 0\.3 s"):
        await pool.start()
    await pool.close()


async def test_closing_ends_every_process_and_refuses_what_waits(stub: str) -> None:
    pool = GraderPool(stub, workers=2, timeout_s=30.0)
    await pool.start()
    [grandchild] = await pool.score(jobs("child"))
    pids = [*pool.pids, int(grandchild.reward or 0)]
    assert all(is_running(pid) for pid in pids)
    waiting = [asyncio.create_task(pool.score(jobs("hang"))) for _ in range(4)]
    await asyncio.sleep(0.1)

    started = time.monotonic()
    await pool.close()
    await pool.close()

    assert time.monotonic() - started < 5.0
    assert await asyncio.to_thread(wait_until, lambda: not any(is_running(pid) for pid in pids))
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, RewardError)
    with pytest.raises(RewardError, match="closed"):
        await pool.score(jobs("a"))


async def test_a_fault_of_the_pool_reaches_whoever_waits_with_its_cause(stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(process: GraderProcess) -> None:
        raise OSError("no timer")

    monkeypatch.setattr(GraderProcess, "watch", watch)
    async with asyncio.timeout(20), GraderPool(stub) as pool:
        with pytest.raises(RewardError, match="the grader pool stopped: OSError") as caught:
            await pool.score(jobs("a", "bb"))
        assert isinstance(caught.value.__cause__, OSError)


async def test_a_cancelled_caller_does_not_disturb_the_others(stub: str) -> None:
    async with GraderPool(stub) as pool:
        first = asyncio.create_task(pool.score(jobs("slow 0.3")))
        second = asyncio.create_task(pool.score(jobs("a")))
        third = asyncio.create_task(pool.score(jobs("bb")))
        await asyncio.sleep(0.1)
        first.cancel()
        second.cancel()
        assert rewards(await third) == [2.0]
        assert pool.num_replaced == 0


@pytest.mark.parametrize("state", ["idle", "hang"])
def test_children_end_with_an_owner_that_is_killed(stub: str, tmp_path: Path, state: str) -> None:
    owner = textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from vime.rewards.workers import GradeJob, GraderPool

        async def main():
            pool = GraderPool({stub!r}, workers=2, timeout_s=60)
            await pool.start()
            task = asyncio.create_task(pool.score([GradeJob({state!r})] * (2 if {state!r} == "hang" else 0)))
            await asyncio.sleep(0.2)
            print(*pool.pids, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    process.kill()
    process.communicate()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))
