import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli.report import add_parser
from vime.errors import DataError
from vime.testing.runs import write_example_run


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["report", *map(str, words)])
    return args.handler(args)


def test_a_page_is_written_into_the_run_and_its_path_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_example_run(tmp_path, 3)
    assert run(tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_out_says_where(tmp_path: Path) -> None:
    write_example_run(tmp_path / "run", 3)
    assert run(tmp_path / "run", "--out", tmp_path / "new" / "page.html") == 0
    assert (tmp_path / "new" / "page.html").is_file()
    assert not (tmp_path / "run" / "report.html").exists()
    assert run(tmp_path / "run", "--json", "--out", tmp_path / "other" / "numbers.json") == 0
    assert json.loads((tmp_path / "other" / "numbers.json").read_text())["steps"] == 3


def test_json_prints_the_numbers_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_example_run(tmp_path, 60)
    assert run(tmp_path, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 60
    assert sum(summary["time_share"].values()) == pytest.approx(1.0)
    assert set(summary["time_share"]) == {"generate", "train", "sync", "other"}
    assert 0 < summary["train_rollout_logprob_abs_diff"]["mean"] <= summary["train_rollout_logprob_abs_diff"]["max"]
    assert summary["eval"]["chain_sum"]["greedy"]["by_step"].keys() == {"0", "50", "60"}
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run directory"):
        run(tmp_path)


def test_abbreviated_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--js")


def test_neither_import_nor_report_needs_torch(tmp_path: Path) -> None:
    write_example_run(tmp_path, 2)
    script = (
        "import sys; import vime.cli.report; early = [m for m in ('rich', 'jinja2', 'torch', 'ray') if m in sys.modules]\n"
        "from pathlib import Path; from vime.observe.report import write_report; write_report(Path(sys.argv[1]))\n"
        "print(early, [m for m in ('torch', 'ray', 'vllm', 'megatron', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[] []\n"
