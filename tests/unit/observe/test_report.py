import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from vime.observe.jsonl import MetricsFile, Row, RowKind
from vime.observe.report import format_bytes, write_report
from vime.observe.samples import SamplesFile, SampleText
from vime.testing.runs import write_example_run

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Balanced(HTMLParser):
    """Collects attributes and text; fails on a tag that is closed out of order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action"):
                self.loaded.append(value or "")
            if name == "id":
                self.ids.add(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def parse(path: Path) -> tuple[str, Balanced]:
    page, parser = path.read_text(encoding="utf-8"), Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return page, parser


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_run(tmp_path_factory.mktemp("run"), 120)


def test_the_page_needs_nothing_but_itself(example: Path) -> None:
    page, parser = parse(write_report(example))
    assert [target for target in parser.loaded if not target.startswith(("#", "data:"))] == []
    assert not re.search(r"https?:|@import|url\(|<img|<iframe|fetch\(|XMLHttpRequest", page)
    anchors = {target[1:] for target in parser.loaded if target.startswith("#")}
    assert anchors <= parser.ids
    assert "prefers-color-scheme: dark" in page


def test_the_page_shows_every_part_of_the_run(example: Path) -> None:
    page, parser = parse(write_report(example))
    text = " ".join(" ".join(parser.text).split())
    for title in ("Reward", "Held-out reward", "Loss", "Gradient norm", "Entropy", "Response length"):
        assert title in text
    assert "tiny-qwen3 (0.8M)" in text
    assert "engine 0 did not answer its health check" in text
    assert "sync/transfer" in text
    assert "3.2 MiB" in text
    assert "engine weights" in text
    assert page.count('<svg class="chart"') == 8
    assert page.count('class="card sample"') == 12
    assert "NaN" not in page
    assert "None" not in text


def test_the_page_is_the_same_for_the_same_run(example: Path, tmp_path: Path) -> None:
    first = write_report(example, out=tmp_path / "deep" / "a.html").read_bytes()
    assert write_report(example, out=tmp_path / "b.html").read_bytes() == first


def test_what_a_model_wrote_is_text_not_markup(tmp_path: Path) -> None:
    write_example_run(tmp_path, 2)
    samples = SamplesFile(tmp_path / "samples.jsonl", per_step=1)
    samples.write(3, [SampleText("<b>x</b>", "</pre><script>alert(1)</script>", None, "&amp;")])
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(Row(RowKind.EVENT, 2, 0.0, data={"name": "<i>", "message": "</td>"}))
    file.write(Row(RowKind.EVAL, 2, 0.0, metrics={"eval/<u>/greedy": 0.5}))
    page, parser = parse(write_report(tmp_path))
    assert "<script>alert" not in page
    assert "</pre><script>alert(1)</script>" in parser.text
    assert "&amp;" in parser.text
    assert "<u>" not in page


def test_a_run_with_a_single_bare_step_has_a_page(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(Row(RowKind.STEP, 1, 0.0, "0.1", {"train/loss": float("nan")}))
    _, parser = parse(write_report(tmp_path))
    text = " ".join(parser.text)
    for absence in (
        "No curves were recorded",
        "No step of the loop has ended",
        "No weights were published",
        "Memory was not recorded",
    ):
        assert absence in text


def test_staleness_has_a_chart_only_where_there_is_some(tmp_path: Path) -> None:
    for place, stale in (("sync", 0), ("async", 1)):
        file = MetricsFile(tmp_path / place / "metrics.jsonl")
        for step in (1, 2):
            file.write(Row(RowKind.STEP, step, 0.0, metrics={"rollout/staleness/max": stale, "rollout/staleness/mean": stale}))
    assert "Staleness of the oldest group" not in write_report(tmp_path / "sync").read_text()
    assert "Staleness of the oldest group" in write_report(tmp_path / "async").read_text()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0"),
        (512, "512 B"),
        (3_313_664, "3.2 MiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
