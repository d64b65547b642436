"""Prompt files: which rows are used, what is reported, and what stays as the file writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vime.config.schema import DataSection
from vime.data.prompts import check_prompt_file, read_prompts, read_texts
from vime.data.templates import PromptTokenizer
from vime.data.tiny_model import EOS_ID, byte_tokenizer
from vime.errors import DataError

TOKENIZER = PromptTokenizer(byte_tokenizer(), eos_id=EOS_ID)


def section(path: Path, **changes: Any) -> DataSection:
    return DataSection(path=path, **changes)


def write(path: Path, *lines: str | dict[str, Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def test_rows_with_missing_or_null_fields_are_reported_and_the_rest_is_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = ['{"prompt": "a", "label": "1"}', '{"prompt": "b"}', '{"prompt": "c", "label": null}', ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(rows).encode() + b"\n")

    table = read_prompts(section(path, on_bad_row="skip"), TOKENIZER)

    assert [(p.text, p.label) for p in table] == [("a", "1")]
    assert table.num_skipped == 2
    assert [bad.where for bad in table.bad_rows] == [f"{path}:2", f"{path}:3"]
    assert "no `label`" in table.bad_rows[0].reason
    assert "`label` is null" in table.bad_rows[1].reason


def test_a_bad_row_fails_by_default_and_names_file_line_and_key(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "a", "label": "1"}, {"question": "b", "label": "1"})
    with pytest.raises(DataError) as caught:
        read_prompts(section(path), TOKENIZER)
    assert caught.value.where == f"{path}:2"
    assert "no `prompt`" in caught.value.what
    assert "`question`" in caught.value.what


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ('"1.0"', "1.0"),
        ('"2"', "2"),
        ('"007"', "007"),
        ("2", "2"),
        ("2.0", "2.0"),
        ("1.50", "1.50"),
        ("1e3", "1e3"),
        ("-0", "-0"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("true", "true"),
        ('""', ""),
    ],
)
def test_a_label_is_the_text_that_the_file_holds(tmp_path: Path, written: str, label: str) -> None:
    path = write(tmp_path / "rows.jsonl", f'{{"prompt": "a", "label": {written}}}')
    assert read_prompts(section(path), TOKENIZER)[0].label == label


@pytest.mark.parametrize("written", ["[1]", '{"a": 1}'])
def test_a_label_that_is_a_structure_is_a_bad_row(tmp_path: Path, written: str) -> None:
    path = write(tmp_path / "rows.jsonl", f'{{"prompt": "a", "label": {written}}}')
    with pytest.raises(DataError, match="`label` must be text or a number"):
        read_prompts(section(path), TOKENIZER)


def test_without_a_label_key_no_label_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "a", "label": None}, {"prompt": "b"})
    assert [p.label for p in read_prompts(section(path, label_key=None), TOKENIZER)] == [None, None]


def test_no_limit_keeps_all_rows_and_a_limit_keeps_their_order(tmp_path: Path) -> None:
    lengths = [3, 9, 1, 8, 2, 4]
    path = write(tmp_path / "rows.jsonl", *({"prompt": "x" * n, "label": str(n)} for n in lengths))

    everything = read_prompts(section(path), TOKENIZER)
    assert [len(p.token_ids) for p in everything] == lengths
    short = read_prompts(section(path, max_prompt_tokens=4), TOKENIZER)
    assert [p.label for p in short] == ["3", "1", "2", "4"]
    assert [p.row for p in short] == [0, 1, 2, 3]
    assert short.num_too_long == 2
    assert short.where(3) == f"{path}:6"


def test_order_survives_batches_of_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *({"prompt": f"question {i}", "label": str(i)} for i in range(2500)))
    table = read_prompts(section(path), TOKENIZER)
    assert [p.label for p in table] == [str(i) for i in range(2500)]
    assert table[2499].token_ids == TOKENIZER.encode("question 2499")


def test_limit_keeps_the_first_usable_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "junk", *({"prompt": f"q{i}" * (1 + i % 2), "label": "1"} for i in range(9)), "junk")
    table = read_prompts(section(path, on_bad_row="skip", max_prompt_tokens=3), TOKENIZER, limit=4)
    assert [p.text for p in table] == ["q0", "q2", "q4", "q6"]
    assert table.num_skipped == 1


def test_task_and_metadata_are_carried(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "label": "1", "task": "gcd", "metadata": {"n": 1.0, "deep": [1]}},
        {"prompt": "b", "label": "1", "metadata": '{"n": 2}'},
        {"prompt": "c", "label": "1", "metadata": None},
    ]
    table = read_prompts(section(write(tmp_path / "rows.jsonl", *rows)), TOKENIZER)
    assert [(p.task, dict(p.metadata)) for p in table] == [("gcd", {"n": 1.0, "deep": [1]}), (None, {"n": 2}), (None, {})]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("[1, 2]", "expected a JSON object, got a list"),
        ('{"prompt": ', "not JSON"),
        ({"prompt": 3, "label": "1"}, "`prompt` must be text or a list of messages"),
        ({"prompt": [{"content": "no role"}], "label": "1"}, "`prompt` must be text or a list of messages"),
        ({"prompt": [{"role": "user", "content": "a"}], "label": "1"}, "only a chat template renders"),
        ({"prompt": "", "label": "1"}, "`prompt` is empty"),
        ({"prompt": "a", "label": "1", "metadata": [1]}, "`metadata` must be a mapping"),
        ({"prompt": "a", "label": "1", "metadata": "{"}, "`metadata` is text but not JSON"),
        ({"prompt": "a", "label": "1", "task": 5}, "`task` must be text"),
    ],
)
def test_each_kind_of_bad_row_has_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "good", "label": "1"}, row)
    table = read_prompts(section(path, on_bad_row="skip"), TOKENIZER)
    assert len(table) == 1
    assert reason in str(table.bad_rows[0])
    assert table.bad_rows[0].where == f"{path}:2"


def test_a_line_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "label": "1"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        read_prompts(section(path), TOKENIZER)


def test_unusable_files_say_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such prompt file"):
        read_prompts(section(tmp_path / "absent.jsonl"), TOKENIZER)
    with pytest.raises(DataError, match="is a directory"):
        read_prompts(section(tmp_path), TOKENIZER)
    with pytest.raises(DataError, match="the file holds no rows"):
        read_prompts(section(write(tmp_path / "empty.jsonl", "", "  ")), TOKENIZER)
    with pytest.raises(DataError, match=r"unknown kind of prompt file: \.csv"):
        read_prompts(section(write(tmp_path / "rows.csv", "a,b")), TOKENIZER)
    with pytest.raises(DataError, match="not a readable parquet file"):
        read_prompts(section(write(tmp_path / "rows.parquet", "PAR1 nonsense")), TOKENIZER)


def test_nothing_left_counts_what_was_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "long", "label": "1"}, {"prompt": "x"})
    with pytest.raises(DataError, match=r"no usable row: 1 bad, 1 above data.max_prompt_tokens"):
        read_prompts(section(path, on_bad_row="skip", max_prompt_tokens=2), TOKENIZER)


def test_parquet_rows_match_jsonl_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "label": i, "task": "t", "metadata": {"i": i}} for i in range(3)]
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    jsonl = write(tmp_path / "rows.jsonl", *rows)

    from_parquet, from_jsonl = read_prompts(section(parquet), TOKENIZER), read_prompts(section(jsonl), TOKENIZER)

    assert from_parquet.rows == from_jsonl.rows
    assert from_parquet.identity == from_jsonl.identity
    assert [p.label for p in from_parquet] == ["0", "1", "2"]


def test_a_null_in_parquet_is_reported_by_row(tmp_path: Path) -> None:
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "label": ["1", None]}), parquet)
    with pytest.raises(DataError) as caught:
        read_prompts(section(parquet), TOKENIZER)
    assert caught.value.where == f"{parquet}:row 2"


def test_identity_follows_questions_and_labels_only(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}]

    def identity(name: str, *lines: Any, **changes: Any) -> str:
        return read_prompts(section(write(tmp_path / name, *lines), **changes), TOKENIZER).identity

    first = identity("one.jsonl", *rows)
    assert identity("two.jsonl", *rows) == first
    assert identity("three.jsonl", *rows, template="<{prompt}>") == first
    assert identity("four.jsonl", *reversed(rows)) != first
    assert identity("five.jsonl", rows[0]) != first
    assert identity("six.jsonl", rows[0], {"prompt": "b", "label": "3"}) != first


def test_check_looks_at_the_first_rows_without_a_tokenizer(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": "a", "label": "1"}] * 3 + [{"prompt": "late"}]
    path = write(tmp_path / "rows.jsonl", *rows)

    assert check_prompt_file(section(path), num_rows=3).num_rows_seen == 3
    with pytest.raises(DataError) as caught:
        check_prompt_file(section(path))
    assert caught.value.where == f"{path}:4"
    seen = check_prompt_file(section(path, on_bad_row="skip"))
    assert (seen.num_rows_seen, len(seen.bad_rows)) == (4, 1)
    with pytest.raises(DataError, match=r"has no \{prompt\}"):
        check_prompt_file(section(path, template="question"))
    with pytest.raises(DataError, match="no usable row"):
        check_prompt_file(section(path, input_key="text", on_bad_row="skip"))


def test_texts_for_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert read_texts(path) == ["a", "b"]
    assert read_texts(path, limit=1) == ["a"]
