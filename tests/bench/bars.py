"""Stacked bars as SVG: one bar for each way, one segment for each phase. A pure function."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

WIDTH, LABELS, BAR, GAP, TOP = 900, 90, 34, 22, 46
LEGEND = 24
COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f", "#edc948",
)  # fmt: skip


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """Return an SVG document of `bars`: name → phase → seconds, phases in the same colour."""
    phases = list(dict.fromkeys(phase for bar in bars.values() for phase in bar))
    colours = {phase: COLOURS[n % len(COLOURS)] for n, phase in enumerate(phases)}
    longest = max((sum(bar.values()) for bar in bars.values()), default=0.0) or 1.0
    scale = (WIDTH - LABELS - 70) / longest
    parts, y = [_text(10, 26, title, "font-weight='bold'")], TOP
    for name, bar in bars.items():
        parts += [_text(10, y + BAR - 11, name), *_segments(bar, colours, scale, y)]
        y += BAR + GAP
    parts += _legend(phases, colours, y)
    height = y + LEGEND * (1 + (len(phases) - 1) // 4) + 10
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}'"
        f" font-family='sans-serif' font-size='14'>\n"
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>\n{body}\n</svg>\n"
    )


def _segments(
    bar: Mapping[str, float], colours: Mapping[str, str], scale: float, y: int
) -> list[str]:
    parts, x = [], float(LABELS)
    for phase, seconds in bar.items():
        width = seconds * scale
        box = f"x='{x:.1f}' y='{y}' width='{width:.1f}' height='{BAR}'"
        tip = f"<title>{escape(phase)}: {seconds:.1f} s</title>"
        parts.append(f"<rect {box} fill='{colours[phase]}'>{tip}</rect>")
        if width > 30:
            style = "fill='white' text-anchor='middle'"
            parts.append(_text(x + width / 2, y + BAR - 11, f"{seconds:.0f}", style))
        x += width
    return [*parts, _text(x + 8, y + BAR - 11, f"{sum(bar.values()):.0f} s")]


def _legend(phases: list[str], colours: Mapping[str, str], y: int) -> list[str]:
    parts = []
    for number, phase in enumerate(phases):
        x, row = LABELS + 200 * (number % 4), y + LEGEND * (number // 4)
        parts.append(f"<rect x='{x}' y='{row}' width='14' height='14' fill='{colours[phase]}'/>")
        parts.append(_text(x + 20, row + 12, phase))
    return parts


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"
