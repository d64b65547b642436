"""What the plan gives an engine and a trainer rank: masks, environment, the transport's engine half."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vime.assemble.setups import (
    Keys,
    away_at_start,
    devices_of,
    engine_bytes,
    engine_specs,
    experts_bytes,
    model_folder,
    sleep_level,
    step_rules,
    takes_turns_at_start,
    trainer_setups,
)
from vime.assemble.trainers import trainer_starts
from vime.config.algorithms import CriticSection, KlSection, PpoSection
from vime.config.optimizer import OptimizerSection
from vime.config.schema import Config
from vime.data.snapshot import Snapshot
from vime.errors import CheckpointError, PluginError
from vime.facts.bindings import RayBinding
from vime.facts.inventory import NodeInventory
from vime.facts.process import EnvMode, EnvValue, Factory
from vime.facts.transports import Edge, Side, TransportOffer
from vime.planning.make import Here, make_plan
from vime.planning.needs import PlanNeeds
from vime.planning.plan import Plan
from vime.rollout.engine import EngineSpec, engine_env
from vime.testing.platforms import TINY_MODEL, FakePlatform
from vime.topology.load import load_topology
from vime.trainer.setup import TrainerSetup

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


def ranks_of(config: Config, plan: Plan) -> list[TrainerSetup]:
    return trainer_setups(config, plan, plan.actor)


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
    assert [s.local_rank for s in ranks_of(config, plan_of(Board()))] == [0, 0, 0, 0]
    assert [s.local_rank for s in ranks_of(config, plan_of(FakePlatform()))] == [0, 1, 2, 3]


def test_what_the_plan_recomputes_reaches_every_rank(config: Config) -> None:
    assert config.trainer.recompute == "auto"
    for recompute in ("none", "full"):
        plan = replace(plan_of(Board()), recompute=recompute)
        assert {s.trainer.recompute for s in ranks_of(config, plan)} == {recompute}
    assert {s.trainer.optimizer for s in ranks_of(config, plan)} == {config.trainer.optimizer}


def test_the_object_store_has_room_for_the_experts_of_all_batches(config: Config) -> None:
    plan = replace(plan_of(Board()), model=replace(TINY_MODEL, layers=3, dense_layers=1, experts=8, experts_per_token=2))
    assert experts_bytes(config, plan) == 0
    longest = config.data.model_copy(update={"max_prompt_tokens": 44})
    trainer = config.trainer.model_copy(update={"routing_replay": "rollout"})
    replaying = config.model_copy(update={"data": longest, "trainer": trainer})
    assert experts_bytes(replaying, plan) == 2 * 32 * 8 * (44 + 256) * 2 * 2


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
        (Board, "colocate", "park", 1, True, True),
        (Board, "colocate", "resident", 0, True, False),
        (Slots, "colocate", "park", 1, False, False),
        (Board, "disaggregated", None, 0, False, False),
    ],
)
def test_who_leaves_shared_devices_at_the_start(
    platform: type[FakePlatform], topology: str, residency: str | None, level: int, in_turn: bool, away: bool
) -> None:
    plan = replace(plan_of(platform(), topology=topology), residency=residency)
    assert (sleep_level(plan), takes_turns_at_start(plan), away_at_start(plan)) == (level, in_turn, away)


def test_an_engine_that_stays_has_its_bytes_in_every_phase() -> None:
    held = engine_bytes(plan_of(Board()))
    assert set(held) == {"serving", "training", "updating"}
    assert all(tags == held["serving"] and tags["engine_weights"] > 0 for tags in held.values())


def crowd(platform: FakePlatform, share: tuple[str, ...] = ("actor", "critic", "ref", "rollout")) -> Plan:
    """A critic and a reference beside the actor, on its devices or on their own."""
    roles = {name: {"kind": "train", **({"like": "actor"} if name in share else {"devices": 4})} for name in ("critic", "ref")}
    topology = {
        "pools": {"p": {"platform": "acme", "nodes": 2}},
        "roles": {"actor": {"kind": "train", "devices": 4}, **roles, "rollout": {"kind": "rollout", "parallel": {"tp": 4}}},
        "share": [{"roles": list(share), "residency": "park"}] if share else [],
        "sync": [{"from": "actor", "to": "rollout"}],
    }
    return make_plan(
        load_topology({"schema": "vime.topology/v1", **topology}),
        model=TINY_MODEL,
        needs=PlanNeeds(needs_values=True, needs_reference=True),
        platforms={"acme": platform},
        inventories={"p": (platform.node(), platform.node())},
        here=Here({}, frozenset({"p"})),
    )


PPO = PpoSection(kl=KlSection(coef=0.1), critic=CriticSection(optimizer=OptimizerSection(lr=0.5), warmup_steps=3))


def test_every_role_has_its_own_task_model_and_optimizer(config: Config) -> None:
    model = config.model.model_copy(update={"critic": Path("critic"), "reference": Path("ref"), "teacher": Path("teacher")})
    config = config.model_copy(update={"algorithm": PPO, "model": model})
    plan = crowd(Slots())
    found = {role.role: trainer_setups(config, plan, role)[0] for role in plan.trainers}
    assert {name: (s.role, s.task, s.model_path, s.trainer.optimizer.lr) for name, s in found.items()} == {
        "actor": ("actor", "actor", config.model.path, config.trainer.optimizer.lr),
        "critic": ("critic", "critic", Path("critic"), 0.5),
        "ref": ("ref", "reference", Path("ref"), config.trainer.optimizer.lr),
    }
    assert model_folder(config, "teacher") == Path("teacher")
    assert step_rules(config, plan.model).critic_warmup_steps == 3


@pytest.mark.parametrize(
    ("platform", "in_turn", "away"),
    [(Board, True, True), (Slots, False, False)],
)
def test_roles_that_share_real_devices_start_one_after_the_other(
    platform: type[FakePlatform], in_turn: bool, away: bool, config: Config, tmp_path: Path
) -> None:
    plan = crowd(platform())
    config = config.model_copy(update={"algorithm": PPO})
    starts = trainer_starts(config, plan, None)
    assert [[start.role.role for start in those] for those in starts] == (
        [["actor", "critic", "ref"]] if in_turn else [["actor"], ["critic"], ["ref"]]
    )
    leaving = {start.role.role: len(start.away) for those in starts for start in those}
    assert leaving == ({"actor": 3, "critic": 3, "ref": 1} if away else dict.fromkeys(("actor", "critic", "ref"), 0))
    assert devices_of(plan) == {"actor": 0, "critic": 0, "ref": 0}


def test_a_checkpoint_without_a_critic_cannot_restore_one(config: Config, tmp_path: Path) -> None:
    plan, config = crowd(Slots()), config.model_copy(update={"algorithm": PPO})
    snapshot = Snapshot(tmp_path, 2, {})
    (tmp_path / "trainer").mkdir()
    with pytest.raises(CheckpointError, match="holds nothing of critic"):
        trainer_starts(config, plan, snapshot)
    (tmp_path / "trainer-critic").mkdir()
    starts = [start for those in trainer_starts(config, plan, snapshot) for start in those]
    assert {start.role.role: start.restore and start.restore.name for start in starts} == {
        "actor": "trainer",
        "critic": "trainer-critic",
        "ref": None,
    }


def test_roles_on_their_own_devices_are_numbered_apart() -> None:
    assert devices_of(crowd(Slots(), share=("actor", "rollout"))) == {"actor": 0, "critic": 1, "ref": 2}
