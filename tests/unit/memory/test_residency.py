"""Which transitions are legal, and that a refused one changes nothing."""

from __future__ import annotations

import pytest

from vime.errors import MemoryStateError
from vime.facts.memory import Tag, TagSemantics
from vime.memory.residency import (
    ENGINE_TAGS,
    TRAINER_TAGS,
    Place,
    Residency,
    check_semantics,
    time_sharing_rules,
    turn_rules,
)


@pytest.fixture
def shared():
    """Trainer and engine on the same devices; the engine serves."""
    residency = Residency(time_sharing_rules("actor", "rollout"))
    residency.register("actor", TRAINER_TAGS, Place.HOST)
    residency.register("rollout", ENGINE_TAGS)
    return residency


def test_a_step_of_time_sharing_goes_round(shared):
    shared.park("rollout", [Tag.ENGINE_WEIGHTS])
    shared.discard("rollout", [Tag.KV])
    shared.wake("actor", TRAINER_TAGS)
    shared.require("actor", TRAINER_TAGS, to="train")
    shared.discard("actor", [Tag.GRADS])
    shared.park("actor", [Tag.OPTIMIZER])
    shared.wake("rollout", [Tag.ENGINE_WEIGHTS])
    shared.park("actor", [Tag.PARAMS])
    shared.wake("rollout", [Tag.KV])
    assert {str(h): p for h, p in shared.places().items()} == {
        "actor's params": Place.HOST,
        "actor's grads": Place.GONE,
        "actor's optimizer": Place.HOST,
        "rollout's engine_weights": Place.DEVICE,
        "rollout's kv": Place.DEVICE,
    }


def test_trainer_and_cache_never_meet(shared):
    with pytest.raises(MemoryStateError, match="rollout's kv is on the same device"):
        shared.wake("actor", [Tag.PARAMS])


def test_optimizer_and_engine_weights_never_meet_but_parameters_may(shared):
    shared.discard("rollout", [Tag.KV])
    with pytest.raises(MemoryStateError, match="rollout's engine_weights"):
        shared.wake("actor", [Tag.PARAMS, Tag.OPTIMIZER])
    assert shared.place("actor", Tag.PARAMS) is Place.HOST
    shared.wake("actor", [Tag.PARAMS])


def test_a_cache_does_not_wake_before_dropped_weights_are_sent_again():
    residency = Residency()
    residency.register("rollout", ENGINE_TAGS)
    residency.discard("rollout", ENGINE_TAGS)
    with pytest.raises(MemoryStateError, match="discarded"):
        residency.wake("rollout", [Tag.KV])
    residency.wake("rollout", [Tag.ENGINE_WEIGHTS])
    with pytest.raises(MemoryStateError, match="without valid content"):
        residency.wake("rollout", [Tag.KV])
    residency.refresh("rollout", [Tag.ENGINE_WEIGHTS])
    residency.wake("rollout", [Tag.KV])


@pytest.mark.parametrize("action", ["park", "discard"])
def test_nothing_leaves_twice(action):
    residency = Residency()
    residency.register("actor", TRAINER_TAGS)
    getattr(residency, action)("actor", [Tag.GRADS])
    with pytest.raises(MemoryStateError, match=f"cannot {action} actor's grads"):
        getattr(residency, action)("actor", [Tag.PARAMS, Tag.GRADS])
    assert residency.place("actor", Tag.PARAMS) is Place.DEVICE


def test_what_is_there_does_not_wake_and_what_is_not_is_not_used():
    residency = Residency()
    residency.register("actor", [Tag.PARAMS])
    with pytest.raises(MemoryStateError, match="on the device"):
        residency.wake("actor", [Tag.PARAMS])
    residency.park("actor", [Tag.PARAMS])
    with pytest.raises(MemoryStateError, match="cannot train: actor's params is parked"):
        residency.require("actor", [Tag.PARAMS], to="train")
    with pytest.raises(MemoryStateError, match="not registered"):
        residency.park("actor", [Tag.KV])
    with pytest.raises(MemoryStateError, match="twice"):
        residency.register("actor", [Tag.PARAMS])


def test_a_platform_that_frees_nothing_is_refused_with_its_reason():
    with pytest.raises(MemoryStateError, match="pinned by the driver"):
        check_semantics([Tag.PARAMS], {Tag.PARAMS: TagSemantics(False, True, "pinned by the driver")}, platform="x")
    with pytest.raises(MemoryStateError, match="names no way"):
        check_semantics([Tag.GRADS], {}, platform="x")


def test_training_roles_in_turn_never_meet():
    tags = {"actor": TRAINER_TAGS, "critic": TRAINER_TAGS, "ref": (Tag.PARAMS,)}
    residency = Residency(turn_rules(tags))
    for role in tags:
        residency.register(role, tags[role], Place.HOST)
    residency.wake("ref", [Tag.PARAMS])
    with pytest.raises(MemoryStateError, match="ref's params is on the same device"):
        residency.wake("critic", [Tag.OPTIMIZER])
    residency.park("ref", [Tag.PARAMS])
    residency.wake("critic", TRAINER_TAGS)
    with pytest.raises(MemoryStateError, match="critic's params is on the same device"):
        residency.wake("actor", [Tag.PARAMS])
    assert residency.place("actor", Tag.PARAMS) is Place.HOST
