"""A run of two platforms on one machine: the trainer on the host's processors, the engine on a third party's device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_acme_run import acme_environment

from vime.testing.recording import HookCall, read_trace, unasked

from live_runs import rows, steps, wait_for, write_run

NUM_STEPS = 2
TOPOLOGY: Mapping[str, Any] = {
    "schema": "vime.topology/v1",
    "name": "mixed",
    "pools": {
        "host": {"platform": "cpu", "nodes": 1, "devices_per_node": 1},
        "boards": {"platform": "acme", "nodes": 1, "devices_per_node": 2},
    },
    "roles": {
        "actor": {"kind": "train", "pool": "host", "devices": 1},
        "rollout": {"kind": "rollout", "pool": "boards", "engines": 1},
    },
    "sync": [{"from": "actor", "to": "rollout"}],
}
EVERY_PUBLICATION = {"probe": {"first": 100}, "fingerprint": {"first": 100}}

TRAINER_HOOKS = {"vime_trainer_runtime", "vime_megatron_adapt", "vime_memory_backend"}
ENGINE_HOOKS = {"vime_vllm_defaults", "vime_engine_sleep"}
BOTH_HOOKS = {"vime_inventory", "vime_capabilities", "vime_ray_binding", "vime_process_env", "vime_transports"}

WATCHER = """
import os, sys

KEEP = {keep!r}

def saw(event, arguments):
    name = {{"open": lambda: str(arguments[0]), "exec": lambda: arguments[0].co_filename}}.get(event, str)()
    for kept in KEEP:
        if name.endswith(kept):
            with open({path!r}, "a") as file:
                file.write(f"{{os.getpid()}} {{kept}}\\n")

sys.addaudithook(saw)
"""
"""Every Python process of the run writes down which of these files it reads or runs."""
METADATA = "/acme_accelerator-1.0.0.dist-info/METADATA"
DRIVER, TRAINER, ENGINE_HOST = (f"/vime/cluster/{name}.py" for name in ("session", "trainer_process", "engine_process"))


@dataclass(frozen=True)
class Finished:
    """What is left of the run, and what was seen of it while it lived."""

    folder: Path
    files: Mapping[int, set[str]]
    resources: Mapping[str, float]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, acme_site: Path) -> Finished:
    folder = tmp_path_factory.mktemp("mixed")
    watch = folder / "watch"
    watch.mkdir()
    keep = (METADATA, DRIVER, TRAINER, ENGINE_HOST)
    (watch / "sitecustomize.py").write_text(WATCHER.format(path=str(folder / "files.txt"), keep=keep))
    more = {"topology": dict(TOPOLOGY), "plugins": {"allow": ["acme"]}, "weights": EVERY_PUBLICATION}
    path = write_run(folder, schedule={"num_steps": NUM_STEPS}, **more)
    env = acme_environment(acme_site, VIME_TRACE_PLUGINS=str(folder / "trace.jsonl"))
    env["PYTHONPATH"] = os.pathsep.join([str(watch), env["PYTHONPATH"]])
    with (folder / "out.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vime.cli.main", "run", str(path)], env=env, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        resources = wait_for(lambda: process.poll() is not None or head_resources(process.pid), timeout_s=60, what="a Ray head")
        code = process.wait(150)
    finally:
        process.kill()
    assert code == 0, (folder / "out.log").read_text()[-4000:]
    return Finished(folder, files_by_process(folder / "files.txt"), resources)


def head_resources(pid: int) -> Mapping[str, float] | None:
    """What the local Ray head of a run was told to offer, by its command line."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            told = [word for word in process.cmdline() if word.startswith("--resources=")]
        except psutil.Error:
            continue
        if told:
            return json.loads(told[0].removeprefix("--resources="))
    return None


def files_by_process(path: Path) -> Mapping[int, set[str]]:
    found: defaultdict[int, set[str]] = defaultdict(set)
    for line in path.read_text().splitlines():
        pid, name = line.split()
        found[int(pid)].add(name)
    return found


@pytest.fixture(scope="module")
def calls(finished: Finished) -> tuple[HookCall, ...]:
    return read_trace(finished.folder / "trace.jsonl")


def plan_of(finished: Finished) -> dict[str, Any]:
    return json.loads((finished.folder / "run" / "plan.json").read_text())


def test_the_halves_of_two_platforms_are_paired(finished: Finished) -> None:
    """Both see one machine, so memory of the host is a way between them; what one side alone offers is not."""
    transport = plan_of(finished)["transport"]
    assert (transport["protocol"], transport["relation"]) == ("host_shm", "same_node")
    rejected = {row["protocol"]: row["reason"] for row in transport["rejected"]}
    assert rejected.keys() == {"acme_link", "collective", "disk"}
    assert rejected["acme_link"] == "the trainer side does not offer it"
    assert rejected["collective"] == "the engine side does not offer it"


def test_one_local_head_has_the_resources_of_both(finished: Finished) -> None:
    pools = {pool["platform"]: pool["resource"] for pool in plan_of(finished)["pools"]}
    assert pools["acme"] == "ACME" != pools["cpu"]
    assert {name: finished.resources[name] for name in pools.values()} == {pools["cpu"]: 1, "ACME": 1}


def asked(calls: tuple[HookCall, ...]) -> Iterator[tuple[str, str]]:
    return ((call.hook, call.platform) for call in calls)


def test_every_hook_is_asked_of_the_platform_that_it_is_about(calls: tuple[HookCall, ...]) -> None:
    assert unasked(calls) == ()
    assert all(call.error is None for call in calls)
    found = set(asked(calls))
    assert {platform for hook, platform in found if hook in TRAINER_HOOKS} == {"cpu"}
    assert {platform for hook, platform in found if hook in ENGINE_HOOKS} == {"acme"}
    assert {(hook, platform) for hook in BOTH_HOOKS for platform in ("cpu", "acme")} <= found
    assert all(call.plugins[-1] == "base" or call.platform in call.plugins for call in calls)
    assert not [call for call in calls if {"cpu", "acme"} <= set(call.plugins)], "no call reaches the other lineage"


@pytest.mark.parametrize("role", [DRIVER, TRAINER, ENGINE_HOST])
def test_the_plugins_of_the_run_are_imposed_on_every_process(finished: Finished, role: str) -> None:
    """Also the trainer, whose own platform is another one, compares acme's version with the driver's."""
    mine = [files for files in finished.files.values() if role in files and (role == DRIVER or DRIVER not in files)]
    assert len(mine) == 1
    assert METADATA in mine[0]


def test_every_publication_is_checked_and_the_engine_computes_with_the_trainers_weights(finished: Finished) -> None:
    synced = [row for row in rows(finished.folder / "run") if row.kind == "sync"]
    assert [row.step for row in synced] == list(range(NUM_STEPS + 1))
    assert max(row.metrics["sync/probe_abs_diff"] for row in synced) < 1e-5
    done = steps(finished.folder / "run")
    assert sorted(done) == list(range(1, NUM_STEPS + 1))
    for row in done.values():
        assert row.metrics["train/grad_norm"] > 0
        assert row.metrics["train/train_rollout_logprob_abs_diff"] <= 2e-6
        assert row.metrics["train/train_rollout_logprob_abs_diff_max"] <= 2e-4
