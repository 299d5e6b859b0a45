"""Pictures of pages: bars of sizes before and after, and one panel of points for each group of layers.

They are drawn without a pixel size, stretch with the page, and take their colours from the style sheet; what they show
is also said in words, for those who do not see them.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Final

import attrs

from quant_spec.html import escaped
from quant_spec.report_table import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_PANELS: Final = 24
"""Panels of one picture; groups beyond these, which have the highest values, are counted."""
_LOW: Final = ' class="low"'


@attrs.frozen
class Bar:
    """One row of a picture of sizes.

    Attributes:
        name: what it is.
        count: how many layers; 0: not said.
        before: bytes before.
        after: bytes after.
    """

    name: str
    count: int
    before: int
    after: int


@attrs.frozen
class Point:
    """One layer in a picture of points.

    Attributes:
        name: the layer.
        group: the panel that it belongs to, as a type of layer.
        scale: what it may be compared with, as a format: panels with the same word have the same scale.
        value: what is drawn; low values are bad.
    """

    name: str
    group: str
    scale: str
    value: float


def bars(rows: Sequence[Bar]) -> str:
    """Return a table of bars, before above after, all on one scale."""
    longest = max((max(row.before, row.after) for row in rows), default=0) or 1
    key = '<p class="soft"><span class="key"></span>before<span class="key after"></span>after</p>'
    heads = (
        '<th scope="col">layer type</th><th scope="col" class="number">layers</th><th scope="col">before and after</th>'
        '<th scope="col" class="number">bytes</th>'
    )
    body = "".join(_bar(row, longest) for row in rows)
    return f'{key}<table class="sizes"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def _bar(row: Bar, longest: int) -> str:
    same = row.before == row.after
    count = f"{row.count:,}" if row.count else ""
    size = human_bytes(row.before) if same else f"{human_bytes(row.before)} → {human_bytes(row.after)}"
    drawn = "".join(
        f'<svg class="bar{css}" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * value / longest:.3f}" height="1"/></svg>'
        for css, value in (("", row.before), (" after", row.after))
    )
    return (
        f'<tr><th scope="row" class="name">{escaped(row.name)}</th><td class="number">{count}</td>'
        f'<td class="bars">{drawn}</td><td class="number">{escaped(size)}</td></tr>'
    )


def panels(points: Iterable[Point], *, unit: str) -> str:
    """Return one panel for each group and scale, its points in the order given; the lowest of each is marked.

    Args:
        points: finite values.
        unit: of the values.
    """
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    scales: dict[str, list[float]] = defaultdict(list)
    for point in points:
        groups[point.group, point.scale].append(point)
        scales[point.scale].append(point.value)
    ordered = sorted(groups.values(), key=lambda group: min(point.value for point in group))
    figures = "".join(_panel(group, scales[group[0].scale], unit) for group in ordered[:MAX_PANELS])
    rest = len(ordered) - MAX_PANELS
    more = f"<p>{rest} more groups, none of them lower, are in the table alone.</p>" if rest > 0 else ""
    return f'<div class="panels">{figures}</div>{more}'


def _panel(group: Sequence[Point], scale: Sequence[float], unit: str) -> str:
    low, high = min(scale), max(scale)
    span = (high - low) or 1.0
    lowest = min(group, key=lambda point: point.value)
    dots = "".join(
        f"<path{_LOW if point is lowest and len(group) > 1 else ''}"
        f' d="M{_across(index, len(group)):.2f} {100 * (high - point.value) / span:.2f}h0">'
        f"<title>{escaped(point.name)}: {point.value:.2f} {escaped(unit)}</title></path>"
        for index, point in enumerate(group)
    )
    middle = median(point.value for point in group)
    said = f"{lowest.scale}: lowest {lowest.value:.1f}, median {middle:.1f} {unit}"
    label = f"{lowest.group}, {said} of {len(group)} layers; the lowest is {lowest.name}"
    return (
        f'<figure><h3 class="name">{escaped(lowest.group)}</h3><p>{escaped(said)}</p>'
        f'<div class="plot"><div aria-hidden="true"><span>{high:.1f}</span><span>{low:.1f}</span></div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escaped(label)}">'
        f'<path class="grid" d="M0 0H100M0 50H100M0 100H100"/>{dots}</svg></div></figure>'
    )


def _across(index: int, count: int) -> float:
    """Return where a point stands, from 0 to 100; a single one in the middle."""
    return 100 * index / (count - 1) if count > 1 else 50.0
