"""A comparison of two checkpoints as a page: totals, a picture of each layer type, and a table to search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quant_spec.html import escaped
from quant_spec.page.charts import Point, panels
from quant_spec.page.frame import Cell, Column, document, search_form, section, table
from quant_spec.report import layer_type

if TYPE_CHECKING:
    from quant_kernels.loading.compare import Comparison, LayerComparison

_COLUMNS: Final = (
    Column("layer", mono=True),
    Column("formats", mono=True),
    Column("SQNR, dB", number=True),
    Column("largest error", number=True),
    Column("cosine", number=True),
)
_LISTED: Final = 20
_SAME: Final = Cell("same", float("inf"))
_NONE: Final = Cell("none", float("-inf"))


def compare_page(found: Comparison) -> str:
    """Return the page: one file, no network."""
    differing = [each for each in found.layers if not each.identical]
    sections = [_totals(found, len(differing))]
    points = [
        Point(each.layer, layer_type(each.layer), f"{each.left}, {each.right}", each.sqnr_db)
        for each in differing
        if each.sqnr_db is not None
    ]
    # In model order, not by error: a picture shows where in the model errors are.
    points.sort(key=lambda point: _by_block(point.name))
    if points:
        text = (
            "<p>Signal to noise ratio of the second against the first, in dB: higher is better, 6 dB are one bit. One"
            " panel a layer type, its first layer left and its last one right; panels of the same formats have one"
            " scale.</p>"
        )
        sections.append(section("Error of each layer", text, panels(points, unit="dB")))
    rows = [_row(each) for each in found.layers]
    made = table(_COLUMNS, rows, label="All layers", element_id="layers")
    sections.append(section("All layers", search_form(f"{len(rows)} of {len(rows)} layers"), made))
    for title, names in (("Only in the first", found.only_left), ("Only in the second", found.only_right)):
        if names:
            sections.append(section(title, _names(names)))
    if found.skipped:
        columns = (Column("tensor", mono=True), Column("why"))
        sections.append(section("Not compared", table(columns, list(found.skipped.items()), label="Not compared")))
    return document("Checkpoints compared", f"{found.left} and {found.right}", sections)


def _totals(found: Comparison, differing: int) -> str:
    same = len(found.layers) - differing
    ratio = "" if found.sqnr_db is None else f", {found.sqnr_db:.2f} dB over all values"
    return section("Totals", f"<p>{differing:,} layers differ, {same:,} are the same{escaped(ratio)}.</p>")


def _row(each: LayerComparison) -> tuple[str | Cell, ...]:
    formats = each.left if each.left == each.right else f"{each.left} → {each.right}"
    ratio = _SAME if each.identical else _NONE if each.sqnr_db is None else Cell(f"{each.sqnr_db:.2f}", each.sqnr_db)
    error = (
        Cell("NaN or Inf", float("inf")) if each.max_error is None else Cell(f"{each.max_error:.3g}", each.max_error)
    )
    cosine = _NONE if each.cosine is None else Cell(f"{each.cosine:.6f}", each.cosine)
    return each.layer, formats, ratio, error, cosine


def _names(names: tuple[str, ...]) -> str:
    listed = "".join(f'<li class="name">{escaped(name)}</li>' for name in names[:_LISTED])
    more = f"<p>and {len(names) - _LISTED:,} more</p>" if len(names) > _LISTED else ""
    return f"<ul>{listed}</ul>{more}"


def _by_block(name: str) -> list[tuple[int, int, str]]:
    """Return what names are sorted by so that block 10 comes after block 9."""
    return [(0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in name.split(".")]
