"""Plots as SVG text: bars for a few series, and curves over two logarithmic axes."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

COLOURS: Final = ("#3b7dc4", "#e08a3c", "#2f9e8f", "#a05195", "#7a8793", "#c0504d")
_WIDTH: Final = 720
_BARS_LEFT: Final = 250
_BAR_HEIGHT: Final = 11
_LINE: Final = "#5f6b7c"
_INTERVAL: Final = "#1a2230"


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        value: Its length.
        low: Lower end of the interval of the value; None if there is none.
        high: Upper end of the interval; None if there is none.
        faint: Whether to draw it faint.
    """

    value: float
    low: float | None = None
    high: float | None = None
    faint: bool = False

    @property
    def end(self) -> float:
        """The largest value that it shows."""
        return self.value if self.high is None else max(self.value, self.high)


def bars(
    title: str,
    series: Mapping[str, Mapping[str, Bar | None]],
    unit: str,
    *,
    reference: float | None = None,
    note: str = "",
) -> str:
    """One group of bars for each row, with a bar for each series.

    Args:
        title: Title of the plot.
        series: Name of the series -> name of the row -> its bar; None for no bar.
        unit: Unit of the values, with which each bar is labelled.
        reference: A value to draw a line at.
        note: Text below the bars.
    """
    names = list(dict.fromkeys(name for values in series.values() for name in values))
    left, right, bar = _BARS_LEFT, 640, _BAR_HEIGHT
    group = bar * len(series) + 12
    top = 30 + 18 * math.ceil(len(series) / 2)
    bottom = top + group * len(names)
    known = [each.end for values in series.values() for each in values.values() if each is not None]
    scale = (right - left) / max([*known, reference or 0.0, 1e-9])
    parts = [_head(title, bottom + 20), *_legend(series)]
    for place, name in enumerate(names):
        y = top + group * place
        middle = y + bar * len(series) / 2 + 4
        parts.append(_text(left - 8, middle, name, anchor="end"))
        for number, values in enumerate(series.values()):
            drawn = values.get(name)
            if drawn is not None:
                colour = COLOURS[number % len(COLOURS)]
                parts += _bar(drawn, y + bar * number, scale, colour, unit)
    if reference is not None:
        x = left + scale * reference
        parts.append(
            f'<path d="M{x:.1f} {top - 4}V{bottom}" stroke="{_LINE}" stroke-dasharray="3 3"/>'
        )
    parts.append(_text(left, bottom + 12, note))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(bar: Bar, y: float, scale: float, colour: str, unit: str) -> list[str]:
    """A bar with its interval and its label."""
    left, height = _BARS_LEFT, _BAR_HEIGHT
    opacity = ' fill-opacity="0.4"' if bar.faint else ""
    parts = [
        f'<rect x="{left}" y="{y}" width="{max(scale * bar.value, 1.0):.1f}" '
        f'height="{height - 1}" fill="{colour}"{opacity}/>'
    ]
    if bar.low is not None and bar.high is not None:
        low, high = left + scale * bar.low, left + scale * bar.high
        parts.append(
            f'<path d="M{low:.1f} {y + (height - 1) / 2}H{high:.1f}" stroke="{_INTERVAL}"/>'
        )
    label = f"{bar.value:.3g} {unit}".strip()
    return [*parts, _text(left + scale * bar.end + 4, y + 9, label, size=10)]


def curves(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], x_unit: str, y_unit: str
) -> str:
    """One curve for each series; both axes are logarithmic.

    Args:
        title: Title of the plot.
        series: Name -> (x, y) in order of x, all above zero.
        x_unit: Unit of the x axis.
        y_unit: Unit of the y axis.
    """
    rows = 18 * math.ceil(len(series) / 2)
    left, right, top, bottom = 70, 700, 40 + rows, 340 + rows
    points = [point for values in series.values() for point in values]
    parts = [_head(title, bottom + 50), *_legend(series)]
    if not points:
        return "\n".join([*parts, "</svg>"]) + "\n"
    low_x, high_x = _decades(x for x, _ in points)
    low_y, high_y = _decades(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * (math.log10(x) - low_x) / (high_x - low_x),
            bottom - (bottom - top) * (math.log10(y) - low_y) / (high_y - low_y),
        )

    for power in range(low_x, high_x + 1):
        x, _ = at(10.0**power, 10.0**low_y)
        parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="#e3e7ec"/>')
        parts.append(_text(x, bottom + 16, f"{10.0**power:g}", anchor="middle"))
    for power in range(low_y, high_y + 1):
        _, y = at(10.0**low_x, 10.0**power)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#e3e7ec"/>')
        parts.append(_text(left - 6, y + 4, f"{10.0**power:g}", anchor="end"))
    parts.append(_text((left + right) / 2, bottom + 36, x_unit, anchor="middle"))
    parts.append(_text(8, top - 10, y_unit))
    for number, values in enumerate(series.values()):
        colour = COLOURS[number % len(COLOURS)]
        places = [at(x, y) for x, y in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head(title: str, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#ffffff"/>\n'
        f"<title>{html.escape(title)}</title>"
    )


def _legend(names: Iterable[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        x, y = 20 + 350 * (number % 2), 12 + 18 * (number // 2)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, y + 10, name))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{html.escape(text)}</text>"
    )


def _decades(values: Iterable[float]) -> tuple[int, int]:
    """Powers of ten that enclose all values."""
    known = list(values)
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    return low, max(high, low + 1)
