"""Check C22 on devices: two processes under masks meet over the whole backend, and each kind of fault is told by its name.

The sound platform's devices compute on the host, so the real processes meet over gloo; masks and environment are real.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vime.facts.collectives import CollectiveSpec
from vime.facts.process import Factory
from vime.testing.conformance.checks.collectives import _on_devices, judge
from vime.testing.conformance.questions import GROUPS
from vime.testing.conformance.registry import ConformanceFailure, NotRun

PLANTED = Path(__file__).resolve().parent / "planted"
sys.path.insert(0, str(PLANTED))
from faults import amend, subject, through  # noqa: E402

sys.path.remove(str(PLANTED))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLANTED))


def on_two_devices(folder: Path, hooks: Any = None, **changes: Any) -> None:
    """The check's part for devices, on the sound platform with some answers replaced."""
    made = subject(folder, hooks)
    asked = next(iter(made.requests(cases=[made.cases[0]])))
    _on_devices(made, replace(made.ask("vime_collective", asked.request, GROUPS[0]), **changes))


def test_two_processes_meet(tmp_path: Path) -> None:
    on_two_devices(tmp_path, reduce_ops=("sum", "max", "min", "product"))


def test_each_process_has_its_mask_and_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime writes what its process sees."""
    (tmp_path / "witness.py").write_text(
        "import os, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "class Runtime:\n"
        "    def set_device(self, index):\n"
        "        seen = folder / f'seen-{os.getpid()}'\n"
        "        seen.write_text(f\"{index} {os.environ['SOUND_VISIBLE']}\")\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    on_two_devices(tmp_path, amend("vime_trainer_runtime", bootstrap=Factory("witness:Runtime")))
    seen = sorted(path.read_text().split() for path in tmp_path.glob("seen-*"))
    assert [index for index, _ in seen] == ["0", "0"]
    assert len({mask for _, mask in seen}) == 2
    assert all("," not in mask for _, mask in seen)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"object_backend": "smoke"}, "two ranks do not meet"),
        ({"backend": "ring"}, "two ranks do not meet over ring"),
    ],
    ids=["object-backend", "backend"],
)
def test_what_the_backend_cannot_do_fails_the_check(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConformanceFailure, match=words):
        on_two_devices(tmp_path, **changes)


def test_a_runtime_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConformanceFailure, match=r"two ranks do not meet .*Absent"):
        on_two_devices(tmp_path, amend("vime_trainer_runtime", bootstrap=Factory("sound_pieces:Absent")))


def test_one_device_is_no_fault(tmp_path: Path) -> None:
    with pytest.raises(NotRun, match="needs two devices, this machine has 1"):
        on_two_devices(tmp_path, through("vime_inventory", lambda node: replace(node, devices=node.devices[:1])))


SPEC = CollectiveSpec("ring", 60.0, ("sum", "max"))
SEEN = {"reduced": {"sum": 5.0, "max": 3.0}, "passed": 7.0, "gathered": [0, 1], "visible": 1, "identity": "a"}


def told(**second: Any) -> list[dict[str, Any]]:
    return [SEEN, {**SEEN, "identity": "b", **second}]


def test_right_answers_pass() -> None:
    judge(told(), SPEC, alone=True)
    judge(told(visible=2, identity="a"), SPEC, alone=False)  # a mask of the whole node


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"reduced": {"sum": 5.0, "max": 2.0}}, "reduce operation max of 2 and 3 over ring gives 2.0 on rank 1"),
        ({"passed": 0.0}, "rank 1 of a group of both got 0.0"),
        ({"gathered": [1, 0]}, "the object backend gloo gives rank 1"),
        ({"visible": 2}, "rank 1 sees 2 devices under a mask of one"),
        ({"identity": "a"}, "both ranks are on device a"),
    ],
    ids=["reduce", "group", "objects", "mask", "device"],
)
def test_each_wrong_answer_fails_by_its_name(second: dict[str, Any], words: str) -> None:
    with pytest.raises(ConformanceFailure, match=words):
        judge(told(**second), SPEC, alone=True)
