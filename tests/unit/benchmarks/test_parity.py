"""Layouts by name, samples that are shared out, and what counts as the same training."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vime.benchmarks import parity
from vime.benchmarks.comparing import JUDGED
from vime.benchmarks.engines import Clock, Here
from vime.benchmarks.parity_rank import GROUP, groups, share
from vime.cli.bench import parser_of
from vime.errors import ConfigError, TrainerError
from vime.facts.process import Factory


@pytest.mark.parametrize(
    ("text", "sizes", "ranks"),
    [
        ("tp2", {"tp": 2, "dp": 1}, 2),
        ("dp2", {"dp": 2}, 2),
        ("pp2-dp2", {"pp": 2, "dp": 2}, 4),
        ("ep2", {"ep": 2, "dp": 2}, 2),
        ("tp2-ep2", {"tp": 2, "ep": 2, "dp": 1}, 2),
        ("cp2-ep4", {"cp": 2, "ep": 4, "dp": 2}, 4),
        ("pp2-vpp2-ep2", {"pp": 2, "vpp": 2, "ep": 2, "dp": 2}, 4),
        ("tp2-ep4", {"tp": 2, "ep": 4, "dp": 2}, 4),
    ],
)
def test_names_of_layouts(text: str, sizes: dict[str, int], ranks: int) -> None:
    assert parity.axes_of(text) == text
    assert parity.sizes_of(text) == sizes
    assert parity.ranks_of(text) == ranks


@pytest.mark.parametrize("text", ["", "2", "tp", "tp0", "tp2,dp2", "xp2", "tp2-"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no layout"):
        parity.axes_of(text)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_row_is_trained_once_in_whole_groups(size: int) -> None:
    batch = groups(50, rows=16, length=12, step=3)
    works = [share(batch, tokens=36, length=12, place=(rank, size)) for rank in range(size)]
    trained = [row for work in works for pack in work.micro_batches for row in pack]
    assert sorted(row.response_ids for row in trained) == sorted(row.response_ids for group in batch for row in group)
    assert {work.num_rollouts for work in works} == {16}
    assert {work.num_tokens for work in works} == {16 * 9}
    assert all(sum(len(r.prompt_ids + r.response_ids) for r in pack) <= 36 for work in works for pack in work.micro_batches)
    assert all(len({row.prompt_ids for row in group}) == 1 and len(set(group[0].group_rewards)) == 2 for group in batch)


def test_a_dtype_that_the_attention_refuses_is_not_asked_of_it() -> None:
    def plan(attention: Factory | None) -> Any:
        return SimpleNamespace(actor=SimpleNamespace(adaptation=SimpleNamespace(core_attention=attention)))

    def job(dtype: str) -> parity.Job:
        return parity.Job(dtype, Path("model"), 8, 4)

    varlen = plan(Factory("vime.trainer.megatron.varlen:VarlenCoreAttention"))
    assert parity.why_not(job("bfloat16"), varlen) is None
    assert "float16 and bfloat16 only" in str(parity.why_not(job("float32"), varlen))
    for other in (None, Factory("vime.trainer.megatron.attention:RmsNorm")):
        assert parity.why_not(job("float32"), plan(other)) is None


def test_steps_have_rows_of_their_own_and_ranks_draw_the_same() -> None:
    first = groups(50, rows=8, length=12, step=0)
    assert first == groups(50, rows=8, length=12, step=0)
    assert first != groups(50, rows=8, length=12, step=1)
    assert len(first) == 8 // GROUP


def row(loss: float, norm: float, tokens: float = 100.0) -> dict[str, Any]:
    return {"metrics": [{"train/loss": loss, "train/grad_norm": norm}], "tokens_per_s": tokens}


def compared(loss: float, norm: float, *, dtype: str, judged: bool = True) -> dict[str, Any]:
    part: dict[str, Any] = {"ok": True, "ranks": 2, "backend": "gloo", "dtypes": {dtype: row(loss, norm, 150.0)}}
    parity.beside(part, {"dtypes": {dtype: row(-0.5, 2.0)}}, judged=judged)
    return part


def test_differences_are_relative_to_the_larger() -> None:
    part = compared(-0.4, 2.5, dtype="bfloat16", judged=False)
    assert part["ok"]
    found = part["dtypes"]["bfloat16"]
    assert found["relative"][0] == pytest.approx({"train/loss": 0.2, "train/grad_norm": 0.2})
    assert found["tokens_per_s / alone"] == 1.5


@pytest.mark.parametrize(
    ("loss", "norm", "dtype", "names"),
    [
        (-0.5, 2.0, "float32", []),
        (-0.50001, 2.00002, "float32", []),
        (-0.5002, 2.0, "float32", ["train/loss"]),
        (-0.5, 2.001, "float32", ["train/grad_norm"]),
        (-0.51, 2.05, "bfloat16", []),
        (-0.5, 2.2, "bfloat16", ["train/grad_norm"]),
        (float("nan"), 2.0, "bfloat16", ["train/loss"]),
        (0.5, float("nan"), "float32", ["train/loss", "train/grad_norm"]),
    ],
)
def test_a_difference_over_its_limit_fails(loss: float, norm: float, dtype: str, names: list[str]) -> None:
    part = compared(loss, norm, dtype=dtype)
    assert part["ok"] is not bool(names)
    assert [name for name in JUDGED if f"{name} differs" in part.get("error", "")] == names


def test_nothing_beside_it_fails() -> None:
    part: dict[str, Any] = {"ok": True, "dtypes": {"float32": row(1.0, 1.0)}}
    parity.beside(part, {}, judged=True)
    assert part["error"] == "float32: nothing to compare with"


def test_ranks_that_disagree_are_told() -> None:
    good, bad = {"dtype": "float32", "metrics": [{"train/loss": 1.0}]}, {"dtype": "float32", "metrics": [{"train/loss": 2.0}]}
    assert parity._disagreement([[good], [good]]) is None
    assert "rank 1 has other metrics" in (parity._disagreement([[good], [bad]]) or "")


def test_rows_that_cannot_be_shared_out_are_refused() -> None:
    args = parser_of("train").parse_args(["--layouts", "dp2", "tp2", "--tokens", "512", "--length", "128"])
    parity.require_rows(args)
    args.micro_batches = 1
    with pytest.raises(ConfigError, match="1 groups of 4 rows cannot be shared out for dp2"):
        parity.require_rows(args)


def test_the_table_ends_with_the_ratio_to_one_rank() -> None:
    part = compared(-0.5, 2.0, dtype="float32")
    lines = list(parity.report({"words": {"ok": True}, "tp2": part}))
    assert lines[0] == "tp2, float32: 150 tokens/s on 2 ranks (gloo)"
    assert "grad_norm 2 (differs by 0.0e+00)" in lines[1]
    assert lines[-1].endswith("one rank's: 1.500")
    assert list(parity.report({"dp2": {"ok": False, "error": "no device"}})) == ["dp2 failed: no device"]


def test_a_layout_over_more_devices_than_there_are_fails() -> None:
    node = SimpleNamespace(virtual=False, devices=(None,))
    with pytest.raises(TrainerError, match="dp2 needs 2 devices, here are 1"):
        parity.measured(argparse.Namespace(), cast("Here", SimpleNamespace(node=node)), [], "dp2", Clock(10))
