"""Charts as inline SVG: lines over steps and stacked bars, with axes that carry units. Colours come from the page's CSS."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from vime.observe.metrics import Number

MAX_POINTS = 400
MAX_BARS = 200

Point = tuple[int, Number | None]


@dataclass(frozen=True, slots=True)
class Series:
    """A line. `colour` is a CSS class (`c1` to `c4`), `faint` draws it thin behind others, `dots` marks its points.

    Where points are too many to draw, neighbours become their mean, or their maximum if `peaks`.
    """

    name: str
    points: Sequence[Point]
    colour: str = "c1"
    faint: bool = False
    dots: bool = False
    peaks: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area inside a view box, in pixels, and the ranges that it shows. `whole`: only whole numbers get a tick."""

    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False
    whole: bool = False
    left: float = 52.0
    right: float = 12.0
    top: float = 22.0
    bottom: float = 34.0

    def px(self, x: float) -> float:
        low, high = self.x
        share = (x - low) / (high - low) if high > low else 0.5
        return self.left + share * (self.width - self.left - self.right)

    def py(self, y: float) -> float:
        low, high = (math.log10(v) for v in self.y) if self.log else self.y
        value = math.log10(y) if self.log else y
        share = (value - low) / (high - low) if high > low else 0.5
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of the last `window` finite values at every step; None where there is none."""
    result: list[Point] = []
    for end, (step, _) in enumerate(points, start=1):
        values = [v for _, v in points[max(0, end - window) : end] if v is not None and math.isfinite(v)]
        result.append((step, sum(values) / len(values) if values else None))
    return result


def thin(points: Sequence[Point], limit: int, reduce: Callable[[Sequence[Number]], Number]) -> list[Point]:
    """At most `limit` points: neighbours become one, at the first one's step. None where a bucket holds no finite value."""
    size = math.ceil(len(points) / limit) if points else 1
    if size == 1:
        return list(points)
    result: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        values = [v for _, v in bucket if v is not None and math.isfinite(v)]
        result.append((bucket[0][0], reduce(values) if values else None))
    return result


def average(values: Sequence[Number]) -> float:
    return sum(values) / len(values)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high]; as many as fit into `count` intervals."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    for factor in (1, 2, 5, 10):
        step = power * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first <= count:
            break
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], every nth where they are many; also 2 and 5 times them where they are few."""
    decades = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
    stride = max(1, len(decades) // 6)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = (factor * 10.0**decade for decade in decades if decade % stride == 0 for factor in factors)
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def tick_label(value: float) -> str:
    """Short: `0.05`, `1.2k`, `3M`, `2e-7` as `2·10⁻⁷`."""
    magnitude = abs(value)
    if value == 0:
        return "0"
    if magnitude < 1e-3:
        exponent = math.floor(math.log10(magnitude) + 1e-9)
        mantissa = value / 10.0**exponent
        power = power_of_ten(exponent)
        return power if abs(mantissa - 1) < 1e-6 else f"{mantissa:.3g}·{power}"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if magnitude >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.4g}"


def power_of_ten(exponent: int) -> str:
    """`10⁻⁷`."""
    return "10" + str(exponent).translate(_SUPERSCRIPT)


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def line_chart(series: Sequence[Series], *, unit: str = "", log: bool = False, size: tuple[int, int] = (540, 230)) -> str:
    """An SVG with the lines over steps; empty text where no series holds a finite value.

    On a log axis values that are not positive are left out. Steps with NaN or infinity get a mark on the top edge.
    """
    thinned = (replace(s, points=thin(s.points, MAX_POINTS, max if s.peaks else average)) for s in series)
    shown = [s for s in thinned if any(_drawable(v, log) for _, v in s.points)]
    if not shown:
        return ""
    values = [v for s in shown for _, v in s.points if v is not None and _drawable(v, log)]
    steps = [step for s in shown for step, _ in s.points]
    whole = all(float(value).is_integer() for value in values)
    frame = Frame(*size, x=_step_range(steps), y=_log_range(values) if log else _linear_range(values), log=log, whole=whole)
    body = _axes(frame, unit)
    body += [_line(frame, s) for s in shown]
    broken = sorted({step for s in series for step, v in s.points if v is not None and not math.isfinite(v)})
    body += [
        f'<path class="broken" d="M{frame.px(x):.1f} {frame.top}l-4 -7h8z"><title>not finite</title></path>' for x in broken
    ]
    hover = {"x": _hover_steps(frame, steps), "s": [_hover_series(s) for s in shown]}
    return _svg(frame, body, hover)


def stacked_bars(parts: Sequence[tuple[str, str, Sequence[Point]]], *, unit: str, size: tuple[int, int] = (1100, 260)) -> str:
    """An SVG with one bar a step; `parts` are (name, CSS class, values), the first at the bottom, all over the same steps.

    The axis ends a little above the 98th percentile; a bar beyond it is cut and marked.
    """
    columns = [(name, colour, thin(points, MAX_BARS, average)) for name, colour, points in parts]
    steps = [step for step, _ in columns[0][2]] if columns else []
    if not steps:
        return ""
    totals = [sum(points[i][1] or 0.0 for _, _, points in columns) for i in range(len(steps))]
    ordered = sorted(totals)
    usual = ordered[min(len(ordered) - 1, int(0.98 * len(ordered)))]
    limit = ordered[-1] if ordered[-1] <= 1.6 * usual else 1.15 * usual
    frame = Frame(*size, x=(-0.5, len(steps) - 0.5), y=(0.0, (limit or 1.0) * 1.02))
    pitch = frame.px(1) - frame.px(0) if len(steps) > 1 else 40.0
    bar = max(1.0, min(40.0, pitch - (1.0 if pitch > 3 else 0.0)))
    body = _axes(frame, unit, labels=[(i, steps[i]) for i in _label_places(steps)])
    for i in range(len(steps)):
        body += _bar(frame, i, bar, [(colour, points[i][1] or 0.0) for _, colour, points in columns])
    hover = {"x": [[step, round(frame.px(i), 1)] for i, step in enumerate(steps)]}
    series = [{"n": name, "c": colour, "v": {s: _short(v) for s, v in points}} for name, colour, points in columns]
    return _svg(frame, body, {**hover, "s": series})


def share_bar(parts: Iterable[tuple[str, float]]) -> str:
    """A thin horizontal bar of shares: (CSS class, share)."""
    body, x = [], 0.0
    for colour, share in parts:
        body.append(f'<rect class="{colour}" x="{x * 1000:.2f}" y="0" width="{max(0.0, share) * 1000:.2f}" height="10"/>')
        x += share
    return f'<svg class="share" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">{"".join(body)}</svg>'


def _drawable(value: Number | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _step_range(steps: Sequence[int]) -> tuple[float, float]:
    low, high = min(steps), max(steps)
    return (low, high) if high > low else (low - 1, high + 1)


def _linear_range(values: Sequence[Number]) -> tuple[float, float]:
    low, high = float(min(values)), float(max(values))
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    bottom = low - margin
    return (0.0 if low >= 0 > bottom or 0 <= low <= 0.5 * high else bottom), high + margin


def _log_range(values: Sequence[Number]) -> tuple[float, float]:
    low, high = min(values) / 1.6, max(values) * 1.6
    return low, high


def _axes(frame: Frame, unit: str, labels: Sequence[tuple[float, int]] | None = None) -> list[str]:
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    body = []
    for value in log_ticks(*frame.y) if frame.log else nice_ticks(*frame.y):
        if frame.whole and not float(value).is_integer():
            continue
        y = frame.py(value)
        body.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="tick" x="{frame.left - 7}" y="{y + 3.5:.1f}" text-anchor="end">{tick_label(value)}</text>')
    if labels is None:
        labels = [(x, round(x)) for x in nice_ticks(*frame.x, count=6) if x == round(x)]
    for place, step in labels:
        x = frame.px(place)
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        body.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{step}</text>')
    body.append(f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    body.append(f'<text class="unit" x="{right}" y="{frame.height - 4}" text-anchor="end">step</text>')
    if unit:
        body.append(f'<text class="unit" x="{frame.left - 7}" y="11" text-anchor="end">{escape(unit)}</text>')
    return body


def _line(frame: Frame, series: Series) -> str:
    parts, drawing = [], False
    for step, value in series.points:
        if value is None or not _drawable(value, frame.log):
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{frame.px(step):.1f} {frame.py(value):.1f}")
        drawing = True
    weight = " faint" if series.faint else ""
    path = f'<path class="line {series.colour}{weight}" d="{"".join(parts)}"/>'
    if series.dots or len(parts) == 1:
        places = ((frame.px(x), frame.py(v)) for x, v in series.points if v is not None and _drawable(v, frame.log))
        path += "".join(f'<circle class="{series.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' for x, y in places)
    return path


def _bar(frame: Frame, place: int, width: float, parts: Iterable[tuple[str, Number]]) -> list[str]:
    left, base, limit = frame.px(place) - width / 2, 0.0, frame.y[1]
    body = []
    for colour, value in parts:
        top = min(base + max(0.0, value), limit)
        if top > base:
            y = frame.py(top)
            height = frame.py(base) - y
            body.append(f'<rect class="{colour}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>')
        base += max(0.0, value)
    if base > limit * 1.001:
        body.append(
            f'<path class="broken" d="M{left + width / 2:.1f} {frame.top - 8}l-4 7h8z"><title>beyond the axis</title></path>'
        )
    return body


def _label_places(steps: Sequence[int]) -> list[int]:
    """Positions of round steps; all of them where they are few."""
    if len(steps) <= 8:
        return list(range(len(steps)))
    wanted = [round(t) for t in nice_ticks(steps[0], steps[-1], count=10)]
    nearest = (min(range(len(steps)), key=lambda i: abs(steps[i] - want)) for want in wanted)
    return sorted(set(nearest))


def _hover_steps(frame: Frame, steps: Iterable[int]) -> list[list[float]]:
    return [[step, round(frame.px(step), 1)] for step in sorted(set(steps))]


def _hover_series(series: Series) -> dict[str, object]:
    return {"n": series.name, "c": series.colour, "v": {step: _short(v) for step, v in series.points if v is not None}}


def _short(value: Number | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _svg(frame: Frame, body: Sequence[str], hover: object) -> str:
    data = escape(json.dumps(hover, separators=(",", ":")), quote=True)
    edge = f'data-top="{frame.top}" data-bottom="{frame.height - frame.bottom}"'
    head = f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" role="img" {edge} data-hover="{data}">'
    return head + "".join(body) + '<line class="cross" visibility="hidden"/></svg>'
