"""Draws charts over steps as SVG, readable without a script, on paper and with a screen reader.

A plot stretches to any width: its SVG has only lines, whose strokes do not scale, and its ticks are
HTML beside it. The script of the page adds a crosshair and a zoom.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from spmdtrain.lab.page.columns import Thinned, thinned
from spmdtrain.lab.page.formats import number, safe

WIDTH, HEIGHT = 1000.0, 100.0  # of a plot's coordinates
MARGIN = 0.05  # of the height, above and below the curves
FAR = 3.0  # times the 99.5th percentile; values beyond it are cut off, as of a first step
Kind = Literal["line", "faint", "dots"]


@dataclass(frozen=True)
class Line:
    """A curve of a chart. `style` names its CSS classes. Screen readers skip faint ones."""

    label: str
    style: str
    points: Thinned
    kind: Kind


@dataclass
class Chart:
    """A chart of curves over the steps up to `last`."""

    key: str
    title: str
    note: str
    last: float
    buckets: int
    is_log: bool = False
    from_zero: bool = False
    is_tall: bool = False
    lines: list[Line] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)  # (step, why) of troubles

    def add(
        self, label: str, style: str, x: np.ndarray, y: np.ndarray, kind: Kind = "line"
    ) -> None:
        """Adds a curve, unless it has no points."""
        if self.is_log:
            y = np.where(y > 0, y, math.nan)
        points = thinned(x, y, self.buckets)
        if len(points.x):
            self.lines.append(Line(label, style, points, kind))

    def html(self) -> str:
        """Returns the figure, or "" if there is nothing to draw."""
        if not self.lines:
            return ""
        scale = _Scale(self)
        read = [line for line in self.lines if line.kind != "faint"]
        at_end = "; ".join(
            f"{line.label} {number(float(line.points.mean[-1]), 4)} "
            f"at step {line.points.x[-1]:,.0f}"
            for line in read
        )
        spoken = safe(f"{self.title}. {self.note}. At the end: {at_end}.")
        body = "".join(
            [
                *(f'<path class="grid" d="M0 {scale.y(v):.1f}H1000"/>' for v in scale.ticks),
                *(f'<path class="mark" d="M{scale.x(at):.1f} 0V100"/>' for at, _ in self.marks),
                *(_drawn(line, scale) for line in self.lines),
            ]
        )
        keys = "".join(
            f'<li class="{line.style} {line.kind}"><i></i>{safe(line.label)}</li>' for line in read
        )
        ticks_y = "".join(
            f'<span style="top:{scale.y(v):.1f}%">{tick(v)}</span>' for v in scale.ticks
        )
        ticks_x = "".join(
            f'<span style="left:{scale.x(v) / 10:.1f}%">{tick(v)}</span>'
            for v in round_numbers(0, self.last, 7)
        )
        scales = (
            f'data-last="{self.last:g}" data-low="{scale.low:.6g}" data-high="{scale.high:.6g}"'
        )
        log = " data-log" if self.is_log else ""
        return (
            f'<figure class="chart{" tall" if self.is_tall else ""}" id="{self.key}" {scales}{log}>'
            f"<figcaption><b>{safe(self.title)}</b> <span>{safe(self.note)}</span></figcaption>"
            f"{f'<ul class=keys>{keys}</ul>' if len(read) > 1 else ''}"
            f'<div class="plot"><div class="y" aria-hidden="true">{ticks_y}</div>'
            f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
            f'aria-label="{spoken}">{body}</svg>'
            f'<div class="x" aria-hidden="true">{ticks_x}</div></div>'
            f'<script type="application/json">{_data(read)}</script></figure>'
        )


class _Scale:
    """The scale of a chart: places values at x from 0 to 1000 and y from 0 (top) to 100."""

    def __init__(self, chart: Chart):
        parts = [column for line in chart.lines for column in line.points[1:] if column is not None]
        values = np.concatenate(parts)
        low, high = float(values.min()), float(values.max())
        if not chart.is_log and not chart.from_zero:
            usual = float(np.quantile(values, 0.995))
            high = usual if high > FAR * abs(usual) else high
        self._is_log = chart.is_log
        self._last = chart.last or 1.0
        low, high = self._of(low), self._of(high)
        pad = (high - low) * MARGIN or abs(high) * 0.1 or 1.0
        self.low = min(0.0, low) if chart.from_zero else low - pad
        self.high = high + pad
        self.ticks = self._ticks(5 if chart.is_tall else 4)

    def _of(self, value):
        return np.log10(value) if self._is_log else value

    def x(self, step):
        return WIDTH * step / self._last

    def y(self, value):
        part = (self._of(value) - self.low) / (self.high - self.low)
        return np.clip(HEIGHT * (1 - part), -5.0, HEIGHT + 5.0)

    def _ticks(self, count: int) -> list[float]:
        if not self._is_log:
            ticks = round_numbers(self.low, self.high, count)
            return [value for value in ticks if self.low <= value <= self.high]
        ticks = powers(self.low, self.high, 7)
        if len(ticks) >= 2:
            return ticks
        return [v for v in round_numbers(10**self.low, 10**self.high, count) if v > 0]


def powers(low: float, high: float, count: int) -> list[float]:
    """Returns at most `count` round numbers between the powers of ten `low` and `high`."""
    whole = range(math.floor(low), math.ceil(high) + 1)
    numbers: list[float] = []
    for digits in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        numbers = [digit * 10.0**power for power in whole for digit in digits]
        numbers = [value for value in numbers if low <= math.log10(value) <= high]
        if len(numbers) <= count:
            return numbers
    return numbers[:: -(-len(numbers) // count)]


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`."""
    step = (high - low) / count
    if not step > 0 or not math.isfinite(step):
        return [low]
    power = 10.0 ** math.floor(math.log10(step))
    step = next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= step * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{at * step:.12g}") for at in range(first, last + 1)]


def tick(value: float) -> str:
    """Returns the label of a tick."""
    if value and not 1e-3 <= abs(value) < 1e4:
        return number(value, 3).replace(" ", "\N{NARROW NO-BREAK SPACE}")
    return f"{value:g}"


def _drawn(line: Line, scale: _Scale) -> str:
    x, mean, lowest, highest = line.points
    if line.kind == "dots":
        dots = "".join(f"M{u:.1f} {v:.1f}h0" for u, v in _at(x, mean, scale))
        return (
            f'<path class="join {line.style}" d="{_path(x, mean, scale)}"/>'
            f'<path class="dots {line.style}" d="{dots}"/>'
        )
    band = ""
    if lowest is not None and highest is not None:
        back = _path(x[::-1], lowest[::-1], scale)[1:]
        band = f'<path class="band {line.style}" d="{_path(x, highest, scale)}L{back}Z"/>'
        if line.kind == "faint":
            return band
    return f'{band}<path class="{line.kind} {line.style}" d="{_path(x, mean, scale)}"/>'


def _at(x: np.ndarray, y: np.ndarray, scale: _Scale) -> list[tuple[float, float]]:
    return list(zip(scale.x(x).tolist(), scale.y(y).tolist(), strict=True))


def _path(x: np.ndarray, y: np.ndarray, scale: _Scale) -> str:
    return "M" + "L".join(f"{u:.1f} {v:.2f}" for u, v in _at(x, y, scale))


def _data(lines: Sequence[Line]) -> str:
    """Returns the points for the script, as JSON that cannot close an HTML element."""
    values = [
        {
            "label": line.label,
            "style": line.style,
            "x": [round(float(step)) for step in line.points.x],
            "y": [float(f"{value:.4g}") for value in line.points.mean],
        }
        for line in lines
    ]
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
