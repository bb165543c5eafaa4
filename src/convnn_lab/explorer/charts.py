"""Line charts as SVG that takes the colours of the page around it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 280, 52, 34, 12, 12
LINES = ("#c2410c", "#2563eb", "#15803d", "#9333ea", "#b45309", "#0e7490", "#be123c", "#4d7c0f")


def chart(label: str, lines: Mapping[str, Sequence[tuple[float, float]]], dotted: frozenset[str] = frozenset()) -> str:
    """Draw lines of points; those named in ``dotted`` are thin and dotted."""
    points = [point for line in lines.values() for point in line if all(map(isfinite, point))]
    if not points:
        return "<p>No epoch was measured.</p>"
    across, down = _ticks([x for x, _ in points], whole=True), _ticks([y for _, y in points])

    def place(x: float, y: float) -> str:
        right = (x - across[0]) / (across[-1] - across[0] or 1) * (WIDTH - LEFT - RIGHT)
        up = (y - down[0]) / (down[-1] - down[0] or 1) * (HEIGHT - BOTTOM - TOP)
        return f"{LEFT + right:.1f},{HEIGHT - BOTTOM - up:.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">']
    for tick in down:
        y = place(across[0], tick).split(",")[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="rule"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y}" dy="4" text-anchor="end">{tick:g}</text>')
    for tick in across:
        x = place(tick, down[0]).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick:g}</text>')
    for number, (name, line) in enumerate(lines.items()):
        drawn = " ".join(place(x, y) for x, y in line if isfinite(x) and isfinite(y))
        kind = ' class="dotted"' if name in dotted else ""
        ink = LINES[number // (2 if dotted else 1) % len(LINES)]
        parts.append(f'<polyline points="{drawn}" stroke="{ink}"{kind}><title>{html.escape(name)}</title></polyline>')
        if len(line) == 1:
            x, y = drawn.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{ink}"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">epoch</text></svg>')
    return "".join(parts)


def legend(names: Sequence[str]) -> str:
    """Which colour is whose."""
    marks = (
        f'<span><i style="background:{LINES[n % len(LINES)]}"></i>{html.escape(name)}</span>'
        for n, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(marks)}<span class="dots">dotted: training</span></p>'


def _ticks(values: Sequence[float], whole: bool = False) -> list[float]:
    """Round numbers that hold all values between them."""
    low, high = min(values), max(values)
    step = 10 ** floor(log10(max(high - low, 1e-9 * max(abs(high), 1), 1e-12)))
    step = next(step * part for part in (0.2, 0.5, 1, 2, 5) if (high - low) / (step * part) <= 6)
    step = max(1.0, float(round(step))) if whole else step
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]
