from __future__ import annotations

import json
import pickle

import pytest

from vime.errors import PluginError
from vime.facts.collectives import GroupRequest
from vime.facts.diagnosis import DoctorContext, ProbeContext, Severity
from vime.facts.memory import NullMemory, Tag
from vime.facts.process import EnvMode, EnvValue, RoleKind
from vime.facts.transports import Relation, Side
from vime.hooks.specs import RULES
from vime.platforms.lineage import Platform
from vime.platforms.merge import merge_env
from vime.platforms.strict import HookError
from vime.testing.recording import read_trace, record, unasked

CTX = ProbeContext(env={})
GROUP = GroupRequest("trainer", 2)


def family(build, body: str, *, parent_body: str = "") -> Platform:
    """`child -> acme -> base`, where acme answers every required hook."""
    return Platform.of(build("acme", parent_body), build("child", body, parent="acme", complete=False))


def test_the_leaf_answers_first_and_none_falls_through(build, inventory, request_for) -> None:
    platform = family(
        build,
        """
        @hookimpl
        def vime_capabilities(inventory): return Capabilities("child-device", ("float32",), "float32")
        @hookimpl
        def vime_collective(request, group): return None
        """,
    )
    assert platform.name == "child"
    assert platform.lineage == ("child", "acme", "base")
    assert platform.capabilities(inventory).device_type == "child-device"
    assert platform.collective(request_for(), GROUP).backend == "acme"
    assert isinstance(platform.memory_backend(request_for()), NullMemory)


def test_a_wrapper_amends_the_parents_answer(build) -> None:
    platform = family(
        build,
        """
        from dataclasses import replace
        @hookimpl(wrapper=True)
        def vime_inventory(ctx):
            answer = yield
            return replace(answer, platform=NAME, driver="7")
        """,
    )
    node = platform.inventory(CTX)
    assert (node.platform, node.driver, node.devices[0].name) == ("child", "7", "acme")


def test_an_exception_of_a_first_hook_never_falls_through(build, inventory) -> None:
    platform = family(build, "@hookimpl\ndef vime_capabilities(inventory): raise OSError('no such register')")
    with pytest.raises(HookError) as caught:
        platform.capabilities(inventory)
    assert caught.value.where == "plugin child, hook vime_capabilities"
    assert "OSError: no such register" in caught.value.what
    assert isinstance(caught.value.__cause__, OSError)


def test_a_parents_error_keeps_the_parents_name_through_a_wrapper(build, inventory) -> None:
    wrapper = "@hookimpl(wrapper=True)\ndef vime_perf_model(inventory):\n    return (yield)"
    platform = family(build, wrapper, parent_body="@hookimpl\ndef vime_perf_model(): raise KeyError('rate')")
    with pytest.raises(HookError, match="plugin acme, hook vime_perf_model: KeyError"):
        platform.perf_model(inventory)


def test_a_wrappers_own_error_is_attributed_to_it(build, inventory) -> None:
    platform = family(
        build, "@hookimpl(wrapper=True)\ndef vime_perf_model(inventory):\n    yield\n    raise ValueError('mine')"
    )
    with pytest.raises(HookError, match="plugin child, hook vime_perf_model: ValueError: mine"):
        platform.perf_model(inventory)


def test_a_plugins_own_error_keeps_its_fix_and_travels_between_processes(build) -> None:
    body = """
    from vime.errors import PluginError
    @hookimpl
    def vime_inventory(ctx): raise PluginError("the driver is too old", fix="install driver 9")
    """
    with pytest.raises(PluginError) as caught:
        family(build, body).inventory(CTX)
    assert caught.value.fix == "install driver 9"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


def test_a_plugin_that_exits_is_an_error_of_that_plugin(build, inventory) -> None:
    with pytest.raises(HookError, match="plugin child, hook vime_perf_model: SystemExit: 3"):
        family(build, "import sys\n@hookimpl\ndef vime_perf_model(): sys.exit(3)").perf_model(inventory)


def test_required_hooks_need_an_implementation_above_base(build) -> None:
    with pytest.raises(PluginError) as caught:
        Platform.of(build("half", "@hookimpl\ndef vime_capabilities(inventory): return None", complete=False))
    text = str(caught.value)
    for hook in ("vime_inventory", "vime_ray_binding", "vime_trainer_runtime", "vime_collective"):
        assert hook in text
    assert "vime_capabilities" not in text
    wrapper = "@hookimpl(wrapper=True)\ndef vime_inventory(ctx):\n    return (yield)"
    with pytest.raises(PluginError, match="implements vime_inventory"):
        Platform.of(build("half", wrapper, complete=False))


def test_a_required_hook_that_nobody_answers_names_itself(build, request_for) -> None:
    body = "@hookimpl\ndef vime_collective(request, group): return None"
    platform = Platform.of(build("acme", body))
    with pytest.raises(PluginError) as caught:
        platform.collective(request_for(), GROUP)
    assert caught.value.where == "platform acme, hook vime_collective"
    assert "nobody answered" in caught.value.what


def test_two_lineages_live_side_by_side(build, inventory) -> None:
    one = Platform.of(build("one"))
    two = Platform.of(build("two"))
    assert one.capabilities(inventory).device_type == "one"
    assert two.capabilities(inventory).device_type == "two"
    assert one.capabilities(inventory).device_type == "one"


def env(build, request_for, parent: str, child: str) -> dict[str, EnvValue]:
    hook = "@hookimpl\ndef vime_process_env(request): return {rules}"
    platform = family(build, hook.format(rules=child), parent_body=hook.format(rules=parent))
    return dict(platform.process_env(request_for()))


def rule(value: str, mode: str = "DEFAULT", scope: str = "process", protocols: tuple[str, ...] = ()) -> str:
    return f"{{'X': EnvValue('{value}', 'why {value}', EnvMode.{mode}, '{scope}', {protocols})}}"


@pytest.mark.parametrize(
    ("parent", "child", "value", "mode"),
    [
        (rule("1"), rule("2"), "2", EnvMode.DEFAULT),
        (rule("1"), rule("2", "REQUIRE"), "2", EnvMode.REQUIRE),
        (rule("1"), rule("1", "FORBID"), "1", EnvMode.FORBID),
        (rule("1", "REQUIRE"), rule("1"), "1", EnvMode.REQUIRE),
        (rule("1", "REQUIRE"), rule("2", "FORBID"), "1", EnvMode.REQUIRE),
        (rule("1", "FORBID"), rule("2", "REQUIRE"), "2", EnvMode.REQUIRE),
        (rule("1", "FORBID"), rule("1", "FORBID"), "1", EnvMode.FORBID),
        (rule("1"), "{'Y': EnvValue('3', 'other')}", "1", EnvMode.DEFAULT),
    ],
)
def test_environment_rules_merge_and_never_loosen(build, request_for, parent, child, value, mode) -> None:
    merged = env(build, request_for, parent, child)
    assert (merged["X"].value, merged["X"].mode) == (value, mode)


@pytest.mark.parametrize(
    ("parent", "child"),
    [
        (rule("1", "REQUIRE"), rule("2", "REQUIRE")),
        (rule("1", "REQUIRE"), rule("1", "FORBID")),
        (rule("1", "REQUIRE"), rule("2")),
        (rule("1", "FORBID"), rule("1", "REQUIRE")),
        (rule("1", "FORBID"), rule("1")),
        (rule("1", "FORBID"), rule("2")),
        (rule("1", "FORBID"), rule("2", "FORBID")),
    ],
)
def test_environment_contradictions_are_errors_with_both_reasons(build, request_for, parent, child) -> None:
    with pytest.raises(PluginError) as caught:
        env(build, request_for, parent, child)
    assert caught.value.where == "platform child, hook vime_process_env"
    assert "why 1" in caught.value.what
    assert caught.value.fix


def test_a_variable_that_must_agree_on_both_sides_keeps_saying_so(build, request_for) -> None:
    merged = env(build, request_for, rule("1", "REQUIRE", "both_equal"), rule("1", "REQUIRE"))
    assert merged["X"].scope == "both_equal"


@pytest.mark.parametrize(
    ("parent", "child", "bound"),
    [
        (("a",), ("b", "a"), ("a", "b")),
        (("a",), (), ()),
        ((), ("b",), ()),
        (("a",), None, ("a",)),
        (None, ("b",), ("b",)),
    ],
)
@pytest.mark.parametrize("mode", ["REQUIRE", "FORBID", "DEFAULT"])
def test_a_rule_binds_over_the_transports_of_parent_and_child(build, request_for, mode, parent, child, bound) -> None:
    """None: a rule for the process alone; (): for every transport."""
    layers = (rule("1", mode) if one is None else rule("1", mode, "both_equal", one) for one in (parent, child))
    merged = env(build, request_for, *layers)["X"]
    assert (merged.scope, merged.protocols) == ("both_equal", bound)


def test_launch_defaults_merge(build, request_for) -> None:
    hook = "@hookimpl\ndef vime_vllm_defaults(request): return VllmDefaults({})"
    platform = family(
        build,
        hook.format("{'a': 2, 'c': 3}, {'E': EnvValue('2', 'child')}, None, ('vime', 'child')"),
        parent_body=hook.format("{'a': 1, 'b': 1}, {'E': EnvValue('1', 'w'), 'F': EnvValue('1', 'w')}, 'm', ('vime',), 'P'"),
    )
    merged = platform.vllm_defaults(request_for(RoleKind.ENGINE))
    assert merged.args == {"a": 2, "b": 1, "c": 3}
    assert {name: value.value for name, value in merged.env.items()} == {"E": "2", "F": "1"}
    assert merged.entry_points == ("vime", "child")
    assert (merged.launch, merged.expected_platform) == ("m", "P")


def test_profiles_and_offers_of_a_child_replace_the_parents(build, edge_for) -> None:
    body = """
    @hookimpl
    def vime_profiles(): return [DeviceProfile("small", NAME, {size}, 8, "x", 1), DeviceProfile(NAME, NAME, 1, 8, "x", 1)]
    @hookimpl
    def vime_transports(edge, side):
        yield TransportOffer("fast", side, Factory("acme.w:F"), TransferCost({size}))
    """
    platform = family(build, body.replace("{size}", "2"), parent_body=body.replace("{size}", "1"))
    assert {p.name: (p.platform, p.memory_bytes) for p in platform.profiles()} == {
        "small": ("child", 2),
        "acme": ("acme", 1),
        "child": ("child", 1),
    }
    offers = platform.transports(edge_for(Relation.NETWORK), Side.ENGINE)
    assert [(o.protocol, o.cost.bytes_per_s) for o in offers] == [("fast", 2), ("disk", None)]
    assert all(o.side is Side.ENGINE for o in offers)


def test_the_other_sides_half_is_refused(build, edge_for) -> None:
    body = """
    @hookimpl
    def vime_transports(edge, side):
        return [TransportOffer("fast", Side.TRAINER, Factory("acme.w:F"), TransferCost(None))]
    """
    platform = Platform.of(build("acme", body))
    assert len(platform.transports(edge_for(Relation.NETWORK), Side.TRAINER)) == 2
    with pytest.raises(PluginError, match="'fast' was offered for the trainer side, the engine side was asked"):
        platform.transports(edge_for(Relation.NETWORK), Side.ENGINE)


def test_a_raising_check_costs_only_its_own_answer(build, inventory) -> None:
    parent = "@hookimpl\ndef vime_doctor_checks(ctx): return [Check('acme.ok', Severity.OK, 'fine')]"
    platform = family(build, "@hookimpl\ndef vime_doctor_checks(ctx): raise ValueError('boom')", parent_body=parent)
    first, second = platform.doctor_checks(DoctorContext(inventory, {}))
    assert (first.id, first.severity) == ("acme.ok", Severity.OK)
    assert (second.id, second.severity) == ("child.doctor", Severity.ERROR)
    assert "boom" in second.finding
    assert second.fix


def test_a_raising_probe_costs_only_its_own_answer(build, caplog) -> None:
    parent = "@hookimpl\ndef vime_probe(ctx): return Match(NAME, 10, 'seen')"
    platform = family(build, "@hookimpl\ndef vime_probe(ctx): raise ValueError('boom')", parent_body=parent)
    assert [match.platform for match in platform.probe(CTX)] == ["acme"]
    assert "plugin child, hook vime_probe: ValueError: boom" in caplog.text


def test_what_base_answers_is_an_explicit_absence(build, request_for, inventory, edge_for) -> None:
    platform = Platform.of(build("acme"))
    memory = platform.memory_backend(request_for())
    assert isinstance(memory, NullMemory)
    assert memory.reason
    sleep = platform.engine_sleep(request_for(RoleKind.ENGINE))
    assert sleep.level == 0
    assert not any(tag.frees for tag in sleep.tags.values())
    assert set(sleep.tags) == {Tag.ENGINE_WEIGHTS, Tag.KV, Tag.GRAPHS}
    assert platform.perf_model(inventory).quantities == {}
    assert platform.profiles() == ()
    assert platform.process_env(request_for()) == {}
    assert platform.fixture(CTX) is None
    assert [o.protocol for o in platform.transports(edge_for(Relation.NETWORK), Side.TRAINER)] == ["disk"]


def test_base_answers_nothing_that_is_required() -> None:
    from vime.platforms import base

    assert not [name for name, rule in RULES.items() if rule.required and hasattr(base, name)]


def test_recording_keeps_hooks_and_arguments(build, inventory, request_for) -> None:
    platform = record(Platform.of(build("acme")))
    platform.capabilities(inventory)
    platform.collective(request_for(), GROUP)
    assert [(call.platform, call.hook) for call in platform.calls] == [
        ("acme", "vime_capabilities"),
        ("acme", "vime_collective"),
    ]
    assert platform.calls[1].arguments["group"] == GROUP
    assert platform.calls[0].answer == platform.capabilities(inventory)
    assert set(unasked(platform.calls)) == {name for name, rule in RULES.items() if rule.runtime} - {
        "vime_capabilities",
        "vime_collective",
    }


def test_a_trace_file_is_written_by_every_platform(build, inventory, request_for, tmp_path, monkeypatch) -> None:
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setenv("VIME_TRACE_PLUGINS", str(trace))
    good, bad = Platform.of(build("acme")), Platform.of(build("bad", "@hookimpl\ndef vime_perf_model(): return 1"))
    good.process_env(request_for())
    good.memory_backend(request_for())
    with pytest.raises(HookError):
        bad.perf_model(inventory)
    assert all(json.loads(line)["pid"] for line in trace.read_text().splitlines())
    calls = read_trace(trace)
    assert [(c.platform, c.hook, c.plugins) for c in calls] == [
        ("acme", "vime_process_env", ()),
        ("acme", "vime_memory_backend", ("base",)),
        ("bad", "vime_perf_model", ("base", "bad")),
    ]
    assert calls[0].arguments["request"]["role"] == "actor"
    assert calls[2].error is not None
    assert "expected PerfTable" in calls[2].error


def test_rules_about_options_of_a_list_merge_when_equal_and_contradict_otherwise() -> None:
    keep = EnvValue("x:True", "parent's reason", EnvMode.OPTION)
    drop = EnvValue("x", "child's reason", EnvMode.WITHOUT)
    again = EnvValue("x:True", "child's reason", EnvMode.OPTION, scope="both_equal")
    assert merge_env([{"A": keep}, {"A": again}], where="here") == {"A": again}
    for parent, child in ((keep, drop), (drop, keep), (keep, EnvValue("y:1", "z")), (EnvValue("y:1", "z"), drop)):
        with pytest.raises(PluginError, match=r"A (must|defaults) .*its child says A (must|defaults)"):
            merge_env([{"A": parent}, {"A": child}], where="here")
