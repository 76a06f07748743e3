"""A drawing as text: shapes in pixels, plots with axes, colours for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH = 760
STYLE = """
text { font: 13px sans-serif; fill: #1c2833 } .small { font-size: 11px } .bold { font-weight: bold }
.line { stroke: #1c2833; fill: none } .faint { stroke: #1c2833; stroke-opacity: .25; fill: none }
.plain { fill: #8a97a3 } .a { fill: #00796b } .b { fill: #d9661f } .c { fill: #5b4bb7 }
.a-line { stroke: #00796b } .b-line { stroke: #d9661f } .c-line { stroke: #5b4bb7 } .plain-line { stroke: #8a97a3 }
.a-line, .b-line, .c-line, .plain-line { fill: none; stroke-width: 2 } .dashed { stroke-dasharray: 5 4 }
.pale { fill: #8a97a3; fill-opacity: .2 }
@media (prefers-color-scheme: dark) {
text { fill: #e4e9ee } .line, .faint { stroke: #e4e9ee } .a { fill: #4db6ac } .b { fill: #ffa366 } .c { fill: #a99cf5 }
.a-line { stroke: #4db6ac } .b-line { stroke: #ffa366 } .c-line { stroke: #a99cf5 } }
"""


def number(value: float) -> str:
    """Return a coordinate with two digits, the shortest way."""
    return (
        f"{value:.2f}".rstrip("0").rstrip(".").replace("-0", "0")
        if abs(value) < 0.005
        else f"{value:.2f}".rstrip("0").rstrip(".")
    )


@dataclass
class Drawing:
    """Shapes one after the other, and what the picture shows in words, for readers who do not see it."""

    height: int
    words: str
    parts: list[str] = field(default_factory=list)

    def shape(self, name: str, css: str, **attributes: float | str) -> None:
        said = (
            f'{key.replace("_", "-")}="{number(v) if not isinstance(v, str) else v}"' for key, v in attributes.items()
        )
        self.parts.append(f'<{name} class="{css}" {" ".join(said)}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str = "line") -> None:
        self.shape("line", css, x1=x1, y1=y1, x2=x2, y2=y2)

    def box(self, x: float, y: float, width: float, height: float, css: str) -> None:
        """Draw a rectangle; a negative height goes up."""
        self.shape("rect", css, x=x, y=min(y, y + height), width=width, height=abs(height))

    def dot(self, x: float, y: float, css: str, radius: float = 3.5) -> None:
        self.shape("circle", css, cx=x, cy=y, r=radius)

    def path(self, points: Iterable[tuple[float, float]], css: str) -> None:
        self.shape("polyline", css, points=" ".join(f"{number(x)},{number(y)}" for x, y in points))

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text class="{css}" x="{number(x)}" y="{number(y)}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def save(self, path: Path) -> None:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">'
        body = "\n".join(
            (head, f"<title>{escape(self.words)}</title>", f"<style>{STYLE}</style>", *self.parts, "</svg>")
        )
        path.write_text(body + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A rectangle of a drawing with a scale on each side."""

    drawing: Drawing
    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def ticks(self, ys: Sequence[float], label: str = "{:g}") -> None:
        """Draw horizontal lines with their values at the left."""
        for y in ys:
            (x1, pixel), x2 = self.at(self.x[0], y), self.left + self.width
            self.drawing.line(x1, pixel, x2, pixel, "faint")
            self.drawing.text(x1 - 6, pixel + 4, label.format(y), "small", "end")

    def line(self, xs: Sequence[float], ys: Sequence[float], css: str) -> None:
        self.drawing.path((self.at(x, y) for x, y in zip(xs, ys, strict=True)), css)

    def bars(self, values: Sequence[float], css: str, shift: float = 0, width: float = 0.3) -> None:
        """Draw bars from zero at 0, 1, 2, ….; shift and width in units of x."""
        for index, value in enumerate(values):
            (x1, zero), (x2, end) = self.at(index + shift, 0), self.at(index + shift + width, value)
            self.drawing.box(x1, zero, x2 - x1, end - zero, css)
