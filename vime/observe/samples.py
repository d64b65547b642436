"""A few answers of every step, kept to be read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vime.errors import DataError
from vime.observe.jsonl import LineFile, read_lines
from vime.observe.metrics import as_number

MAX_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class SampleText:
    """One answer as text. `reward` None: it was not scored."""

    prompt: str
    response: str
    reward: float | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class KeptSample:
    """A sample and the step that trained on it."""

    step: int
    sample: SampleText


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Both ends of a long text, with the number of characters left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


class SamplesFile:
    """samples.jsonl: at most `per_step` samples in one call, long texts shortened."""

    def __init__(self, path: Path, *, per_step: int) -> None:
        self._file = LineFile(path)
        self._path = path
        self._per_step = per_step

    def write(self, step: int, samples: Iterable[SampleText]) -> None:
        for _, sample in zip(range(self._per_step), samples, strict=False):
            reward = as_number(sample.reward)
            content = {
                "step": step,
                "prompt": shorten(sample.prompt),
                "response": shorten(sample.response),
                "reward": reward if reward is not None and math.isfinite(reward) else None,
                "label": None if sample.label is None else shorten(str(sample.label)),
            }
            self._file.append(json.dumps(content, ensure_ascii=False, allow_nan=False))

    def cut_back(self, step: int) -> None:
        """Drop the samples of later steps. Nobody else may be writing."""
        lines = read_lines(self._path)
        kept = [line for (_, line), sample in zip(lines, read_samples(self._path), strict=True) if sample.step <= step]
        if len(kept) < len(lines):
            self._file.cut_back(0)
            for line in kept:
                self._file.append(line)

    def close(self) -> None:
        self._file.close()


def read_samples(path: Path) -> list[KeptSample]:
    """All kept samples as they were written; none where the file is absent. Raises DataError with file and line."""
    return [_parse(line, f"{path}:{number}") for number, line in read_lines(path)] if path.is_file() else []


def _parse(line: str, where: str) -> KeptSample:
    try:
        row = json.loads(line)
        text = SampleText(str(row["prompt"]), str(row["response"]), as_number(row.get("reward")), row.get("label"))
        return KeptSample(int(row["step"]), text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"not a kept sample: {type(error).__name__}: {error}"
        raise DataError(what, where=where, fix="remove the line if it was edited by hand") from None
