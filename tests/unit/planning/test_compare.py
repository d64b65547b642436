"""A plan beside the rows that the Recorder wrote for a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vime.errors import DataError
from vime.facts.inventory import NodeInventory
from vime.facts.perf import PerfTable, Provenance, Quantity
from vime.observe.jsonl import MetricsFile, Row, RowKind
from vime.observe.recorder import Recorder
from vime.planning.compare import compare, compare_json, compare_text, rows_of_run
from vime.planning.make import make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.testing.platforms import GIB, TINY_MODEL, FakePlatform
from vime.topology.load import load_topology
from vime.types import PolicyVersion

MODEL = replace(TINY_MODEL, parameters=10**9)


class Loads(FakePlatform):
    """An engine that takes a tenth of a second for an update, and parks at half the link's rate."""

    def perf_model(self, inventory: NodeInventory) -> PerfTable:
        known = super().perf_model(inventory).quantities
        more = {"engine_update": (0.1, "s"), "parking": (25e9, "bytes/s")}
        return PerfTable({**known, **{n: Quantity(v, u, Provenance.MEASURED, "here") for n, (v, u) in more.items()}})


def plan_of(residency: str = "park") -> Plan:
    source = {
        "pools": {"p": {"platform": "acme", "nodes": 1}},
        "roles": {"policy": {"kind": "train", "devices": 8}, "rollout": {"kind": "rollout", "engines": 8}},
        "share": [{"roles": ["policy", "rollout"], "residency": residency}],
    }
    return make_plan(load_topology(source), model=MODEL, needs=PlanNeeds(), platforms={"acme": Loads()})


def rows(*, grads: int = 4 * 10**9) -> list[Row]:
    """Three publications and two steps of a parked run: 0.5 s of each publication are named by no part of it."""
    sync = {"sync": 3.0, "sync/update": 2.0, "sync/leave": 0.25, "sync/hold": 0.25}
    held = {"params": 2 * 10**9, "grads": grads, "optimizer": 0}
    edge = {"edge": "training", "device": {"actor": held, "rollout": {"engine_weights": 7}}, "host": {}}
    return [
        Row(RowKind.SYNC, 0, 0.0, seconds={**sync, "sync": 9.0, "sync/update": 8.0}),
        Row(RowKind.MEMORY, 1, 0.0, data={**edge, "device": {"actor": {"params": 1}}}),
        Row(RowKind.MEMORY, 1, 0.0, data=edge),
        *(Row(RowKind.SYNC, step, 0.0, seconds=sync) for step in (1, 2)),
        *(Row(RowKind.WALL, step, 0.0, seconds={"wall": 9.0, "other/turn": 0.2 * step}) for step in (1, 2)),
        Row(RowKind.STEP, 2, 0.0),
    ]


def test_an_update_that_nothing_checked_is_the_one_to_compare() -> None:
    checked = {"sync": 1.0, "sync/update": 0.4, "sync/engine_update": 0.3, "sync/probe": 0.1}
    plain = {"sync": 0.5, "sync/update": 0.2, "sync/engine_update": 0.1}
    publications = [Row(RowKind.SYNC, step, 0.0, seconds=seconds) for step, seconds in enumerate((checked, checked, plain))]
    found = {one.what: one for one in compare(plan_of(), publications)}
    assert (found["update of the weights"].measured, found["update of the weights"].note) == (0.2, "median of 1")
    # 0.5 and 0.3 are named by no part; what lies inside the update is not taken off twice.
    assert found["parking the trainer"].measured == pytest.approx(0.4)


def test_bytes_and_seconds_side_by_side() -> None:
    found = {one.what: one for one in compare(plan_of(), rows(grads=5 * 10**9))}
    assert found["training policy params"].ratio == 1.0
    assert (found["training policy grads"].predicted, found["training policy grads"].ratio) == (4 * 10**9, 1.25)
    assert found["training rollout engine_weights"].note == "the run's own plan, not measured"
    size = 2 * 10**9 / GIB
    update = found["update of the weights"]
    assert update.predicted == pytest.approx(0.1 + size * 0.01)
    assert (update.measured, update.note) == (2.0, "median of 2, the first left out")
    assert (found["publication as a whole"].predicted, found["publication as a whole"].measured) == (None, 3.0)
    moved = (2 * 10**9 + 12 * 10**9 // 8) / 25e9
    parking, waking = found["parking the trainer"], found["waking the trainer"]
    assert (parking.predicted, parking.measured) == (pytest.approx(moved), pytest.approx(0.75))
    assert (waking.predicted, waking.measured) == (pytest.approx(moved), pytest.approx(0.3))


def test_an_update_is_what_the_trainer_stages_and_what_the_engines_take() -> None:
    """And an engine's bytes are those that it counted at its last update."""
    said = {"sync/staging": 0.3, "sync/held_kv": 70.0, "sync/held_engine_weights": 2e9}
    publication = Row(RowKind.SYNC, 1, 0.0, metrics=said, seconds={"sync": 0.9, "sync/update": 0.2})
    found = {one.what: one for one in compare(plan_of(), [publication])}
    assert found["update of the weights"].measured == pytest.approx(0.5)
    weights = found["an engine's engine_weights"]
    assert (weights.predicted, weights.ratio) == (2 * 10**9, 1.0)
    assert found["an engine's kv"].measured == 70.0


def test_what_is_not_there_has_no_ratio() -> None:
    found = {one.what: one for one in compare(plan_of(), rows())}
    lost = found["training policy optimizer"]
    assert (lost.measured, lost.ratio) == (0, None)
    assert found["publication as a whole"].ratio is None
    assert not any("the trainer" in one.what for one in compare(plan_of("resident"), rows()))
    assert compare(plan_of(), [row for row in rows() if row.kind is RowKind.STEP]) == ()


def test_in_words_and_as_json() -> None:
    found = compare(plan_of(), rows())
    text = compare_text(found)
    line = next(line for line in text.splitlines() if "training policy grads" in line)
    assert line.split() == ["training", "policy", "grads", "3.73", "GiB", "3.73", "GiB", "1.00"]
    assert "no estimate" in text
    told = json.loads(json.dumps(compare_json(found)))
    assert told[0].keys() == {"what", "unit", "predicted", "measured", "ratio", "note"}


def written(folder: Path, kept: list[Row]) -> Path:
    file = MetricsFile(folder / "metrics.jsonl")
    for row in kept:
        file.write(row)
    file.close()
    return folder


def test_what_a_recorder_wrote_is_understood(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.begin_step(1)
    recorder.memory("training", {"actor": {"params": 10**9}, "rollout": {}})
    with recorder.phase("other"), recorder.span("other/turn"):
        pass
    with recorder.phase("sync") as phase, recorder.span("sync/update"):
        pass
    recorder.published(PolicyVersion(0, 1), phase)
    recorder.end_step()
    recorder.close()
    found = {one.what: one for one in compare(plan_of(), rows_of_run(tmp_path))}
    assert found["training policy params"].ratio == 0.5
    assert {"update of the weights", "publication as a whole", "parking the trainer"} <= found.keys()


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    found = rows_of_run(written(tmp_path, rows()))
    assert len(found) == 7
    assert {one.what for one in compare(plan_of(), found)} >= {"training policy grads", "waking the trainer"}


def test_a_folder_without_rows_to_compare(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        rows_of_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        rows_of_run(tmp_path)
    with pytest.raises(DataError, match="holds no row of kind memory, sync or wall: nothing was measured") as caught:
        rows_of_run(written(tmp_path, [Row(RowKind.STEP, 1, 0.0)]))
    assert caught.value.fix is not None
    assert "published weights once" in caught.value.fix
