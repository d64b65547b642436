from __future__ import annotations

import pytest

from vime.errors import PluginError
from vime.facts.diagnosis import ProbeContext
from vime.facts.process import RoleKind
from vime.hooks import PluginInfo
from vime.platforms.lineage import Platform, Plugin
from vime.platforms.strict import HookError

CTX = ProbeContext(env={})


def refusal(build, body: str) -> str:
    with pytest.raises(PluginError) as caught:
        Platform.of(build("acme", body))
    return str(caught.value)


def test_unknown_hook_is_refused_with_the_nearest_name(build) -> None:
    text = refusal(build, "@hookimpl\ndef vime_inventry(ctx): return None")
    assert "plugin acme, hook vime_inventry" in text
    assert "did you mean vime_inventory?" in text


def test_unmarked_hook_is_refused(build) -> None:
    text = refusal(build, "def vime_profiles(): return ()")
    assert "plugin acme, hook vime_profiles" in text
    assert "not marked" in text
    assert "@hookimpl" in text


def test_wrong_parameter_is_refused_with_the_signature(build) -> None:
    text = refusal(build, "@hookimpl\ndef vime_perf_model(inventry): return PerfTable()")
    assert "plugin acme, hook vime_perf_model" in text
    assert "no parameter 'inventry'" in text
    assert "did you mean 'inventory'?" in text
    assert "vime_perf_model(inventory)" in text


def test_wrong_parameter_with_a_default_is_refused_too(build) -> None:
    assert "no parameter 'x'" in refusal(build, "@hookimpl\ndef vime_perf_model(inventory, x=None): return PerfTable()")


@pytest.mark.parametrize("parameters", ["*args", "**kwargs", "*, inventory"])
def test_parameters_that_pluggy_never_fills_are_refused(build, parameters: str) -> None:
    assert "cannot be filled" in refusal(build, f"@hookimpl\ndef vime_perf_model({parameters}): return PerfTable()")


def test_old_style_wrapper_is_refused(build) -> None:
    text = refusal(build, "@hookimpl(hookwrapper=True)\ndef vime_profiles():\n    yield")
    assert "hookwrapper=True" in text
    assert "@hookimpl(wrapper=True)" in text


@pytest.mark.parametrize("option", ["tryfirst", "trylast"])
def test_order_options_are_refused(build, option: str) -> None:
    assert "leaf answers first" in refusal(build, f"@hookimpl({option}=True)\ndef vime_profiles(): return ()")


def test_wrapper_of_an_isolated_hook_is_refused(build) -> None:
    text = refusal(build, "@hookimpl(wrapper=True)\ndef vime_doctor_checks(ctx):\n    return (yield)")
    assert "called one by one" in text


def test_wrapper_that_does_not_yield_and_async_hooks_are_refused(build) -> None:
    assert "must yield" in refusal(build, "@hookimpl(wrapper=True)\ndef vime_profiles(): return ()")
    assert "async" in refusal(build, "@hookimpl\nasync def vime_profiles(): return ()")


def test_a_hook_under_another_function_name_is_checked_as_that_hook(build) -> None:
    text = refusal(build, "@hookimpl(specname='vime_perf_model')\ndef rates(node): return PerfTable()")
    assert "hook vime_perf_model" in text
    assert "no parameter 'node'" in text
    twice = "@hookimpl\ndef vime_profiles(): return ()\n@hookimpl(specname='vime_profiles')\ndef more(): return ()"
    assert "implemented twice" in refusal(build, twice)


def test_all_problems_of_a_plugin_are_reported_at_once(build) -> None:
    text = refusal(build, "def vime_profiles(): return ()\n@hookimpl\ndef vime_probee(ctx): return None")
    assert "vime_profiles is not marked" in text
    assert "no hook named vime_probee" in text


def test_module_without_identity_is_refused() -> None:
    with pytest.raises(PluginError, match="has no VIME_PLUGIN"):
        Plugin.of(object())


def test_object_with_methods_can_be_a_plugin(build, inventory) -> None:
    from vime.facts.perf import PerfTable, Provenance, Quantity
    from vime.hooks import hookimpl

    class Rates:
        VIME_PLUGIN = PluginInfo("rates", parent="acme")

        @hookimpl
        def vime_perf_model(self, inventory):
            return PerfTable({"memcpy": Quantity(float(inventory.cpus), "bytes/s", Provenance.SPEC)})

    platform = Platform.of(build("acme"), Rates())
    assert platform.perf_model(inventory).get("memcpy").value == 1.0


def test_parameters_that_are_not_needed_may_be_left_out(build, inventory) -> None:
    body = "@hookimpl\ndef vime_perf_model(): return PerfTable()\n@hookimpl\ndef vime_memory_backend(): return NullMemory('x')"
    platform = Platform.of(build("acme", body))
    assert platform.perf_model(inventory).quantities == {}


def test_wrong_type_of_a_single_answer_names_plugin_and_hook(build, inventory) -> None:
    platform = Platform.of(build("acme", "@hookimpl\ndef vime_perf_model(): return {'memcpy': 1}"))
    with pytest.raises(HookError) as caught:
        platform.perf_model(inventory)
    assert str(caught.value).startswith("plugin acme, hook vime_perf_model: the answer is a dict, expected PerfTable")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("DeviceProfile('d', NAME, 1, 1, 'x', 1)", "the answer is a DeviceProfile, expected an iterable of DeviceProfile"),
        ("[DeviceProfile('d', NAME, 1, 1, 'x', 1), 'b']", "item 1 is a str, expected DeviceProfile"),
        ("'ab'", "the answer is a str, expected an iterable of DeviceProfile"),
        ("{'d': 1}", "the answer is a dict, expected an iterable of DeviceProfile"),
        ("5", "the answer is a int, expected an iterable of DeviceProfile"),
    ],
)
def test_wrong_items_are_named(build, answer: str, message: str) -> None:
    platform = Platform.of(build("acme", f"@hookimpl\ndef vime_profiles(): return {answer}"))
    with pytest.raises(HookError) as caught:
        platform.profiles()
    assert message in str(caught.value)
    assert caught.value.where == "plugin acme, hook vime_profiles"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[('A', EnvValue('1', 'w'))]", "the answer is a list, expected a mapping from names to EnvValue"),
        ("{'A': '1'}", "the value of 'A' is a str, expected EnvValue"),
        ("{1: EnvValue('1', 'w')}", "key 1 is a int, expected a name"),
    ],
)
def test_wrong_mappings_are_named(build, request_for, answer: str, message: str) -> None:
    platform = Platform.of(build("acme", f"@hookimpl\ndef vime_process_env(request): return {answer}"))
    with pytest.raises(HookError) as caught:
        platform.process_env(request_for(RoleKind.ENGINE))
    assert message in str(caught.value)
    assert caught.value.where == "plugin acme, hook vime_process_env"


def test_a_wrapper_answers_for_what_it_returns(build, inventory) -> None:
    child = build(
        "child",
        """
        @hookimpl(wrapper=True)
        def vime_perf_model():
            yield
            return 7
        @hookimpl(wrapper=True)
        def vime_profiles():
            yield
            return ()
        """,
        parent="acme",
        complete=False,
    )
    platform = Platform.of(build("acme"), child)
    with pytest.raises(HookError, match="plugin child, hook vime_perf_model: the answer is a int"):
        platform.perf_model(inventory)
    with pytest.raises(HookError, match="plugin child, hook vime_profiles: the wrapper returned a tuple"):
        platform.profiles()


def test_generators_are_read_inside_the_guard(build) -> None:
    body = "@hookimpl\ndef vime_profiles():\n    yield DeviceProfile('d', NAME, 1, 1, 'x', 1)\n    raise RuntimeError('late')"
    with pytest.raises(HookError, match="plugin acme, hook vime_profiles: RuntimeError: late"):
        Platform.of(build("acme", body)).profiles()
