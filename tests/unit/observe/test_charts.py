import json
import math
import re
from html import unescape
from typing import Any

import pytest

from vime.observe.charts import (
    Series,
    line_chart,
    log_ticks,
    nice_ticks,
    running_mean,
    share_bar,
    stacked_bars,
    thin,
    tick_label,
)


def hover(svg: str) -> dict[str, Any]:
    found = re.search(r'data-hover="([^"]*)"', svg)
    assert found is not None
    return json.loads(unescape(found.group(1)))


def line_points(svg: str, colour: str) -> list[tuple[float, float]]:
    found = re.search(rf'class="line {colour}[^"]*" d="([^"]*)"', svg)
    assert found is not None
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", found.group(1))]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.03, 0.021, [-0.03, -0.02, -0.01, 0, 0.01, 0.02]),
        (1, 200, [50, 100, 150, 200]),
        (2, 2, [2]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks, rel=1e-9, abs=1e-18)


def test_log_ticks_are_powers_of_ten_with_more_where_they_are_few() -> None:
    assert log_ticks(3e-8, 2e-3) == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
    assert log_ticks(3e-7, 9e-7) == pytest.approx([5e-7])
    assert len(log_ticks(1e-12, 1e6)) <= 10


def test_labels_are_short() -> None:
    values = [0, 0.05, -0.02, 1, 150, 12000, 3e6, 2.5e9, 1e-6, 2e-7, -5e-7]
    assert [tick_label(v) for v in values] == [
        "0", "0.05", "-0.02", "1", "150", "12k", "3M", "2.5G", "10⁻⁶", "2·10⁻⁷", "-5·10⁻⁷",
    ]  # fmt: skip


def test_running_mean_skips_what_is_no_number() -> None:
    points = [(1, 1.0), (2, 3.0), (3, None), (4, math.nan), (5, 5.0)]
    assert running_mean(points, 2) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, None), (5, 5.0)]


def test_thinning_keeps_the_mean_or_the_peak() -> None:
    points = [(step, float(step)) for step in range(1, 10)]
    assert thin(points, 3, max) == [(1, 3.0), (4, 6.0), (7, 9.0)]
    assert thin(points, 9, max) == points
    assert thin([(1, None), (2, math.nan)], 1, max) == [(1, None)]


def test_a_line_is_drawn_to_scale() -> None:
    svg = line_chart([Series("a", [(0, 0.0), (5, 1.0), (10, 2.0)], "c2")], unit="nat", size=(540, 230))
    (x0, y0), (x1, y1), (x2, y2) = line_points(svg, "c2")
    assert (x0, x2) == (52.0, 528.0)
    assert x1 == pytest.approx(290, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert y0 == 196.0, "a range that begins at 0 has its axis there"
    assert ">nat</text>" in svg
    assert ">step</text>" in svg


def test_a_log_axis_spaces_decades_evenly_and_leaves_out_zero() -> None:
    svg = line_chart([Series("a", [(1, 1e-7), (2, 1e-6), (3, 0.0), (4, 1e-5)], "c1")], log=True)
    (_, y0), (_, y1), (_, y2) = line_points(svg, "c1")
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_gaps_break_the_line_and_steps_that_are_not_finite_are_marked() -> None:
    svg = line_chart([Series("a", [(1, 1.0), (2, None), (3, 2.0), (4, math.nan), (5, math.inf), (6, 1.0)], "c1")])
    path = re.search(r'class="line c1" d="([^"]*)"', svg)
    assert path is not None
    assert path.group(1).count("M") == 3
    assert svg.count('class="broken"') == 2
    assert "nan" not in path.group(1)


def test_hovering_shows_the_values_of_a_step() -> None:
    svg = line_chart([Series('a "quoted" <name>', [(1, 0.125), (2, None)], "c1")])
    assert "<name>" not in svg
    data = hover(svg)
    assert [step for step, _ in data["x"]] == [1, 2]
    assert data["s"] == [{"n": 'a "quoted" <name>', "c": "c1", "v": {"1": "0.125"}}]


@pytest.mark.parametrize("points", [[], [(1, None)], [(1, math.nan), (2, math.inf)]])
def test_nothing_to_draw_is_no_chart(points: list[tuple[int, float | None]]) -> None:
    assert line_chart([Series("a", points)]) == ""
    assert stacked_bars([], unit="s") == ""


def test_one_point_is_visible() -> None:
    svg = line_chart([Series("a", [(7, 3.0)])])
    assert svg.count("<circle") == 1


def test_bars_stack_to_scale() -> None:
    svg = stacked_bars([("low", "c1", [(1, 1.0), (2, 1.0)]), ("high", "c2", [(1, 3.0), (2, 0.0)])], unit="s")
    bars = re.findall(r'<rect class="(c\d)" x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', svg)
    assert [colour for colour, *_ in bars] == ["c1", "c2", "c1"]
    low, high, _ = [(float(y), float(height)) for _, _, y, height in bars]
    assert high[1] == pytest.approx(3 * low[1], abs=0.3)
    assert high[0] + high[1] == pytest.approx(low[0], abs=0.2)


def test_a_bar_far_beyond_the_others_is_cut_and_marked() -> None:
    points = [(1, 100.0), *((step, 1.0) for step in range(2, 200))]
    svg = stacked_bars([("a", "c1", points)], unit="s")
    heights = [float(h) for h in re.findall(r'<rect [^>]* height="([\d.]+)"', svg)]
    assert svg.count('class="broken"') == 1
    assert heights[0] < 1.3 * heights[1]


def test_long_runs_stay_small() -> None:
    points = [(step, 1.0) for step in range(20000)]
    assert line_chart([Series("a", points)]).count("L") <= 400
    assert stacked_bars([("a", "c1", points)], unit="s").count("<rect") <= 200


def test_a_share_bar_fills_its_width() -> None:
    widths = [float(w) for w in re.findall(r'width="([\d.]+)"', share_bar([("c1", 0.25), ("c2", 0.75)]))]
    assert widths == [250.0, 750.0]
