"""`vime topology`: list, show, schema, check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime.cli.main import main
from vime.topology.load import shipped_names, shipped_text

Command = Callable[..., Any]


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in listed] == list(shipped_names())
    assert main(["topology", "show", "cpu-train"]) == 0
    assert capsys.readouterr().out == shipped_text("cpu-train")
    assert main(["topology", "show", "cpu-trane"]) == 1
    assert "did you mean `cpu-train`?" in capsys.readouterr().err


def test_schema_describes_pools_and_roles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["required"]) == {"pools", "roles"}
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["$id"] == "vime.topology/v1"
    assert "from" in schema["$defs"]["Sync"]["properties"]


def test_check(command: Command, tmp_path: Path) -> None:
    good = tmp_path / "t.yaml"
    good.write_text(shipped_text("cpu-disaggregated"))
    done = command("topology", "check", str(good))
    assert done.returncode == 0
    assert "rollout: rollout on pool host, 2 devices (2 engines x 1)" in done.stdout
    good.write_text("pools: {p: {}}\nroles:\n  a: {kind: train, devices: 3, parallel: {tp: 2}}\n  b: {kind: trane}\n")
    done = command("topology", "check", str(good))
    assert done.returncode == 1
    assert "t.yaml:4: E103" in done.stdout


def test_check_takes_what_a_run_cannot_start_and_prints_notes(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "pools: {p: {platform: acme, nodes: 5, domain: {kind: fabric, segment_nodes: 2}}, q: {}}\n"
        "roles:\n"
        "  actor: {kind: train, pool: p, devices: 8}\n"
        "  critic: {kind: train, like: actor, pool: q}\n"
        "  sampler: {kind: rollout, pool: p, engines: [{count: 2, parallel: {tp: 2}}, {}]}\n"
        "  pre: {kind: rollout, pool: q, stage: prefill}\n"
        "  dec: {kind: rollout, pool: q, stage: decode, devices: half}\n"
        "  old: {kind: rollout, pool: external, endpoints: ['http://a:1']}\n"
    )
    done = command("topology", "check", str(path))
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == [
        "actor: train (actor) on pool p, 8 devices",
        "critic: train (critic) on pool q, 8 devices",
        "sampler: rollout on pool p, 5 devices (2 x 2 + 1 x 1 engines)",
        "pre: rollout (prefill) on pool q, 1 device (1 engine x 1)",
        "dec: rollout (decode) on pool q, half of its devices",
        "old: rollout, 1 engine that runs already",
        "note: W222 pools.p.nodes: 5 nodes are not a multiple of segment_nodes 2: the last segment has 1; use 4 or 6 nodes",
        f"{path}: ok",
    ]
