"""YAML nodes: what scalars mean, where things stand, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from vime.errors import ConfigError, Errors
from vime.yamltree import (
    Bytes,
    Count,
    Duration,
    Entries,
    Number,
    Whole,
    did_you_mean,
    find,
    leaves,
    merge,
    nearest,
    parse,
    plain,
    quoted,
    read,
    resolve,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1e6", 1e6),
        ("1.0e-6", 1e-6),
        (".5", 0.5),
        ("-2", -2),
        ("0", 0),
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
    ],
)
def test_numbers_nulls_and_booleans_are_read_as_people_mean_them(text: str, value: object) -> None:
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


@pytest.mark.parametrize(
    "text", ["on", "off", "yes", "No", "y", "010", "08", "1_000", "1:30:00", "2001-01-01", "0x1f", "=", "nan"]
)
def test_surprises_of_older_yaml_stay_text(text: str) -> None:
    assert plain(parse(f"a: {text}", "f")) == {"a": text}


def test_nan_needs_its_dot() -> None:
    assert math.isnan(resolve(".nan"))


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [(Number, "1e-6", 1e-6), (Number, "010", 10.0), (Number, "1_000", 1000.0), (Whole, "08", 8), (Count, "1e3", 1000)],
)
def test_a_typed_number_takes_the_text(field: Any, text: str, value: float) -> None:
    assert TypeAdapter(field).validate_python(resolve(text)) == value


@pytest.mark.parametrize(
    ("field", "value"), [(Number, "fast"), (Number, True), (Whole, 1.5), (Count, 0), (Bytes, True), (Bytes, "3 parsecs")]
)
def test_a_typed_number_refuses_the_rest(field: Any, value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(field).validate_python(value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 2**30),
        ("512 MiB", 512 * 2**20),
        ("64MB", 64_000_000),
        ("10", 10),
        ("1.5KiB", 1536),
        ("2_000B", 2000),
        ("1e3kb", 10**6),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert TypeAdapter(Bytes).validate_python(text) == size


@pytest.mark.parametrize("text", ["700Gi", "-1GiB", "GiB", "1e400GiB", "nan", "."])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValidationError, match=r"expected a size|greater than or equal"):
        TypeAdapter(Bytes).validate_python(text)


@pytest.mark.parametrize(("text", "seconds"), [("20m", 1200.0), ("1.5h", 5400.0), ("90s", 90.0), ("3", 3.0), ("250ms", 0.25)])
def test_durations(text: str, seconds: float) -> None:
    assert TypeAdapter(Duration).validate_python(text) == seconds


def test_every_node_knows_its_line() -> None:
    node = parse("a:\n  b: 1\n  c:\n    - x\n    - y\n", "f.yaml")
    assert str(find(node, ("a", "c", 1))[1]) == "f.yaml:5"
    assert str(find(node, ("a", "b"))[1]) == "f.yaml:2"
    assert find(node, ("a", "unknown", "c"))[0] == ("a", "c")


def test_a_key_written_twice_is_an_error_with_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"f:3: the key `a` is written twice \(first at line 1\)"):
        parse("a: 1\nb: 2\na: 3", "f")


def test_all_problems_of_a_file_are_reported_together() -> None:
    with pytest.raises(Errors) as caught:
        parse("a: 1\na: 2\nb: !x 3\nc: {d: 1, d: 2}", "f")
    assert [e.where for e in caught.value.errors] == ["f:2", "f:3", "f:4"]


@pytest.mark.parametrize("text", ["a: !!python/object:os.system x", "a: !!str 1", "a: !local 1", "a: !!set {x}"])
def test_tags_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        parse(text, "f")


def test_keys_are_text() -> None:
    assert plain(parse("on: 1\n2: 3\nnull: 4", "f")) == {"on": 1, "2": 3, "null": 4}


def test_aliases_and_merge_keys_are_fine() -> None:
    text = "base: &b {x: 1, y: 2}\nuse: *b\nmore:\n  <<: *b\n  y: 3\n"
    assert plain(parse(text, "f")) == {"base": {"x": 1, "y": 2}, "use": {"x": 1, "y": 2}, "more": {"y": 3, "x": 1}}


def test_an_alias_inside_itself_is_an_error() -> None:
    with pytest.raises(ConfigError, match="inside the value"):
        parse("a: &a [1, *a]", "f")


@pytest.mark.parametrize("text", ["a: b: c", "\ta: 1", "a: [1", "a: 1\n---\nb: 2", "? [a]\n: 1"])
def test_broken_yaml_is_an_error_with_a_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"f:\d"):
        parse(text, "f")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes("\ufeffa: 1\n".encode())
    assert plain(read(path)) == {"a": 1}


def test_missing_and_binary_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "b").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(tmp_path / "b")
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path)


def test_merging_keeps_places() -> None:
    below, above = parse("a: {x: 1, y: 2}\nb: [1, 2]", "low"), parse("a: {y: 3}\nb: [9]", "high")
    merged = merge(below, above)
    assert plain(merged) == {"a": {"x": 1, "y": 3}, "b": [9]}
    places = {path: str(where) for path, where in leaves(merged)}
    assert places == {"a.x": "low:1", "a.y": "high:1", "b.0": "high:2"}


def test_quoted_keeps_what_was_written() -> None:
    assert plain(quoted(parse("A: 010\nB: true\nC: 1e-6", "f"))) == {"A": "010", "B": "true", "C": "1e-6"}


def test_nearest_words() -> None:
    assert nearest("max-num-seqs", ["max_num_seqs", "seed"]) == "max_num_seqs"
    assert nearest("zzz", ["max_num_seqs"]) is None
    assert did_you_mean("sead", ["seed", "dir"]) == "did you mean `seed`?"
    assert did_you_mean("zzzz", ["seed", "dir"]) == "known keys: dir, seed"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_tree_or_a_config_error(text: str) -> None:
    try:
        node = parse(text, "f")
    except (ConfigError, Errors):
        return
    assert plain(node) == plain(parse(text, "f")) or "nan" in text.lower()


def test_an_empty_document_is_an_empty_mapping() -> None:
    node = parse("# nothing\n", "f")
    assert isinstance(node, Entries)
    assert plain(node) == {}
