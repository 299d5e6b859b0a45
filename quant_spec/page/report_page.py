"""The report of a job as a page."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from quant_spec.html import escaped
from quant_spec.page.charts import Bar, Point, bars, panels
from quant_spec.page.frame import Cell, Column, document, search_form, section, table
from quant_spec.report import layer_type
from quant_spec.report_table import because, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quant_spec.report import KeptLayer, LayerReport, QuantReport

LOWEST: Final = 5
"""Layers of lowest signal to noise ratio that are named."""
_NAMED: Final = 3
_REST: Final = "other tensors"
_UNMEASURED: Final = Cell("", float("inf"))
"""Sorts behind all that was measured."""
_COLUMNS: Final = (
    Column("layer", mono=True),
    Column("format", mono=True),
    Column("activation", wide=True, mono=True),
    Column("rule", mono=True),
    Column("shapes", wide=True),
    Column("before", number=True),
    Column("after", number=True),
    Column("SQNR dB", number=True),
)


def report_page(report: QuantReport) -> str:
    """Return the page of a report: one file, no network, no secret beyond what the report's own file holds."""
    parts = [
        _totals(report),
        _warnings(report),
        _unmatched(report),
        _sizes(report),
        _errors(report),
        _kept(report),
        _layers(report),
        _origin(report),
    ]
    return document("Quantization report", report.model, filter(None, parts))


def _totals(report: QuantReport) -> str:
    share = f"{report.bytes_after / report.bytes_before:.0%} of the bytes" if report.bytes_before else "bytes"
    shown = [
        (f"{report.num_layers:,}", "layers quantized"),
        (f"{len(report.kept):,}", "layers kept"),
        (f"{human_bytes(report.bytes_before)} → {human_bytes(report.bytes_after)}", f"all tensors, {share}"),
        (f"{report.elapsed_seconds:,.2f} s", "conversion" if report.loading else "whole job"),
    ]
    if report.loading is not None:
        shown.append((f"{report.loading.load_seconds:,.2f} s", f"load, {report.loading.ranks} ranks"))
    cards = "".join(f"<li><b>{escaped(value)}</b><span>{escaped(what)}</span></li>" for value, what in shown)
    return f'<ul class="cards">{cards}</ul>'


def _warnings(report: QuantReport) -> str:
    if not report.warnings:
        return ""
    listed = "".join(f"<li>{escaped(warning)}</li>" for warning in report.warnings)
    return section("Warnings", f'<ul class="warnings">{listed}</ul>')


def _unmatched(report: QuantReport) -> str:
    if not report.unmatched:
        return ""
    columns = (
        Column("entry", mono=True),
        Column("where in the request", mono=True),
        Column("perhaps meant", mono=True),
    )
    rows = [(each.entry, each.path, ", ".join(each.nearest) or "none is like it") for each in report.unmatched]
    return section("Entries that match no layer", table(columns, rows, label="Entries that match no layer"))


def _sizes(report: QuantReport) -> str:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    quantized = ((layer.layer, layer.bytes_before, layer.bytes_after) for layer in report.layers)
    kept = ((layer.layer, layer.nbytes, layer.nbytes) for layer in report.kept)
    for name, before, after in (*quantized, *kept):
        found = sums[layer_type(name)]
        found[:] = found[0] + 1, found[1] + before, found[2] + after
    rows = [Bar(name, *each) for name, each in sums.items()]
    rows += [Bar(f"{each.kind} modules", each.modules, each.nbytes, each.nbytes) for each in report.others]
    rest = report.bytes_before - sum(row.before for row in rows), report.bytes_after - sum(row.after for row in rows)
    rows.sort(key=lambda row: -row.before)
    if min(rest) > 0:
        rows.append(Bar(_REST, 0, *rest))
    return section("Bytes by layer type", bars(rows))


def _errors(report: QuantReport) -> str:
    points = [
        Point(layer.layer, layer_type(layer.layer), layer.target, layer.sqnr_db)
        for layer in report.layers
        if layer.sqnr_db is not None
    ]
    title = "Error of each layer"
    if not points:
        return section(title, "<p>Not measured. <code>--measure</code> or <code>measure=True</code> asks for it.</p>")
    lowest = sorted(points, key=lambda point: point.value)[:LOWEST]
    named = "".join(f'<li><span class="name">{escaped(each.name)}</span>: {each.value:.2f} dB</li>' for each in lowest)
    return section(
        title,
        "<p>Signal to quantization noise ratio, in dB: higher is better, 6 dB are one bit. One panel a layer type,"
        " its first layer left and its last one right; panels of one format have one scale.</p>",
        panels(points, unit="dB"),
        f"<p>Lowest:</p><ul>{named}</ul>",
    )


def _kept(report: QuantReport) -> str:
    groups: dict[tuple[str, str], list[KeptLayer]] = defaultdict(list)
    for layer in report.kept:
        groups[because(str(layer.rule), layer.reason), layer.source].append(layer)
    columns = (
        Column("why"),
        Column("layers", number=True),
        Column("format", mono=True),
        Column("which", mono=True),
        Column("bytes", number=True),
    )
    rows = [
        (why, f"{len(group):,}", source, _names(group), human_bytes(sum(layer.nbytes for layer in group)))
        for (why, source), group in groups.items()
    ]
    rows += [(each.reason, f"{each.modules:,}", "", each.kind, human_bytes(each.nbytes)) for each in report.others]
    return section("Kept layers and why", table(columns, rows, label="Kept layers and why")) if rows else ""


def _names(group: Sequence[KeptLayer]) -> str:
    kinds = tuple(dict.fromkeys(layer_type(layer.layer) for layer in group))
    more = f" and {len(kinds) - _NAMED} more types" if len(kinds) > _NAMED else ""
    return ", ".join(kinds[:_NAMED]) + more


def _layers(report: QuantReport) -> str:
    total = len(report.layers) + len(report.kept)
    rows = (*map(_quantized_row, report.layers), *map(_kept_row, report.kept))
    made = table(_COLUMNS, rows, label="All layers", element_id="layers")
    return section("All layers", search_form(f"{total} of {total} layers"), made)


def _quantized_row(layer: LayerReport) -> tuple[str | Cell, ...]:
    return (
        layer.layer,
        f"{layer.source} → {layer.target}",
        layer.activation,
        str(layer.rule),
        _shapes(layer.shapes, layer.weights),
        Cell(human_bytes(layer.bytes_before), layer.bytes_before),
        Cell(human_bytes(layer.bytes_after), layer.bytes_after),
        _UNMEASURED if layer.sqnr_db is None else Cell(f"{layer.sqnr_db:.2f}", layer.sqnr_db),
    )


def _kept_row(layer: KeptLayer) -> tuple[str | Cell, ...]:
    size = Cell(human_bytes(layer.nbytes), layer.nbytes)
    why = because(str(layer.rule), layer.reason)
    return layer.layer, f"{layer.source}, kept", "", why, _shapes(layer.shapes, 1), size, size, _UNMEASURED


def _shapes(shapes: Sequence[Sequence[int]], weights: int) -> str:
    listed = ", ".join(" × ".join(map(str, shape)) for shape in shapes)
    return f"{weights} of {listed}" if weights > 1 else listed


def _origin(report: QuantReport) -> str:
    request = json.dumps(report.online_quant_config, indent=2, ensure_ascii=False)
    listed = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in _facts(report))
    return section("The request", f"<pre>{escaped(request)}</pre>", f"<dl>{listed}</dl>")


def _facts(report: QuantReport) -> Iterator[tuple[str, str]]:
    if report.output:
        yield "output", report.output
    if report.saved_to is not None:
        yield "this report as JSON", str(report.saved_to)
    yield "digest", report.digest
    yield from report.versions.items()
    if report.loading is not None:
        yield "bytes read", human_bytes(report.loading.bytes_read)
        yield "greatest memory on a rank", human_bytes(report.loading.peak_bytes)
        yield "sent between ranks", human_bytes(report.loading.sent_bytes)
