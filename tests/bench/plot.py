"""Curves side by side, as SVG.  The horizontal axes are logarithmic; the vertical axis starts at zero and is shared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import attrs

__all__ = ["Panel", "drawn"]

WIDTH, HEIGHT, LEFT, TOP, BELOW, GAP = 280, 200, 64, 44, 62, 28
COLOURS = ("#1f6fb4", "#c4541a", "#3a8f3a")


@attrs.frozen
class Panel:
    title: str
    axis: str
    at: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def drawn(panels: Sequence[Panel], axis: str) -> str:
    """The picture, as the text of an SVG file."""
    highest = max(each for panel in panels for line in panel.lines.values() for each in line)
    step = _step(highest)
    top = step * math.ceil(highest * 1.05 / step)
    width = LEFT + len(panels) * (WIDTH + GAP)
    height = TOP + HEIGHT + BELOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(14, TOP + HEIGHT / 2, axis, turned=True),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (WIDTH + GAP), top, step, labelled=number == 0)
    return "\n".join([*parts, "</svg>\n"])


def _step(highest: float) -> float:
    """The distance between the horizontal lines; there are four to eight of them."""
    magnitude = 10.0 ** math.floor(math.log10(highest))
    return next(magnitude * each for each in (0.2, 0.5, 1, 2) if highest / (magnitude * each) <= 6)


def _panel(panel: Panel, left: float, top: float, step: float, *, labelled: bool) -> list[str]:
    first, last = math.log10(panel.at[0]), math.log10(panel.at[-1])

    def x(value: float) -> float:
        return left + 10 + (WIDTH - 20) * (math.log10(value) - first) / (last - first)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / top)

    parts = [_text(left + WIDTH / 2, TOP - 22, panel.title, bold=True)]
    for each in range(round(top / step) + 1):
        at = y(each * step)
        parts.append(f'<path d="M{left} {at:.1f}h{WIDTH}" stroke="{"#222" if each == 0 else "#ddd"}"/>')
        if labelled:
            parts.append(_text(left - 8, at + 4, f"{each * step:g}", anchor="end"))
    parts += [_text(x(each), TOP + HEIGHT + 18, f"{each:,}") for each in panel.at]
    parts.append(_text(left + WIDTH / 2, TOP + HEIGHT + 40, panel.axis))
    for (name, line), colour in zip(panel.lines.items(), COLOURS, strict=False):
        points = [(x(at), y(value)) for at, value in zip(panel.at, line, strict=True)]
        path = "L".join(f"{across:.1f} {down:.1f}" for across, down in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{colour}"/>' for across, down in points]
        parts.append(_text(points[0][0], points[0][1] - 10, name, anchor="start", colour=colour))
    return parts


def _text(
    x: float, y: float, text: str, *, anchor: str = "middle", bold: bool = False, turned: bool = False, colour: str = ""
) -> str:
    more = f' fill="{colour}"' if colour else ""
    more += ' font-weight="bold"' if bold else ""
    more += f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
