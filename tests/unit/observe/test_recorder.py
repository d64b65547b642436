import json
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from vime.observe.console import Console
from vime.observe.jsonl import Row, RowKind, read_rows
from vime.observe.recorder import Recorder
from vime.observe.samples import SampleText, read_samples
from vime.observe.trackers import TensorBoard
from vime.types import Batch, Group, PolicyVersion, PromptId, SampleInfo, SampleStatus, StepReport


def version(step: int) -> PolicyVersion:
    return PolicyVersion(0, step)


def report(step: int, metrics: Mapping[str, float] | None = None) -> StepReport:
    return StepReport(step, version(step), metrics or {"train/loss": 0.5}, {"pack": 0.25})


def rows(directory: Path, kind: RowKind | None = None) -> list[Row]:
    return [row for row in read_rows(directory / "metrics.jsonl") if kind in (None, row.kind)]


def one_batch(step: int) -> Batch:
    samples = (SampleInfo(0, 5, 3, 3, 1.0, SampleStatus.COMPLETED), SampleInfo(1, 5, 1, 1, 0.0, SampleStatus.COMPLETED))
    return Batch(step, (Group(PromptId(0, 0, 0), samples, None, version(step - 1)),))


def turn(recorder: Recorder, step: int) -> None:
    """What the wrapped roles do in one turn of the loop."""
    recorder.begin_step(step)
    with recorder.phase("generate"):
        pass
    recorder.batch(one_batch(step))
    with recorder.phase("train"):
        pass
    recorder.step(report(step))
    with recorder.phase("sync") as phase, recorder.span("sync/pause"):
        pass
    recorder.published(version(step), phase)


def test_the_step_row_is_on_disk_when_step_returns(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.begin_step(3)
    recorder.batch(one_batch(3))
    recorder.note(RowKind.STEP, metrics={"rollout/x": 1.0}, seconds={"queue": 0.5})
    recorder.count("rollout/dynamic_filter/drop_zero_std", 2)
    recorder.count("rollout/dynamic_filter/drop_zero_std")
    recorder.step(report(3, {"train/loss": 0.5, "rollout/raw_reward": 0.75}))
    row = rows(tmp_path)[-1]
    assert (row.kind, row.step, row.version) == (RowKind.STEP, 3, "0.3")
    assert row.metrics["train/loss"] == 0.5
    assert row.metrics["rollout/raw_reward"] == 0.75, "the report's own value wins"
    assert row.metrics["rollout/response_len/mean"] == 2.0
    assert row.metrics["rollout/dynamic_filter/drop_zero_std"] == 3
    assert row.seconds == {"train/pack": 0.25, "train/queue": 0.5}


def test_the_numbers_of_one_step_do_not_leak_into_the_next(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.count("rollout/regenerated")
    turn(recorder, 1)
    recorder.begin_step(2)
    recorder.step(report(2))
    assert rows(tmp_path, RowKind.STEP)[0].metrics["rollout/regenerated"] == 1
    assert set(rows(tmp_path, RowKind.STEP)[1].metrics) == {"train/loss"}


def test_a_publication_has_a_row_with_its_version_details_and_notes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with recorder.phase("sync") as phase:
        recorder.timeline.add("sync/pause", 0.5)
    recorder.note(RowKind.SYNC, metrics={"perf/update_weights_wire_bytes": 12}, seconds={"transfer": 0.25})
    recorder.published(version(0), phase)
    with recorder.phase("sync") as phase:
        pass
    recorder.published(version(1), phase)
    first, second = rows(tmp_path, RowKind.SYNC)
    assert (first.step, first.version, first.metrics["perf/update_weights_wire_bytes"]) == (0, "0.0", 12)
    assert (first.seconds["sync/pause"], first.seconds["sync/transfer"]) == (0.5, 0.25)
    assert (second.version, set(second.seconds), set(second.metrics)) == ("0.1", {"sync"}, {"perf/update_weights_time"})


def test_every_kind_of_row_carries_the_step_it_belongs_to(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.start({"model": "tiny"})
    recorder.evaluation(version(0), {"eval/sums/greedy": 0.5}, seconds={"evaluate": 3.0})
    turn(recorder, 1)
    recorder.saved(version(1), 0.5, metrics={"perf/bytes": 7})
    recorder.event("engine_restarted", "engine 0 died", engine=0)
    recorder.end_step()
    recorder.end_step()
    kinds = [(row.kind.value, row.step) for row in rows(tmp_path)]
    assert kinds == [("run", 0), ("eval", 0), ("event", 0), ("step", 1), ("sync", 1), ("save", 1), ("event", 1), ("wall", 1)]
    saved = rows(tmp_path, RowKind.SAVE)[0]
    assert saved.metrics == {"perf/save_model_time": 0.5, "perf/bytes": 7}
    assert rows(tmp_path, RowKind.EVENT)[1].data == {"name": "engine_restarted", "message": "engine 0 died", "engine": 0}


def test_memory_is_written_where_it_changed_at_the_same_edge(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for kv in (64, 64, 32):
        recorder.memory("training", {"actor": {"params": 8}})
        recorder.memory("serving", {"rollout": {"kv": kv}}, host={"actor": {"optimizer": 16}})
    held = [row.data for row in rows(tmp_path, RowKind.MEMORY)]
    assert [(data["edge"], data["device"], data["host"]) for data in held] == [
        ("training", {"actor": {"params": 8}}, {}),
        ("serving", {"rollout": {"kv": 64}}, {"actor": {"optimizer": 16}}),
        ("serving", {"rollout": {"kv": 32}}, {"actor": {"optimizer": 16}}),
    ]


def test_a_resumed_run_goes_on_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    recorder, position = Recorder(tmp_path, samples_per_step=1), 0
    for step in (1, 2, 3):
        recorder.begin_step(step)
        recorder.step(report(step))
        recorder.samples(step, [SampleText(f"p{step}", "r"), SampleText("too many", "r")])
        if step == 2:
            position = recorder.position()
    resumed = Recorder(tmp_path, samples_per_step=1)
    resumed.cut_back(position, step=2)
    resumed.start({"resumed_from": "0.2"})
    resumed.step(report(3))
    resumed.samples(3, [SampleText("p3", "again")])
    assert [(row.kind.value, row.step) for row in rows(tmp_path)][-3:] == [("step", 2), ("run", 2), ("step", 3)]
    assert [row.step for row in rows(tmp_path, RowKind.STEP)] == [1, 2, 3]
    assert [(kept.step, kept.sample.response) for kept in read_samples(tmp_path / "samples.jsonl")] == [
        (1, "r"), (2, "r"), (3, "again"),
    ]  # fmt: skip


class BrokenPipe:
    def write(self, _: str) -> int:
        raise BrokenPipeError("gone")

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_a_closed_terminal_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(3, stream=BrokenPipe())  # pyright: ignore[reportArgumentType]
    recorder = Recorder(tmp_path, sinks=[console])
    for step in (1, 2, 3):
        turn(recorder, step)
    recorder.end_step()
    recorder.close()
    assert [row.step for row in rows(tmp_path, RowKind.WALL)] == [1, 2, 3]
    assert capsys.readouterr().err.splitlines() == ["vime: Console is turned off after BrokenPipeError: gone"]


def test_a_full_disk_does_end_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        recorder.step(report(1))


def test_closing_twice_does_nothing_and_writing_after_it_is_an_error(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.close()
    recorder.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        recorder.step(report(1))


def read_tensorboard(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written_and_what_a_resume_replaced(tmp_path: Path) -> None:
    board = tmp_path / "tensorboard"
    recorder, position = Recorder(tmp_path, sinks=[TensorBoard(board)]), 0
    for step in (1, 2, 3):
        recorder.step(report(step, {"train/loss": float(step), "train/bad": float("nan")}))
        if step == 2:
            position = recorder.position()
    recorder.evaluation(version(3), {"eval/sums/greedy": 0.5})
    recorder.close()
    scalars = read_tensorboard(board)
    assert scalars == {"train/loss": [(1, 1.0), (2, 2.0), (3, 3.0)], "eval/sums/greedy": [(3, 0.5)]}

    (events,) = board.iterdir()  # TensorBoard orders its files by the whole second in their names
    events.rename(board / events.name.replace("tfevents.", "tfevents.0"))
    resumed = Recorder(tmp_path, sinks=[TensorBoard(board)])
    resumed.cut_back(position, step=2)
    resumed.step(report(3, {"train/loss": 30.0}))
    resumed.close()
    assert read_tensorboard(board)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_without_tensorboard_one_warning_and_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    recorder = Recorder(tmp_path, sinks=[TensorBoard(tmp_path / "tensorboard")])
    with pytest.warns(RuntimeWarning, match="install tensorboard or set"):
        recorder.step(report(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.step(report(2))
    recorder.close()
    assert len(rows(tmp_path)) == 2
    assert not (tmp_path / "tensorboard").exists()


def test_rows_are_strict_json_for_any_reader(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step(report(1, {"train/loss": float("nan")}))

    def refuse(text: str) -> None:
        raise AssertionError(text)

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert set(json.loads(line, parse_constant=refuse)) >= {"kind", "step", "version", "time", "metrics", "seconds"}


def test_a_step_costs_little(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, sinks=[TensorBoard(tmp_path / "tensorboard")])
    turn(recorder, 1)
    start = time.process_time()
    for step in range(2, 102):
        turn(recorder, step)
    assert (time.process_time() - start) / 100 < 0.003
    recorder.close()
