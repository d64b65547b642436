from __future__ import annotations

import pickle
import shutil
import sys

import pytest

from vime.errors import PluginError
from vime.facts.diagnosis import Severity
from vime.platforms import policy as rules
from vime.platforms.discovery import Discovery, PluginPolicy, PluginStatus, ResolvedPlugin, discover, impose

HIT = "@hookimpl\ndef vime_probe(ctx): return Match(NAME, {}, 'seen by ' + NAME)"


def allowing(*names: str) -> Discovery:
    return discover(PluginPolicy(allow=names))


def refused(found: Discovery, name: str) -> PluginError:
    with pytest.raises(PluginError) as caught:
        found.platform(name)
    return caught.value


def test_available_until_asked_for_then_active(install) -> None:
    install("acme")
    found = allowing("acme")
    assert found.row("acme").status is PluginStatus.AVAILABLE
    assert "acme_plugin_acme" not in sys.modules
    platform = found.platform("acme")
    assert platform.lineage == ("acme", "base")
    assert found.platform("acme") is platform
    row = found.row("acme")
    assert row.status is PluginStatus.ACTIVE
    assert (row.distribution, row.version, row.parent, row.api) == ("acme-plugin", "1.0", "base", ">=1.0,<2")
    assert "vime_inventory" in row.hooks


def test_only_the_chosen_lineage_is_imported(install) -> None:
    install("parent")
    install("child", parent="parent", complete=False)
    install("other", "raise RuntimeError('imported')")
    found = allowing("parent", "child", "other")
    assert found.platform("child").lineage == ("child", "parent", "base")
    assert "other_plugin_other" not in sys.modules
    assert [found.row(name).status for name in ("child", "parent")] == [PluginStatus.ACTIVE] * 2
    assert found.row("other").status is PluginStatus.AVAILABLE


def test_a_third_party_plugin_loads_only_when_named(install) -> None:
    install("acme")
    found = discover(PluginPolicy())
    error = refused(found, "acme")
    assert found.row("acme").status is PluginStatus.NOT_ALLOWED
    assert "not-allowed" in str(error)
    assert "--platform acme, plugins.allow, or VIME_PLUGINS=acme" in str(error)
    assert "acme_plugin_acme" not in sys.modules


@pytest.mark.parametrize(
    "policy",
    [
        PluginPolicy.read(platform="acme", env={}),
        PluginPolicy.read(allow=["acme"], env={}),
        PluginPolicy.read(env={"VIME_PLUGINS": "other, acme"}),
    ],
)
def test_each_way_of_naming_suffices(install, policy: PluginPolicy) -> None:
    install("acme")
    assert discover(policy).platform("acme").name == "acme"


def test_deny_beats_every_way_of_naming(install) -> None:
    install("acme")
    found = discover(PluginPolicy.read(platform="acme", allow=["acme"], deny=["acme"], env={"VIME_PLUGINS": "acme"}))
    assert "take acme out of plugins.deny" in str(refused(found, "acme"))
    assert found.row("acme").status is PluginStatus.DENIED


def test_a_first_party_plugin_can_be_denied() -> None:
    found = discover(PluginPolicy(deny=("cpu",)))
    assert found.row("cpu").status is PluginStatus.DENIED
    refused(found, "cpu")


def test_an_empty_list_turns_third_party_plugins_off_and_only_those(install) -> None:
    install("acme")
    found = discover(PluginPolicy.read(platform="acme", allow=["acme"], env={"VIME_PLUGINS": ""}))
    assert "VIME_PLUGINS is empty" in str(refused(found, "acme"))
    assert found.platform("cpu").name == "cpu"


def test_cpu_is_first_party_and_a_name_that_looks_like_ours_is_not(install) -> None:
    install("acme", distribution="vime-acme")
    found = discover(PluginPolicy())
    assert found.row("cpu").first_party
    assert not found.row("acme").first_party
    assert found.row("acme").status is PluginStatus.NOT_ALLOWED


def test_first_party_are_the_distributions_that_our_metadata_lists_as_extras(install, tmp_path) -> None:
    install("ours", distribution="vime-ours")
    install("needed", distribution="vime-needed")
    core = tmp_path / "site" / "vime-0.1.0.dist-info"
    core.mkdir()
    (core / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vime\nVersion: 0.1.0\nProvides-Extra: ours\n"
        'Requires-Dist: Vime_Ours==1.0; extra == "ours"\nRequires-Dist: torch; extra == "ours"\nRequires-Dist: vime-needed\n'
    )
    assert rules.first_party_distributions() == {"vime", "vime-ours"}
    assert discover(PluginPolicy()).platform("ours").name == "ours"
    assert discover(PluginPolicy()).row("needed").status is PluginStatus.NOT_ALLOWED


def test_import_error_keeps_the_original_exception(install) -> None:
    install("acme", "import a_module_that_nobody_has")
    found = allowing("acme")
    error = refused(found, "acme")
    row = found.row("acme")
    assert row.status is PluginStatus.IMPORT_ERROR
    assert isinstance(row.error, ModuleNotFoundError)
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert "ModuleNotFoundError: No module named 'a_module_that_nobody_has'" in str(error)
    assert "vime plugins show acme" in str(error)


@pytest.mark.parametrize("body", ["def (:", "raise SystemExit(1)", "1/0"])
def test_whatever_breaks_at_import_is_an_import_error(install, body: str) -> None:
    install("acme", body)
    found = allowing("acme")
    refused(found, "acme")
    assert found.row("acme").status is PluginStatus.IMPORT_ERROR
    assert found.platform("cpu").name == "cpu"


@pytest.mark.parametrize(
    ("api", "reason", "fix"),
    [
        (None, "its metadata states no range of the hook API", '"vime-hooks>=1.2,<2" to `keywords` in its pyproject.toml'),
        ("", "its metadata states no range of the hook API", "install a acme-plugin for hook API 1.2"),
        (">=0.1,<0.2", "written for hook API >=0.1,<0.2, this is 1.2", "install a acme-plugin for hook API 1.2"),
        ("<1", "written for hook API <1, this is 1.2", "its authors port it"),
        (">=1.3,<2", "written for hook API >=1.3,<2, this is 1.2", "install a newer vime"),
        (">=7", "written for hook API >=7, this is 1.2", "install a newer vime"),
    ],
)
def test_the_range_of_the_hook_api_is_checked_before_import(install, api: str | None, reason: str, fix: str) -> None:
    install("acme", "raise RuntimeError('imported')", api=api)
    found = allowing("acme")
    error = refused(found, "acme")
    assert found.row("acme").status is PluginStatus.API_MISMATCH
    assert reason in str(error)
    assert fix in str(error)
    assert "acme_plugin_acme" not in sys.modules


@pytest.mark.parametrize("api", [">=1.0,<2", ">=0.1,<2", "==1.*", "~=1.0", " >= 1.0, < 2"])
def test_a_range_with_this_version_loads(install, api: str) -> None:
    install("acme", api=api)
    assert allowing("acme").platform("acme").name == "acme"


def test_what_is_no_range_is_a_validation_error(install) -> None:
    install("acme", api=">=seven")
    found = allowing("acme")
    assert "'>=seven' in its keyword vime-hooks is no version range" in str(refused(found, "acme"))
    assert found.row("acme").status is PluginStatus.VALIDATION_ERROR
    install("other", api="-and-others>=7")
    assert "states no range" in str(refused(allowing("other"), "other"))


def test_a_plugin_that_is_not_allowed_is_told_so_whatever_its_range(install) -> None:
    install("acme", api="<1")
    assert discover(PluginPolicy()).row("acme").status is PluginStatus.NOT_ALLOWED


def test_metadata_rules_a_plugin_out_before_it_is_imported(install) -> None:
    install("acme", "raise RuntimeError('imported')", requires=("vime>=7",))
    found = allowing("acme")
    assert found.row("acme").status is PluginStatus.API_MISMATCH
    error = str(refused(found, "acme"))
    assert "requires vime>=7, this is vime 0.1.0" in error
    assert "install the vime that it requires" in error
    install("fine", requires=("vime>=0.1,<0.2", 'vime>=7; extra == "later"', "not a requirement !"))
    assert allowing("fine").platform("fine").name == "fine"


def test_parent_that_is_missing_broken_or_not_allowed(install) -> None:
    install("orphan", parent="nobody", complete=False)
    install("broken", "1/0")
    install("child", parent="broken", complete=False)
    install("foreign")
    install("guest", parent="foreign", complete=False)
    found = allowing("orphan", "broken", "child", "guest")
    assert "needs nobody: no platform named 'nobody' is installed" in str(refused(found, "orphan"))
    assert "ZeroDivisionError" in str(refused(found, "child"))
    assert "foreign (distribution foreign-plugin 1.0) is not-allowed" in str(refused(found, "guest"))
    for name in ("orphan", "child", "guest"):
        assert found.row(name).status is PluginStatus.PARENT_MISSING
        assert found.row(name).error is not None
    assert found.row("broken").status is PluginStatus.IMPORT_ERROR


def test_a_parent_of_the_same_distribution_needs_no_naming(install) -> None:
    install("parent", distribution="acme-hardware")
    install("child", parent="parent", complete=False, distribution="acme-hardware")
    found = allowing("child")
    assert found.row("parent").status is PluginStatus.NOT_ALLOWED
    assert found.platform("child").lineage == ("child", "parent", "base")


def test_parent_cycles_are_refused(install) -> None:
    install("a", parent="b")
    install("b", parent="a")
    install("self", parent="self")
    found = allowing("a", "b", "self")
    assert "cycle: a -> b -> a" in str(refused(found, "a"))
    assert found.row("a").status is PluginStatus.VALIDATION_ERROR
    assert found.row("b").status is PluginStatus.VALIDATION_ERROR
    assert "cycle: self -> self" in str(refused(found, "self"))


def test_validation_errors(install) -> None:
    install("typo", "@hookimpl\ndef vime_inventry(ctx): return None")
    install("half", complete=False)
    install("alias", "VIME_PLUGIN = PluginInfo('another')")
    install("blank", "VIME_PLUGIN = None")
    install("rootless", parent="")
    found = allowing("typo", "half", "alias", "blank", "rootless")
    assert "did you mean vime_inventory?" in str(refused(found, "typo"))
    assert "implements vime_inventory, vime_capabilities" in str(refused(found, "half"))
    assert "VIME_PLUGIN says 'another'" in str(refused(found, "alias"))
    assert "has no VIME_PLUGIN" in str(refused(found, "blank"))
    assert "names no parent" in str(refused(found, "rootless"))
    for name in ("typo", "half", "alias", "blank", "rootless"):
        assert found.row(name).status is PluginStatus.VALIDATION_ERROR
    assert found.platform("cpu").name == "cpu"


def test_a_parent_too_small_for_a_platform_still_serves_its_child(install) -> None:
    install("shared", "@hookimpl\ndef vime_perf_model(): return PerfTable()", complete=False)
    install("acme", parent="shared")
    found = allowing("shared", "acme")
    found.check()
    assert found.row("shared").status is PluginStatus.VALIDATION_ERROR
    assert found.platform("acme").lineage == ("acme", "shared", "base")


def test_two_distributions_with_one_name_are_refused_by_both_names(install) -> None:
    install("acme", distribution="acme-one")
    install("acme", distribution="acme-two")
    found = allowing("acme")
    error = refused(found, "acme")
    assert found.row("acme").status is PluginStatus.VALIDATION_ERROR
    assert "acme-one and acme-two both provide" in str(error)


def test_nobody_takes_the_place_of_a_first_party_name_unseen(install) -> None:
    install("cpu", distribution="not-ours")
    assert "not-ours and vime both provide" in str(refused(discover(PluginPolicy()), "cpu"))


@pytest.mark.parametrize("name", ["auto", "base"])
def test_reserved_names_are_refused(install, name: str) -> None:
    install(name)
    assert "reserved" in str(refused(allowing(name), name))


def test_unknown_platform_lists_the_installed_and_the_nearest(install) -> None:
    install("gadget20")
    text = str(refused(discover(PluginPolicy()), "gadge20"))
    assert "no platform named 'gadge20' is installed" in text
    assert "did you mean gadget20?" in text
    assert {"cpu", "gadget20"} <= set(text.partition("installed: ")[2].split(", "))


def test_a_platform_of_ours_that_is_not_installed_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setattr("vime.platforms.discovery.first_party_distributions", lambda: frozenset({"vime", "vime-board7"}))
    assert "pip install 'vime[board7]'; installed: " in str(refused(discover(PluginPolicy()), "board7"))
    assert "did you mean board7?" in str(refused(discover(PluginPolicy()), "bord7"))


def test_two_of_ours_that_match_beat_the_host_and_are_both_listed(install) -> None:
    """The host matches every machine; it decides no tie and hides none."""
    for name in ("a", "b"):
        install(name, HIT.format(1))
    with pytest.raises(PluginError, match=r"a \(seen by a\); b \(seen by b\)") as caught:
        allowing("a", "b").detect()
    assert "cpu" not in caught.value.what


def test_check_brings_every_plugin_to_its_status(install) -> None:
    install("good")
    install("typo", "def vime_profiles(): return ()")
    install("gone", "import a_module_that_nobody_has")
    install("old", api="<0.1")
    install("denied")
    install("stranger", "raise RuntimeError('imported')")
    found = discover(PluginPolicy(allow=("good", "typo", "gone", "old"), deny=("denied",)))
    found.check()
    expected = {
        "cpu": "available",
        "denied": "denied",
        "gone": "import-error",
        "good": "available",
        "old": "api-mismatch",
        "stranger": "not-allowed",
        "typo": "validation-error",
    }
    assert {name: str(found.row(name).status) for name in expected} == expected
    findings = {check.id: check for check in found.findings()}
    assert findings["plugin.gone"].severity is Severity.WARNING
    assert findings["plugin.stranger"].severity is Severity.INFO
    assert "plugin.good" not in findings
    assert all(check.fix for check in findings.values())


def test_names_of_the_policy_that_are_not_installed_are_findings(install) -> None:
    install("gadget20")
    found = discover(PluginPolicy.read(allow=["gadge20"], deny=["nobody"], env={"VIME_PLUGINS": "no-one"}))
    unknown = [check for check in found.findings() if check.id == "plugin.unknown"]
    assert len(unknown) == 3
    assert "did you mean gadget20?" in unknown[0].fix


def test_the_most_specific_match_is_detected_and_the_host_is_the_last_resort(install) -> None:
    install("wide", HIT.format(10))
    install("narrow", HIT.format(20), parent="wide", complete=False)
    assert allowing("wide", "narrow").detect() == "narrow"
    assert discover(PluginPolicy()).detect() == "cpu"


def test_equal_matches_are_an_error_that_lists_both(install) -> None:
    install("a", HIT.format(10))
    install("b", HIT.format(10))
    with pytest.raises(PluginError) as caught:
        allowing("a", "b").detect()
    assert "a (seen by a); b (seen by b)" in str(caught.value)
    assert "--platform a or --platform b" in str(caught.value)
    assert allowing("a", "b").platform("b").name == "b"


def test_no_match_is_an_error_that_says_who_was_asked(install) -> None:
    install("silent", "@hookimpl\ndef vime_probe(ctx): return None")
    with pytest.raises(PluginError) as caught:
        discover(PluginPolicy(allow=("silent",), deny=("cpu",))).detect()
    assert "cpu is denied" in str(caught.value)
    assert "silent is available" in str(caught.value)
    assert "--platform NAME" in str(caught.value)


def test_a_crash_a_hang_and_an_exception_are_no_match_and_a_finding(install) -> None:
    install("aborts", "import os\n@hookimpl\ndef vime_probe(ctx):\n    os.abort()")
    install("hangs", "import time\n@hookimpl\ndef vime_probe(ctx):\n    time.sleep(60)")
    install("raises", "@hookimpl\ndef vime_probe(ctx):\n    raise OSError('bus error')")
    install("gone", "import a_module_that_nobody_has")
    found = allowing("aborts", "hangs", "raises", "gone")
    assert found.probe("hangs", timeout_s=0.5) == ()
    assert found.detect() == "cpu"
    rows = {row.name: row for row in found.status}
    assert {name: str(rows[name].status) for name in ("aborts", "hangs", "raises", "gone")} == {
        "aborts": "probe-crashed",
        "hangs": "probe-crashed",
        "raises": "probe-crashed",
        "gone": "import-error",
    }
    assert "SIGABRT" in rows["aborts"].reason
    assert "did not answer within 0.5 s" in rows["hangs"].reason
    assert "bus error" in rows["raises"].reason
    assert {check.id for check in found.findings()} >= {"plugin.aborts", "plugin.hangs", "plugin.raises", "plugin.gone"}
    assert found.platform("raises").name == "raises"


def test_the_resolved_plugins_are_imposed_on_other_processes(install) -> None:
    install("parent", distribution="acme-hardware")
    install("child", parent="parent", complete=False, distribution="acme-hardware")
    install("other")
    found = allowing("child", "other")
    found.platform("child")
    resolved = found.resolved()
    assert resolved == (ResolvedPlugin("child", "acme-hardware", "1.0"), ResolvedPlugin("parent", "acme-hardware", "1.0"))
    here = impose(pickle.loads(pickle.dumps(resolved)))
    assert here.platform("child").lineage == ("child", "parent", "base")
    assert "the driver of this run did not load it" in str(refused(here, "cpu"))
    refused(here, "other")


def test_imposing_refuses_another_version_distribution_or_absence(install, tmp_path) -> None:
    install("acme")
    impose([ResolvedPlugin("acme", "acme-plugin", "1.0")])
    with pytest.raises(PluginError, match=r"acme: acme-plugin 1\.0 here, acme-plugin 2\.0 on the driver"):
        impose([ResolvedPlugin("acme", "acme-plugin", "2.0")])
    with pytest.raises(PluginError, match=r"acme: acme-plugin 1\.0 here, fork 1.0 on the driver"):
        impose([ResolvedPlugin("acme", "fork", "1.0")])
    shutil.rmtree(tmp_path / "site")
    with pytest.raises(PluginError, match=r"acme: acme-plugin 1\.0 is not installed here"):
        impose([ResolvedPlugin("acme", "acme-plugin", "1.0")])


def test_imposing_ignores_the_processes_own_environment(install, monkeypatch) -> None:
    install("acme")
    monkeypatch.setenv("VIME_PLUGINS", "")
    assert impose([ResolvedPlugin("acme", "acme-plugin", "1.0")]).platform("acme").name == "acme"
