"""Reading prompt files: JSONL and parquet rows become a table of `Prompt`, in file order, with every skipped row reported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vime.config.schema import DataSection
from vime.data.templates import Messages, PromptTokenizer, check_template, render_prompt, with_prefix
from vime.errors import DataError
from vime.types import Prompt

TASK_KEY = "task"
_ENCODE_ROWS = 1024
_KEPT_REASONS = 100


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. `where` is `file:line`, for parquet `file:row N` counted from 1."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class PromptTable:
    """The usable prompts of a file, in file order: `table[i].row == i`.

    `identity` names the questions and labels in their order, so that a resumed run notices another data set; it does
    not depend on path, template or tokenizer (as far as they leave no row out). `bad_rows` holds the first hundred.
    """

    path: Path
    rows: tuple[Prompt, ...]
    places: tuple[int, ...]
    identity: str
    bad_rows: tuple[BadRow, ...] = ()
    num_skipped: int = 0
    num_too_long: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Prompt:
        return self.rows[row]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.rows)

    def where(self, row: int) -> str:
        """`file:line` of a row."""
        return _place(self.path, self.places[row])


@dataclass(frozen=True, slots=True)
class PromptFileCheck:
    """What a look at the first rows of a file found."""

    path: Path
    num_rows_seen: int
    bad_rows: tuple[BadRow, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """A raw row: its line (or row number, from 1), its values, and how to get a number's own text."""

    place: int
    values: Mapping[str, Any]
    number_text: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _Fields:
    place: int
    prompt: str | Messages
    label: str | None
    task: str | None
    metadata: Mapping[str, Any]


class _Unusable(Exception):
    """This row only: why."""


def read_prompts(section: DataSection, tokenizer: PromptTokenizer, *, limit: int | None = None) -> PromptTable:
    """Read, render and tokenize `section.path`.

    Args:
        limit: keep the first so many usable rows; None keeps all.

    Raises:
        DataError: the file is missing, empty or unreadable; a row is bad and `on_bad_row` is `fail`; no row is left.
    """
    reader = _Reader(section, tokenizer)
    fields = _read_fields(section, reader.reject)
    while batch := list(islice(fields, reader.wanted(limit))):
        reader.add(batch)
    return reader.table()


def check_prompt_file(section: DataSection, *, num_rows: int = 50) -> PromptFileCheck:
    """Look at the file and its first rows, without a tokenizer.

    Raises:
        DataError: as `read_prompts`, as far as the first `num_rows` rows show it.
    """
    check_template(section.template)
    bad: list[BadRow] = []

    def reject(place: int, reason: str) -> None:
        bad.append(_bad_row(section, place, reason))

    seen = sum(1 for _ in islice(_read_fields(section, reject, limit=num_rows), num_rows))
    if not seen:
        raise _nothing_left(section.path, bad, num_skipped=len(bad), num_too_long=0)
    return PromptFileCheck(section.path, seen + len(bad), tuple(bad))


def read_texts(path: Path, *, input_key: str = "prompt", limit: int | None = None) -> list[str]:
    """The prompts of a file as plain texts, for training a tokenizer.

    Raises:
        DataError: as `read_prompts`; also for a prompt that is a list of messages.
    """
    section = DataSection(path=path, input_key=input_key, label_key=None)

    def reject(place: int, reason: str) -> None:
        _bad_row(section, place, reason)

    texts = [render_prompt(fields.prompt, None) for fields in _read_fields(section, reject, limit=limit)]
    if not texts:
        raise _nothing_left(path, [], num_skipped=0, num_too_long=0)
    return texts


class _Reader:
    """Gathers the table; one per call."""

    def __init__(self, section: DataSection, tokenizer: PromptTokenizer) -> None:
        check_template(section.template)
        self.section = section
        self.tokenizer = tokenizer
        self.rows: list[Prompt] = []
        self.places: list[int] = []
        self.hashes: list[bytes] = []
        self.bad: list[BadRow] = []
        self.num_skipped = 0
        self.num_too_long = 0

    def reject(self, place: int, reason: str) -> None:
        bad = _bad_row(self.section, place, reason)
        self.num_skipped += 1
        if len(self.bad) < _KEPT_REASONS:
            self.bad.append(bad)

    def add(self, batch: list[_Fields]) -> None:
        template, rendered = self.section.template, []
        for fields in batch:
            try:
                rendered.append((fields, render_prompt(fields.prompt, template, self.tokenizer.chat)))
            except DataError as error:
                self.reject(fields.place, error.what)
        encoded = self.tokenizer.encode_batch([text for _, text in rendered])
        for (fields, text), ids in zip(rendered, encoded, strict=True):
            self._keep(fields, text, with_prefix(ids, self.tokenizer, template))

    def _keep(self, fields: _Fields, text: str, ids: tuple[int, ...]) -> None:
        longest = self.section.max_prompt_tokens
        if not ids:
            self.reject(fields.place, f"`{self.section.input_key}` is empty")
        elif longest is not None and len(ids) > longest:
            self.num_too_long += 1
        else:
            row = Prompt(len(self.rows), text, ids, label=fields.label, task=fields.task, metadata=fields.metadata)
            self.rows.append(row)
            self.places.append(fields.place)
            self.hashes.append(_row_hash(fields))

    def wanted(self, limit: int | None) -> int:
        """How many rows to look at next."""
        return _ENCODE_ROWS if limit is None else min(_ENCODE_ROWS, limit - len(self.rows))

    def table(self) -> PromptTable:
        if not self.rows:
            raise _nothing_left(self.section.path, self.bad, num_skipped=self.num_skipped, num_too_long=self.num_too_long)
        return PromptTable(
            path=self.section.path,
            rows=tuple(self.rows),
            places=tuple(self.places),
            identity=hashlib.sha256(b"".join(self.hashes)).hexdigest(),
            bad_rows=tuple(self.bad),
            num_skipped=self.num_skipped,
            num_too_long=self.num_too_long,
        )


def _row_hash(fields: _Fields) -> bytes:
    content = json.dumps([fields.prompt, fields.label], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _place(path: Path, place: int) -> str:
    return f"{path}:row {place}" if path.suffix == ".parquet" else f"{path}:{place}"


def _bad_row(section: DataSection, place: int, reason: str) -> BadRow:
    where = _place(section.path, place)
    if section.on_bad_row == "fail":
        raise DataError(reason, where=where, fix="mend the row, or set data.on_bad_row: skip to leave such rows out")
    return BadRow(where, reason)


def _nothing_left(path: Path, bad: list[BadRow], *, num_skipped: int, num_too_long: int) -> DataError:
    if not num_skipped and not num_too_long:
        return DataError("the file holds no rows", where=str(path), fix="point data.path at a file with prompts")
    reasons = "".join(f"\n  {row}" for row in bad[:3])
    return DataError(
        f"no usable row: {num_skipped} bad, {num_too_long} above data.max_prompt_tokens{reasons}",
        where=str(path),
        fix="check data.input_key, data.label_key and data.max_prompt_tokens",
    )


# Rows of a file ------------------------------------------------------------------------------------------------------


def _read_fields(section: DataSection, reject: Callable[[int, str], None], *, limit: int | None = None) -> Iterator[_Fields]:
    """The rows with their fields checked; `limit` bounds the rows looked at, good or bad."""
    for row in islice(_read_rows(section.path, reject), limit):
        try:
            yield _fields(section, row)
        except _Unusable as unusable:
            reject(row.place, str(unusable))


def _read_rows(path: Path, reject: Callable[[int, str], None]) -> Iterator[_Row]:
    if not path.is_file():
        what = "is a directory, not a prompt file" if path.is_dir() else "no such prompt file"
        raise DataError(what, where=str(path), fix="check data.path; `vime data make` writes one")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _jsonl_rows(path, reject)
    raise DataError(f"unknown kind of prompt file: {path.suffix or 'no suffix'}", where=str(path), fix="use .jsonl or .parquet")


def _jsonl_rows(path: Path, reject: Callable[[int, str], None]) -> Iterator[_Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8")
                values = json.loads(text)
            except UnicodeDecodeError as error:
                reject(number, f"not UTF-8: {error.reason} at byte {error.start}")
            except (ValueError, RecursionError) as error:
                reject(number, f"not JSON: {error}")
            else:
                if isinstance(values, dict):
                    yield _Row(number, values, _number_text_of(text))
                else:
                    reject(number, f"expected a JSON object, got {_kind(values)}")


def _number_text_of(line: str) -> Callable[[str], str]:
    """A number as the file writes it: 1.50 stays `1.50`."""
    return lambda key: json.loads(line, parse_int=str, parse_float=str, parse_constant=str)[key]


def _parquet_rows(path: Path) -> Iterator[_Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "reading parquet needs pyarrow", where=str(path), fix="pip install 'vime[tasks]', or use JSONL"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ENCODE_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield _Row(number, values, _shortest_text(values))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"not a readable parquet file: {error}", where=str(path), fix="write the file again") from error


def _shortest_text(values: Mapping[str, Any]) -> Callable[[str], str]:
    return lambda key: str(values[key])


# Fields of a row -----------------------------------------------------------------------------------------------------


def _fields(section: DataSection, row: _Row) -> _Fields:
    return _Fields(
        place=row.place,
        prompt=_prompt(row.values, section.input_key),
        label=_label(row, section.label_key),
        task=_task(row.values),
        metadata=_metadata(row.values, section.metadata_key),
    )


def _required(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise _Unusable(f"no `{key}`; the row has {', '.join(f'`{k}`' for k in values) or 'no keys'}")
    if values[key] is None:
        raise _Unusable(f"`{key}` is null")
    return values[key]


def _prompt(values: Mapping[str, Any], key: str) -> str | Messages:
    prompt = _required(values, key)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(t, dict) and isinstance(t.get("role"), str) for t in prompt):
        return prompt
    raise _Unusable(f"`{key}` must be text or a list of messages with a role each, got {_kind(prompt)}")


def _label(row: _Row, key: str | None) -> str | None:
    if key is None:
        return None
    label = _required(row.values, key)
    if isinstance(label, str):
        return label
    if isinstance(label, bool):
        return "true" if label else "false"
    if isinstance(label, (list, dict, bytes)):
        raise _Unusable(f"`{key}` must be text or a number, got {_kind(label)}")
    return row.number_text(key)


def _task(values: Mapping[str, Any]) -> str | None:
    task = values.get(TASK_KEY)
    if task is None or isinstance(task, str):
        return task
    raise _Unusable(f"`{TASK_KEY}` must be text, got {_kind(task)}")


def _metadata(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A mapping; JSON text of one is accepted, because parquet columns often hold that."""
    metadata = values.get(key)
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError as error:
            raise _Unusable(f"`{key}` is text but not JSON: {error}") from None
    if metadata is None:
        return {}
    if isinstance(metadata, dict):
        return metadata
    raise _Unusable(f"`{key}` must be a mapping, got {_kind(metadata)}")


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
