"""The conformance kit passes a correct platform and catches every planted fault, each by the checks that are meant to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from vime.hooks.specs import hook_names
from vime.testing.conformance import NotRun, Status, check, every_check, run_check, run_checks
from vime.testing.conformance.document import render
from vime.testing.conformance.questions import unasked
from vime.testing.conformance.registry import Check

PLANTED = Path(__file__).resolve().parent / "planted"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PLANTED))
from faults import FAULTS, Fault, planted, subject, written  # noqa: E402

sys.path.remove(str(PLANTED))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Factories of the sound platform are looked up by name; faults may add folders of their own."""
    monkeypatch.syspath_prepend(str(PLANTED))
    path, environment = list(sys.path), dict(os.environ)
    yield
    sys.path[:] = path
    for name in set(os.environ) - set(environment):
        del os.environ[name]


def failed(made: Any) -> dict[str, str]:
    return {outcome.id: outcome.what for outcome in run_checks(made) if outcome.status is Status.FAILED}


def test_a_correct_platform_passes_every_check(tmp_path: Path) -> None:
    made = subject(tmp_path)
    written("", "sound_written")(made)
    outcomes = run_checks(made)
    assert [(o.id, o.status, o.what) for o in outcomes if o.status is not Status.PASSED] == []
    assert len(outcomes) == len(every_check())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_planted_fault_is_caught_by_its_checks_and_no_others(fault: Fault, tmp_path: Path) -> None:
    found = failed(planted(fault, tmp_path))
    assert tuple(sorted(found)) == tuple(sorted(fault.caught_by)), found


def test_every_check_catches_a_fault_that_no_other_check_catches() -> None:
    alone = {fault.caught_by[0] for fault in FAULTS if len(fault.caught_by) == 1}
    assert {one.id for one in every_check()} - alone == set()


def test_every_hook_has_a_check_of_its_own_and_is_asked() -> None:
    covered = {hook for one in every_check() for hook in one.hooks}
    assert covered == set(hook_names())
    assert unasked() == ()


def test_the_page_lists_the_checks_as_they_are() -> None:
    assert (ROOT / "docs" / "conformance.md").read_text() == render()


def test_ids_are_given_once() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        check("C01", title="another")(lambda subject: None)


@pytest.mark.parametrize(
    ("raised", "status", "what"),
    [
        (NotRun("no torch"), Status.NOT_RUN, "no torch"),
        (KeyError("devices"), Status.FAILED, "KeyError: 'devices'"),
        (SystemExit(3), Status.FAILED, "SystemExit: 3"),
    ],
)
def test_whatever_a_check_meets_becomes_its_outcome(tmp_path: Path, raised: BaseException, status: Status, what: str) -> None:
    def run(_: Any) -> None:
        raise raised

    outcome = run_check(Check("X01", "odd", "", (), run), subject(tmp_path))
    assert (outcome.status, outcome.what) == (status, what)


def test_only_the_named_checks_run(tmp_path: Path) -> None:
    assert [o.id for o in run_checks(subject(tmp_path), only=["C17", "C15"])] == ["C15", "C17"]
    with pytest.raises(ValueError, match="C99"):
        run_checks(subject(tmp_path), only=["C99"])


# ---- pytest and the command


def test_the_kit_needs_neither_pytest_nor_torch_to_load() -> None:
    code = (
        "import sys, vime.testing.conformance as kit; kit.every_check();"
        "print(sorted({'pytest', '_pytest', 'torch', 'ray', 'vllm', 'megatron'} & set(sys.modules)))"
    )
    assert command("-c", code).stdout.strip() == "[]"


def pytest_command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """pytest with the kit's plugin, which its entry point brings where the installed metadata has it."""
    known = {point.value for point in entry_points(group="pytest11")}
    plugin = () if "vime.testing.pytest_plugin" in known else ("-p", "vime.testing.pytest_plugin")
    return command("-m", "pytest", *plugin, "-p", "no:cacheprovider", *words, cwd=cwd)


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = [str(PLANTED), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run([sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=120)


SUITE = """
from faults import MACHINES
from vime.testing.conformance import PlatformConformance

class TestSound(PlatformConformance):
    platform = "sound_platform"
    machines = MACHINES

class TestAbsent(PlatformConformance):
    platform = "nowhere"
"""


def test_one_test_a_check_with_ids_reasons_and_a_summary_per_platform(tmp_path: Path) -> None:
    (tmp_path / "test_sound.py").write_text(SUITE)
    done = pytest_command("-v", "test_sound.py", "-k", "C13 or C15 or C27", cwd=tmp_path)
    assert "TestSound::test_contract[C13-unreadable-machines-are-refused-with-a-fix] PASSED" in done.stdout
    assert "conformance sound_platform: 3 passed, 0 failed, 0 not run" in done.stdout
    assert "conformance nowhere: 0 passed, 3 failed, 0 not run" in done.stdout
    assert "platform 'nowhere' does not load: no platform named 'nowhere' is installed" in done.stdout


def test_an_installed_platform_is_checked_without_a_test_file(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("raise AssertionError('collected')\n")
    done = pytest_command("-rs", "--vime-platform", "cpu", "-k", "C11 or C17", cwd=tmp_path)
    assert "C11 not run: no foreign machine was given" in done.stdout
    assert "conformance cpu: 1 passed, 0 failed, 1 not run" in done.stdout
    assert done.returncode == 0


def test_validate_fails_with_the_reason_and_the_fix(tmp_path: Path) -> None:
    source = (PLANTED / "sound_platform.py").read_text()
    (tmp_path / "broken_platform.py").write_text(source.replace('"sound-16g", "sound", 16 * GIB', '"sound-16g", "sound", 0'))
    done = command("-m", "vime.cli.main", "plugins", "validate", "broken_platform", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    checks = {one["id"]: one for one in answer["checks"]}
    assert (done.returncode, answer["platform"], answer["counts"]["failed"]) == (1, "sound", 1)
    assert checks["C15"]["status"] == "failed"
    assert checks["C15"]["what"] == "profile 'sound-16g' has a size of 0 or less"
    assert checks["C15"]["fix"] == "give memory_bytes, node_memory_bytes and numa_nodes"
    assert checks["C11"]["status"] == "passed"


def test_validate_looks_at_recordings(tmp_path: Path) -> None:
    recording = {"platform": "sound", "origin": "synthetic", "date": "2026-01-31", "data": {"devices": 3, "driver": "2.0"}}
    (tmp_path / "three.json").write_text(json.dumps(recording))
    words = ("-m", "vime.cli.main", "plugins", "validate", "sound_platform", "--machine", "three.json")
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "C12  passed   inventory lists the devices" in done.stdout
    assert "C10  not run  probe knows its machines" in done.stdout
    (tmp_path / "three.json").write_text(json.dumps({**recording, "data": {"devices": 3}}))
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "C12  failed   inventory lists the devices: vime_inventory raises on three.json: KeyError: 'driver'" in done.stdout


def test_validate_of_a_plugin_that_is_not_there_says_so() -> None:
    done = command("-m", "vime.cli.main", "plugins", "validate", "sonud_platform")
    assert done.returncode == 1
    assert "no platform named 'sonud_platform' is installed" in done.stderr
