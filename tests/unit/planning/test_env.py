"""Environment rules against each other and against the user."""

from __future__ import annotations

import pytest

from vime.errors import PlanError
from vime.facts.process import EnvMode, EnvValue
from vime.planning.env import check_equal, merge_env


def rule(value: str, mode: EnvMode = EnvMode.DEFAULT, why: str = "because", scope: str = "process") -> EnvValue:
    return EnvValue(value, why, mode, scope)


def merged(*layers: dict[str, EnvValue], user: dict[str, str] | None = None) -> dict[str, str]:
    return merge_env(layers, user or {}, process="actor", where="t.yaml:4")[0]


def test_later_layers_and_the_user_win_over_defaults() -> None:
    assert merged({"A": rule("1"), "B": rule("1")}, {"A": rule("2")}, user={"B": "3", "C": "4"}) == {
        "A": "2",
        "B": "3",
        "C": "4",
    }


def test_a_requirement_wins_over_defaults_of_any_layer() -> None:
    assert merged({"A": rule("1", EnvMode.REQUIRE)}, {"A": rule("2")}) == {"A": "1"}
    assert merged({"A": rule("1", EnvMode.REQUIRE)}, user={"A": "1"}) == {"A": "1"}


def test_a_user_who_breaks_a_requirement_hears_why() -> None:
    with pytest.raises(PlanError) as caught:
        merged({"A": rule("1", EnvMode.REQUIRE, "the routes need it")}, user={"A": "0"})
    assert caught.value.what == "E261 actor: A is '0' in the topology, but must be '1': the routes need it"
    assert caught.value.where == "t.yaml:4"


def test_two_requirements_that_contradict() -> None:
    with pytest.raises(PlanError, match=r"E261 actor: A must be '1' \(x\) and '2' \(y\)"):
        merged({"A": rule("1", EnvMode.REQUIRE, "x")}, {"A": rule("2", EnvMode.REQUIRE, "y")})


def test_a_forbidden_value() -> None:
    forbid = {"A": rule("0", EnvMode.FORBID, "it turns the fabric off")}
    assert merged(forbid) == {}
    assert merged(forbid, user={"A": "1"}) == {"A": "1"}
    for layers, user in (((forbid,), {"A": "0"}), ((forbid, {"A": rule("0")}), {})):
        with pytest.raises(PlanError, match="which is forbidden: it turns the fabric off"):
            merged(*layers, user=user)


def test_every_value_has_its_reason() -> None:
    layers = ({"A": rule("1", EnvMode.REQUIRE, "x"), "B": rule("0", EnvMode.FORBID, "y"), "D": rule("5")},)
    _, reasons = merge_env(layers, {"C": "3"}, process="actor")
    told = {(r.name, r.value, r.mode, r.why) for r in reasons}
    assert told == {
        ("A", "1", "require", "x"),
        ("B", "0", "forbid", "y"),
        ("C", "3", "user", "set in the topology"),
        ("D", "5", "default", "because"),
    }


def test_both_sides_must_agree_where_the_rule_says_so() -> None:
    rules = [{"A": rule("1", scope="both_equal", why="one communicator")}]
    check_equal(rules, {"A": "1"}, {"A": "1"})
    with pytest.raises(PlanError, match="E262 A is '1' for the trainer and None for the engine: one communicator"):
        check_equal(rules, {"A": "1"}, {})
