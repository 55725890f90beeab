"""Pictures of measurements as SVG, written plainly: a plotting library would weigh far more."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

# Okabe and Ito's colours, which every eye tells apart; plain decoding is grey.
COLOURS = (
    "#7f7f7f",
    "#e69f00",
    "#0072b2",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#000000",
    "#f0e442",
)
FONT = 'font-family="sans-serif" font-size="12"'
MARGIN = (64, 20, 44, 40)  # left, right, bottom, top, in pixels
PANEL = (420, 280)
LETTER = 7.0  # pixels of a letter, rather more than most take


@dataclass
class Drawing:
    """Shapes on a white page."""

    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> None:
        self.shapes.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}" stroke-width="{width:g}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, tip: str) -> None:
        """A filled rectangle. tip: shown by browsers under the pointer."""
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
            f'fill="{colour}"><title>{escape(tip)}</title></rect>'
        )

    def dot(self, x: float, y: float, colour: str, tip: str) -> None:
        self.shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(tip)}</title></circle>"
        )

    def text(self, x: float, y: float, words: str, anchor: str = "start", style: str = "") -> None:
        """anchor: start, middle or end."""
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {FONT} {style}>'
            f"{escape(words)}</text>"
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}">'
        )
        page = '<rect width="100%" height="100%" fill="white"/>'
        path.write_text("\n".join([head, page, *self.shapes, "</svg>\n"]), encoding="utf-8")


@dataclass(frozen=True)
class Point:
    """One measurement: its median and the range around it."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """Lines over batch sizes, one a name; an empty one keeps its colour.

    level: a height at which a line is drawn, such as 1 of a ratio.
    """

    title: str
    x_label: str
    lines: Mapping[str, Sequence[Point]]
    level: float | None = None


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to at least `top`, four to eight of them."""
    step = 10 ** math.floor(math.log10(top)) if top > 0 else 1.0
    for factor in (0.2, 0.25, 0.5, 1.0, 2.0):
        if top / (step * factor) <= 7:
            step *= factor
            break
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def draw_panels(panels: Sequence[Panel], notes: Sequence[str]) -> Drawing:
    """Panels side by side, a legend, and below it the conditions."""
    left, right, bottom, top = MARGIN
    width = len(panels) * (PANEL[0] + left + right)
    notes = _wrapped(notes, width - left - right)
    height = top + PANEL[1] + bottom + 26 + 16 * len(notes)
    drawing = Drawing(width, height)
    for i, panel in enumerate(panels):
        _draw_panel(drawing, panel, i * (PANEL[0] + left + right) + left, top)
    y = top + PANEL[1] + bottom + 8
    _legend(drawing, list(panels[0].lines), left, y)
    _notes(drawing, notes, left, y + 22)
    return drawing


def _draw_panel(drawing: Drawing, panel: Panel, x0: float, y0: float) -> None:
    width, height = PANEL
    points = [point for line in panel.lines.values() for point in line]
    xs = sorted({point.x for point in points}) or [1.0]
    marks = ticks(max([point.high for point in points] + [panel.level or 0.0], default=1.0) or 1.0)

    def across(x: float) -> float:  # by doublings
        span = math.log2(xs[-1] / xs[0])
        return x0 + width * ((0.04 + 0.92 * math.log2(x / xs[0]) / span) if span else 0.5)

    def up(y: float) -> float:
        return y0 + height * (1 - y / marks[-1])

    drawing.text(x0, y0 - 14, panel.title, style='font-weight="bold"')
    for mark in marks:
        drawing.line(x0, up(mark), x0 + width, up(mark), "#dddddd", 1)
        drawing.text(x0 - 6, up(mark) + 4, f"{mark:g}", "end")
    for x in xs:
        drawing.text(across(x), y0 + height + 18, f"{x:g}", "middle")
    drawing.text(x0 + width / 2, y0 + height + 36, panel.x_label, "middle")
    if panel.level is not None:
        drawing.line(x0, up(panel.level), x0 + width, up(panel.level), "#555555", 1)
    for (name, line), colour in zip(panel.lines.items(), _colours(panel.lines), strict=True):
        for a, b in itertools.pairwise(line):
            drawing.line(across(a.x), up(a.y), across(b.x), up(b.y), colour, 2)
        for p in line:
            drawing.line(across(p.x), up(p.low), across(p.x), up(p.high), colour, 1.5)
            tip = f"{name}, {p.x:g}: {p.y:.3g} ({p.low:.3g} to {p.high:.3g})"
            drawing.dot(across(p.x), up(p.y), colour, tip)


def draw_bars(
    title: str,
    unit: str,
    parts: Sequence[str],
    bars: dict[str, dict[str, float]],
    notes: Sequence[str],
) -> Drawing:
    """One bar a name, made of `parts` laid end to end, each in the same colour in every bar."""
    left, width, row, top = 110.0, 760.0, 34.0, 48.0
    notes = _wrapped(notes, width)
    marks = ticks(max((sum(bar.values()) for bar in bars.values()), default=1.0))
    bottom = top + row * len(bars)
    drawing = Drawing(left + width + 70, bottom + 74 + 16 * len(notes))
    drawing.text(left, 24, title, style='font-weight="bold"')
    for mark in marks:
        x = left + width * mark / marks[-1]
        drawing.line(x, top - 6, x, bottom, "#dddddd", 1)
        drawing.text(x, bottom + 16, f"{mark:g}", "middle")
    drawing.text(left + width + 30, bottom + 16, unit)
    for i, (name, bar) in enumerate(bars.items()):
        x, y = left, top + row * i
        drawing.text(left - 8, y + 17, name, "end")
        for part, colour in zip(parts, _colours(parts), strict=True):
            length = width * bar.get(part, 0.0) / marks[-1]
            tip = f"{name}, {part}: {bar.get(part, 0.0):.3g} {unit}"
            drawing.box(x, y, length, row - 10, colour, tip)
            x += length
        drawing.text(x + 6, y + 17, f"{sum(bar.values()):.3g}")
    _legend(drawing, parts, left, bottom + 40)
    _notes(drawing, notes, left, bottom + 62)
    return drawing


def _colours(names: Sized) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(names))]


def _legend(drawing: Drawing, names: Sequence[str], x: float, y: float) -> None:
    for name, colour in zip(names, _colours(names), strict=True):
        drawing.box(x, y - 9, 11, 11, colour, name)
        drawing.text(x + 16, y, name)
        x += 16 + LETTER * len(name) + 18


def _wrapped(notes: Sequence[str], width: float) -> list[str]:
    """Lines that fit into so many pixels."""
    return [line for note in notes for line in textwrap.wrap(note, int(width / LETTER))]


def _notes(drawing: Drawing, notes: Sequence[str], x: float, y: float) -> None:
    for i, note in enumerate(notes):
        drawing.text(x, y + 16 * i, note, style='fill="#555555"')
