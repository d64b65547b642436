import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vime.errors import DataError
from vime.observe.jsonl import MetricsFile, Row, RowKind, read_rows, reproducible


def row(step: int, **metrics: object) -> Row:
    return Row(RowKind.STEP, step, 1000.5, version=f"0.{step}", metrics=metrics)  # pyright: ignore[reportArgumentType]


def no_constants(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def test_a_row_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(Row(RowKind.SYNC, 3, 12.25, "1.3", {"a": 0.1}, {"sync": 0.5}, {"note": "é\n"}))
    assert read_rows(path) == [Row(RowKind.SYNC, 3, 12.25, "1.3", {"a": 0.1}, {"sync": 0.5}, {"note": "é\n"})]
    assert path.read_bytes().count(b"\n") == 1


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = {"third": 1 / 3, "tiny": 5e-324, "minus_zero": -0.0, "count": 7}
    file = MetricsFile(tmp_path / "m")
    file.write(row(1, **values))
    (back,) = read_rows(tmp_path / "m")
    assert dict(back.metrics) == values
    assert str(back.metrics["minus_zero"]) == "-0.0"
    assert isinstance(back.metrics["count"], int)


def test_nan_and_infinity_stay_strict_json_and_come_back(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m")
    file.write(row(1, loss=math.nan, up=math.inf, down=-math.inf, good=1.0, none=None))
    content = json.loads((tmp_path / "m").read_text(), parse_constant=no_constants)
    assert content["metrics"] == {"loss": None, "up": None, "down": None, "good": 1.0, "none": None}
    assert content["non_finite"] == {"loss": "nan", "up": "inf", "down": "-inf"}
    metrics = read_rows(tmp_path / "m")[0].metrics
    assert math.isnan(metrics["loss"] or 0)
    assert (metrics["up"], metrics["down"], metrics["none"]) == (math.inf, -math.inf, None)


def test_scalars_of_other_libraries_become_plain_numbers() -> None:
    values = {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "flag": True, "text": "high", "many": np.zeros(2)}
    content = json.loads(row(1, **values).to_json())
    assert content["metrics"] == {"f": 0.5, "i": 3, "b": 1, "flag": 1, "text": None, "many": None}


def test_a_torn_last_line_is_not_read_and_is_dropped_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "m"
    file = MetricsFile(path)
    file.write(row(1))
    file.write(row(2))
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [r.step for r in read_rows(path)] == [1]
    file = MetricsFile(path)
    file.write(row(2))
    assert path.read_bytes() == whole
    path.write_bytes(b'{"kind":"st')
    assert MetricsFile(path).position() == 0


def test_cut_back_leaves_exactly_what_the_checkpoint_saw(tmp_path: Path) -> None:
    path = tmp_path / "m"
    file = MetricsFile(path)
    file.write(row(1))
    position = file.position()
    seen = path.read_bytes()
    assert position == len(seen)
    file.write(row(2))
    file.close()
    file = MetricsFile(path)
    assert file.cut_back(position) == path.stat().st_size - position + len(row(2).to_json()) + 1
    assert path.read_bytes() == seen
    file.write(row(3))
    assert [r.step for r in read_rows(path)] == [1, 3]
    assert file.position() == path.stat().st_size


@pytest.mark.parametrize(("offset", "message"), [(1000, "holds"), (-1, "does not end a line")])
def test_cut_back_refuses_a_position_of_another_file(tmp_path: Path, offset: int, message: str) -> None:
    file = MetricsFile(tmp_path / "m")
    file.write(row(1))
    with pytest.raises(DataError, match=message) as caught:
        file.cut_back(file.position() + offset)
    assert caught.value.where == str(tmp_path / "m")
    assert caught.value.fix
    assert len(read_rows(tmp_path / "m")) == 1


@pytest.mark.parametrize(
    "line", ["{", '{"kind":"step"}', '{"kind":"other","step":1,"time":0}', "[1]", '{"kind":"step","step":null,"time":0}']
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m"
    path.write_text(f"{row(1).to_json()}\n\n{line}\n{row(2).to_json()}\n")
    with pytest.raises(DataError, match="not a row of metrics") as caught:
        read_rows(path)
    assert caught.value.where == f"{path}:3"


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_rows(tmp_path / "absent")


def test_rows_survive_the_sudden_end_of_the_process(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from vime.observe.jsonl import *\n"
        "MetricsFile(Path(sys.argv[1])).write(Row(RowKind.STEP, 5, 0.0)); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "m")], timeout=30)
    assert done.returncode == 9
    assert [r.step for r in read_rows(tmp_path / "m")] == [5]


def test_the_reproducible_part_holds_no_time_and_no_incarnation() -> None:
    first = Row(RowKind.STEP, 4, 10.0, "0.4", {"train/loss": 0.5, "perf/train_time": 1.0}, {"train": 1.0})
    again = Row(RowKind.STEP, 4, 99.0, "1.4", {"train/loss": 0.5, "perf/train_time": 2.0}, {"train": 2.0})
    other = Row(RowKind.STEP, 4, 10.0, "0.4", {"train/loss": 0.25, "perf/train_time": 1.0}, {"train": 1.0})
    assert reproducible(first) == reproducible(again) != reproducible(other)
    assert reproducible(Row(RowKind.WALL, 4, 10.0)) is None
