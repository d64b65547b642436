from __future__ import annotations

import json
from pathlib import Path

import pytest


def recording(tmp_path: Path, **changes: object) -> Path:
    facts = {
        "hostname": "elsewhere",
        "arch": "x86_64",
        "cpus": [0, 1],
        "memory_bytes": 2**34,
        "numa": [],
        "software": {
            "trainer": {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "safetensors": "0.8.0", "ray": "2.60.0"},
            "engine": {"vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "ray": "2.60.0"},
            "router": {"vllm-router": "0.1.17"},
        },
    }
    path = tmp_path / "recording.json"
    path.write_text(json.dumps({"platform": "cpu", "origin": "synthetic", "date": "2026-11-29", "data": facts | changes}))
    return path


def test_a_good_machine_ends_with_zero(vime, tmp_path) -> None:
    done = vime("doctor", "--inventory", str(recording(tmp_path)))
    assert done.returncode == 0
    assert done.stdout.startswith("platform: cpu\n")
    assert done.stdout.endswith("0 errors, 0 warnings\n")


def test_an_error_ends_with_one_and_comes_first_with_its_fix(vime, tmp_path) -> None:
    software = {"engine": {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}}
    done = vime("doctor", "--inventory", str(recording(tmp_path, software=software)))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1].endswith("recording.json (synthetic 2026-11-29, platform cpu)")
    assert lines[2].startswith("ERROR   cpu.media: torchvision 0.28.0 beside torch 2.13.0+cpu")
    assert lines[3].strip().startswith("fix: ")
    assert "pip uninstall -y torchvision" in lines[3]
    assert "WARNING cpu.trainer" in done.stdout


def test_the_platform_of_this_machine_is_found_and_recorded(vime, tmp_path) -> None:
    path = tmp_path / "here.json"
    done = vime("doctor", "--record", str(path), "--json")
    data = json.loads(done.stdout)
    assert data["platform"] == "cpu"
    assert all(check["fix"] for check in data["checks"] if check["severity"] != "ok")
    recorded = json.loads(path.read_text())
    assert (recorded["platform"], recorded["origin"]) == ("cpu", "recorded")
    again = json.loads(vime("doctor", "--inventory", str(path), "--json").stdout)
    ids = {check["id"] for check in data["checks"]} - {"cpu.env"}
    assert {check["id"] for check in again["checks"]} == ids


def test_an_unknown_platform_is_an_error_finding(vime, broken_plugin) -> None:
    done = vime("doctor", "--platform", "gadgett", "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["platform"] is None
    assert data["checks"][0]["severity"] == "error"
    assert "did you mean gadget?" in data["checks"][0]["fix"]


def test_a_broken_platform_is_an_error_and_never_another_one(vime, broken_plugin) -> None:
    done = vime("doctor", "--platform", "gadget")
    assert done.returncode == 1
    assert "platform: none" in done.stdout
    assert "ModuleNotFoundError" in done.stdout


@pytest.mark.parametrize("text", ["", "[]", '{"platform": "cpu"}'])
def test_what_is_no_recording_is_refused(vime, tmp_path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    done = vime("doctor", "--inventory", str(path))
    assert done.returncode == 1
    assert f"{path}: not a recording: " in done.stderr


def test_a_recording_of_another_platform_is_refused(vime, tmp_path) -> None:
    done = vime("doctor", "--inventory", str(recording(tmp_path)), "--platform", "gadget")
    assert done.returncode == 1
    assert "the recording is of platform 'cpu'" in done.stderr
