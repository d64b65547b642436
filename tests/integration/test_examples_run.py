"""The examples' twins: the run files of large models, from end to end with tiny ones."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from live_runs import environment, finish, rows, steps

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "vime.cli.main")


_SLOW = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "name", ["qwen3-4b-gsm8k", *(pytest.param(name, marks=_SLOW) for name in ("qwen3-30b-a3b-dapo", "glm4.5-air-dapo"))]
)
def test_a_twin_runs_by_the_commands_of_its_readme(name: str, tmp_path: Path) -> None:
    tiny, twin = commands(name)
    where = tiny.index("--out") + 1
    model = tmp_path / Path(tiny[where]).name
    tiny[where] = str(model)
    subprocess.run([*COMMAND, *tiny], check=True, capture_output=True, cwd=ROOT, env=environment())
    words = [*twin, f"run.dir={tmp_path / 'run'}", f"model.path={model}"]
    with (tmp_path / "out.log").open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, *words], stdout=log, stderr=log, text=True, cwd=ROOT, env=environment(), start_new_session=True
        )
    finish(process, tmp_path / "run.yaml", timeout_s=200)
    seen = steps(tmp_path / "run")
    assert sorted(seen) == [1, 2]
    for row in seen.values():
        difference, norm = (row.metrics[f"train/{name}"] for name in ("train_rollout_logprob_abs_diff", "grad_norm"))
        assert difference is not None
        assert norm is not None
        assert difference <= 2e-6
        assert norm > 0
    assert sum(row.kind == "sync" for row in rows(tmp_path / "run")) == 3


def commands(name: str) -> tuple[list[str], list[str]]:
    """The words after `vime` of the two commands for a CPU."""
    text = (ROOT / "examples" / name / "README.md").read_text().replace("\\\n", " ")
    found = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("$ vime ")]
    tiny = next(words for words in found if words[:2] == ["data", "tiny-model"])
    return tiny, next(words for words in found if words[0] == "run" and "cpu.yaml" in words[-1])
