"""`make test` runs every test file once, and fails when its tests fail or take longer than their limits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUT_OF_TREE = ROOT / "tests/contract/acme_accelerator"


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vime_suite", ROOT / "tests/suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_test_file_is_in_one_group(suite: ModuleType) -> None:
    files = {path for folder in ("tests", "plugins") for path in (ROOT / folder).rglob("test_*.py")}
    mine = [path for path in files if not path.is_relative_to(OUT_OF_TREE)]
    for path in mine:
        assert len([group for group in suite.groups() if path.is_relative_to(ROOT / group)]) == 1, path


def test_names_of_groups_and_parts_exist(suite: ModuleType) -> None:
    assert set(suite.LONGEST) <= set(suite.groups())
    for place in suite.PART_OF:
        assert (ROOT / place).is_dir() or (ROOT / f"{place}.py").is_file(), place
    assert set(suite.PART_OF.values()) == set(suite.PARTS_MIN)


def test_a_failure_and_the_seconds_of_every_test_come_back(suite: ModuleType, tmp_path: Path) -> None:
    """A real pytest on a folder of its own: one slow set-up, one failure, one test that is marked slow."""
    (tmp_path / "test_it.py").write_text(
        "import time, pytest\n"
        "@pytest.fixture\ndef late(): time.sleep(0.3)\n"
        "def test_good(late): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.slow\ndef test_not_asked_for(): raise OSError\n"
    )
    ended = suite.run_group(str(tmp_path / "test_it.py"), tmp_path)
    assert not ended.good
    assert "assert 1 == 2" in ended.output
    assert len(ended.tests) == 2
    assert 0.3 <= sum(seconds for _, seconds in ended.tests) < ended.seconds


def test_a_part_takes_its_share_of_the_suite(suite: ModuleType) -> None:
    tests = [
        ("tests/unit/trainer/test_x", 60.0),
        ("tests/integration/test_engine", 30.0),
        ("tests/unit/trainerless/test_x", 6.0),
    ]
    assert suite.minutes_by_part(tests, 2) == {
        "spine": pytest.approx(0.05), "plugins": 0, "topology": 0, "training": 0.5, "rollout": 0.25,
    }  # fmt: skip


def test_each_limit_fails_the_suite_by_its_name(suite: ModuleType) -> None:
    within = dict(suite.PARTS_MIN)
    assert suite.over(within, suite.LIMIT_MIN) == []
    for part, limit in within.items():
        (line,) = suite.over({**within, part: limit + 0.2}, suite.LIMIT_MIN)
        assert line.startswith(f"{part} took {limit + 0.2:.1f} min")
    (line,) = suite.over(within, suite.LIMIT_MIN + 1)
    assert line.startswith("the suite took")
    assert suite.over(within, suite.LIMIT_MIN * 1.4, slack=1.5) == []
    assert len(suite.over(within, suite.LIMIT_MIN * 1.6, slack=1.5)) == 1
