"""A trainer beside a plain loop: the batch, the order of turns, what counts as the same work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.benchmarks import against
from vime.benchmarks.against_side import EQUAL, GROUP, GROUPS, advantage, batch
from vime.cli.bench import parser_of
from vime.cli.main import main
from vime.errors import ConfigError, TrainerError


def row(**changes: float) -> dict[str, float]:
    return {"loss": 0.5, "grad_norm": 2.0, "cpu_s": 1.0, "wall_s": 1.0, "tokens": 100.0, **changes}


def test_equal_rows_have_nothing_to_share_and_groups_have_one_prompt_and_many_lengths() -> None:
    sizes = {"rows": 2 * GROUP, "length": 64, "number": 3}
    equal, groups = batch(300, EQUAL, **sizes), batch(300, GROUPS, **sizes)
    assert {len(s.prompt_ids) + len(s.response_ids) for s in equal} == {64}
    assert len({s.prompt_ids for s in equal}) == len(equal) == 2 * GROUP
    assert len({s.prompt_ids for s in groups}) == 2
    assert {len(s.prompt_ids) for s in groups} == {16}
    lengths = {len(s.response_ids) for s in groups}
    assert len(lengths) > 5
    assert lengths <= set(range(12, 49))
    assert batch(300, GROUPS, **sizes) == groups != batch(300, GROUPS, **{**sizes, "number": 4})


def test_advantages_by_hand() -> None:
    (first, second, *_) = batch(300, EQUAL, rows=GROUP, length=16, number=0)
    share = sum(first.group_rewards) / GROUP
    deviation = (share * (1 - share) * GROUP / (GROUP - 1)) ** 0.5
    assert (advantage(first), advantage(second)) == pytest.approx(((1 - share) / deviation, -share / deviation))


def test_who_goes_first_changes_with_every_pair() -> None:
    assert [first for first, _ in against.turns(4)] == ["vime", "transformers", "vime", "transformers"]
    assert all(first != second for first, second in against.turns(4))


def test_the_first_step_does_not_count() -> None:
    rows = {
        "vime": [row(cpu_s=9.0), row(), row(), row(cpu_s=2.0)],
        "transformers": [row(), row(cpu_s=2.0), row(cpu_s=3.0), row(cpu_s=8.0)],
    }
    found = against.summary(rows)
    assert found["ratios"] == [2.0, 3.0, 4.0]
    assert found["ratio"] == 3.0
    assert found["tokens_per_cpu_s"] == {"vime": 100.0, "transformers": pytest.approx(100 / 3)}
    told = list(
        against.report(
            {"words": {"ok": True}, "2m": {"ok": True, "batches": {EQUAL: found}}, "x": {"ok": False, "error": "why"}}
        )
    )
    assert told[1] == "  vime / transformers: 3.000 (2.000 to 4.000 in 3 pairs)"
    assert told[2] == "x failed: why"


@pytest.mark.parametrize("changes", [{"loss": 0.500006}, {"grad_norm": 2.0003}, {"loss": float("nan")}])
def test_other_work_is_no_comparison(changes: dict[str, float]) -> None:
    with pytest.raises(TrainerError, match="step 1 was not the same work"):
        against.summary({"vime": [row(), row(**changes)], "transformers": [row(), row()]})
    near = [row(), row(loss=0.500001, grad_norm=2.0001)]
    assert against.summary({"vime": near, "transformers": [row(), row()]})["ratio"] == 1.0


@pytest.mark.parametrize(
    ("words", "virtual", "why"),
    [
        ([], False, "accelerator"),
        (["--dtype", "bfloat16"], True, "float32"),
        (["--threads", "2"], True, "one thread"),
        (["--tokens", "512", "--micro-batches", "1"], True, "whole groups of 8"),
        (["--pairs", "0"], True, "at least 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], virtual: bool, why: str) -> None:
    args = parser_of("train").parse_args(["--tokens", "1024", "--length", "128", *words])
    here: Any = SimpleNamespace(node=SimpleNamespace(virtual=virtual))
    with pytest.raises(ConfigError, match=why):
        against.check(args, here)


def test_a_side_that_fails_fails_the_part(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    words = ["bench", "train", "--against", "transformers", "--model", str(tmp_path), "--out", str(tmp_path), "--pairs", "1"]
    assert main(words) == 1
    parts = json.loads((tmp_path / "bench-train-against-transformers.json").read_text())["parts"]
    assert "vime: ConfigError" in parts[tmp_path.name]["error"]
