"""A node read through the fake tool: probing, inventory, recordings, and what is derived from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vime.errors import PluginError
from vime.facts.diagnosis import DoctorContext, ProbeContext, Severity
from vime.facts.inventory import NodeInventory, Tri
from vime_ascend import doctor, inventory, probe, process, stack
from vime_ascend.testing.fake_npu_smi import installed, load_profile, profile_names


@pytest.fixture(scope="module")
def node() -> Callable[[str], NodeInventory]:
    """Inventories by profile, each read once through the tool."""
    known: dict[str, NodeInventory] = {}

    def read(profile: str) -> NodeInventory:
        if profile not in known:
            with installed(profile) as env:
                known[profile] = inventory.of(ProbeContext(env))
        return known[profile]

    return read


def test_a2_server(node: Callable[[str], NodeInventory]) -> None:
    found = node("atlas-a2x8")
    assert (found.platform, found.hostname, found.arch, found.driver) == ("ascend", "atlas-a2-0", "aarch64", "25.5.1")
    assert [d.index for d in found.devices] == list(range(8))
    assert {(d.name, d.arch, d.memory_bytes, d.health) for d in found.devices} == {
        ("Ascend 910B3", "ascend910b", 64 * 2**30, "ok")
    }
    assert [d.numa_node for d in found.devices] == [6, 6, 4, 4, 0, 0, 2, 2]
    assert found.devices[0].pci_bus == "0000:C1:00.0"
    assert {link.kind for link in found.links} == {"HCCS"}
    assert len(found.links) == 8 * 7
    assert found.fabric is None
    assert found.software["engine"]["cann"] == "8.5.0"
    assert "cann" not in found.software["router"]
    assert found.vendor["firmware"] == "7.8.0.5.216"
    assert found.vendor["vllm_ascend_build"] == "A2"


def test_a3_server_has_sixteen_dies_in_eight_packages(node: Callable[[str], NodeInventory]) -> None:
    found = node("atlas-a3x16")
    assert len(found.devices) == 16
    assert {d.arch for d in found.devices} == {"ascend910c"}
    assert {d.numa_node for d in found.devices} == {None}
    assert found.vendor["packages"] == [card for card in range(8) for _ in range(2)]
    kinds = {(link.source, link.target): link.kind for link in found.links}
    assert kinds[0, 1] == "SIO"
    assert kinds[1, 2] == "HCCS_SW"
    assert found.fabric is not None
    assert (found.fabric.id, found.fabric.usable) == ("super-pod-0", Tri.UNKNOWN)
    assert process.binding(found).labels == {"ray.io/accelerator-type": "ascend910c", "vime/super-pod": "0"}


def test_a_sick_chip_is_listed_with_the_reason_and_refused_questions_cost_only_their_answer(
    node: Callable[[str], NodeInventory],
) -> None:
    found = node("atlas-a2-sick")
    assert [d.health for d in found.devices] == ["ok"] * 3 + ["npu-smi says Alarm"] + ["ok"] * 4
    assert found.links == ()
    assert {d.numa_node for d in found.devices} == {None}
    assert found.driver == "24.1.rc3.7"
    assert set(found.vendor["problems"]) == {"topo", "board"}


def test_a_translated_tool_gives_the_same_devices(node: Callable[[str], NodeInventory]) -> None:
    plain, translated = node("atlas-a2x8"), node("atlas-a2-zh")
    assert [(d.name, d.health, d.numa_node, d.memory_bytes) for d in translated.devices] == [
        (d.name, d.health, d.numa_node, d.memory_bytes) for d in plain.devices
    ]
    assert translated.driver == plain.driver
    assert translated.vendor["firmware"] == plain.vendor["firmware"]


def test_chips_of_another_generation_are_listed_but_no_role_may_use_them(node: Callable[[str], NodeInventory]) -> None:
    found = node("ascend-910x8")
    assert {d.arch for d in found.devices} == {None}
    assert all("neither Atlas A2 (910B) nor Atlas A3 (910C)" in d.health for d in found.devices)


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ("atlas-a2x8", "npu-smi lists 8 chips, the first a 910B3"),
        ("atlas-a3x16", "npu-smi lists 16 chips, the first a Ascend910"),
        ("npu-smi-missing", None),
        ("npu-smi-broken", None),
        ("ascend-910x8", None),
    ],
)
def test_the_probe_says_yes_to_its_own_chips_only(profile: str, reason: str | None) -> None:
    with installed(profile) as env:
        match = probe.matched(ProbeContext(env))
    assert (match.reason if match else None) == reason


@pytest.mark.parametrize(
    ("profile", "what"),
    [
        ("npu-smi-missing", "npu-smi is not on PATH"),
        ("npu-smi-broken", "ended with code 1 and said: dcmi module initialize failed. ret is -8005"),
    ],
)
def test_an_unreadable_node_names_the_next_step(profile: str, what: str) -> None:
    with installed(profile) as env, pytest.raises(PluginError) as caught:
        inventory.of(ProbeContext(env))
    assert what in caught.value.what
    assert caught.value.fix


def test_a_hung_tool_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.2)
    with pytest.raises(PluginError, match=r"`npu-smi info` did not answer within 0.2 s"):
        probe.run({"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}, "info")


def test_the_tool_is_asked_for_untranslated_output(tmp_path: Path) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text('#!/bin/sh\necho "$LC_ALL $LANG $LC_MESSAGES $KEPT $*"\n')
    tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}", "LC_ALL": "zh_CN.UTF-8", "KEPT": "yes"}
    assert probe.run(env, "info", "-m") == "C C C yes info -m\n"


@pytest.mark.parametrize("profile", ["atlas-a2x8", "atlas-a3x16", "atlas-a2-zh", "atlas-a2-sick"])
def test_a_recording_replays_to_the_same_node(profile: str) -> None:
    with installed(profile) as env:
        recorded = inventory.fixture(ProbeContext(env))
        here = inventory.of(ProbeContext(env))
    data = json.loads(json.dumps(recorded.data))
    assert inventory.of(ProbeContext({}, data)) == here
    assert inventory.fixture(ProbeContext({}, data)).data == data
    assert (recorded.platform, recorded.origin) == ("ascend", "recorded")


@pytest.mark.parametrize("broken", [{}, {"host": {}, "npu_smi": {}}, {"host": None, "npu_smi": {"info": "", "map": ""}}])
def test_a_foreign_recording_is_refused(broken: Mapping[str, Any]) -> None:
    with pytest.raises(PluginError, match="not one of the ascend platform"):
        inventory.from_facts(broken)


def test_lists_of_chips_that_do_not_go_together_are_refused() -> None:
    with installed("atlas-a2x8") as env:
        facts = probe.read(env)
    lines = facts["npu_smi"]["map"].splitlines(keepends=True)
    facts["npu_smi"]["map"] = "".join(line for line in lines if not line.startswith("\t7 "))
    with pytest.raises(PluginError, match="table has 8 chips and its mapping 7"):
        inventory.from_facts(facts)
    facts["npu_smi"]["info"] = ""
    with pytest.raises(PluginError, match="lists no chips"):
        inventory.from_facts(facts)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__device_type__ = 'A2'", "A2"),
        ("__device_type__ = AscendDeviceType.A3.name", "A3"),
        ("__device_type__ = '_310P'\n", "310P"),
        ("__soc_version__ = 'ascend910_9391'\n__sleep_mode_enabled__ = True", "A3"),
        ('__soc_version__ = "ASCEND910B1"', "A2"),
        ("nothing", None),
    ],
)
def test_the_chips_that_vllm_ascend_was_built_for(text: str, build: str | None) -> None:
    assert stack.build_from(text) == build


def test_reading_a_node_imports_neither_torch_nor_the_vendors_packages() -> None:
    code = (
        "import sys\n"
        "from vime.facts.diagnosis import ProbeContext\n"
        "from vime_ascend import inventory\n"
        "from vime_ascend.testing.fake_npu_smi import installed\n"
        "with installed('atlas-a2x8') as env:\n"
        "    assert len(inventory.of(ProbeContext(env)).devices) == 8\n"
        "print(sorted({'torch', 'torch_npu', 'acl', 'vllm', 'vllm_ascend', 'mindspeed', 'megatron'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# ---- the fake


@pytest.mark.parametrize("line", ["info -t nonsense -i 0", "info -t board -i 8", "info -x", "set", ""])
def test_the_fake_fails_for_what_it_does_not_know(line: str) -> None:
    with installed("atlas-a2x8") as env:
        done = subprocess.run(["npu-smi", *line.split()], check=False, env=dict(env), capture_output=True, text=True)
    assert done.returncode == 255
    assert done.stdout.startswith("Error parameter of ")


def test_the_fake_leaves_the_process_as_it_was() -> None:
    before, path = dict(os.environ), list(sys.path)
    facts = probe.host_facts
    with installed("atlas-a3x16"):
        assert probe.host_facts is not facts
    assert (dict(os.environ), sys.path, probe.host_facts) == (before, path, facts)


@pytest.mark.parametrize("name", profile_names())
def test_profiles_say_where_they_come_from(name: str) -> None:
    profile = load_profile(name)
    assert profile["origin"] in ("synthetic", "recorded")
    assert all(profile[key] for key in ("machine", "date", "note", "driver"))


# ---- doctor


def findings(found: NodeInventory, env: Mapping[str, str] | None = None) -> dict[str, Severity]:
    checks = list(doctor.checks(DoctorContext(found, env or {})))
    assert len({check.id for check in checks}) == len(checks)
    assert all(check.id.startswith("ascend.") and (check.fix or check.severity is Severity.OK) for check in checks)
    return {check.id.removeprefix("ascend."): check.severity for check in checks if check.severity is not Severity.OK}


def test_a_good_node_has_no_finding(node: Callable[[str], NodeInventory]) -> None:
    assert findings(node("atlas-a2x8")) == {}
    assert findings(node("atlas-a3x16"), {"ASCEND_RT_VISIBLE_DEVICES": "14,15", "HCCL_CONNECT_TIMEOUT": "1800"}) == {}


def test_what_is_wrong_with_the_sick_node(node: Callable[[str], NodeInventory]) -> None:
    assert findings(node("atlas-a2-sick")) == {
        "chips": Severity.ERROR,
        "torch-pair": Severity.ERROR,
        "vllm-build": Severity.ERROR,
        "driver": Severity.ERROR,
        "cann": Severity.WARNING,
        "tool": Severity.WARNING,
    }


def test_a_translated_tool_is_told(node: Callable[[str], NodeInventory]) -> None:
    assert findings(node("atlas-a2-zh")) == {"language": Severity.INFO}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}, {"allocator": Severity.INFO}),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}, {}),
        ({"VLLM_ASCEND_ENABLE_NZ": "1"}, {"layout": Severity.ERROR}),
        ({"ASCEND_RT_VISIBLE_DEVICES": "6,7,8"}, {"mask": Severity.ERROR}),
        ({"ASCEND_RT_VISIBLE_DEVICES": "NoDevFiles"}, {"mask": Severity.ERROR}),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, {"mask": Severity.ERROR}),
        ({"HCCL_BUFFSIZE": "8096"}, {"buffers": Severity.WARNING}),
        ({"HCCL_BUFFSIZE": "large"}, {"buffers": Severity.ERROR}),
        ({"HCCL_CONNECT_TIMEOUT": "60"}, {"connect-timeout": Severity.ERROR}),
        ({"LD_PRELOAD": "/opt/torch_memory_saver_hook_mode_preload.abi3.so"}, {"preload": Severity.WARNING}),
    ],
)
def test_what_the_environment_says(
    node: Callable[[str], NodeInventory], env: Mapping[str, str], expected: Mapping[str, Severity]
) -> None:
    assert findings(node("atlas-a2x8"), env) == expected


def test_the_buffers_arithmetic_is_shown(node: Callable[[str], NodeInventory]) -> None:
    checks = doctor.checks(DoctorContext(node("atlas-a2x8"), {"HCCL_BUFFSIZE": "400"}))
    told = next(check.finding for check in checks if check.id == "ascend.buffers")
    assert "10 communicators x 2 x 400 MiB = 8000 MiB of 65536 MiB a chip" in told
