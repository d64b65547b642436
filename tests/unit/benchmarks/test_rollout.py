"""Prompts, what processes spend, ratios by hand."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import pytest

from vime.benchmarks import rollout, sleep


def asked(**words: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"prompts": 5, "prompt_tokens": 8, "response_tokens": 40, "repeats": 2, "n": 1, **words})


def test_no_two_sets_share_a_prompt_and_both_sides_get_the_same() -> None:
    sets = rollout.prompt_sets(asked(), 1000)
    assert [s["kind"] for s in sets] == ["warm-up", "equal", "equal", "spread"]
    prompts = [tuple(ids) for s in sets for ids in s["token_ids"]]
    assert len(set(prompts)) == 4 * 5
    assert all(len(ids) == 8 and min(ids) >= rollout.FIRST_ID and max(ids) < 1000 for ids in prompts)
    assert sets == rollout.prompt_sets(asked(), 1000)
    assert [set(s["responses"]) for s in sets[:3]] == [{16}, {40}, {40}]
    assert all(10 <= length <= 40 for length in sets[3]["responses"])


def test_processor_seconds_are_those_of_the_process_that_spends_them() -> None:
    code = "import time; t = time.process_time()\nwhile time.process_time() < t + 0.3: pass\nprint(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.05)
        found = rollout.Processes({"engine": child.pid, "gone": 2**22 + 1}).seconds()
    finally:
        child.kill()
        child.wait()
    (key,) = (name for name in found if name.startswith("engine: "))
    assert found[key] >= 0.25
    assert not any(name.startswith("gone") for name in found)


def row(kind: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {"kind": kind, "tokens": tokens, "seconds": seconds}


def test_ratios_take_the_best_repeat_and_leave_the_warm_up_out() -> None:
    plain = [row("warm-up", 900, 1.0), row("equal", 100, 1.0), row("equal", 100, 0.5), row("spread", 50, 0.5)]
    with_log_probs = [row("warm-up", 900, 1.0), row("equal", 100, 2.0), row("equal", 100, 1.0), row("spread", 50, 1.0)]
    floors = rollout.rates({"plain": plain, "log_probs": with_log_probs})
    assert floors == {"plain": {"equal": 200.0, "spread": 100.0}, "log_probs": {"equal": 100.0, "spread": 50.0}}
    served = {
        "ok": True,
        "rates": {"equal": 90.0, "spread": 49.0, "direct": 95.0},
        "us_per_token": {"client": 3.0},
        "answer": {},
    }
    parts = {"server": served, "bare": {"ok": True, "rates": floors}}
    found = rollout.ratios(parts)
    assert found["equal / log_probs"] == 0.9
    assert found["spread / log_probs"] == 0.98
    assert found["equal / plain"] == 0.45
    assert found["direct / log_probs"] == 0.95
    lines = rollout.report({**parts, "ratios": {"ok": True, **found}}).splitlines()
    assert lines[-2].split()[-3:] == ["0.9", "goal", "0.95"]
    assert "server failed: why" in rollout.report({"server": {"ok": False, "error": "why"}})


def test_sleep_is_told_by_phase_and_beside_its_floors() -> None:
    cycle = {"sleep_s": 1.0, "wake_weights_s": 2.0, "wake_cache_s": 3.0}
    slow = dict.fromkeys(cycle, 50.0)
    found = sleep.best([slow, cycle, {name: 2 * value for name, value in cycle.items()}, cycle])
    assert {name: found[name] for name in cycle} == cycle
    assert found["cycle_s"] == 6.0
    copies = {f"{way}_bytes_per_s": 10e9 for way in ("to_host", "from_host")}
    parts = {
        "server": {"ok": True, **found},
        "bare": {"ok": True, "cycle_s": 3.0, **{name: value / 2 for name, value in cycle.items()}},
        "copies": {"ok": True, **copies},
        "park": {"ok": True, "park_s": 1.0, "park_bytes_per_s": 5e9, "wake_bytes_per_s": 8e9},
    }
    ratios = sleep.ratios(parts)
    assert ratios["cycle / vLLM's own"] == ratios["sleep / vLLM's own"] == 2.0
    assert (ratios["park / copy to host"], ratios["wake / copy from host"]) == (2.0, 1.25)
    text = sleep.report({**parts, "ratios": {"ok": True, **ratios}})
    assert "trainer: park" in text
    assert text.splitlines()[-1].startswith("wake / copy from host")


@pytest.mark.parametrize("kind", ["server", "park"])
def test_what_is_left_out_is_said(kind: str) -> None:
    assert "because" in sleep.report({kind: {"ok": True, "left_out": "because"}})
