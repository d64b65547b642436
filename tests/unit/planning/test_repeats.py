"""`run.deterministic` in a plan: every role of every platform is asked for it, and a host's trainer is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config.schema import Config
from vime.planning.make import make_plan
from vime.planning.needs import needs_from
from vime.platforms.cpu import plugin
from vime.platforms.lineage import Platform
from vime.testing.plans import BOUNDED, plan_of, topology
from vime.testing.platforms import TINY_MODEL
from vime.topology.load import load_topology


def configured(folder: Path, **run: bool) -> Config:
    sections = {"model": {"path": folder}, "data": {"path": folder / "d.jsonl"}, "schedule": {"num_steps": 1}}
    return Config.model_validate({"run": {"dir": folder, **run}, **sections, "reward": {"kind": "math"}})


@pytest.mark.parametrize(("run", "asked"), [({}, True), ({"deterministic": True}, True), ({"deterministic": False}, False)])
def test_what_the_run_file_says_reaches_the_processes(run: dict[str, bool], asked: bool, tmp_path: Path) -> None:
    needs = needs_from(configured(tmp_path, **run))
    plan = make_plan(load_topology("cpu-colocate"), model=TINY_MODEL, needs=needs, platforms={"cpu": Platform.of(plugin)})
    assert [role.request.deterministic for role in (plan.actor, *plan.engines)] == [asked] * 2
    assert plan.actor.runtime.bootstrap.options["deterministic"] is asked
    assert "deterministic" not in plan.pools[0].capabilities.absent
    assert set(plan.pools[0].capabilities.deterministic) == {"trainer", "engine"}


def test_another_platform_is_asked_too() -> None:
    plan = plan_of(topology(), needs=BOUNDED)
    assert {role.request.deterministic for role in (plan.actor, *plan.engines)} == {True}
