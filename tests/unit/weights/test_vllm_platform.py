"""The expected platform against the resolved one, and what vLLM's platform plugins say when they are asked again."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from vime.errors import EngineError
from vime.rollout.engine import find_cause
from vime.weights.vllm_platform import ask_plugins, check_platform, is_expected


class Expected:
    """Stands for a vLLM platform class."""


class Special(Expected):
    """A subclass of it."""


NAME = f"{Expected.__module__}.{Expected.__qualname__}"


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three platform plugins of one distribution: one raises, one says no, one cannot be imported."""
    info = tmp_path / "boards-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: boards\nVersion: 2.0\n")
    points = ("raises = boards_for_vllm:raises", "quiet = boards_for_vllm:quiet", "gone = no_such_module_at_all:register")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\n" + "\n".join(points) + "\n")
    (tmp_path / "boards_for_vllm.py").write_text(
        "def raises():\n    raise OSError('libboard.so:\\n  version too old')\ndef quiet():\n    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "boards_for_vllm", raising=False)


def test_the_expected_class_or_a_special_form_of_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_EXPECTED_PLATFORM", NAME)
    check_platform(Expected)
    check_platform(Special)
    monkeypatch.delenv("VIME_EXPECTED_PLATFORM")
    check_platform(int)


def test_the_expected_name_may_be_another_name_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_platforms")
    probed = type("ProbedPlatform", (), {"__module__": "some_platforms"})
    module.Platform = probed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_platforms", module)
    assert is_expected("some_platforms.Platform", probed)
    assert is_expected("some_platforms.Platform", type("Special", (probed,), {}))
    assert not is_expected("some_platforms.Platform", type("Other", (), {}))
    assert not is_expected("some_platforms.Absent", probed)
    assert not is_expected("no_such_platforms.Platform", probed)


def test_another_class_is_refused_with_both_names_and_what_was_swallowed(
    monkeypatch: pytest.MonkeyPatch, plugins: None
) -> None:
    monkeypatch.setenv("VIME_EXPECTED_PLATFORM", NAME)
    monkeypatch.setenv("VLLM_PLUGINS", "vime,raises,quiet")
    with pytest.raises(EngineError) as caught:
        check_platform(int)
    assert caught.value.what.splitlines() == [
        f"vime expects vLLM's platform {NAME}, vLLM resolved builtins.int (VLLM_PLUGINS 'vime,raises,quiet')",
        "  platform plugin raises (boards 2.0) raised OSError: libboard.so: version too old",
        "  platform plugin quiet (boards 2.0) says no",
        "  platform plugin gone (boards 2.0) is not admitted",
    ]


def test_without_a_list_every_plugin_is_asked(monkeypatch: pytest.MonkeyPatch, plugins: None) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    errors = {a.name: a.error for a in ask_plugins() if a.distribution == "boards 2.0"}
    assert errors["gone"] == "ModuleNotFoundError: No module named 'no_such_module_at_all'"
    assert errors["quiet"] is None


def test_the_mismatch_is_the_cause_that_a_log_gives_whatever_came_before() -> None:
    log = """\
(APIServer pid=7) ERROR 11-29 17:02:41 [plugins.py:88] Failed to load plugin dummy
(APIServer pid=7) ERROR 11-29 17:02:41 [plugins.py:88] ModuleNotFoundError: No module named 'x'
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)   File "vllm_ext.py", line 50, in register
(APIServer pid=7) vime.errors.EngineError: vime expects vLLM's platform a.A, vLLM resolved b.B
(APIServer pid=7)   platform plugin dummy (d 1) raised ModuleNotFoundError: No module named 'x'
(APIServer pid=7)   fix: mend it
(APIServer pid=7) nanobind: leaked
"""
    assert find_cause(log) == (
        "vime expects vLLM's platform a.A, vLLM resolved b.B\n"
        "  platform plugin dummy (d 1) raised ModuleNotFoundError: No module named 'x'\n"
        "  fix: mend it"
    )
