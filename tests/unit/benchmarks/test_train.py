"""The parts of `vime bench train`: one child, its results, what happens when it dies, the table."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vime.benchmarks import train
from vime.benchmarks.shapes import SHAPES
from vime.benchmarks.train_parts import attempt, flops, make_work
from vime.cli.bench import parser_of
from vime.data.tiny_model import tiny_config


def words(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(SHAPES["tiny"], dtype="float32")))
    args = parser_of("train").parse_args(["--tokens", "64", "--length", "32", "--product", "64", "--steps", "1"])
    args.dtype = "float32"
    return {**train.words_of(args, tmp_path), **changes}


def test_parts_come_from_one_child_and_what_fails_leaves_them_a_new_one(tmp_path: Path) -> None:
    """The plan is of the same rank."""
    parts = train.Parts(words(tmp_path), ["no such part", "recompute none", "head"], limit_s=120)
    try:
        failed = parts.result("no such part")
        assert parts._child is None
        trained = parts.result("recompute none")
        child = parts._child
        head = parts.result("head")
        assert parts._child is child
    finally:
        parts.close()
    assert not failed["ok"]
    assert "KeyError: 'no'" in failed["error"]
    assert "train_parts.py" in failed["trace"]
    held = trained["memory"]["bytes_by_tag"]
    args = parser_of("train").parse_args(["--tokens", "64"])
    args.dtype = "float32"
    planned = train.planned_bytes(args, tiny_config(SHAPES["tiny"], dtype="float32"), "none")
    assert {tag: planned[tag] for tag in held} == held
    assert trained["tokens_per_step"] == 128
    assert trained["park"]["bits_equal"]
    assert trained["park"]["same_sizes"]
    assert set(head["chunks"]) == {"64"}


def test_a_child_that_dies_gives_its_last_words(tmp_path: Path) -> None:
    parts = train.Parts(words(tmp_path, platform="no platform of this name"), ["head"], limit_s=60)
    with pytest.raises(RuntimeError, match="no platform of this name"):
        parts.result("head")
    assert parts._child is None


def test_the_limit_ends_the_child(tmp_path: Path) -> None:
    parts = train.Parts(words(tmp_path), ["head"], limit_s=0.2)
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        parts.result("head")
    assert parts._child is None


def test_operations_by_hand() -> None:
    work = make_work(10, tokens=6, length=3, micro_batches=2, seed=0)
    assert (work.num_rollouts, work.num_tokens) == (4, 8)
    sizes = {"parameters": 1000, "vocab": 10, "hidden": 4, "layers": 2, "heads": 3, "head_dim": 5, "value_dim": 3}
    shape = SimpleNamespace(**sizes, tied_embeddings=False)
    products, everything = flops(shape, work)
    assert products == 6 * (1000 - 40) * 12
    assert everything - products == 3 * 2 * 3 * (5 + 3) * (4 * 9)


def test_a_failure_is_a_result() -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("out of memory")

    found = attempt(fails)
    assert (found["ok"], found["error"]) == (False, "ValueError: out of memory")
    assert attempt(lambda: {"x": 1}) == {"x": 1}


def part(held: int) -> dict[str, Any]:
    return {
        "ok": True,
        "recompute": "none",
        "tokens_per_s": 1000.0,
        "tflops_6n": 1.0,
        "tflops_with_attention": 2.0,
        "product": {"tflops": 4.0},
        "ratio_to_product": 0.5,
        "memory": {"bytes_by_tag": {"params": 100}, "held_bytes": held, "peak_bytes": 180},
        "planned_bytes": {"params": 50, "activations": 40},
        "park": {"bytes": 0, "rounds": []},
    }


def test_planned_beside_measured() -> None:
    assert train.compared(part(held=100)) == {"params": (50, 100), "activations": (40, 80)}
    assert train.compared(part(held=0)) == {"params": (50, 100), "activations": (40, None)}


def test_the_table_ends_with_the_ratio_and_names_what_failed() -> None:
    lines = list(train.report({"words": {"ok": True}, "recompute none": part(held=100)}))
    assert lines[-1].endswith("ratio 0.500")
    assert any("x 2.00" in line for line in lines)
    lines = list(train.report({"head": {"ok": False, "error": "no memory"}}))
    assert lines == ["head failed: no memory"]
