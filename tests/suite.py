"""Runs the whole test suite, two groups at a time, and compares what it took with its limits.

python tests/suite.py            everything that is not marked slow
python tests/suite.py --jobs 1   one group after the other

A group is a pytest of its own: one file of `tests/integration`, or one other folder. Integration tests mostly wait for
processes that start, so two groups fill two cores where one leaves half of them idle.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/unit", "tests/loop", "tests/architecture", "tests/contract", "plugins")
LONGEST = (
    "tests/integration/test_run.py",
    "tests/unit",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_static_types.py",
    "tests/integration/test_bench.py",
    "tests/contract",
    "tests/integration/test_weight_sync.py",
    "tests/integration/test_trainer_layouts.py",
    "tests/integration/test_nodes.py",
)
"""Groups to start first; a long group that starts last leaves a core idle."""

TEST_TIMEOUT_S = 600
LIMIT_MIN = 18.0
"""For the whole suite, beside about two minutes of installation."""
SLACK = 1.5
"""How much slower than the limits' machine another one may be before a limit fails the suite; before that it is told."""

PARTS_MIN: Mapping[str, float] = {"spine": 7.0, "plugins": 3.0, "topology": 2.0, "training": 4.0, "rollout": 2.0}
PART_OF: Mapping[str, str] = {
    "tests": "spine",
    "plugins": "plugins",
    "tests/contract": "plugins",
    "tests/unit/platforms": "plugins",
    "tests/unit/hooks": "plugins",
    "tests/integration/test_acme_run": "plugins",
    "tests/integration/test_mixed_run": "plugins",
    "tests/contract/test_hardware_plans": "topology",
    "tests/unit/topology": "topology",
    "tests/unit/planning": "topology",
    "tests/integration/test_device_masks": "topology",
    "tests/integration/test_nodes": "topology",
    "tests/contract/test_examples": "topology",
    "tests/contract/test_step_times": "topology",
    "tests/integration/test_examples_run": "topology",
    "tests/unit/trainer": "training",
    "tests/unit/algorithms": "training",
    "tests/unit/memory": "training",
    "tests/unit/models": "training",
    "tests/integration/test_trainer_layouts": "training",
    "tests/integration/test_checkpoints": "training",
    "tests/integration/test_experts_run": "training",
    "tests/integration/test_families_run": "training",
    "tests/integration/test_family_layouts": "training",
    "tests/integration/test_roles_run": "training",
    "tests/integration/test_bench_step": "training",
    "tests/integration/test_weight_sync": "training",
    "tests/unit/weights": "training",
    "tests/unit/rollout": "rollout",
    "tests/unit/rewards": "rollout",
    "tests/integration/test_engine": "rollout",
    "tests/integration/test_bench": "rollout",
    "tests/integration/test_version_stamps": "rollout",
    "tests/integration/test_vllm_alignment": "rollout",
}
"""What a folder or a file without its `.py` belongs to; the longest name that fits decides."""


@dataclass(frozen=True)
class Ended:
    """One group. `tests` holds (place, seconds) of every test, `place` like `tests/unit/test_yamltree`."""

    group: str
    code: int
    output: str
    seconds: float
    tests: tuple[tuple[str, float], ...]

    @property
    def good(self) -> bool:
        """All passed; a group whose tests are all marked slow has nothing to run (pytest's exit status 5)."""
        return self.code in (0, 5)


def groups() -> list[str]:
    """Every group, the longest first."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/integration").glob("test_*.py"))
    everything = [*files, *FOLDERS]
    return [*(name for name in LONGEST if name in everything), *(name for name in everything if name not in LONGEST)]


def run_group(group: str, folder: Path) -> Ended:
    """Run one group to its end; its output is kept."""
    report = folder / f"{group.replace('/', '-')}.xml"
    words = ["-m", "pytest", "-q", "-m", "not slow", "--durations=5", f"--timeout={TEST_TIMEOUT_S}", f"--junit-xml={report}"]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words, group],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    tests = tuple(tests_of(report.read_text())) if report.exists() else ()
    return Ended(group, done.returncode, done.stdout, time.monotonic() - begin, tests)


def tests_of(report: str) -> Iterable[tuple[str, float]]:
    """(place, seconds) of every test in pytest's JUnit report; set-up and teardown are its seconds too."""
    for case in ElementTree.fromstring(report).iter("testcase"):
        yield case.get("classname", "").replace(".", "/"), float(case.get("time", "0"))


def part_of(place: str) -> str:
    """The part of vime that the test at `place` belongs to."""
    fitting = [name for name in PART_OF if f"{place}/".startswith(f"{name}/")]
    return PART_OF[max(fitting, key=len, default="tests")]


def minutes_by_part(tests: Iterable[tuple[str, float]], jobs: int) -> dict[str, float]:
    """What each part took of the suite's time: the seconds of its tests, of which `jobs` pass at once."""
    total: defaultdict[str, float] = defaultdict(float)
    for place, seconds in tests:
        total[part_of(place)] += seconds / jobs / 60
    return {part: total[part] for part in PARTS_MIN}


def over(parts: Mapping[str, float], whole: float, *, slack: float = 1.0) -> list[str]:
    """A line for every limit that was passed by more than `slack`."""
    rows = [*((part, parts[part], limit) for part, limit in PARTS_MIN.items()), ("the suite", whole, LIMIT_MIN)]
    return [f"{name} took {took:.1f} min, its limit is {limit:.0f} min" for name, took, limit in rows if took > limit * slack]


def summary(ended: Iterable[Ended], parts: Mapping[str, float], whole: float) -> str:
    """Seconds of the groups, then minutes of the parts beside their limits."""
    lines = [f"{one.seconds:7.1f} s  {one.group}" for one in sorted(ended, key=lambda one: -one.seconds)]
    lines += [f"{parts[part]:7.1f} min of {limit:.0f}  {part}" for part, limit in PARTS_MIN.items()]
    return "\n".join([*lines, f"{whole:7.1f} min of {LIMIT_MIN:.0f}  the suite"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the test suite and compare what it took with its limits.")
    parser.add_argument("--jobs", type=int, default=2, help="groups at a time (default: 2)")
    jobs = parser.parse_args().jobs
    begin = time.monotonic()
    ended: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="vime-suite-") as folder, ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_group, group, Path(folder)) for group in groups()]):
            one = future.result()
            ended.append(one)
            print(f"==== {one.group}: exit status {one.code}, {one.seconds:.1f} s\n{one.output}", flush=True)
    whole = (time.monotonic() - begin) / 60
    parts = minutes_by_part((test for one in ended for test in one.tests), jobs)
    wrong = [f"{one.group} failed" for one in ended if not one.good] + over(parts, whole, slack=SLACK)
    print(summary(ended, parts, whole))
    print("\n".join(wrong or over(parts, whole)) or "everything passed within its limits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
