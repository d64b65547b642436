"""Made prompt files and the start model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli.data import add_parser
from vime.config.schema import DataSection
from vime.data.make import Part, make_prompt_files, make_start_model, parse_split, part_sizes
from vime.data.prompts import read_prompts
from vime.data.templates import encode_label, load_tokenizer
from vime.data.tiny_model import TinyShape
from vime.errors import DataError
from vime.rewards.reasoning_gym import grade
from vime.rewards.values import GradeJob

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["data", *words])
    return args.handler(args)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_split_is_read() -> None:
    assert parse_split("sft=6000, rl=0.4,eval") == (Part("sft", 6000), Part("rl", 0.4), Part("eval", None))


@pytest.mark.parametrize("text", ["", "a,,b", "a=0", "a=1.5", "a=x", "a=-3", "a,a", "../a=1", "a=0.0"])
def test_a_split_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        parse_split(text)


def test_sizes_take_counts_and_shares_first_and_the_rest_evenly() -> None:
    assert part_sizes(parse_split("a=10,b=0.5,c,d"), 101) == [10, 50, 21, 20]
    with pytest.raises(DataError, match="100 different questions do not fill the split a=60, b=60"):
        part_sizes(parse_split("a=60,b=60"), 100)
    with pytest.raises(DataError, match="do not fill"):
        part_sizes(parse_split("a=100,b"), 100)


def test_parts_share_no_question_and_are_the_same_every_time(tmp_path: Path) -> None:
    split = parse_split("eval=50,sft=0.5,rl")
    made = make_prompt_files("reasoning_gym:chain_sum", tmp_path / "a", num_draws=2000, seed=7, split=split, config=EASY)
    make_prompt_files("reasoning_gym:chain_sum", tmp_path / "b", num_draws=2000, seed=7, split=split, config=EASY)
    make_prompt_files("reasoning_gym:chain_sum", tmp_path / "c", num_draws=2000, seed=8, split=split, config=EASY)

    questions = {name: {row["prompt"] for row in rows(tmp_path / "a" / f"{name}.jsonl")} for name in ("eval", "sft", "rl")}
    assert len(questions["eval"]) == 50
    assert sum(len(q) for q in questions.values()) == len(set.union(*questions.values())) == made.num_questions
    for name in questions:
        first = (tmp_path / "a" / f"{name}.jsonl").read_bytes()
        assert (tmp_path / "b" / f"{name}.jsonl").read_bytes() == first
        assert (tmp_path / "c" / f"{name}.jsonl").read_bytes() != first


def test_made_rows_are_read_and_graded(tmp_path: Path) -> None:
    assert run("make", "reasoning_gym:chain_sum", "--n", "50", "--out", str(tmp_path), "--config", "min_terms=2") == 0
    for row in rows(tmp_path / "train.jsonl"):
        assert set(row) == {"prompt", "label", "task", "metadata"}
        assert grade(GradeJob(row["label"], row["label"], row["task"], row["metadata"])).reward == 1.0
        assert grade(GradeJob("x", row["label"], row["task"], row["metadata"])).reward == 0.0


def test_metadata_that_json_would_change_keeps_its_python_form(tmp_path: Path) -> None:
    make_prompt_files("reasoning_gym:rearc", tmp_path, num_draws=2, seed=0, split=[Part("train", None)])
    for row in rows(tmp_path / "train.jsonl"):
        assert list(row["metadata"]) == ["python_literal"]
        assert grade(GradeJob(row["label"], row["label"], row["task"], row["metadata"])).reward == 1.0


def test_rows_without_a_label_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("make", "reasoning_gym:propositional_logic", "--n", "3", "--out", str(tmp_path)) == 0
    assert "3 questions have no label" in capsys.readouterr().out
    assert all(row["label"] is None for row in rows(tmp_path / "train.jsonl"))


@pytest.mark.parametrize(
    ("source", "config", "message"),
    [
        ("chain_sum", {}, "unknown task source"),
        ("reasoning_gym:chain_sun", {}, "did you mean chain_sum"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, "its settings are min_terms"),
        ("reasoning_gym:chain_sum", {"seed": 2}, "has no setting seed"),
        ("reasoning_gym:chain_sum", {"min_terms": 9}, "refuses these settings"),
    ],
)
def test_what_cannot_be_drawn_is_explained(tmp_path: Path, source: str, config: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_prompt_files(source, tmp_path, num_draws=2, seed=0, split=[Part("train", None)], config=config)


def test_the_start_model_reads_its_prompts_in_few_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_prompt_files(
        "reasoning_gym:chain_sum",
        tmp_path,
        num_draws=3000,
        seed=7,
        split=[Part("sft", None)],
        config=EASY | {"allow_negation": False},
    )
    path = next(iter(made.rows))
    assert run("tiny-model", "--out", str(tmp_path / "model"), "--prompts", str(path)) == 0
    assert "0.828 M parameters, 316 tokenizer entries" in capsys.readouterr().out

    tokenizer = load_tokenizer(tmp_path / "model")
    table = read_prompts(DataSection(path=path, template="<|im_start|>{prompt}<|sep|>"), tokenizer)
    assert max(len(p.token_ids) for p in table) == 9
    assert encode_label(tokenizer, "-107") == encode_label(tokenizer, "-107", digits_apart=True)
    assert tokenizer.decode(table[0].token_ids) == rows(path)[0]["prompt"]


def test_the_start_model_is_the_same_every_time(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "what is 12 and 3?"}\n{"prompt": "what is 4 and 56?"}\n')
    shape = TinyShape(vocab_size=300, layers=1)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_start_model(tmp_path / name, prompts, shape, seed=seed)
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / names[2]).read_bytes() != (tmp_path / "c" / names[2]).read_bytes()


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(SystemExit):
        run("make", "reasoning_gym:chain_sum", "--see", "3")


def test_the_command_is_cheap_to_import() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'reasoning_gym', 'pydantic'}"
    code = f"import sys, vime.cli.data; print(len({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "0"
