from __future__ import annotations

import json

from vime.hooks.api import API_TEXT
from vime.hooks.specs import hook_names


def test_list_shows_every_entry_point_with_its_status(vime, broken_plugin) -> None:
    done = vime("plugins", "list")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "STATUS", "DISTRIBUTION", "VERSION", "PARENT", "WHY"]
    rows = {line.split()[0]: line.split() for line in lines[1:] if line}
    assert " ".join(rows["cpu"]).startswith("cpu active vime 0.1.0 base every machine has a host")
    assert " ".join(rows["cuda"]).endswith("its probe does not find its hardware on this machine")
    assert rows["gadget"][:4] == ["gadget", "not-allowed", "gadget-hardware", "2.5"]
    assert "--platform auto: cpu" in done.stdout


def test_list_as_json_keeps_the_original_error(vime, broken_plugin) -> None:
    done = vime("plugins", "list", "--json", env={"VIME_PLUGINS": broken_plugin})
    data = json.loads(done.stdout)
    assert (data["api"], data["auto"]) == (API_TEXT, "cpu")
    rows = {row["name"]: row for row in data["plugins"]}
    assert rows["cpu"]["hooks"] == sorted(hook_names())
    assert (rows["cpu"]["status"], rows["cpu"]["first_party"], rows["cpu"]["error"]) == ("active", True, None)
    assert rows["gadget"]["status"] == "import-error"
    assert "No module named 'a_module_that_nobody_has'" in rows["gadget"]["error"]
    assert "gadget_hardware.py" in rows["gadget"]["error"]


def test_list_all_adds_hooks_and_errors_and_unknown_names(vime, broken_plugin) -> None:
    done = vime("plugins", "list", "--all", env={"VIME_PLUGINS": "gadget,gadgett"})
    assert "vime_transports" in done.stdout
    assert "original error:" in done.stdout
    assert "'gadgett' is named in the policy but not installed" in done.stdout
    assert "did you mean gadget?" in done.stdout


def test_show_tells_hooks_parent_and_api(vime) -> None:
    done = vime("plugins", "show", "cpu")
    assert done.returncode == 0
    for text in (
        "cpu: available",
        "vime 0.1.0 (first-party)",
        "parent        base",
        f"hook API      {API_TEXT} (this is {API_TEXT})",
    ):
        assert text in done.stdout
    for hook in hook_names():
        assert hook in done.stdout


def test_show_tells_why_a_plugin_is_not_active_and_does_not_import_a_stranger(vime, broken_plugin) -> None:
    stranger = vime("plugins", "show", "gadget")
    assert "gadget: not-allowed" in stranger.stdout
    assert "a_module_that_nobody_has" not in stranger.stdout
    named = json.loads(vime("plugins", "show", "gadget", "--json", env={"VIME_PLUGINS": "gadget"}).stdout)
    assert named["status"] == "import-error"
    assert "ModuleNotFoundError" in named["error"]


def test_show_of_an_unknown_name_lists_the_installed(vime, broken_plugin) -> None:
    done = vime("plugins", "show", "gadgett")
    assert done.returncode == 1
    assert "did you mean gadget? installed: " in done.stderr


def test_flags_are_not_abbreviated(vime) -> None:
    assert vime("plugins", "list", "--js").returncode == 2
