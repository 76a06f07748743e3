"""Line charts and coloured tables for an HTML page: SVG and plain markup, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 22, 10, 34
SERIES = 8
"""Colours of the style sheet."""


class Series(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers between two."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(title: str, series: Sequence[Series], unit: str, across: str = "step") -> str:
    """Return a figure with a line for each series; one without points is left out.

    Args:
        title: says what is shown.
        series: in the order of their colours.
        unit: of the values.
        across: what the points lie along.
    """
    shown = [(i % SERIES, one) for i, one in enumerate(series) if one.points]
    if not shown:
        return ""
    xs = [x for _, one in shown for x, _ in one.points]
    ys = [y for _, one in shown for _, y in one.points]
    (x0, x1), (y0, y1) = (min(xs), max(xs)), (min(ys), max(ys))
    x1, margin = max(x1, x0 + 1e-9), 0.06 * (y1 - y0) or abs(y1) * 0.1 or 1.0
    y0, y1 = y0 - margin, y1 + margin

    def at(x: float, y: float) -> tuple[float, float]:
        across_px = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return round(across_px, 1), round(TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM), 1)

    parts = []
    for tick in _ticks(y0, y1, 5):
        _, y = at(x0, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(x0, x1, 6):
        x, _ = at(tick, y0)
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for colour, one in shown:
        line = " ".join(f"{x},{y}" for x, y in (at(*point) for point in one.points))
        last = at(*one.points[-1])
        parts.append(f'<polyline class="s{colour}" points="{line}"><title>{escape(one.name)}</title></polyline>')
        parts.append(f'<circle class="s{colour}" cx="{last[0]}" cy="{last[1]}" r="3"/>')
    names = "".join(f'<li class="s{colour}">{escape(one.name)}</li>' for colour, one in shown)
    label = f"{title}, {unit} along {across}"
    return (
        f'<figure><figcaption>{escape(title)} <span class="unit">{escape(unit)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
        f'<ul class="legend">{names}</ul></figure>'
    )


def heat_table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """Return a table whose cells are coloured by value, the lowest most: low is what to look at."""
    known = [value for _, values in rows for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)

    def cell(value: float | None) -> str:
        if value is None:
            return "<td>-</td>"
        share = 0 if high == low else round(70 * (high - value) / (high - low))
        return f'<td style="--heat:{share}%">{value:.1f}</td>'

    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in ("layer", *columns))
    body = "".join(f"<tr><th scope=row>{escape(name)}</th>{''.join(map(cell, values))}</tr>" for name, values in rows)
    return scrolled(title, f'<table class="heat"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def text_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts."""
    top = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return scrolled(title, f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>")


def scrolled(title: str, content: str) -> str:
    """Return content that scrolls by itself where it is wider than the page; reached by the keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">{content}</div>'
