"""What the plan gives an engine and a trainer rank: masks, environment, the transport's engine half."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vime.assemble.setups import (
    Keys,
    away_at_start,
    engine_bytes,
    engine_specs,
    sleep_level,
    takes_turns_at_start,
    trainer_setups,
)
from vime.config.schema import Config
from vime.errors import PluginError
from vime.facts.bindings import RayBinding
from vime.facts.inventory import NodeInventory
from vime.facts.process import EnvMode, EnvValue, Factory
from vime.facts.transports import Edge, Side, TransportOffer
from vime.memory.residency import TRAINER_TAGS
from vime.planning.make import Here, make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.rollout.engine import EngineSpec, engine_env
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology

KEYS = Keys("id", "token", "key")


class Board(FakePlatform):
    """Masked devices; `half` is the engine half of its best transport."""

    half = Factory("acme.weights:Engine", {"lanes": 2})

    def ray_binding(self, inventory: NodeInventory) -> RayBinding:
        return RayBinding("GPU", ("VISIBLE",), ("NOSET",), unset_env=("OTHER",))

    def transports(self, edge: Edge, side: Side) -> tuple[TransportOffer, ...]:
        offers = super().transports(edge, side)
        return tuple(replace(offer, factory=self.half) if side is Side.ENGINE else offer for offer in offers)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    sections = {"run": {"dir": tmp_path}, "model": {"path": tmp_path}, "data": {"path": tmp_path / "d.jsonl"}}
    return Config.model_validate({**sections, "schedule": {"num_steps": 1}})


def plan_of(board: FakePlatform, env: dict[str, str] | None = None, topology: str = "disaggregated") -> Plan:
    return make_plan(
        load_topology(topology, platform="acme"),
        model=TINY_MODEL,
        needs=PlanNeeds(),
        platforms={"acme": board},
        inventories={"node": (board.node(),)},
        here=Here(env or {}, frozenset({"node"})),
    )


def specs_of(config: Config, board: FakePlatform, env: dict[str, str] | None = None) -> list[EngineSpec]:
    return engine_specs(config, plan_of(board, env), KEYS)


def test_an_engine_sees_its_own_device_and_no_variable_beside_the_mask(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    env = dict.fromkeys(("VISIBLE", "OTHER"), "6,4,2,0")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    made = [engine_env(spec) for spec in specs_of(config, Board(), env)]
    assert [e["VISIBLE"] for e in made] == ["2", "0"]
    assert all("OTHER" not in e for e in made)


def test_a_rank_behind_a_mask_of_one_device_knows_it_as_number_0(config: Config) -> None:
    assert [s.local_rank for s in trainer_setups(config, plan_of(Board()))] == [0, 0, 0, 0]
    assert [s.local_rank for s in trainer_setups(config, plan_of(FakePlatform()))] == [0, 1, 2, 3]


def test_what_the_plan_recomputes_reaches_every_rank(config: Config) -> None:
    assert config.trainer.recompute == "auto"
    for recompute in ("none", "full"):
        plan = replace(plan_of(Board()), recompute=recompute)
        assert {s.trainer.recompute for s in trainer_setups(config, plan)} == {recompute}
    assert {s.trainer.optimizer for s in trainer_setups(config, plan)} == {config.trainer.optimizer}


def test_an_engine_s_bytes_of_one_tag_are_added_up() -> None:
    plan = plan_of(Board())
    rows = [row for row in plan.memory.rows if row.tag == "engine_weights"]
    twice = replace(plan, memory=replace(plan.memory, rows=(*plan.memory.rows, *rows)))
    assert engine_bytes(twice)["serving"]["engine_weights"] == 2 * engine_bytes(plan)["serving"]["engine_weights"]


def test_the_allocator_option_that_a_rule_takes_out_is_gone_in_the_engine(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv(name, "expandable_segments:True,max_split_size_mb:128")
    board = Board(rules={name: EnvValue("expandable_segments", "the sleep pool refuses it", EnvMode.WITHOUT)})
    env = {name: "expandable_segments:True,max_split_size_mb:128"}
    assert engine_env(specs_of(config, board, env)[0])[name] == "max_split_size_mb:128"


def test_the_chosen_engine_half_reaches_the_engine(config: Config) -> None:
    told = json.loads(engine_env(specs_of(config, Board())[0])["VIME_ENGINE_HALVES"])
    assert told == {"collective": {"target": "acme.weights:Engine", "options": {"lanes": 2}}}


def test_a_half_that_every_engine_knows_needs_no_telling(config: Config) -> None:
    board = Board()
    board.half = Factory("vime.weights.transports.collective:CollectiveEngine")
    assert "VIME_ENGINE_HALVES" not in engine_env(specs_of(config, board)[0])
    board.half = replace(board.half, options={"backend": "other"})
    assert "VIME_ENGINE_HALVES" in engine_env(specs_of(config, board)[0])


def test_options_of_a_half_that_do_not_travel(config: Config) -> None:
    board = Board()
    board.half = Factory("acme.weights:Engine", {"lanes": object()})
    with pytest.raises(PluginError, match="the engine half of collective has options that are not JSON"):
        engine_env(specs_of(config, board)[0])


class Slots(FakePlatform):
    """A host's devices."""

    def ray_binding(self, inventory: NodeInventory) -> RayBinding:
        return RayBinding("slot", virtual=True)


@pytest.mark.parametrize(
    ("platform", "topology", "residency", "level", "in_turn", "away"),
    [
        (Board, "colocate", "park", 1, True, TRAINER_TAGS),
        (Board, "colocate", "resident", 0, True, ()),
        (Slots, "colocate", "park", 1, False, ()),
        (Board, "disaggregated", None, 0, False, ()),
    ],
)
def test_who_leaves_shared_devices_at_the_start(
    platform: type[FakePlatform], topology: str, residency: str | None, level: int, in_turn: bool, away: tuple[str, ...]
) -> None:
    plan = replace(plan_of(platform(), topology=topology), residency=residency)
    assert (sleep_level(plan), takes_turns_at_start(plan), away_at_start(plan)) == (level, in_turn, away)


def test_an_engine_that_stays_has_its_bytes_in_every_phase() -> None:
    held = engine_bytes(plan_of(Board()))
    assert set(held) == {"serving", "training", "updating"}
    assert all(tags == held["serving"] and tags["engine_weights"] > 0 for tags in held.values())
