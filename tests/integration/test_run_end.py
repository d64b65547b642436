"""What a run leaves in its folder when it ends."""

from __future__ import annotations

from pathlib import Path

from live_runs import run, write_run


def test_a_run_without_its_last_checkpoint_keeps_what_its_processes_printed(tmp_path: Path) -> None:
    run(write_run(tmp_path, checkpoint={"last": False}, schedule={"num_steps": 1}))
    left = tmp_path / "run"
    assert not (left / "checkpoints").exists()
    assert not (left / "model").exists()
    printed = {path.name: path.read_text(errors="replace") for path in (left / "logs" / "ray").iterdir()}
    assert all(printed.values())
    assert sum(map(len, printed.values())) <= 2 * 1024 * 1024
    actors = " ".join(text for name, text in printed.items() if name.startswith("worker-"))
    assert all(name in actors for name in ("TrainerProcess", "EngineProcess", "RolloutProcess"))
