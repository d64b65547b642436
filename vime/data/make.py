"""Prompt files from procedural task generators, split into parts that share no question."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.data.prompts import read_texts
from vime.data.templates import PromptTokenizer, encode_prompt
from vime.data.tiny_model import EOS_ID, PAD_ID, QUESTION_TEMPLATE, TinyShape, phrase_tokenizer, save_tiny, save_tokenizer
from vime.errors import DataError

SOURCE = "reasoning_gym"
LITERAL_KEY = "python_literal"
"""Metadata entry with the Python form of a task's metadata, where JSON would change what the verifier sees; the grader
of the same name reads it back."""
_ROUND_TRIP_ROWS = 20
_TOKENIZER_TEXTS = 5000


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a split: `amount` questions if it is an int, that share of all if a float, None for what is left."""

    name: str
    amount: int | float | None


@dataclass(frozen=True, slots=True)
class MadeFiles:
    """What `make_prompt_files` wrote: rows by path, draws, different questions among them, and how many have no label."""

    rows: Mapping[Path, int]
    num_draws: int
    num_questions: int
    num_unlabelled: int


@dataclass(frozen=True, slots=True)
class MadeModel:
    """What `make_start_model` wrote. `longest_prompt` is in tokens, under `template`."""

    directory: Path
    num_parameters: int
    vocab_size: int
    longest_prompt: int
    template: str


def parse_split(text: str) -> tuple[Part, ...]:
    """`sft=6000,rl=0.4,eval`: a whole number counts questions, a number below 1 is a share of all, a bare name takes the rest.

    Several bare names share the rest evenly.

    Raises:
        DataError: a name twice or not usable as a file name, or an amount that is neither.
    """
    parts = tuple(_parse_part(item.strip()) for item in text.split(","))
    names = [part.name for part in parts]
    if doubles := {name for name in names if names.count(name) > 1}:
        raise DataError(f"--split names {', '.join(sorted(doubles))} more than once")
    return parts


def _parse_part(item: str) -> Part:
    name, equals, amount = (piece.strip() for piece in item.partition("="))
    if not name or not name.replace("-", "_").isidentifier():
        raise DataError(f"--split has no usable name in {item!r}", fix="write it like sft=6000,eval=1500,rl")
    if not equals:
        return Part(name, None)
    try:
        number = float(amount) if "." in amount or "e" in amount.lower() else int(amount)
    except ValueError:
        number = 0
    if isinstance(number, float) and not 0 < number < 1:
        raise DataError(f"--split {item}: a share lies between 0 and 1", fix="a count of questions has no decimal point")
    if number <= 0:
        raise DataError(f"--split {item}: expected a count or a share above 0")
    return Part(name, number)


def part_sizes(parts: Sequence[Part], num_questions: int) -> list[int]:
    """Questions per part. Raises DataError when they do not suffice, or a part would be empty."""
    sizes = [_fixed_size(part, num_questions) for part in parts]
    left = num_questions - sum(size for size in sizes if size is not None)
    open_parts = [i for i, size in enumerate(sizes) if size is None]
    if left < len(open_parts):
        asked = ", ".join(f"{p.name}={p.amount if p.amount is not None else 'rest'}" for p in parts)
        raise DataError(
            f"{num_questions} different questions do not fill the split {asked}",
            fix="draw more (--n), make the task harder (--config), or ask for less",
        )
    for position, i in enumerate(open_parts):
        sizes[i] = left // len(open_parts) + (position < left % len(open_parts))
    return [size or 0 for size in sizes]


def _fixed_size(part: Part, num_questions: int) -> int | None:
    if isinstance(part.amount, float):
        return max(1, int(part.amount * num_questions))
    return part.amount


def make_prompt_files(
    source: str, out: Path, *, num_draws: int, seed: int, split: Sequence[Part], config: Mapping[str, Any] | None = None
) -> MadeFiles:
    """Draw questions of `reasoning_gym:TASK` and write `out/PART.jsonl` with rows {prompt, label, task, metadata}.

    Parts share no question text. Which question lands in which part depends on its text and `seed` alone, so the same
    arguments give the same bytes.

    Raises:
        DataError: unknown source, task or setting, or too few different questions for the split.
    """
    task = _task_name(source)
    entries = _draw(task, num_draws, seed, config or {})
    questions = sorted(entries, key=lambda question: hashlib.sha256(f"{seed}:{question}".encode()).digest())
    sizes = part_sizes(split, len(questions))
    out.mkdir(parents=True, exist_ok=True)
    rows, start = {}, 0
    for part, size in zip(split, sizes, strict=True):
        path = out / f"{part.name}.jsonl"
        _write_rows(path, (entries[question] for question in questions[start : start + size]))
        rows[path] = size
        start += size
    num_unlabelled = sum(entry["label"] is None for entry in entries.values())
    return MadeFiles(rows, num_draws, len(questions), num_unlabelled)


def _task_name(source: str) -> str:
    library, _, task = source.partition(":")
    if library != SOURCE or not task:
        raise DataError(f"unknown task source {source!r}", fix=f"write it like {SOURCE}:chain_sum")
    return task


def _draw(task: str, num_draws: int, seed: int, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows by question text; the first draw of a question is kept."""
    dataset = _dataset(task, num_draws, seed, config)
    entries: dict[str, dict[str, Any]] = {}
    for i in range(num_draws):
        entry = dataset[i]
        entries.setdefault(entry["question"].strip(), entry)
    as_literal = _json_changes_scores(dataset.score_answer, list(entries.values())[:_ROUND_TRIP_ROWS])
    return {question: _row(task, question, entry, as_literal) for question, entry in entries.items()}


def _dataset(task: str, size: int, seed: int, config: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError("the task generators are not installed", fix="pip install 'vime[tasks]'") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        raise DataError(
            f"reasoning-gym has no task {task!r}",
            fix=f"did you mean {', '.join(near)}?" if near else "see its gallery of tasks",
        )
    known = DATASETS[task][1].__dataclass_fields__
    if unknown := [key for key in config if key not in known or key in ("seed", "size")]:
        settings = ", ".join(key for key in known if key not in ("seed", "size"))
        raise DataError(f"{task} has no setting {', '.join(unknown)}", fix=f"its settings are {settings}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{task} refuses these settings: {error}", fix="change --config or --n") from error


def _row(task: str, question: str, entry: Mapping[str, Any], as_literal: bool) -> dict[str, Any]:
    metadata = {LITERAL_KEY: repr(entry["metadata"])} if as_literal else entry["metadata"]
    return {"prompt": question, "label": entry["answer"], "task": task, "metadata": metadata}


def _json_changes_scores(score: Callable[[Any, Any], float], entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether tuples becoming lists, or keys becoming text, matters to the verifier. Without a known answer: assume so."""
    for entry in entries:
        metadata = entry["metadata"]
        try:
            rebuilt = json.loads(json.dumps(metadata))
        except TypeError:
            return True
        if rebuilt == metadata:
            continue
        try:
            if entry["answer"] is None or score(entry["answer"], {**entry, "metadata": rebuilt}) != 1.0:
                return True
        except Exception:  # noqa: BLE001  the verifier is foreign code and raises what it likes
            return True
    return False


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def make_start_model(directory: Path, prompts: Path, shape: TinyShape, *, seed: int = 0) -> MadeModel:
    """A small random model whose own tokenizer is trained on the prompts of `prompts`, to be taught from scratch.

    Args:
        shape: its `vocab_size` is the most entries the tokenizer may have; the model gets as many as came out.

    Raises:
        DataError: the prompt file cannot be used.
    """
    texts = read_texts(prompts, limit=_TOKENIZER_TEXTS)
    encoder = phrase_tokenizer(texts, max_entries=shape.vocab_size)
    tokenizer = PromptTokenizer(encoder, eos_id=EOS_ID, pad_id=PAD_ID)
    longest = max(len(encode_prompt(tokenizer, text, QUESTION_TEMPLATE)[1]) for text in texts)
    entries = encoder.get_vocab_size()
    save_tokenizer(encoder, directory, max_length=shape.max_positions)
    num_parameters = save_tiny(directory, replace(shape, vocab_size=entries), seed=seed)
    return MadeModel(directory, num_parameters, entries, longest, QUESTION_TEMPLATE)
