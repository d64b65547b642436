"""Environment rules against each other and against the user."""

from __future__ import annotations

import pytest

from vime.errors import PlanError
from vime.facts.process import EnvMode, EnvValue
from vime.planning.env import EdgeEnd, check_equal, merge_env


def rule(
    value: str, mode: EnvMode = EnvMode.DEFAULT, why: str = "because", scope: str = "process", protocols: tuple[str, ...] = ()
) -> EnvValue:
    return EnvValue(value, why, mode, scope, protocols)


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
    check_equal(EdgeEnd(rules, {"A": "1"}), EdgeEnd(rules, {"A": "1"}))
    with pytest.raises(PlanError, match=r"E262 A is '1' for the trainer and None for the engine: one communicator\n"):
        check_equal(EdgeEnd(rules, {"A": "1"}), EdgeEnd(rules, {}))
    check_equal(EdgeEnd([{"A": rule("1")}], {"A": "1"}), EdgeEnd([], {}))


@pytest.mark.parametrize("mode", [EnvMode.DEFAULT, EnvMode.REQUIRE, EnvMode.FORBID])
@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_rule_of_one_side_binds_the_other(mode: EnvMode, side: str) -> None:
    rules = [{"A": rule("0", mode, scope="both_equal", why="one communicator")}]

    def ends(ours: dict[str, str], theirs: dict[str, str]) -> tuple[EdgeEnd, EdgeEnd]:
        pair = (EdgeEnd(rules, ours), EdgeEnd([], theirs))
        return pair if side == "trainer" else (pair[1], pair[0])

    check_equal(*ends({"A": "1"}, {"A": "1"}))
    check_equal(*ends({}, {}))
    with pytest.raises(PlanError, match=rf"E262 A is .*\(only the {side}'s platform says so\)"):
        check_equal(*ends({"A": "1"}, {}))


def test_a_rule_about_transports_binds_over_no_other() -> None:
    rules = [{"A": rule("0", scope="both_equal", protocols=("link", "wire"))}]
    ends = EdgeEnd(rules, {"A": "1"}), EdgeEnd([], {})
    check_equal(*ends, protocol="disk")
    for protocol in ("link", "wire", None):
        with pytest.raises(PlanError, match="E262 A is '1' for the trainer and None for the engine") as caught:
            check_equal(*ends, protocol=protocol)
        assert (caught.value.fix or "").endswith("or choose a transport other than link and wire")


def test_sides_are_compared_as_their_processes_see_the_variable() -> None:
    rules = [{"A": rule("0", EnvMode.FORBID, scope="both_equal")}]
    check_equal(EdgeEnd(rules, {"A": "1"}), EdgeEnd([], {}), inherited={"A": "1"})
    with pytest.raises(PlanError, match="'1' for the trainer and '0' for the engine"):
        check_equal(EdgeEnd(rules, {"A": "1"}), EdgeEnd([], {}), inherited={"A": "0"})


@pytest.mark.parametrize(("mode", "option"), [(EnvMode.OPTION, "grow:False"), (EnvMode.WITHOUT, "grow")])
def test_of_a_list_only_the_rules_option_must_agree(mode: EnvMode, option: str) -> None:
    rules = [{"A": rule(option, mode, scope="both_equal")}]
    check_equal(EdgeEnd(rules, {"A": "split:8,grow:False"}), EdgeEnd(rules, {"A": "grow:False"}))
    check_equal(EdgeEnd(rules, {"A": "split:8"}), EdgeEnd(rules, {}))
    with pytest.raises(PlanError, match="E262"):
        check_equal(EdgeEnd(rules, {"A": "grow:False"}), EdgeEnd(rules, {"A": "grow:True"}))


# ---- lists of options

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
WITHOUT = {name: rule("expandable_segments", EnvMode.WITHOUT, "the sleep pool needs it") for name in ALLOCATORS}


def optioned(
    *layers: dict[str, EnvValue], user: dict[str, str] | None = None, inherited: dict[str, str] | None = None
) -> dict[str, str]:
    return merge_env(layers, user or {}, process="rollout", where="t.yaml:4", inherited=inherited)[0]


def test_an_option_is_taken_out_and_the_others_stay_under_both_names() -> None:
    given = dict.fromkeys(ALLOCATORS, "expandable_segments:True,max_split_size_mb:128")
    for source in ("user", "inherited"):
        assert optioned(WITHOUT, **{source: given}) == dict.fromkeys(ALLOCATORS, "max_split_size_mb:128")
    only = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert optioned(WITHOUT, inherited=only) == {"PYTORCH_ALLOC_CONF": ""}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "a:1"),
        ("b:2", "b:2,a:1"),
        ("a:0,b:2", "b:2,a:1"),
        ("a:1,b:2", None),
        ("b:[x:1,y:2],a:0", "b:[x:1,y:2],a:1"),
    ],
)
def test_an_option_is_put_in_place_of_its_other_value(before: str | None, after: str | None) -> None:
    inherited = {} if before is None else {"A": before}
    assert optioned({"A": rule("a:1", EnvMode.OPTION)}, inherited=inherited) == ({} if after is None else {"A": after})


def test_nothing_is_said_where_nothing_changes() -> None:
    assert optioned(WITHOUT, inherited=dict.fromkeys(ALLOCATORS, "max_split_size_mb:128")) == {}
    assert optioned(WITHOUT) == {}
    assert optioned(WITHOUT, user={"PYTORCH_ALLOC_CONF": "x:1"}) == {"PYTORCH_ALLOC_CONF": "x:1"}


def test_the_users_value_goes_before_the_inherited_one_and_the_reason_says_which() -> None:
    layers, user = (WITHOUT,), {ALLOCATORS[0]: "expandable_segments:True,a:1"}
    values, reasons = merge_env(layers, user, process="rollout", inherited={ALLOCATORS[0]: "b:2"})
    assert values == {ALLOCATORS[0]: "a:1"}
    assert [(r.mode, r.why) for r in reasons] == [
        ("without", "the sleep pool needs it (from your value 'expandable_segments:True,a:1')")
    ]


def test_options_that_contradict() -> None:
    with_it = {ALLOCATORS[0]: rule("expandable_segments:True", EnvMode.OPTION, "less waste")}
    with pytest.raises(PlanError, match=r"E261 rollout: .* must be without .*sleep pool.* and with .*less waste"):
        optioned(WITHOUT, with_it)
    required = {ALLOCATORS[0]: rule("expandable_segments:True", EnvMode.REQUIRE, "x")}
    with pytest.raises(PlanError, match="E261 rollout"):
        optioned(required, WITHOUT)
    assert optioned(with_it, with_it) == {ALLOCATORS[0]: "expandable_segments:True"}


def test_a_forbidden_value_that_the_machine_sets_is_refused() -> None:
    forbid = {"A": rule("0", EnvMode.FORBID, "it turns the fabric off")}
    with pytest.raises(PlanError, match=r"A is '0' \(inherited from the environment\), which is forbidden") as caught:
        optioned(forbid, inherited={"A": "0"})
    assert (caught.value.where, caught.value.fix) == (None, "remove A from the environment, or give another value")
    assert optioned(forbid, inherited={"A": "1"}) == {}
    assert optioned(forbid, user={"A": "2"}, inherited={"A": "0"}) == {"A": "2"}
