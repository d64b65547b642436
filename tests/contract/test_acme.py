"""A third-party plugin, built as a wheel and installed beside vime: when it loads, and what its neighbours can do to it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime.hooks.specs import RULES, hook_names
from vime.testing.tiny_models import make_tiny_qwen3

PROJECT = Path(__file__).parent / "acme_accelerator"
VIME = ("-m", "vime.cli.main")

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def table(acme_site: Path) -> dict[str, str]:
    """The environment of a machine with two devices."""
    return {"ACME_DEVICE_TABLE": str(acme_site / "acme_accelerator" / "testing" / "tables" / "a1x2.json")}


@pytest.fixture
def run_file(tmp_path: Path, acme_site: Path) -> Path:
    """A run on one device that both roles share."""
    make_tiny_qwen3(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\nmodel: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{path: {tmp_path / 'prompts.jsonl'}}}\nschedule: {{num_steps: 1}}\n"
        f"topology: {acme_site / 'acme_accelerator' / 'topologies' / 'acme-colocate.yaml'}\n"
    )
    return path


def strangers(watch: Any) -> set[str]:
    """Modules of the plugin that a watched process imported."""
    seen = watch.imported()
    assert "vime.platforms.discovery" in seen
    return {name for name in seen if name.startswith("acme")}


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["plugins"]}


def distribution(folder: Path, name: str, source: str, *, owner: str | None = None, version: str = "1.0") -> Path:
    """A distribution that provides a plugin from one module."""
    owner = owner or f"{name}-hardware"
    module = owner.replace("-", "_")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    written_for = "Keywords: vime-hooks>=1.0,<2\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: {version}\n{written_for}")
    (info / "entry_points.txt").write_text(f"[vime.plugins]\n{name} = {module}\n")
    (folder / f"{module}.py").write_text(source)
    return folder


# ---- when it loads


def test_unnamed_it_is_listed_as_not_allowed_and_no_process_imports_it(
    python: Python, acme_site: Path, table: dict[str, str], watch: Any
) -> None:
    row = rows(python(*VIME, "plugins", "list", "--json", site=(watch.site, acme_site), env=table))["acme"]
    assert (row["status"], row["distribution"], row["version"]) == ("not-allowed", "acme-accelerator", "1.0.0")
    assert not row["first_party"]
    assert strangers(watch) == set()


def test_a_topology_that_names_it_does_not_allow_it(
    python: Python, acme_site: Path, table: dict[str, str], run_file: Path, watch: Any
) -> None:
    done = python(*VIME, "plan", str(run_file), site=(watch.site, acme_site), env=table)
    assert done.returncode == 1
    assert "acme (distribution acme-accelerator 1.0.0) is not-allowed" in done.stderr
    assert strangers(watch) == set()


def test_named_by_the_environment_it_is_chosen_for_its_machine(python: Python, acme_site: Path, table: dict[str, str]) -> None:
    done = python(*VIME, "plugins", "list", "--json", site=acme_site, env={**table, "VIME_PLUGINS": "acme"})
    row = rows(done)["acme"]
    assert (row["status"], row["parent"]) == ("active", "base")
    assert row["hooks"] == sorted(hook_names())
    assert json.loads(done.stdout)["auto"] == "acme"


def test_on_another_machine_it_is_only_available(python: Python, acme_site: Path) -> None:
    done = python(*VIME, "plugins", "list", "--json", site=acme_site, env={"VIME_PLUGINS": "acme"})
    assert rows(done)["acme"]["status"] == "available"
    assert json.loads(done.stdout)["auto"] == "cpu"


@pytest.mark.parametrize("words", [["--platform", "acme"], ["plugins.allow=[acme]"]], ids=["platform", "allow"])
def test_named_by_a_flag_or_by_the_run_file_it_plans(
    python: Python, acme_site: Path, table: dict[str, str], run_file: Path, words: list[str]
) -> None:
    done = python(*VIME, "plan", str(run_file), *words, "--json", site=acme_site, env=table)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["topology"] == "acme-colocate"
    assert '"acme_link"' in done.stdout


def test_a_plan_asks_every_hook_that_a_run_asks(python: Python, acme_site: Path, table: dict[str, str], run_file: Path) -> None:
    words = ["plugins", "trace", "--json", "--", "plan", str(run_file), "--platform", "acme"]
    done = python(*VIME, *words, site=acme_site, env=table)
    assert done.returncode == 0, done.stderr
    traced = json.loads(done.stdout)
    assert traced["runtime_hooks_not_asked"] == []
    asked = {row["hook"]: row for row in traced["hooks"]}
    assert asked["vime_transports"]["plugins"] == ["acme", "base"]
    assert asked["vime_capabilities"]["plugins"] == ["acme"]
    assert all(row["platform"] == "acme" and row["failed"] == 0 for row in asked.values())


# ---- neighbours

RAISES = "raise OSError('libbroken.so.7: cannot open shared object file')\n"
HEAD = "from vime.facts.diagnosis import Match\nfrom vime.hooks import PluginInfo, hookimpl\n"


def test_a_plugin_that_raises_on_import_is_listed_with_its_exception_and_hurts_nobody(
    python: Python, acme_site: Path, table: dict[str, str], run_file: Path, tmp_path: Path
) -> None:
    site = (acme_site, distribution(tmp_path / "site", "broken", RAISES))
    env = {**table, "VIME_PLUGINS": "acme,broken"}
    listed = rows(python(*VIME, "plugins", "list", "--json", site=site, env=env))
    assert (listed["broken"]["status"], listed["acme"]["status"]) == ("import-error", "active")
    assert "broken_hardware.py" in listed["broken"]["error"]
    assert "OSError: libbroken.so.7: cannot open shared object file" in listed["broken"]["error"]
    assert python(*VIME, "plan", str(run_file), site=site, env=env).returncode == 0


def test_asking_for_a_broken_platform_fails_with_its_exception_and_nothing_takes_its_place(
    python: Python, run_file: Path, tmp_path: Path
) -> None:
    site = distribution(tmp_path / "site", "broken", RAISES)
    anywhere = tmp_path / "anywhere.yaml"
    anywhere.write_text("pools: {any: {platform: auto}}\nroles: {actor: {kind: train}, rollout: {kind: rollout}}\n")
    done = python(*VIME, "run", "--platform", "broken", "--topology", str(anywhere), str(run_file), site=site)
    assert done.returncode == 1
    assert "plugin broken (distribution broken-hardware 1.0) is import-error" in done.stderr
    assert "OSError: libbroken.so.7: cannot open shared object file" in done.stderr
    assert not (tmp_path / "run").exists()


def test_two_distributions_of_one_name_are_refused_and_neither_is_imported(
    python: Python, acme_site: Path, table: dict[str, str], run_file: Path, tmp_path: Path, watch: Any
) -> None:
    site = (watch.site, distribution(tmp_path / "site", "acme", RAISES, owner="acme-twin"), acme_site)
    done = python(*VIME, "plan", "--platform", "acme", str(run_file), site=site, env=table)
    assert done.returncode == 1
    assert "acme-accelerator and acme-twin both provide a plugin named 'acme'; uninstall one of them" in done.stderr
    assert strangers(watch) == set()


PROBES = """
import json
from vime.platforms.discovery import PluginPolicy, discover
found = discover(PluginPolicy(allow=("acme", "aborts", "hangs")))
matches = found.probe("acme", "aborts", "hangs", timeout_s=6.0)
rows = {row.name: [str(row.status), row.reason] for row in found.status}
print(json.dumps([[match.platform for match in matches], rows]))
"""


def test_probes_that_abort_or_hang_cost_their_neighbour_nothing(
    python: Python, acme_site: Path, table: dict[str, str], tmp_path: Path
) -> None:
    body = "{head}import os, time\nVIME_PLUGIN = PluginInfo({name!r})\n@hookimpl\ndef vime_probe(ctx):\n    {do}\n"
    for name, do in (("aborts", "os.abort()"), ("hangs", "time.sleep(600)")):
        distribution(tmp_path / "site", name, body.format(head=HEAD, name=name, do=do))
    done = python("-c", PROBES, site=(acme_site, tmp_path / "site"), env=table)
    assert done.returncode == 0, done.stderr
    matches, statuses = json.loads(done.stdout)
    assert matches == ["acme"]
    assert statuses["acme"][0] == "available"
    assert statuses["aborts"][0] == statuses["hangs"][0] == "probe-crashed"
    assert "SIGABRT" in statuses["aborts"][1]
    assert "did not answer within 6 s" in statuses["hangs"][1]


# ---- in the other processes of a run

DRIVER = """
import pickle, sys
from vime.platforms.discovery import PluginPolicy, discover
found = discover(PluginPolicy.read(platform="acme"))
found.platform("acme")
sys.stdout.write(pickle.dumps(found.resolved()).hex())
"""
WORKER = """
import pickle, sys
from vime.platforms.discovery import impose
print(impose(pickle.loads(bytes.fromhex(sys.argv[1]))).platform("acme").lineage)
"""


def test_a_worker_with_another_version_refuses_to_start(python: Python, acme_site: Path, tmp_path: Path, watch: Any) -> None:
    resolved = python("-c", DRIVER, site=acme_site).stdout
    same = python("-c", WORKER, resolved, site=acme_site)
    assert same.stdout.strip() == "('acme', 'base')", same.stderr
    other = tmp_path / "worker"
    shutil.copytree(acme_site, other)
    info = (other / "acme_accelerator-1.0.0.dist-info").rename(other / "acme_accelerator-1.0.1.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0.0", "Version: 1.0.1"))
    refused = python("-c", WORKER, resolved, site=(watch.site, other))
    assert refused.returncode == 1
    assert "acme: acme-accelerator 1.0.1 here, acme-accelerator 1.0.0 on the driver" in refused.stderr
    assert strangers(watch) == set()


BOTH = """
import pickle, sys
from vime.platforms.discovery import PluginPolicy, discover
found = discover(PluginPolicy.read(platform="cpu", allow=("acme",)))
for name in ("acme", "cpu"):
    found.platform(name)
sys.stdout.write(pickle.dumps(found.resolved()).hex())
"""
PROCESSES = """
import pickle, sys
from typing import Any
from vime.cluster.engine_process import EngineProcess
from vime.cluster.trainer_process import TrainerProcess
from vime.errors import PluginError
nothing: Any = None
plugins = pickle.loads(bytes.fromhex(sys.argv[1]))
for start in (
    lambda: TrainerProcess(nothing, plugins),
    lambda: EngineProcess(nothing, plugins, start_timeout_s=1.0, segments=""),
):
    try:
        start()
    except PluginError as error:
        print([plugin.name for plugin in plugins], error.what)
"""


def test_in_a_run_of_two_platforms_every_process_compares_both_plugins(python: Python, acme_site: Path, tmp_path: Path) -> None:
    """A trainer on the host refuses another version of the plugin that only the engines use."""
    resolved = python("-c", BOTH, site=acme_site).stdout
    other = tmp_path / "worker"
    shutil.copytree(acme_site, other)
    info = other / "acme_accelerator-1.0.0.dist-info"
    metadata = info.rename(other / "acme_accelerator-1.0.1.dist-info") / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0.0", "Version: 1.0.1"))
    done = python("-c", PROCESSES, resolved, site=other)
    told = [line for line in done.stdout.splitlines() if "acme-accelerator 1.0.1 here, acme-accelerator 1.0.0" in line]
    assert len(told) == 2, done.stdout + done.stderr
    assert all("'acme'" in line and "'cpu'" in line for line in told)


# ---- what its makers ship


def test_recordings_of_its_machine_replay_without_it(
    python: Python, acme_site: Path, table: dict[str, str], tmp_path: Path
) -> None:
    path = str(tmp_path / "machine.json")
    recorded = python(*VIME, "doctor", "--platform", "acme", "--record", path, site=acme_site, env=table)
    assert recorded.returncode == 0, recorded.stdout
    assert "driver 3.1.4" in recorded.stdout
    replayed = python(*VIME, "doctor", "--platform", "acme", "--inventory", path, site=acme_site)
    assert replayed.returncode == 0, replayed.stdout
    assert "2 devices, all in order" in replayed.stdout


def test_its_own_tests_pass_where_it_is_installed(python: Python, acme_site: Path) -> None:
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(PROJECT / "tests"), site=acme_site)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1] or "--device" in done.stdout


def test_every_hook_of_the_specification_is_answered_by_it(python: Python, acme_site: Path) -> None:
    done = python(*VIME, "plugins", "show", "acme", "--json", site=acme_site, env={"VIME_PLUGINS": "acme"})
    assert json.loads(done.stdout)["hooks"] == sorted(RULES)
