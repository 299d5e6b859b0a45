"""The trade-off curve as a picture: an SVG document that stands by itself."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant_kernels.recommend.choose import Chosen, Point
    from quant_kernels.recommend.measure import Measured

WIDTH: Final = 720
HEIGHT: Final = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 56, 56
_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#222}.a{stroke:#888;stroke-width:1}.g{stroke:#ddd;stroke-width:1}"
    ".c{fill:none;stroke:#2166ac;stroke-width:2}.p{fill:#2166ac}.x{fill:#b2182b}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.g{stroke:#444}.b{fill:#1b1b1b}.c{stroke:#92c5de}"
    ".p{fill:#92c5de}.x{fill:#f4a582}}.b{fill:#fff}@media(prefers-color-scheme:dark){.b{fill:#1b1b1b}}"
)


def curve_svg(measured: Measured, chosen: Chosen, whole: Mapping[str, Point], *, title: str) -> str:
    """Return the picture of the trade-off.

    Args:
        measured: the checkpoint, for its size.
        chosen: what was chosen, and the curve.
        whole: format -> the point of all layers in that format, for comparison.
        title: stands above.
    """
    points = chosen.curve
    highest = max(point.error for point in points)
    if highest <= 0:
        return _frame(title, '<text x="360" y="210" text-anchor="middle">nothing to trade: no error</text>')
    sizes = [point.nbytes / measured.nbytes for point in points]
    left, right = min(sizes) - 0.02, max(sizes) + 0.02

    def at(point: Point) -> tuple[float, float]:
        x = _LEFT + (point.nbytes / measured.nbytes - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)
        y = _TOP + (1 - point.error / highest) * (HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [*_grid(left, right)]
    path = " ".join(f"{x},{y}" for x, y in map(at, points))
    parts.append(f'<polyline class="c" points="{path}"><title>each layer by itself</title></polyline>')
    for index, (name, point) in enumerate(whole.items()):
        x, y = at(point)
        up = 8 + 16 * (index % 3)  # labels of points that lie close to each other
        parts.append(f'<circle class="p" cx="{x}" cy="{y}" r="4"/><text x="{x + 7}" y="{y - up}">{escape(name)}</text>')
    x, y = at(_own(chosen))
    label = f'<text x="{x - 9}" y="{y + 20}" text-anchor="end">chosen</text>'
    parts.append(f'<circle class="x" cx="{x}" cy="{y}" r="6"/>{label}')
    return _frame(title, "".join(parts))


def _own(chosen: Chosen) -> Point:
    return type(chosen.curve[0])(chosen.nbytes, chosen.error)


def _grid(left: float, right: float) -> list[str]:
    found = []
    inner_width, inner_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    for step in range(5):
        x = _LEFT + inner_width * step / 4
        y = _TOP + inner_height * step / 4
        share, error = left + (right - left) * step / 4, 1 - step / 4
        found.append(f'<line class="g" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_TOP + inner_height}"/>')
        found.append(f'<line class="g" x1="{_LEFT}" x2="{_LEFT + inner_width}" y1="{y}" y2="{y}"/>')
        found.append(f'<text x="{x}" y="{HEIGHT - 34}" text-anchor="middle">{share:.0%}</text>')
        found.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{error:.0%}</text>')
    found.append(
        f'<text x="{_LEFT + inner_width / 2}" y="{HEIGHT - 12}" text-anchor="middle">size, of the source</text>'
    )
    middle = _TOP + inner_height / 2
    turned = f'text-anchor="middle" transform="rotate(-90 16 {middle})"'
    found.append(f'<text x="16" y="{middle}" {turned}>error, of the smallest formats</text>')
    return found


def _frame(title: str, inside: str) -> str:
    said = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">'
        f"<title>{said}</title><style>{_STYLE}</style>"
        f'<rect class="b" width="{WIDTH}" height="{HEIGHT}"/>'
        f'<text x="{_LEFT}" y="24" style="font-weight:600">{said}</text>{inside}</svg>\n'
    )
