"""A picture of error against size, as SVG text."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH: Final = 760
HEIGHT: Final = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 180, 30, 52
_LABEL_WIDTH, _LINE = 130, 13
_COLOURS: Final = {"weights": "#1f6feb", "weights and activations": "#d1570a"}


@attrs.frozen
class Point:
    """One quantized model.

    Attributes:
        label: its recipe.
        series: `weights` or `weights and activations`.
        bits: bits a quantized weight, scales included.
        value: the measure, above 0.
    """

    label: str
    series: str
    bits: float
    value: float


def picture(points: Sequence[Point], title: str, measure: str) -> str:
    """Return an SVG: bits a weight to the right, the measure upwards on a logarithmic scale.

    Args:
        points: what to show; values above 0.
        title: of the picture.
        measure: what the values are.
    """
    low = 10 ** math.floor(math.log10(min(point.value for point in points)))
    high = 10 ** math.ceil(math.log10(max(point.value for point in points)))
    left, right = 4.0, 9.0

    def across(bits: float) -> float:
        return _LEFT + (bits - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)

    def up(value: float) -> float:
        span = math.log10(high / low) or 1.0
        return HEIGHT - _BOTTOM - math.log10(value / low) / span * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        f' font-family="sans-serif" font-size="12"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="14" fill="#1b1f24">{escape(title)}</text>',
    ]
    for bits in range(int(left), int(right) + 1):
        x = across(bits)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 34}" text-anchor="middle" fill="#424a53">{bits}</text>')
    value = low
    while value <= high * 1.001:
        y = up(value)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#424a53">{value:g}</text>')
        value *= 10
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle" fill="#1b1f24">bits a weight</text>')
    turn = f"translate(16 {HEIGHT / 2}) rotate(-90)"
    parts.append(f'<text transform="{turn}" text-anchor="middle" fill="#1b1f24">{escape(measure)}</text>')
    texts: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: -point.value):
        x, y, colour = across(point.bits), up(point.value), _COLOURS[point.series]
        filled = colour if point.series == "weights" else "none"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{filled}" stroke="{colour}" stroke-width="2"/>')
        if point.series == "weights":
            at = y + 4
            while any(abs(x - other) < _LABEL_WIDTH and abs(at - line) < _LINE for other, line in texts):
                at += 1
            texts.append((x, at))
            parts.append(f'<text x="{x + 9:.1f}" y="{at:.1f}" fill="#1b1f24">{escape(point.label)}</text>')
    for index, (series, colour) in enumerate(_COLOURS.items()):
        y = _TOP + 14 + 20 * index
        filled = colour if series == "weights" else "none"
        parts.append(
            f'<circle cx="{WIDTH - 168}" cy="{y - 4}" r="5" fill="{filled}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{WIDTH - 156}" y="{y}" fill="#1b1f24">{series}</text>')
    return "\n".join([*parts, "</svg>", ""])
